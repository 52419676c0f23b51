"""What the fork server of ranks imports once, as a module that it can be given as its preload.

It runs no tensor operation: a child forked after one hangs.
"""

import gc
from contextlib import suppress
from importlib import import_module
from pkgutil import walk_packages

import vitsweep.techniques
from vitsweep.rates.profile import profile_of
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import prepare

MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.profiler",
    "torch._dynamo",
    "torch.distributed._tools.mem_tracker",
    "numpy.ma",
    "vitsweep.cell",
    "vitsweep.execution.worker",
    "vitsweep.data.batches",
    "vitsweep.data.synthetic",
    *(found.name for found in walk_packages(vitsweep.techniques.__path__, "vitsweep.techniques.")),
)

gc.disable()  # collections amid these imports free nothing and take an eighth of their time
for module in MODULES:
    with suppress(ImportError):  # what is missing has its reason where it is needed
        import_module(module)
profile_of("")  # reads all profiles
prepare(CellSpec)
gc.freeze()  # a first collection would look at 300,000 objects in each rank: 0.2 s of each run
gc.enable()
