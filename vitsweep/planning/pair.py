"""The two cells of a comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import merge_overrides
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.errors import BadValueError, ImpossibleCellError
from vitsweep.planning.machine_defaults import with_sizes
from vitsweep.planning.sweep_plan import SweepPlan, make_sweep_plan
from vitsweep.spec.resources import Machine

DEFAULT_WIDTH, DEFAULT_MINUTES = 0.05, 30.0
FOLDER = "sweep.name=compare"
"""Where the runs go unless the user says otherwise: blocks of two, apart from ordinary sweeps."""


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest:
    """Two settings to compare.

    Attributes:
        variant: overrides of A.
        baseline: overrides of B, which the ratio divides by.
        common: overrides of both.
        width: half of the interval that is narrow enough, relative: 0.05 is +- 5 %.
        minutes: budget of this command.
        mixed_hardware: whether blocks of different devices may be taken together.
        traced_blocks: so many blocks with traced steps are measured, whatever the width; 0 for none.
    """

    variant: tuple[str, ...]
    baseline: tuple[str, ...]
    common: tuple[str, ...]
    width: float = DEFAULT_WIDTH
    minutes: float = DEFAULT_MINUTES
    mixed_hardware: bool = False
    traced_blocks: int = 0

    @property
    def names(self) -> tuple[str, str]:
        """A and B in words."""
        variant, baseline = (" ".join(s) or "the default" for s in (self.variant, self.baseline))
        return variant, baseline


class PlannedPair(NamedTuple):
    """The two cells, the baseline last, the settings of their sweep, its tracker, what is said of sizes."""

    plan: SweepPlan
    settings: SweepSettings
    tracker: Mapping[str, Any]
    request: ComparisonRequest
    defaults: str = ""


def plan_pair(request: ComparisonRequest) -> PlannedPair:
    """Type and check the two cells of a comparison.

    Raises:
        VitsweepError: a setting is wrong or cannot run.
    """
    composer, machine = Composer(), Machine.here()
    typed = [*request.common, *request.variant, *request.baseline]
    _require_single_cells(typed, composer)
    composed = [
        composer.compose(merge_overrides([(FOLDER,), request.common, setting], composer))
        for setting in (request.variant, request.baseline)
    ]
    (variant, baseline), defaults = with_sizes(composed, typed, composer, machine)
    if variant.tree["sweep"] != baseline.tree["sweep"]:
        raise BadValueError("`sweep.*` is one for A and B: give it after both.")
    settings = sweep_settings(variant.tree)
    if settings.accept_code != "same":
        raise BadValueError(
            f"`sweep.accept_code={settings.accept_code}`: `compare` takes all blocks together into one "
            "interval, so that they must be of one code: leave it out."
        )
    if not settings.question:
        first, second = request.names
        settings = replace(settings, question=f"How does {first} compare with {second}?")
    plan = make_sweep_plan([variant, baseline], machine, lambda cell: baseline)
    if reasons := [reason for e in plan.entries.values() for reason in e.reasons]:
        raise ImpossibleCellError(list(dict.fromkeys(reasons)))
    return PlannedPair(plan, settings, variant.tree.get("tracker") or {}, request, defaults)


def _require_single_cells(texts: Sequence[str], composer: Composer) -> None:
    """Refuse what makes several cells of one, and what chooses another launcher."""
    for override in composer.parse(texts):
        text = override.input_line
        if override.is_sweep_override():
            raise BadValueError(f"`{text}` is several settings; `compare` takes one A and one B.")
        if str(override.key_or_group).split(".")[0].split("/")[0] == "hydra":
            raise BadValueError(
                f"`{text}`: `compare` measures on this machine. On a cluster type it inside an "
                "allocation of one node (`salloc -N1 ... python -m vitsweep compare ...`)."
            )
