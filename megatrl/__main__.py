"""`python -m megatrl` is the `megatrl` command."""

from megatrl.cli.main import app

if __name__ == "__main__":
    app()
