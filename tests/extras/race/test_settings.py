"""Settings of a race, and what does not go with one."""

import pytest

from tests.cells import composer
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.errors import BadValueError


def settings(*overrides: str) -> SweepSettings:
    return sweep_settings(composer().compose(list(overrides)).tree)


@pytest.mark.parametrize(
    "override",
    [
        "sweep.limit.key=model.depth",
        "sweep.accept_code=any",
        "sweep.replicate=seed",
        "sweep.max_gpu_hours=1",
    ],
)
def test_what_does_not_go_with_a_race_is_refused(override: str) -> None:
    with pytest.raises(BadValueError, match=r"`sweep.search=race`"):
        settings("sweep.search=race", override)


def test_a_race_is_refused_blocks_of_one_cell_and_a_grid_is_not() -> None:
    with pytest.raises(BadValueError, match=r"`sweep.cells_per_block=1`"):
        settings("sweep.search=race", "sweep.cells_per_block=1")
    assert settings("sweep.search=race", "sweep.cells_per_block=2").cells_per_block == 2
    assert settings("sweep.cells_per_block=1").cells_per_block == 1  # beside a baseline


@pytest.mark.parametrize(
    "override",
    [
        "sweep.rank_by=throughput_per_cost",
        "sweep.memory_limit_gib=5",
        "sweep.confirm=2",
    ],
)
def test_what_only_a_race_has_is_refused_in_a_grid(override: str) -> None:
    with pytest.raises(
        BadValueError,
        match=rf"`{override}.*`sweep\.search=race`",
    ):
        settings(override)
    settings(override, "sweep.search=race")
