"""What chooses blocks from the runs before is refused on a cluster, where jobs hold all their blocks."""

import pytest

from hydra_plugins.vitsweep_launchers.plugin import LocalLauncher, SlurmLauncher
from tests.composition.test_sweep_settings import settings as sweep_of
from tests.launchers.slurm.test_packing import settings
from vitsweep.api.functions import require_rounds
from vitsweep.errors import BadValueError
from vitsweep.launchers.slurm.submit.launch import check_wait


def test_a_race_and_minutes_are_refused_with_the_way_out() -> None:
    for typed in ("sweep.search=race", "sweep.minutes=3"):
        require_rounds(LocalLauncher(), sweep_of(typed))
        with pytest.raises(BadValueError, match=rf"^`{typed}` .*launcher=local.*salloc -N1"):
            require_rounds(SlurmLauncher(), sweep_of(typed))
    require_rounds(SlurmLauncher(), sweep_of())


def test_a_search_for_limits_waits_for_its_rounds() -> None:
    with pytest.raises(
        BadValueError, match=r"launcher\.wait=false`: each round of `sweep.limit` is"
    ):
        check_wait(settings(wait=False))
    check_wait(settings())
