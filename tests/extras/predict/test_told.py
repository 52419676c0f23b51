from tests.builders import run, table
from vitsweep.extras.predict.told import prediction_sentence
from vitsweep.tables.cells import cells
from vitsweep.tables.sentences import say


def test_errors_of_predicted_step_times_are_reported():
    def predicted(ms: float, low: float, high: float) -> dict[str, float]:
        ends = {"low": low, "high": high}
        return {f"predicted_step_time_{end}_ms": value for end, value in ends.items()} | {
            "predicted_step_time_ms": ms, "predicted_peak_gib": 1.0, "peak_allocated_gib": 2.0,
        }  # fmt: skip

    before, after = (
        {"predicted_at": f"2026-10-20T{hour}:00:00.000+00:00"} for hour in ("09", "11")
    )
    close, far = predicted(704.0, 600.0, 800.0), predicted(160.0, 150.0, 170.0)
    runs = table(
        run("a", "b0", 100, metrics=close, environment=before),  # 640 ms were measured
        run("b", "b0", 200, metrics=far, environment=before, precision="O1"),  # 320 ms
        run("c", "b0", 100, precision="O2"),
        run("late", "b0", 100, metrics=close, environment=after, precision="O3"),
        run("undated", "b0", 100, metrics=close, precision="bf16"),
    )
    sentence = prediction_sentence(cells(runs, {}))
    # factors 1.1 and 2: as far below as above
    assert sentence == say("predictions", cells="2 cells", median=1.6, high=1.9, held=1, all=2)
    assert prediction_sentence(cells(runs[runs["cell_id"].isin(["late", "undated"])], {})) == ""


def test_without_predictions_nothing_is_reported():
    alone = cells(table(run("a")), {})
    assert prediction_sentence(alone) == ""
