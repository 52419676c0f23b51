"""Is there the compiler that torch.compile needs?"""

import os
import shlex
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vitsweep.spec.technique import Compilation

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


def missing_compiler(choice: Compilation, cell: "CellSpec") -> Iterator[str]:
    """Yield a sentence where TorchInductor would find no C++ compiler on a CPU."""
    command = os.environ.get("CXX", "g++")  # what TorchInductor calls
    if cell.resources.device == "cpu" and shutil.which(shlex.split(command)[0]) is None:
        yield (
            f"`compilation={choice.name}` needs a C++ compiler on cpu; found no `{command}`. "
            "Install one (Debian: `apt-get install g++`), name it in CXX, or use "
            "`compilation=eager`."
        )
