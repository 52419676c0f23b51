"""vitsweep: sweeps over the techniques that make Vision-Transformer training fast, measured soundly.

    import vitsweep
    sweep = vitsweep.sweep(["precision=O1,O2", "sharding=ddp,fsdp"], model="vit_nano")
    sweep.speedups()

Importing it loads neither torch nor pandas: each name is imported when it is first used.
"""

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitsweep import extras
from vitsweep.interpreters import take_environment_of_parent

if TYPE_CHECKING:
    from vitsweep.api.functions import plan, sweep
    from vitsweep.api.sweep import Report, Sweep, load
    from vitsweep.errors import BadValueError, ImpossibleCellError, VitsweepError
    from vitsweep.extras import Applied as Applied
    from vitsweep.extras import ComparisonResult as ComparisonResult
    from vitsweep.extras import Guard as Guard
    from vitsweep.extras import Tuner as Tuner
    from vitsweep.extras import apply as apply
    from vitsweep.extras import check as check
    from vitsweep.extras import compare_settings as compare  # noqa: F401
    from vitsweep.extras import is_checking as is_checking
    from vitsweep.extras import measured as measured
    from vitsweep.extras import tune as tune

take_environment_of_parent()

__version__ = "0.1.0"

__all__ = [
    "BadValueError",
    "ImpossibleCellError",
    "Report",
    "Sweep",
    "VitsweepError",
    "__version__",
    "load",
    "plan",
    "sweep",
    *extras.NAMES,
]

_HOMES = {
    "api.functions": ("plan", "sweep"),
    "api.sweep": ("Report", "Sweep", "load"),
    "errors": ("BadValueError", "ImpossibleCellError", "VitsweepError"),
}
_MODULE_OF = {name: f"vitsweep.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in extras.NAMES and name not in _MODULE_OF:
        raise AttributeError(f"module 'vitsweep' has no attribute {name!r}")
    state = random.getstate()  # rich draws when it is imported
    try:
        if name in extras.NAMES:
            return extras.load(extras.NAMES[name])
        return getattr(import_module(_MODULE_OF[name]), name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
