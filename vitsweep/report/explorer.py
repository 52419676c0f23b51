"""The interactive chart of the report: any two numbers against each other, by any choice."""

import base64
import gzip
import json
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.results.metrics import METRICS
from vitsweep.results.record import Status
from vitsweep.tables.budget import with_peak
from vitsweep.tables.columns import CHOICES, metric_columns, varying
from vitsweep.tables.formatting import missing, plain
from vitsweep.tables.names import cell_names

FIRST = ("peak_gib", "images_per_second")
"""What the explorer opens with: memory across, throughput up."""


def explorer(cells: DataFrame) -> dict[str, Any] | None:
    """Return what the page needs to draw: data as JSON and plotly's code, compressed.

    None where nothing was measured or plotly is not installed; the page then has no explorer.
    """
    measured = with_peak(cells[cells["status"] == Status.measured])
    if measured.empty or find_spec("plotly") is None:
        return None
    numbers = [c for c in metric_columns(measured) if measured[c].notna().any()]
    numbers += [c for c in varying(measured) if c not in CHOICES and measured[c].dtype.kind in "if"]
    groups = [c for c in varying(cells) if c in CHOICES] or ["model"]
    data = {
        "names": cell_names(cells)[measured.index].tolist(),
        "numbers": {c: [None if missing(v) else float(v) for v in measured[c]] for c in numbers},
        "labels": {c: style.axis_label(c) for c in numbers},
        "groups": {c: [plain(v) for v in measured[c]] for c in groups},
        "colours": {c: {plain(v): style.colour(c, plain(v)) for v in measured[c]} for c in groups},
        "first": [c if c in numbers else numbers[0] for c in FIRST],
        "better": {c: METRICS[c].better for c in numbers if c in METRICS},
    }
    # "</" would end the script element of the page
    return {"data": json.dumps(data).replace("</", "<\\/"), "code": _plotly_code()}


@cache
def _plotly_code() -> str:
    code = files("plotly.package_data").joinpath("plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(code, 6, mtime=0)).decode()
