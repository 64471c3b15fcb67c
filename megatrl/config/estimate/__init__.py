"""What a recipe will need before anything runs: parameters, bytes, operations, seconds. Pure functions, no torch."""
