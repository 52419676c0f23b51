"""What a hardware profile must hold, so that a wrong file is refused before anything is traced."""

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, Literal, get_args

from vitsweep.composition.suggestions import did_you_mean

Confidence = Literal["measured", "published", "derived", "assumed"]
FLOAT_FORMATS = ("float32", "tf32", "bfloat16", "float16", "float8")
KEYS = ("name", "peaks_of", "peak_tflops", "figures", "drivers_name")
PRICES = ("price_low_usd_per_hour", "price_high_usd_per_hour")
BY_FORMAT = "matmul_fraction"
"""The table whose positions are number formats."""
WHOLE = ("multiprocessors", "devices_per_node")
MAY_BE_ZERO = (
    *PRICES, "reserved_gib", "kernel_us", "dispatch_us", "fabric_pass_us", "overlap_charge_link",
    "overlap_charge_fabric",
)  # fmt: skip


def problems(tree: Mapping[str, Any], tables: Mapping[str, bool]) -> Iterator[str]:
    """Yield what is wrong with a profile, as parts of a sentence.

    Args:
        tree: the file.
        tables: figure that a profile may have -> whether it is a table; prices are known besides.
    """
    for key in tree:
        if key not in KEYS:
            yield _unknown(f"`{key}`", str(key), KEYS)
    yield from _peak_problems(tree.get("peak_tflops"))
    kinds = dict(tables) | dict.fromkeys(PRICES, False)
    figures = tree.get("figures") or {}
    if not isinstance(figures, dict):
        yield f"`figures: {figures}` is no list of named figures"
        return
    for name, node in figures.items():
        if name not in kinds:
            yield _unknown(f"`figures.{name}`", str(name), list(kinds))
        else:
            yield from _figure_problems(str(name), node, kinds[name])
    priced = [name for name in PRICES if name in figures]
    if len(priced) == 1:
        [lacking] = set(PRICES) - set(priced)
        yield f"`{priced[0]}` needs `{lacking}` beside it, which may be the same"


def _unknown(shown: str, name: str, known: Any) -> str:
    hint = did_you_mean(name, list(known), str).strip()
    return f"{shown} is nothing that a profile has. {hint}".strip().rstrip(".")


def _peak_problems(peaks: Any) -> Iterator[str]:
    if peaks is None:
        return
    if not isinstance(peaks, dict):
        yield f"`peak_tflops: {peaks}` is not {{format: TFLOP/s}}, like {{float32: 19.5, bfloat16: 312}}"
        return
    for name, value in peaks.items():
        if name not in FLOAT_FORMATS:
            yield f"`peak_tflops.{name}` is none of {', '.join(FLOAT_FORMATS)}"
        elif problem := _number_problem(f"peak_tflops.{name}", value):
            yield problem
    if "float32" not in peaks:
        yield "`peak_tflops` lacks `float32`, from which the rate of any other format is no estimate"


def _figure_problems(name: str, node: Any, is_table: bool) -> Iterator[str]:
    if not isinstance(node, dict) or {"value", "source", "confidence"} - set(node):
        yield f"`{name}` needs `value`, `source` and `confidence`"
        return
    if node["confidence"] not in get_args(Confidence):
        yield f"`{name}.confidence: {node['confidence']}` is none of {', '.join(get_args(Confidence))}"
    value = node["value"]
    if isinstance(value, dict) != is_table:
        kind = "a table {position: number}" if is_table else "one number"
        yield f"`{name}.value: {value}` must be {kind}"
    elif is_table:
        yield from _table_problems(name, value)
    elif problem := _number_problem(name, value):
        yield problem
    elif name in WHOLE and float(value) % 1:
        yield f"`{name}: {value}` must be a whole number"


def _table_problems(name: str, table: Mapping[Any, Any]) -> Iterator[str]:
    if not table:
        yield f"`{name}` is an empty table"
    for position, value in table.items():
        if name == BY_FORMAT and position not in FLOAT_FORMATS:
            yield f"`{name}.{position}` is none of {', '.join(FLOAT_FORMATS)}"
        elif name != BY_FORMAT and (
            problem := _number_problem(f"{name}, position", position, "position")
        ):
            yield problem
        elif problem := _number_problem(f"{name}.{position}", value, name):
            yield problem


def _number_problem(shown: str, value: Any, figure: str = "") -> str:
    """Return why a value is no figure; "" where it is one."""
    name = figure or shown
    try:
        number = float(value)
    except (TypeError, ValueError):
        return f"`{shown}: {value}` is no number"
    if isinstance(value, bool) or not isfinite(number):
        return f"`{shown}: {value}` is no number"
    if number < 0 or (number == 0 and name not in MAY_BE_ZERO):
        return f"`{shown}: {value}` must be above 0"
    if "fraction" in name and number > 1:
        return f"`{shown}: {value}` is a share, at most 1"
    return ""
