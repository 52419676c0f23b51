"""The front door: `python -m vitsweep [verb] ...`.

Kept light: every process that runs a cell imports this module once.
"""

import sys


def main() -> None:
    """Run a verb, else compose and run cells."""
    try:
        from vitsweep.cli.main import run
        from vitsweep.console import as_typed, flush, prepare_streams

        prepare_streams()
    except KeyboardInterrupt:
        print("Stopped before anything ran.", file=sys.stderr)
        sys.exit(130)
    sys.argv = [sys.argv[0], *as_typed(sys.argv[1:])]
    sys.exit(flush(run(sys.argv[1:])))


if __name__ == "__main__":
    main()
