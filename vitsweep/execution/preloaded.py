"""What the fork server of ranks imports once, as a module that it can be given as its preload.

It runs no tensor operation: a child forked after one hangs.
"""

import gc
from contextlib import suppress
from importlib import import_module

MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.profiler",
    "torch._dynamo",
    "vitsweep.cell",
    "vitsweep.execution.worker",
)

gc.disable()  # collections amid these imports free nothing and take an eighth of their time
for module in MODULES:
    with suppress(ImportError):  # what is missing has its reason where it is needed
        import_module(module)
gc.enable()
