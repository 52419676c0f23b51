"""Which part of a cell a process does that something else started, and what stock launchers are refused."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from vitsweep.cli import hydra_detour
from vitsweep.cli.hydra_detour import (
    _is_raised_by_hydra,
    _refuse_varying_resources,
    run_composed,
    run_hydra,
    run_part,
)
from vitsweep.composition.hydra import parse
from vitsweep.errors import BadValueError, ExitCode


def test_a_task_of_several_is_a_rank_and_one_alone_starts_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(hydra_detour, "running_cell", lambda: (SimpleNamespace(tree={}), None))
    monkeypatch.setattr(hydra_detour, "sweep_settings", lambda tree: None)
    monkeypatch.setattr(hydra_detour, "run_rank", lambda *_: done.append("rank"))
    monkeypatch.setattr(hydra_detour, "run_unlocked", lambda *_: done.append("alone"))
    for place, part in (
        (None, "alone"),
        ((0, 0, 1), "alone"),
        ((0, 0, 2), "rank"),
        ((1, 1, 3), "rank"),
    ):
        monkeypatch.setattr(hydra_detour, "environment_rank", lambda place=place: place)
        run_composed()
        assert done.pop() == part


def test_rank_0_alone_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"status": "failed"}]
    monkeypatch.setattr("vitsweep.cli.summary.summarize", lambda *_, **more: rows)
    monkeypatch.setattr(hydra_detour, "held", lambda *_: nullcontext())
    for found, code in (
        (None, ExitCode.ok),
        ((SimpleNamespace(store=None), SimpleNamespace(report=True)), ExitCode.not_all_measured),
    ):
        monkeypatch.setattr(hydra_detour, "run_in_place", lambda _, found=found: found)
        assert run_part([]) == code


def test_one_array_of_stock_submitit_has_one_size() -> None:
    def cells(*sizes: dict[str, int]) -> Any:
        return [SimpleNamespace(tree={"resources": size}) for size in sizes]

    same = {"nodes": 1, "ranks_per_node": 2}
    _refuse_varying_resources(cells(same, dict(same)))
    with pytest.raises(BadValueError, match=r"^`resources\.nodes` vary") as refused:
        _refuse_varying_resources(cells(same, same, same | {"nodes": 2}))
    assert "ranks_per_node" not in str(refused.value)


def test_an_error_of_hydra_is_distinguished_from_one_of_what_it_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Exception) as of_hydra:  # noqa: PT011
        parse("a=[", None)
    assert _is_raised_by_hydra(of_hydra.value)
    with pytest.raises(ValueError, match="x") as of_another:
        raise ValueError("x")
    assert not _is_raised_by_hydra(of_another.value)

    def main(**_: Any) -> Any:
        def ends(task: Any) -> Any:
            def run() -> None:
                raise raised

            return run

        return ends

    monkeypatch.setattr(hydra_detour.hydra_core, "main", main)
    monkeypatch.setattr("sys.argv", ["x"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for code, ended in ((1, 2), (3, 3), (0, 0)):
        raised: BaseException = SystemExit(code)
        with pytest.raises(SystemExit) as left:
            run_hydra([])
        assert left.value.code == ended
    raised = ValueError("not of hydra")
    with pytest.raises(ValueError, match="not of hydra"):
        run_hydra([])
