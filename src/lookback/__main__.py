"""Runs the command line as `python -m lookback`."""

import sys

from lookback.cli import main

if __name__ == "__main__":
    sys.exit(main())
