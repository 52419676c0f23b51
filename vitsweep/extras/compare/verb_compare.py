"""`vitsweep compare`: two settings in turns, with an interval on the ratio of their throughputs."""

import shlex
from collections.abc import Sequence
from typing import Any

from vitsweep.cli import VERBS, Options, print_json
from vitsweep.cli.summary import summarize
from vitsweep.console import open_console
from vitsweep.errors import VitsweepError
from vitsweep.extras.compare.measure import ComparisonResult, compared_settings
from vitsweep.extras.compare.pair import (
    DEFAULT_MINUTES,
    DEFAULT_WIDTH,
    ComparisonRequest,
    cells_named,
    plan_pair,
    sweep_first,
    with_cells,
)

HELP = """\
Measure two settings in turns and say how their throughputs compare, with a 95 % interval.

A and B are overrides as anywhere in vitsweep; several of them, or none, are quoted as one word. Or
they are cells of a sweep, as in `explain`: `O2`, `O2 fsdp`, an id. What follows holds for both. The runs go
into results/compare (or `sweep.name=NAME`); Ctrl-C loses nothing and the same command continues with the
blocks so far. First each setting has one short screening run; settings that differ by more than
`sweep.prune_slowdown` (4x) get no blocks. The 95 % interval is valid at any look: repeat the command as
often as you like. It assumes independent blocks; a warning says where neighbouring blocks correlate.

  python -m vitsweep compare precision=O1 precision=fp32 sharding=ddp batch.images_per_step=128
  python -m vitsweep compare "sharding=fsdp memory=recompute_blocks" "" --width 0.02 --minutes 60
  python -m vitsweep compare first O2 baseline           cells of the sweep `first`
  python -m vitsweep compare precision=O1 precision=O1      the same twice: a test of the comparison
"""


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_argument("settings", nargs="*", metavar="A B override", help="see above")
    options.number(
        "--width",
        DEFAULT_WIDTH,
        "stop when the interval is +- this, relative (default %(default)s)",
        most=0.99,
    )
    options.number(
        "--minutes",
        DEFAULT_MINUTES,
        "budget of this command: no block that would end later, windows short enough for three "
        "blocks (default %(default)g)",
    )
    options.add_argument("--sweep", metavar="SWEEP", help="A and B are cells of it (the latest)")
    options.add_config_dir()
    options.add_json()


def comparison_request(arguments: Sequence[str]) -> ComparisonRequest:
    """Read a command line.

    Raises:
        VitsweepError: there are not two settings, an option is unknown or has a wrong value.
    """
    options = VERBS["compare"].parser()
    found = options.read(arguments)
    settings, sweep = sweep_first(found.settings, found.sweep)
    if len(settings) < 2:
        raise VitsweepError(
            f"`compare` needs two settings, A and B{_apart(settings)}; an empty one (`''`) is the default.\n"
            + options.format_usage().strip()
        )
    variant, baseline, *common = settings
    request = ComparisonRequest(
        variant=_overrides(variant),
        baseline=_overrides(baseline),
        common=tuple(common),
        width=found.width,
        minutes=found.minutes,
        config_dir=found.config_dir,
    )
    store = cells_named(variant, baseline, sweep)
    return request if store is None else with_cells(request, store, variant, baseline)


def _apart(settings: Sequence[str]) -> str:
    """Return how two values in one word, `precision=O1,O2`, are typed."""
    key, _, values = "".join(settings).partition("=")
    two = values.split(",")
    return f", such as `compare {key}={two[0]} {key}={two[1]}`" if len(two) == 2 else ""


def _overrides(setting: str) -> tuple[str, ...]:
    return tuple(shlex.split(setting)) if " " in setting.strip() else tuple(setting.split())


def compared(result: ComparisonResult) -> dict[str, Any]:
    """Return what `--json` says."""
    low, high = result.interval
    return {
        "a": result.a,
        "b": result.b,
        "ratio": result.ratio,
        "low": low,
        "high": high,
        "blocks": result.comparison.num_blocks,
        "claim": result.claim,
        "stop_reason": result.stop_reason.name,
        "sentences": result.sentences,
        "folder": result.folder,
    }


def run(arguments: Sequence[str]) -> int:
    """Measure two settings in turns and show their ratio.

    Returns:
        0 if they are compared, 3 if a setting was not measured, 130 after Ctrl-C or SIGTERM.

    Raises:
        VitsweepError: what was typed is wrong, or cannot be compared; nothing has run.
    """
    as_json = VERBS["compare"].read(arguments).json
    planned = plan_pair(comparison_request(arguments))  # no mistake waits for pandas and the charts
    progress, settings = open_console(stderr=True), planned.settings
    with compared_settings(planned, progress) as (launched, result):
        said = result.sentences
        summarize(launched, progress, planned.tracker, with_report=settings.report, said=said)
    if as_json:
        print_json(**compared(result))
    return result.stop_reason.exit_code
