"""A YAML copied under another name meets every rule that the original meets."""

from itertools import combinations
from pathlib import Path

import pytest

from tests.cells import GPU_NODE, LAPTOP, TINY, composer
from vitsweep.composition.composer import ComposedCell, copy_tree
from vitsweep.errors import BadValueError
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.spec.resources import Machine

CONF = Path(__file__).parents[2] / "conf"
COPY = "copied_"
ON_THE_HOST = ("loader=", "runtime=")
"""Their rules look at data and resources alone."""
CHOICES = [
    f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))
]
MODELS = {
    "vit_nano": (),
    "video_vit_nano": ("data=moving_digits",),
}
MACHINES = {"cpu": LAPTOP, "cuda": GPU_NODE}


def renamed(composed: ComposedCell) -> ComposedCell:
    """The cell as if the file of every technique had been copied under another name."""
    tree = copy_tree(composed.tree)
    for group in GROUPS:
        tree[group]["name"] = COPY + tree[group]["name"]
    return ComposedCell(composed.overrides, composed.choices, tree)


def verdict(composed: ComposedCell, machine: Machine) -> tuple[object, ...]:
    """Reasons, and what formulas read off the choices."""
    try:
        planned = plan_cell(composed, machine)
    except BadValueError as error:
        return (str(error),)
    spec = planned.spec
    reasons = tuple(reason.replace(COPY, "") for reason in planned.reasons)
    if planned.reasons:
        return (reasons,)
    tokens = None if spec.num_tokens is None else spec.sequence_parallel.tokens_per_rank(spec)
    return (reasons, tokens, spec.memory.forwards_per_step, spec.compilation.scope)


def overrides_of(model: str, *choices: str) -> list[str]:
    size = TINY if model == "vit_nano" else TINY[-1:]
    return [f"model={model}", *MODELS[model], *size, *choices]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "model", [m if m == "vit_nano" else pytest.param(m, marks=pytest.mark.full) for m in MODELS]
)
@pytest.mark.parametrize("group", GROUPS)
def test_a_copied_yaml_meets_the_rules_of_its_original(
    group: str, model: str, machine: str
) -> None:
    pairs = [
        pair
        for pair in combinations(CHOICES, 2)
        if pair[0].partition("=")[0] == group != pair[1].partition("=")[0]
        and not pair[1].startswith(ON_THE_HOST)
    ]
    single = [(choice,) for choice in CHOICES if choice.startswith(f"{group}=")]
    for choices in [*single, *pairs]:
        composed = composer().compose(overrides_of(model, *choices))
        original = verdict(composed, MACHINES[machine])
        assert verdict(renamed(composed), MACHINES[machine]) == original, choices


def test_the_pairs_meet_many_different_rules() -> None:
    found = {
        reason
        for pair in combinations(CHOICES, 2)
        if pair[0].partition("=")[0] != pair[1].partition("=")[0]
        for reason in plan(pair)
    }
    assert len(found) > 60


def plan(pair: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return plan_cell(composer().compose(overrides_of("vit_nano", *pair)), LAPTOP).reasons
    except BadValueError as error:
        return (str(error),)
