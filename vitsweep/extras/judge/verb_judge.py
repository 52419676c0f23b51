"""`vitsweep judge`: is a change of code faster, and does it still train the same?"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vitsweep.cli import VERBS, Options, print_json, require_writable
from vitsweep.console import interrupts_to, open_console, print_lines
from vitsweep.errors import BadValueError, ExitCode
from vitsweep.extras.judge.session import JudgeRequest, file_and_function, judge, overrides_of

HELP = """\
Train two states of a project in turns, and say whether the newer one is faster and still right.

BASE and HEAD are commits, or folders; without HEAD it is the working tree. `--step` names the training
step: `make_step(cell)` builds model and optimizer and returns `step(batch) -> loss`, with the model as
`step.model`. Batches are the judge's. Without it the cell's model is judged (`model.target=...`).

  python -m vitsweep judge main --step train.py:make_step batch.images_per_step=64 --minutes 5
  python -m vitsweep judge v1.2 my-branch --step bench/step.py:make_step data=synthetic
  python -m vitsweep judge HEAD~1 HEAD --config-dir conf model=mine

Exit codes: 0 not worse, 1 worse or wrong, 2 bad input, 3 not measured, 4 undecided within the budget.
"""
MINUTES, WIDTH = 5.0, 0.03


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_argument("words", nargs="*", metavar="BASE HEAD override", help="see above")
    options.add_argument("--step", metavar="FILE:FUNCTION", help="makes the training step")
    options.add_argument(
        "--script", default="", metavar="FILE", help="a loop with `vitsweep.measured()`: times only"
    )
    options.add_argument(
        "--examples",
        metavar="FILE:FUNCTION",
        help="makes the base's examples, instead of the cell's data",
    )
    options.add_argument(
        "--quality",
        default="",
        metavar="NAME",
        help="for changes that alter training: `loss`, or of the step",
    )
    options.number("--minutes", MINUTES, "budget of this command (default %(default)g)")
    options.number(
        "--width",
        WIDTH,
        "no difference is claimed where the interval is within +- this, relative (default %(default)g)",
        most=0.99,
    )
    options.add_argument("--setup", default="", metavar="CMD", help="builds a side, in its root")
    options.add_argument(
        "--link", action="append", default=[], metavar="PATH", help="data that git does not track"
    )
    options.add_argument(
        "--path", action="append", default=[], metavar="FOLDER", help="of packages, such as `src`"
    )
    for side in ("base", "head"):
        options.add_argument(
            f"--python-{side}", metavar="PYTHON", help=f"interpreter of the {side}"
        )
    options.add_config_dir()
    options.add_argument("--markdown", type=Path, metavar="FILE", help="write it for a comment")
    options.flag("--json", help="print the verdict as JSON")


def judge_request(arguments: Sequence[str]) -> tuple[JudgeRequest, bool, Path | None]:
    """Read a command line: the request, whether JSON is printed, and the file for Markdown.

    Raises:
        VitsweepError: an option is unknown or has a wrong value.
    """
    options = VERBS["judge"].parser()
    found = options.read(arguments)
    states, overrides = overrides_of(found.words)
    if not 1 <= len(states) <= 2:
        raise BadValueError(
            "`judge` needs one or two states of the code, BASE and HEAD.\n"
            + options.format_usage().strip()
        )
    if found.step and found.script:
        raise BadValueError("`--step` and `--script` exclude one another: leave one out.")
    if found.script and (found.quality or found.examples):
        raise BadValueError(
            "`--script` takes no `--quality` and no `--examples`: it hands nothing over."
        )
    if found.quality not in ("", "loss") and not found.step:
        raise BadValueError(
            f"`--quality {found.quality}` is asked of what `--step` makes, and there is none: use "
            "`--quality loss`."
        )
    if found.markdown:
        require_writable("--markdown", found.markdown)
    request = JudgeRequest(
        base=states[0],
        head=states[1] if len(states) > 1 else None,
        overrides=overrides,
        step=file_and_function("--step", found.step) if found.step else None,
        script=found.script,
        examples=file_and_function("--examples", found.examples) if found.examples else None,
        quality=found.quality,
        minutes=found.minutes,
        width=found.width,
        setup=found.setup,
        links=tuple(found.link),
        paths=tuple(found.path),
        pythons=(found.python_base, found.python_head),
        config_dir=found.config_dir,
    )
    return request, bool(found.json), found.markdown


def run(arguments: Sequence[str]) -> int:
    """Judge a change of code; return the exit code.

    Raises:
        VitsweepError: what was typed is wrong, or cannot be judged.
    """
    request, as_json, markdown = judge_request(arguments)
    console = open_console()
    try:
        with interrupts_to(signal.default_int_handler):
            judged = judge(request, open_console(stderr=True).print)
    except KeyboardInterrupt:
        print("Stopped without a verdict; the same command begins anew.", file=sys.stderr)
        return ExitCode.interrupted
    if markdown:
        markdown.write_text(judged.verdict.markdown(), encoding="utf-8")
    if as_json:
        print_json(**judged.verdict.json())
    else:
        console.print()
        print_lines(console, [*judged.verdict.sentences, f"Records: {judged.folder}"])
    return judged.verdict.exit_code
