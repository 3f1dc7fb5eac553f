"""`python -m cumulant`: the command `cumulant`, of the interpreter that runs it."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
