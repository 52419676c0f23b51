"""`vitsweep explain`: why one cell is faster than another, cause by cause."""

import json
from argparse import Namespace
from collections.abc import Sequence

from rich.console import Console

from vitsweep.api.compare import (
    DEFAULT_BLOCKS,
    DEFAULT_STEPS,
    ExplainRequest,
    StopReason,
    explain,
)
from vitsweep.cli.verbs import VERBS, Options
from vitsweep.console import open_console, print_lines
from vitsweep.errors import BadValueError, ExitCode, VitsweepError
from vitsweep.planning.sweep_plan import DEFAULT_MINUTES
from vitsweep.report.explained import Explained, explain_cell
from vitsweep.report.html import write_report
from vitsweep.report.views import collect
from vitsweep.results.store import find_sweep
from vitsweep.spec.measurement import MIN_BLOCKS, MOST_BLOCKS, MOST_TRACED_STEPS
from vitsweep.tables.bounds import Bounds, bound_text
from vitsweep.tables.causes import Explanation, cause_text, module_text, operator_text
from vitsweep.tables.render import as_table

WIDE, WIDE_ONLY = 110, ("by less work", "by a better rate", "launches", "class", "rate")
"""Characters of a terminal below which these columns are left to `--json`."""
LONGEST_HEADING = 10
"""Of a column of a narrow terminal, in characters."""

HELP = f"""\
Say why A takes another time per step than B: causes, with 95 % intervals, that add up to the
measured difference.

A and B are overrides, as in `compare`: those that follow hold for both, the runs go into
results/compare. Or they are cells of a sweep, as its table names them: `O2`, `O2 fsdp`, with `--sweep`
`precision=O2` too, or a cell id. Where the sweep holds traced blocks of both, nothing is measured. Else
both run in turns, and each run ends, after its timed window, with steps under torch's profiler; at
least {MIN_BLOCKS} blocks give intervals.

  python -m vitsweep explain optimizer=adamw_foreach optimizer=adamw_loop
  python -m vitsweep explain O2 fp32 --sweep vit_nano-precision
  python -m vitsweep explain O2 fp32 --operators 10 --modules
  python -m vitsweep explain O2 fp32 --json

With one cell: how far the time of each class is from the shortest in which this device can do its FLOPs
and bytes, at the rates that its runs measured.

  python -m vitsweep explain O2 --sweep vit_nano-precision
"""


def parser() -> Options:
    """Return the parser."""
    options = Options(VERBS["explain"], HELP)
    options.add_argument("settings", nargs="*", metavar="A [B [override ...]]", help="see above")
    options.add_argument("--sweep", metavar="SWEEP", help="A and B are cells of it (the latest)")
    options.number(
        "--blocks", DEFAULT_BLOCKS, "blocks with traces (default %(default)s)", 1, MOST_BLOCKS
    )
    options.number(
        "--steps", DEFAULT_STEPS, "traced steps per run (default %(default)s)", 1, MOST_TRACED_STEPS
    )
    options.number("--minutes", DEFAULT_MINUTES, "budget of this command (default %(default)g)")
    options.number("--operators", 0, "also show the N operators that differ most", 0, metavar="N")
    options.flag(
        "--modules",
        help="also show what each block and part of the model takes, forward and backward",
    )
    options.flag("--json", help="print JSON: difference_ms, causes, operators, modules")
    return options


def explain_request(arguments: Sequence[str]) -> tuple[ExplainRequest, Namespace]:
    """Read a command line; also return its words, which say what is shown.

    Raises:
        VitsweepError: there are not two settings, an option is unknown or has a wrong value.
    """
    options = parser()
    found = options.parse_intermixed_args([word for word in arguments if word != "--"])
    if len(found.settings) < 2:
        raise VitsweepError(
            "`explain` needs two settings or cells, A and B (an empty one, `''`, is the default), or one "
            "cell of a sweep that holds traces.\n" + options.format_usage().strip()
        )
    a, b, *common = found.settings
    request = ExplainRequest(
        a=a,
        b=b,
        common=tuple(common),
        sweep=found.sweep,
        blocks=found.blocks,
        steps=found.steps,
        minutes=found.minutes,
    )
    return request, found


def run(arguments: Sequence[str]) -> int:
    """Measure what lacks and say why A is faster than B.

    Returns:
        0 if it is explained, 3 if blocks were not measured, 130 after Ctrl-C.

    Raises:
        VitsweepError: what was typed is wrong, or nothing could be measured.
    """
    options = parser()
    asked = options.parse_intermixed_args([word for word in arguments if word != "--"])
    if len(asked.settings) == 1:
        for option in ("blocks", "steps", "minutes", "operators", "modules"):
            if getattr(asked, option) != options.get_default(option):
                raise BadValueError(
                    f"`--{option}` is for two cells or settings, A and B: one cell is explained from the "
                    "traces that are stored. Name a second one, or leave the option out."
                )
        return _explain_one(asked)
    request, asked = explain_request(arguments)
    console = Console(stderr=True) if asked.json else open_console()
    found, stop_reason = explain(request, console)
    if asked.json:
        print(json.dumps(found.explanation.json(), indent=1))
    else:
        _show(found, request, console, asked)
    codes = {
        StopReason.not_measured: ExitCode.not_all_measured,
        StopReason.interrupted: ExitCode.interrupted,
    }
    return codes.get(stop_reason, ExitCode.ok) if stop_reason else ExitCode.ok


def _explain_one(asked: Namespace) -> int:
    """Show how far the classes of one cell are from the bounds of their work."""
    found = explain_cell(find_sweep(asked.sweep), *asked.settings)
    assert isinstance(found.explanation, Bounds)
    if asked.json:
        print(json.dumps(found.explanation.json(), indent=1))
        return ExitCode.ok
    console = open_console()
    console.print()
    console.print(as_table(bound_text(found.explanation), "Where the time goes"))
    lines = [f"\n{found.sentence}", *found.explanation.notes]
    print_lines(console, [*lines, f"Report: {write_report(collect(found.store))}"])
    return ExitCode.ok


def _show(found: Explained, request: ExplainRequest, console: Console, asked: Namespace) -> None:
    """Write the views and the report; show the table and the sentences."""
    explanation = found.explanation
    assert isinstance(explanation, Explanation)
    shown = {"Causes": cause_text(explanation)}
    if asked.operators > 0:
        shown["Operators that differ most, A | B"] = operator_text(explanation, asked.operators)
    if asked.modules and len(explanation.modules):
        shown["Modules, forward and backward, in traced steps"] = module_text(explanation)
    console.print()
    if console.width < WIDE:
        letters = dict(zip(explanation.names, "AB", strict=True))
        if max(map(len, letters)) <= LONGEST_HEADING:
            letters = {}
        for name, letter in letters.items():
            console.print(f"{letter}: {name}", highlight=False)
        shown = {
            title: table.drop(columns=[*WIDE_ONLY], errors="ignore").rename(columns=letters)
            for title, table in shown.items()
        }
    for title, table in shown.items():
        console.print(as_table(table, title))
    lines = [f"\n{found.sentence}", *explanation.notes]
    if asked.modules and not len(explanation.modules):
        lines.append("The stored traces hold no modules: another `--blocks` measures new ones.")
    if explanation.num_blocks < request.blocks:
        more = f"{explanation.num_blocks} of {request.blocks} blocks have traces of both"
        lines.append(f"{more}; the same command continues.")
    lines.append(f"Report: {write_report(collect(found.store))}")
    print_lines(console, lines)
