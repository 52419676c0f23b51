"""Writes the measured cells of a sweep on a GPU as a table that `sweep.reference` takes.

python -m analysis.reference analysis/sample_h200 vitsweep/extras/reference/h200.csv
"""

import sys
from pathlib import Path

from vitsweep.extras.reference.records import measured
from vitsweep.results.store import Store

if __name__ == "__main__":
    folder, table = map(Path, sys.argv[1:])
    cells = measured(Store(folder)).sort_values("cell_id")
    cells.to_csv(table, index=False, float_format="%.6g", lineterminator="\n")
