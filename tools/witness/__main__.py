"""The commands `record` and `compare`."""

import argparse
import json
import os
import sys
from pathlib import Path

from tools.witness.differences import compare
from tools.witness.record import PARTS, record


def main() -> int:
    """Run what was typed."""
    parser = argparse.ArgumentParser(description="Record or compare everything the product shows.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument(
        "parts", nargs="*", help=f"some of {', '.join(PARTS)}; all if none is named"
    )
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--explained", type=Path, help="JSON list of differences that are meant")
    typed = parser.parse_args()
    if typed.verb == "record":
        if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets
            os.environ["PYTHONHASHSEED"] = "0"
            os.execv(sys.executable, [sys.executable, "-m", "tools.witness", *sys.argv[1:]])
        record(typed.folder.absolute(), typed.parts)
        return 0
    explained = json.loads(typed.explained.read_text()) if typed.explained else []
    return compare(typed.before, typed.after, explained)


if __name__ == "__main__":
    sys.exit(main())
