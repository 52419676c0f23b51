"""Searches for limits find them, try few values, and say what they cannot look for."""

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from tests.api.test_session import Recorded, printed
from tests.cells import TINY, composer
from tests.command import Command
from tests.refusals import require
from vitsweep.api.session import open_session
from vitsweep.cli.cells import finish
from vitsweep.composition.composer import ComposedCell
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import LimitSettings, sweep_settings
from vitsweep.errors import BadValueError, ExitCode
from vitsweep.extras.limit.search import Search, Searches

SETTINGS = {"key": "model.depth", "first": 16, "step": 1, "most": None, "within": 0.06}


def searched(holds: Callable[[int], bool], **settings: object) -> tuple[Search, list[int]]:
    """Search where what `holds` fits; return what was found and what was tried."""
    limit = LimitSettings(**SETTINGS | settings)  # type: ignore[arg-type]
    search, tried = Search(), []
    while (value := search.next(limit)) is not None:
        tried.append(value)
        search.learn(value, {"status": "measured" if holds(value) else "out_of_memory"})
    return search, tried


def test_a_limit_is_found_within_six_percent_by_few_values() -> None:
    for most in [1, 2, 15, 16, 17, 100, 1000, 12_345]:
        search, tried = searched(lambda value, most=most: value <= most)
        assert search.fits <= most < (search.fails or 0)
        assert (search.fails or 0) - search.fits <= max(1, 0.06 * search.fits)
        assert len(tried) <= 16
        assert len(set(tried)) == len(tried)


def test_only_multiples_of_the_step_are_tried() -> None:
    search, tried = searched(lambda value: value <= 77, step=8, first=20)
    assert all(value % 8 == 0 for value in tried)
    assert (search.fits, search.fails) == (72, 80)


def test_where_even_the_smallest_value_fails_nothing_fits() -> None:
    search, tried = searched(lambda value: False, step=4)
    assert (search.fits, search.fails) == (0, 4)
    assert tried == [16, 8, 4]


def test_no_value_above_the_most_is_tried() -> None:
    search, tried = searched(lambda value: True, most=50, step=4)
    assert (search.fits, search.fails) == (48, None)
    assert tried == [16, 32, 48]


def test_another_end_than_out_of_memory_ends_the_search_with_its_reason() -> None:
    search = Search()
    search.learn(16, {"status": "failed", "reason": "KeyError: x"})
    assert search.next(LimitSettings(**SETTINGS)) is None  # type: ignore[arg-type]
    assert search.failure == "failed: KeyError: x"


def test_cells_take_their_steps_together_and_end_each_for_itself() -> None:
    holds = {"ddp": 20, "fsdp": 60}
    cells = expand(["sharding=ddp,fsdp", "sweep.baseline=null"], composer())
    rounds = []

    def run_round(number: int, tried: list) -> list[dict[str, str]]:  # type: ignore[type-arg]
        depths = {c.choices["sharding"]: c.tree["model"]["depth"] for c in tried}
        rounds.append(depths)
        fits = [depth <= holds[sharding] for sharding, depth in depths.items()]
        return [{"status": "measured" if fit else "out_of_memory"} for fit in fits]

    limit = LimitSettings(**SETTINGS)  # type: ignore[arg-type]
    found = Searches(cells, limit, composer()).run(run_round)
    assert rounds[0] == {"ddp": 16, "fsdp": 16}
    assert "ddp" not in rounds[-1]
    for search, most in zip(found, holds.values(), strict=True):
        assert search.fits <= most < (search.fails or 0)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.depth=3"], "`model.depth=3` `sweep.limit`"),
        (["sweep.baseline=default"], "`sweep.baseline=null`"),
        (["sweep.limit.first=0"], "`sweep.limit.first=0` 0"),
        (
            ["sweep.limit.step=16", "sweep.limit.most=8"],
            "`sweep.limit.step=16` `sweep.limit.most=8`",
        ),
        (["sweep.limit.key=3"], "`sweep.limit.key=3`"),
    ],
)
def test_a_mistake_is_named_as_typed(overrides: list[str], told: str) -> None:
    given = ["sweep.limit.key=model.depth", "sweep.baseline=null", *overrides]

    def search() -> None:
        of_cells(expand(given, composer()))

    with pytest.raises(BadValueError) as error:
        search()
    require(str(error.value), told)


