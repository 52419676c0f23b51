"""A run's record: JSON there and back, and what is no record."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.builders import run
from tests.refusals import named
from vitsweep.results.metrics import METRICS
from vitsweep.results.record import SCHEMA_VERSION, OtherSchemaError, RunRecord, Status

WHOLE = run(
    "0123456789ab",
    metrics={"mfu": None, "accuracy_top1": 0.96},
    validity={"throttled": None},
    precision="O2",
)
MEASURED = replace(
    WHOLE, samples={"step_time_ms": [[1.5, 2.5], [1.25, 2.0]], "skipped": [False, True]}
)
ENDED = run("0123456789ab", status=Status.out_of_memory, reason="Rank 1 wanted 3 GiB, “more”.")


@pytest.mark.parametrize("record", [MEASURED, ENDED], ids=["measured", "ended"])
def test_a_record_is_read_back_as_it_was(record: RunRecord) -> None:
    again = RunRecord.from_json(record.to_json())
    assert again == record
    assert isinstance(again.status, Status)


def test_the_names_of_many_records_stand_in_memory_once() -> None:
    first, second = (RunRecord.from_json(MEASURED.to_json()) for _ in range(2))
    for part in ("spec", "metrics", "environment"):
        names = zip(getattr(first, part), getattr(second, part), strict=True)
        assert all(one is two for one, two in names)


def test_no_section_of_a_record_says_which_run_it_is() -> None:
    other = {"cell_id": "other", "status": "failed", "block": 7}
    row = replace(MEASURED, environment=other, metrics=other).row()
    assert (row["cell_id"], row["status"], row["block"]) == (
        "0123456789ab",
        "measured",
        MEASURED.block,
    )
    assert [*row][:3] == ["schema_version", "run_id", "cell_id"]


def test_every_way_to_end_survives() -> None:
    for status in Status:
        record = run("x", status=status)
        assert RunRecord.from_json(record.to_json()).status is status
        assert json.loads(record.to_json())["status"] == status.name


def test_numbers_that_are_not_finite_become_null_wherever_they_are() -> None:
    nan, inf = float("nan"), float("inf")
    odd = replace(
        MEASURED,
        metrics={"loss_last": nan, "mfu": -inf, "step_time_ms": 1.5},
        samples={"step_time_ms": [[1.0, inf], [nan, 2.0]]},
        environment={"deep": {"list": [(1, nan)]}},
    )
    text = odd.to_json()
    assert json.loads(text, parse_constant=pytest.fail)["metrics"] == {
        "loss_last": None,
        "mfu": None,
        "step_time_ms": 1.5,
    }
    again = RunRecord.from_json(text)
    assert again.samples == {"step_time_ms": [[1.0, None], [None, 2.0]]}
    assert again.environment == {"deep": {"list": [[1, None]]}}
    assert math.isnan(odd.metrics["loss_last"] or 0), "the record itself is left alone"


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_record_of_another_version_is_refused_with_both_versions(version: int) -> None:
    other = json.loads(MEASURED.to_json()) | {"schema_version": version}
    with pytest.raises(OtherSchemaError) as error:
        RunRecord.from_json(json.dumps(other))
    assert {str(version), str(SCHEMA_VERSION)} <= named(str(error.value))


def test_fields_that_a_later_writer_added_are_left_out() -> None:
    more = json.loads(MEASURED.to_json()) | {"mood": "good"}
    assert RunRecord.from_json(json.dumps(more)) == MEASURED


def test_what_is_no_whole_record_is_a_value_error() -> None:
    for text in [
        "",
        "null",
        "3",
        "[]",
        "{}",
        '{"status": "measured"}',
        '{"schema_version": null}',
        '{"schema_version": "1"}',
        f'{{"schema_version": {SCHEMA_VERSION}}}',
        MEASURED.to_json().replace('"measured"', '"fine"'),
        MEASURED.to_json().replace('"run_id"', '"name"'),
        json.dumps(json.loads(MEASURED.to_json()) | {"metrics": None}),
        json.dumps(json.loads(MEASURED.to_json()) | {"spec": ["O2"]}),
        MEASURED.to_json()[: len(MEASURED.to_json()) // 2],
        MEASURED.to_json()[:-1],
    ]:
        with pytest.raises(ValueError, match=r"record|Expect|delimiter|Unterminated|valid"):
            RunRecord.from_json(text)


def test_a_row_is_flat_and_holds_every_part_but_the_samples() -> None:
    row = MEASURED.row()
    assert (row["cell_id"], row["status"], row["precision"]) == ("0123456789ab", "measured", "O2")
    assert row["accuracy_top1"] == 0.96
    assert row["device"] == "AMD EPYC 7B13"
    assert row["throttled"] is None
    assert not any(isinstance(value, dict | list) for value in row.values())
    parts = [WHOLE.spec, WHOLE.metrics, WHOLE.validity, WHOLE.environment]
    assert sum(map(len, parts)) + 10 == len(row), "no part hides a column of another"


UNITS = {
    "_ms": "ms",
    "_gib": "GiB",
    "_seconds": "s",
    "_bytes_per_step": "B",
    "_gb_per_s": "GB/s",
    "_hours_imagenet1k": "h",
    "tflops_per_rank": "TFLOP/s",
    "images_per_second": "img/s",
    "images_per_second_per_rank": "img/s",
    "tokens_per_second": "tokens/s",
}


def test_a_metric_has_its_unit_in_its_name_and_a_definition() -> None:
    for metric in METRICS.values():
        stated = [unit for ending, unit in UNITS.items() if metric.column.endswith(ending)]
        assert stated in ([], [metric.unit])
        assert len(metric.definition) > 10
        assert metric.unit in metric.axis_label or metric.unit == "1"
        assert metric.axis_label.startswith(metric.label)


@pytest.mark.parametrize(
    "module", ["vitsweep.results.record", "vitsweep.files", "vitsweep.results.store"]
)
def test_reading_records_does_not_load_pandas(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'pandas', 'numpy', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("place", [0.1, 0.4, 0.6, 0.9])
def test_a_byte_that_changed_is_seen(place: float) -> None:
    text = MEASURED.to_json()
    digit = text.index("1", int(place * text.rindex("checksum")) // 2)
    with pytest.raises(ValueError, match="checksum"):
        RunRecord.from_json(f"{text[:digit]}7{text[digit + 1 :]}")


def test_a_record_without_checksum_is_read() -> None:
    tree = json.loads(MEASURED.to_json())
    del tree["checksum"]
    assert RunRecord.from_json(json.dumps(tree)) == MEASURED


def test_a_value_of_another_type_is_a_value_error() -> None:
    for change in [
        {"run_id": 7},
        {"attempt": "1"},
        {"failed_rank": "x"},
        {"reason": None},
        {"status": []},
        {"metrics": {"mfu": "high"}},
        {"metrics": {"mfu": [1]}},
        {"spec": {"world_size": "two"}},
        {"samples": {"step_time_ms": 3}},
        {"samples": {"step_time_ms": [["a"]]}},
    ]:
        tree = json.loads(MEASURED.to_json()) | change
        with pytest.raises(ValueError, match=r"record|valid"):
            RunRecord.from_json(json.dumps(tree))


def test_numbers_of_any_length_and_any_depth_end_well() -> None:
    text = MEASURED.to_json().rpartition(',\n "checksum"')[0]
    huge = RunRecord.from_json(text.replace('"mfu": null', f'"mfu": {"9" * 400}') + "}")
    assert huge.metrics["mfu"] is None
    for digits, depth in ((5000, 0), (1, 100_000), (1, 200)):  # 200 can be read, not written
        number = "[" * depth + "9" * digits + "]" * depth
        with pytest.raises(ValueError, match=r"nested|digits|sections"):
            RunRecord.from_json(text.replace('"mfu": null', f'"mfu": {number}') + "}")
