"""What the parts cost. Run one with `python -m benchmarks.NAME --help`; docs/performance.md says what they showed."""
