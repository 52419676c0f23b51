"""The front door: `python -m vitsweep [verb] ...`.

Kept light: every process that runs a cell imports this module once.
"""

import os
import sys


def main() -> None:
    """Run a verb, else compose and run cells."""
    from vitsweep.cli.main import run

    sys.exit(run(sys.argv[1:], os.environ))


if __name__ == "__main__":
    main()
