"""`vitsweep explain`: why one cell is faster than another, cause by cause."""

from argparse import Namespace
from collections.abc import Sequence

from rich.console import Console

from vitsweep.cli import VERBS, Options, print_json
from vitsweep.composition.hydra import value_override
from vitsweep.console import open_console, print_lines, was_terminated
from vitsweep.errors import BadValueError, ExitCode, VitsweepError
from vitsweep.extras.compare.measure import StopReason, compared_settings
from vitsweep.extras.compare.pair import (
    DEFAULT_MINUTES,
    ComparisonRequest,
    cells_named,
    plan_pair,
    sweep_first,
    with_cells,
)
from vitsweep.extras.explain.causes import LEAST_BLOCKS, Explanation, explain_cells
from vitsweep.extras.explain.explained import Explained, explain_cell, explain_stored
from vitsweep.report.html import write_report
from vitsweep.report.views import collect
from vitsweep.results.sweeps import find_sweep
from vitsweep.spec.measurement import MIN_BLOCKS, MOST_BLOCKS, MOST_TRACED_STEPS
from vitsweep.tables.render import TextTable
from vitsweep.tables.sweep_tables import SweepTables

DEFAULT_BLOCKS, DEFAULT_STEPS = LEAST_BLOCKS, 3
WIDE, WIDE_ONLY = 110, ["launches", "class"]
"""Characters of a terminal below which these columns are left to `--json`."""

HELP = f"""\
Say why A takes another time per step than B: causes, with 95 % intervals, that
add up to the measured difference.

A and B are overrides, as in `compare`: those that follow hold for both, the
runs go into results/compare. Or they are cells of a sweep, which is
named first, as its table names them: `O2`, `O2 fsdp`, `precision=O2`, or a cell id. Where
the sweep holds traced blocks of both, nothing is measured. Else both run in
turns, and each run ends, after its timed window, with steps under torch's
profiler. Causes have intervals, and are shown, from {LEAST_BLOCKS} blocks on.

  python -m vitsweep explain optimizer=adamw_foreach optimizer=adamw_loop
  python -m vitsweep explain vit_nano-precision O2 fp32
  python -m vitsweep explain O2 fp32 --operators 10
  python -m vitsweep explain O2 fp32 --json

With one cell: the rate of each phase against the highest that its FLOPs and bytes
allow on this device (its roofline); nothing is measured.

  python -m vitsweep explain vit_nano-precision O2
"""


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_argument("settings", nargs="*", metavar="A B override", help="see above")
    options.add_argument("--sweep", metavar="SWEEP", help="A and B are cells of it (the latest)")
    options.number(
        "--blocks",
        0,
        f"blocks with traces (default {DEFAULT_BLOCKS}; of a sweep's {MIN_BLOCKS} are enough)",
        1,
        MOST_BLOCKS,
    )
    options.number(
        "--steps", DEFAULT_STEPS, "traced steps per run (default %(default)s)", 1, MOST_TRACED_STEPS
    )
    options.number("--minutes", DEFAULT_MINUTES, "budget of this command (default %(default)g)")
    options.add_config_dir()
    options.number("--operators", 0, "also show the N operators that differ most", 0, metavar="N")
    options.flag("--json", help="print JSON: difference_ms, causes, operators")


def run(arguments: Sequence[str]) -> int:
    """Measure what lacks and say why A is faster than B, or what the roofline of A is.

    Returns:
        0 if it is explained, 3 if blocks were not measured, 130 after Ctrl-C or SIGTERM.

    Raises:
        VitsweepError: what was typed is wrong, or nothing could be measured.
    """
    options = VERBS["explain"].parser()
    asked = options.read(arguments)
    asked.settings, asked.sweep = sweep_first(asked.settings, asked.sweep)
    if len(asked.settings) == 1:
        _refuse_options_of_two(options, asked)
        found, stop_reason = explain_cell(find_sweep(asked.sweep), *asked.settings), None
    elif asked.settings:
        found, stop_reason = _of_two(asked, open_console(stderr=True))
    else:
        raise VitsweepError(
            "`explain` needs two settings or cells, A and B (an empty one, `''`, is the default), or one "
            "cell of a sweep.\n" + options.format_usage().strip()
        )
    if asked.json:
        print_json(**found.explanation.json())
    else:
        _show(found, open_console(), asked)
    return stop_reason.exit_code if stop_reason else ExitCode.ok


def _refuse_options_of_two(options: Options, asked: Namespace) -> None:
    for option in ("blocks", "steps", "minutes", "operators"):
        if getattr(asked, option) != options.get_default(option):
            raise BadValueError(
                f"`--{option}` is for two cells or settings, A and B: one cell is explained from what "
                "is stored. Name a second one, or leave the option out."
            )


def _of_two(asked: Namespace, console: Console) -> tuple[Explained, StopReason | None]:
    """Explain A by B; blocks with traces are measured where they lack.

    Returns:
        The explanation, and why no further block was measured; None where nothing was.
    """
    a, b, *common = asked.settings
    store = cells_named(a, b, asked.sweep)
    if store and (known := explain_stored(store, a, b, asked.blocks or MIN_BLOCKS)):
        return known, None
    traces = value_override("measurement.traced_steps", asked.steps), "sweep.prune_slowdown=null"
    request = ComparisonRequest(
        variant=tuple(a.split()),
        baseline=tuple(b.split()),
        common=(*common, *traces),
        minutes=asked.minutes,
        config_dir=asked.config_dir,
        traced_blocks=asked.blocks or DEFAULT_BLOCKS,
    )
    if store:
        request = with_cells(request, store, a, b)
    planned = plan_pair(request)
    if len(planned.plan.entries) == 1:
        raise BadValueError(f"`{a}` and `{b}` are the same cell: name two.")
    with compared_settings(planned, console) as (launched, result):
        tables = SweepTables.of(launched.store)
        try:
            found = explain_cells(tables, *planned.cells, request.names)
        except VitsweepError:
            if launched.interrupted:
                raise KeyboardInterrupt from None  # before a block had traces of both
            raise
        return Explained(found, launched.store), result.stop_reason


def _show(found: Explained, console: Console, asked: Namespace) -> None:
    """Write the views and the report; show the tables and the sentences."""
    explanation = found.explanation
    console.print()
    for title, table in explanation.texts(asked.operators).items():
        narrow = WIDE_ONLY if console.width < WIDE else []
        console.print(TextTable(table.drop(columns=narrow, errors="ignore"), title))
    lines = ["", *filter(None, [found.sentence, *explanation.notes])]
    wanted = asked.blocks or DEFAULT_BLOCKS
    if isinstance(explanation, Explanation) and explanation.num_blocks < wanted:
        is_done = explanation.num_blocks >= (asked.blocks or MIN_BLOCKS)
        how = f"`--blocks {wanted}` measures more" if is_done else "the same command continues"
        lines.append(f"{explanation.num_blocks} of {wanted} blocks have traces of both; {how}.")
    print_lines(console, lines)  # the answer first: a folder of someone else takes no report
    if not was_terminated():
        print_lines(console, [f"Report: {write_report(collect(found.store))}"])
