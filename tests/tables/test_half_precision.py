"""The sentence that says why half precision is not faster on a CPU."""

import io
from collections.abc import Callable
from functools import partial

import pytest
from pandas import DataFrame
from rich.console import Console

from tests.builders import run, table
from vitsweep.tables.cells import cells
from vitsweep.tables.notes import half_precision_note
from vitsweep.tables.render import CellTable

Found = Callable[[], DataFrame]


def compared(pace: float, instructions: str | None, width: int, device: str = "cpu") -> DataFrame:
    """Return a float32 baseline of 1,000 images/s, and O1 at some pace, over five blocks."""
    records = []
    for block in range(5):
        for name, dtype, rate in (("fp32", "float32", 1000.0), ("O1", "bfloat16", pace)):
            where = {
                "device_type": device,
                "compute_dtype": dtype,
                "cpu_half_precision": instructions,
            }
            spec = {"precision": name, "model.width": width}
            speed = rate * (1 + block / 1000)
            records.append(run(name, f"b{block}", speed, environment=where, **spec))
    return cells(table(*records), {"fp32": "fp32", "O1": "fp32"})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            partial(compared, 240, "none", 128),
            "no bfloat16 instructions: it emulates half precision",
        ),
        (partial(compared, 240, "none", 768), "no bfloat16 instructions"),
    ],
)
def test_the_reason_stands_above_the_table(found: Found, said: str) -> None:
    text = io.StringIO()
    Console(file=text, width=140).print(CellTable(found(), "first"))
    title, note, *rest = text.getvalue().splitlines()
    assert title.startswith("Sweep first")
    assert said in note
    assert any("O1" in line for line in rest)


@pytest.mark.parametrize(
    "found",
    [
        partial(compared, 1400, "none", 128),
        partial(compared, 900, "amx_bf16", 128),
        partial(compared, 900, None, 128),
        partial(compared, 900, "none", 128, device="cuda"),
        lambda: compared(900, "none", 128).drop(columns="cpu_half_precision"),
    ],
    ids=["faster", "with instructions", "unknown", "on a GPU", "an older record"],
)
def test_nothing_is_said_where_the_reason_is_another_or_unknown(found: Found) -> None:
    assert half_precision_note(found()) == ""