def of_cells(cells: list[ComposedCell], **settings: Any) -> Searches:
    found = {"settings": sweep_settings(cells[0].tree)} if not settings else settings
    return Searches.of(SimpleNamespace(cells=cells, composer=composer(), **found))  # type: ignore[arg-type]


def test_one_baseline_among_the_cells_of_a_search_is_refused() -> None:
    settings = SimpleNamespace(limit=LimitSettings(**SETTINGS))  # type: ignore[arg-type]
    plain, other = (
        ComposedCell((), {}, {"sweep": {"baseline": baseline}}) for baseline in (None, {"seed": 1})
    )
    assert of_cells([plain, plain], settings=settings).limit is settings.limit
    for cells in ([plain, other], [other, plain], [other]):
        with pytest.raises(BadValueError, match=r"`sweep\.baseline=null`"):
            of_cells(cells, settings=settings)


LIMIT = ("sweep.baseline=null", "sweep.limit={key:model.depth,first:2,step:2}")


def test_a_search_measures_each_round_and_finds_the_limit_of_each_cell(tmp_path: Path) -> None:
    most = {"fp32": 2, "O1": 0}
    launcher = Recorded(
        lambda e: e.composed.tree["model"]["depth"] <= most[e.composed.choices["precision"]]
    )
    typed = [t for t in TINY if "depth" not in t]
    session = open_session(
        [*typed, f"sweep.folder={tmp_path}", "precision=fp32,O1", *LIMIT], Console(file=StringIO())
    )
    session = replace(session, launcher=launcher)
    assert session.searches
    assert {e.composed.tree["model"]["depth"] for e in session.plan.entries.values()} == {2}
    found = session.searches.measure(session)
    assert [(search.fits, search.fails) for search in found] == [(2, 4), (0, 2)]
    rounds = [
        sorted(e.composed.tree["model"]["depth"] for e in request.plan.entries.values())
        for request in launcher.requests
    ]
    assert rounds == [[2, 2], [4]]
    assert [line.partition(": ")[2] for line in printed(session).splitlines() if ": " in line] == [
        ", ".join(map(str, probed)) for probed in rounds
    ]


def test_a_search_ends_well_where_no_cell_of_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr("vitsweep.extras.limit.search.show", shown.append)
    for failures, code in (
        ([], ExitCode.ok),
        (["", ""], ExitCode.ok),
        (["", "no"], ExitCode.not_all_measured),
        (["no"], ExitCode.not_all_measured),
    ):
        searches = Searches([], None, None)  # type: ignore[arg-type]
        found = [Search(failure=failure) for failure in failures]
        monkeypatch.setattr(Searches, "measure", lambda *_, found=found: found)
        session = SimpleNamespace(searches=searches)
        assert finish(session) == code  # type: ignore[arg-type]
        assert shown.pop() is session


BUDGET = (
    "+sweep=largest_model",
    "sharding=ddp,fsdp",
    "memory=keep_all",
    "model.width=512",
    "model.mlp_width=1024",
    "model.num_heads=4",
    "batch.images_per_step=4",
    "resources.ranks_per_node=2",
    "resources.memory_gib_per_rank=0.25",
    "sweep.limit={first:5,within:0.4}",
)


@pytest.mark.full
def test_the_largest_model_is_found_by_one_command_and_remembered(tmp_path: Path) -> None:
    vitsweep = Command(tmp_path)
    done = vitsweep("-m", *BUDGET, quick=False)
    assert done.returncode == 0, done.stderr + done.stdout
    found = pd.read_csv(tmp_path / "results/largest_model/report/limits.csv")
    fits = found.set_index("sharding")["fits"]
    assert 0 < fits["ddp"] < fits["fsdp"], "shards leave room for a larger model"
    assert (found["fails_at"] > found["fits"]).all()
    assert (found["num_parameters"] > 0).all()
    cells = vitsweep.cells("largest_model")
    assert set(cells["status"]) == {"measured", "out_of_memory"}
    assert f"{fits['fsdp']:.0f} fsdp, {fits['ddp']:.0f} ddp" in done.stdout

    again = vitsweep("-m", *BUDGET, quick=False)
    assert again.returncode == 0, again.stderr
    assert len(vitsweep.cells("largest_model")) == len(cells), "nothing was tried anew"
