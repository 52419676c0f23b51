"""What is read of a line without a verb, which words it refuses, and its exit code."""

import pytest

from vitsweep.api.session import SUBMITTED, NotOursError
from vitsweep.cli.cells import (
    Line,
    _refuse_words,
    _repeated_keys,
    check_words,
    exit_code,
    is_override,
    read_line,
)
from vitsweep.composition.hydra import parse_overrides
from vitsweep.errors import ExitCode, VitsweepError
from vitsweep.results.record import Status


def test_flags_and_overrides_are_distinguished() -> None:
    for typed, overrides, more in (
        ("", [], {}),
        ("-m seed=1,2 ~tracker", ["seed=1,2", "~tracker"], {}),
        ("-q seed=1", ["seed=1"], {"is_quiet": True}),
        ("--quiet -r seed=1", ["seed=1"], {"is_quiet": True}),
        ("--config-dir mine seed=1", ["seed=1"], {"config_dir": "mine"}),
        ("-cd=mine seed=1", ["seed=1"], {"config_dir": "mine"}),
        ("--config-name=own seed=1", ["seed=1"], {"config_name": "own"}),
        ("-cn own seed=1", ["seed=1"], {"config_name": "own"}),
        ("-c job seed=1,2", ["seed=1,2"], {"of_hydra": "-c"}),
        ("--package=model seed=1", ["seed=1"], {"of_hydra": "--package=model"}),
    ):
        line = read_line(typed.split())
        plain = {"config_dir": None, "config_name": "config", "is_quiet": False, "of_hydra": ""}
        assert vars(line) == {"overrides": overrides, **plain, **more}, typed


def test_an_option_that_is_none_is_refused_with_its_value_as_the_setting() -> None:
    for typed, meant in (
        ("--seed 3", "`seed=3`?"),
        ("--seed=3", "`seed=3`?"),
        ("--precision O1", "`precision=O1`?"),
        ("--precision -q", "`precision=...`?"),
        ("--precision seed=3", "`precision=...`?"),
        ("--precision", "`precision=...`?"),
        ("--sweep first", "`+sweep=first`?"),
        ("--multirn", "`--multirun`?"),
    ):
        with pytest.raises(VitsweepError) as refused:
            read_line(typed.split())
        assert str(refused.value).endswith(meant), (typed, str(refused.value))
        assert str(refused.value).startswith(f"`{typed.split()[0]}` ")


def test_an_override_sets_sweeps_or_removes_a_key() -> None:
    found = [w for w in ("a=1", "a=", "+a=1", "~a", "a", "-a=1", "--a=1", "-") if is_override(w)]
    assert found == ["a=1", "a=", "+a=1", "~a"]


def test_a_word_that_is_no_override_is_refused_with_what_to_type() -> None:
    for line in (["-m", "seed=1"], ["-c", "job"], ["--package", "x", "seed=1"], ["-q", "a=1"], []):
        _refuse_words(line)
    for typed, codes in (
        ("seed=1, 2", ("seed=1, 2", ",", "=", "seed=1,2")),
        ("seed= 1", ("seed= 1", ",", "=", "seed=1")),
        ("-m seed =1,2", ("seed =1,2", ",", "=", "seed=1,2")),
        ("seed = 1 , 2 batch.images_per_step=8", ("seed = 1 , 2", ",", "=", "seed=1,2")),
        ("a=1 seed =1", ("seed =1", ",", "=", "seed=1")),
        ("seed=1 plan", ("python -m vitsweep plan seed=1",)),
        ("precision", ("precision", "precision=...", "python -m vitsweep show precision")),
        ("precision.name", ("precision.name", "python -m vitsweep show precision")),
        ("precision:O1", ("precision:O1", "precision=O1")),
        ("precision/O1", ("precision/O1", "precision=O1")),
        ("reprot", ("reprot", "key=value", "python -m vitsweep report")),
    ):
        with pytest.raises(VitsweepError) as refused:
            _refuse_words(typed.split())
        assert tuple(str(refused.value).split("`")[1::2]) == codes, typed


def test_several_cells_need_the_flag_of_a_sweep() -> None:
    check_words(["-m", "seed=1,2"])
    check_words(["--multirun", "seed=1,2"])
    check_words(["seed=[1,2]"])
    with pytest.raises(VitsweepError, match=r"^`seed=1,2` .* -m precision=O1 seed=1,2`"):
        check_words(["precision=O1", "seed=1,2"])


def test_a_key_that_is_typed_twice_is_reported_with_the_sweep_over_all_of_its_values() -> None:
    [told] = _repeated_keys(parse_overrides(["seed=1", "a=1", "+seed=2,3"]))
    assert told.split("`")[1::2] == ["seed", "seed=1", "+seed=2,3", "-m seed=1,2,3"]
    assert [*_repeated_keys(parse_overrides(["seed=1", "a=1"]))] == []


def test_the_exit_code_is_that_of_the_worst_cell() -> None:
    for statuses, code in (
        ([], ExitCode.ok),
        ([Status.measured, SUBMITTED], ExitCode.ok),
        ([Status.measured, Status.failed], ExitCode.not_all_measured),
        ([Status.invalid], ExitCode.not_all_measured),
    ):
        assert exit_code([{"status": status} for status in statuses]) == code


def test_what_hydra_alone_can_run_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitsweep.cli.cells.finish", lambda session: session)
    monkeypatch.setattr(Line, "session", lambda self: 3)
    assert Line([]).measured() == 3
    assert Line([], of_hydra="--cfg").measured() is None

    def refused(self: Line) -> None:
        raise NotOursError("basic")

    monkeypatch.setattr(Line, "session", refused)
    assert Line([]).measured() is None
