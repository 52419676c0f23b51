"""What chooses from the runs before is refused on a cluster, where jobs hold all their blocks."""

import pytest

from hydra_plugins.vitsweep_launchers.plugin import LocalLauncher, SlurmLauncher
from tests.composition.test_sweep_settings import settings
from vitsweep.api.functions import require_rounds
from vitsweep.errors import BadValueError


def test_a_race_minutes_and_a_search_for_limits_are_refused_with_the_way_out() -> None:
    for typed in ("search=race", "minutes=3", "limit.key=batch.images_per_step"):
        require_rounds(LocalLauncher(), settings(f"sweep.{typed}"))
        with pytest.raises(BadValueError, match=rf"^`sweep.{typed}.* .*launcher=local.*salloc -N1"):
            require_rounds(SlurmLauncher(), settings(f"sweep.{typed}"))
    require_rounds(SlurmLauncher(), settings())
