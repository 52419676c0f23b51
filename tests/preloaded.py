"""What the fork server of the tests holds beside imports, so that no command makes it anew.

The digits, which nearly every cell reads; what a command parses first: the files that hash as the code
of a cell, and words of Hydra's grammar, whose parser learns as it reads; and what is imported late.
"""

from importlib import import_module

from tests.cells import LAPTOP, TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.data.digits import read_digits
from vitsweep.execution.code_hash import code_of
from vitsweep.planning.sweep_plan import plan_cell

for late in ("pyarrow.parquet", "scipy.optimize", "vitsweep.cli.cells", "vitsweep.launchers.local"):
    import_module(late)
read_digits()
for cell in expand([*TINY, "sharding=ddp,fsdp", "optimizer.learning_rate=1e-3"], composer()):
    code_of(plan_cell(composer().compose(cell.overrides), LAPTOP).spec)
