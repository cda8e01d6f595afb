"""`python -m shapebucket`: the command."""

import sys

from shapebucket.cli import main

if __name__ == "__main__":
    sys.exit(main())
