"""How long a measurement is, and that of a screening run."""

from dataclasses import replace

from tests.cells import cell
from vitsweep.spec.measurement import OF_COMMAND, SCREENING_SECONDS


def test_a_window_holds_the_fewest_steps_that_were_asked_for() -> None:
    measurement = cell("measurement.measured_steps=20").measurement
    for fewest, steps in ((0, 20), (1, 1), (19, 19), (20, 20), (21, 20)):
        assert replace(measurement, fewest_steps=fewest).least_steps == steps


def test_a_screening_run_is_as_short_as_can_be() -> None:
    spec = cell("measurement.traced_steps=3", "measurement.warmup_min_seconds=2").measurement
    for longest in (SCREENING_SECONDS / 2, SCREENING_SECONDS, SCREENING_SECONDS * 2):
        full = replace(spec, max_seconds=longest, min_seconds=1.5, trace=True)
        short = full.for_screening()
        assert short.max_seconds == min(longest, SCREENING_SECONDS)
        assert (short.warmup_min_seconds, short.min_seconds) == (0.0, 0.0)
        assert (short.trace, short.traced_steps) == (False, 0)
        changed = {"max_seconds", "warmup_min_seconds", "min_seconds", "trace", "traced_steps"}
        assert {k: v for k, v in vars(short).items() if k not in changed} == {
            k: v for k, v in vars(full).items() if k not in changed
        }


def test_what_belongs_to_the_command_makes_no_other_cell() -> None:
    assert {*OF_COMMAND} == {
        "warmup_min_seconds", "min_seconds", "max_seconds", "blocks", "prove", "trace", "fewest_steps",
        "traced_steps", "start", "timeout_min",
    }  # fmt: skip
    measurement = cell().measurement
    assert cell().of_command["measurement"] == {k: getattr(measurement, k) for k in OF_COMMAND}
