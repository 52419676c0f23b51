"""The tables of sweeps: what each reads, and which optional features they hold something of."""

from pathlib import Path

import numpy as np
import pytest

from tests.builders import from_runs, run, table
from vitsweep.errors import VitsweepError
from vitsweep.extras import Feature
from vitsweep.results.store import Store
from vitsweep.tables import sweep_tables
from vitsweep.tables.diagnostics import diagnostics
from vitsweep.tables.sweep_tables import SweepTables


def stored(folder: Path, *cells: str, **command: object) -> Store:
    store = Store(folder).create()
    for name in cells:
        for seed in (1, 2, 3):
            record = run(
                f"{name}{seed}",
                f"s{seed}",
                100.0 + seed,
                seed=seed,
                precision=name,
                sweep=store.name,
            )
            store.save_run(record)
    store.append_command({"baselines": {}} | command)
    return store


def test_one_folder_is_read_as_it_is_and_several_as_one(tmp_path: Path) -> None:
    one = stored(tmp_path / "one", "fp32")
    stored(tmp_path / "two", "O1")
    tables = SweepTables.of(one)
    assert SweepTables.of(tables) is tables
    assert SweepTables.of(one.root).stores[0].root == one.root
    assert (tables.is_tidy, SweepTables.read(one.root).is_tidy) == (False, True)
    assert (len(tables.every_run), len(tables.runs), len(tables.cells)) == (3, 3, 3)
    assert tables.every_run["precision"].dtype != "category"
    both = SweepTables.read(tmp_path)
    assert set(both.runs["sweep"]) == {"one", "two"}
    assert both.runs["precision"].dtype == "category"
    assert both.runs.index.tolist() == list(range(6))
    assert len(both.commands) == 2
    empty = Store(tmp_path / "empty").create()
    assert SweepTables.of(empty).every_run.empty
    assert SweepTables.of(empty).evaluations.empty
    with pytest.raises(VitsweepError, match="empty"):
        SweepTables.read(empty.root)


def test_settings_are_those_of_the_latest_command(tmp_path: Path) -> None:
    store = stored(tmp_path / "s", "fp32", "O1")
    plain = SweepTables.of(store)
    assert (plain.replicate_key, len(plain.replicates)) == ("", 0)
    assert plain.settings is plain.cells
    assert plain.settings_of(plain.cells[:2]).equals(plain.cells[:2])
    store.append_command({"replicate": "seed"})
    repeated = SweepTables.of(store)
    assert repeated.replicate_key == "seed"
    assert repeated.settings is repeated.replicates
    assert repeated.settings["precision"].tolist() == ["O1", "fp32"]
    assert len(repeated.settings_of(repeated.cells[:1])) == 1
    assert "replicates" in repeated.settings_of(repeated.cells[:1])
    store.append_command({"replicate": "nosuch"})
    unknown = SweepTables.of(store)
    assert len(unknown.settings) == len(unknown.settings_of(unknown.cells)) == 6


def test_features_are_those_of_which_a_sweep_holds_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stored(tmp_path / "s", "fp32", raced={"x": 1}, none=[])
    (store.root / "kept.json").write_text("{}")
    features = {
        "always": Feature(), "command": Feature(recorded="raced"), "empty": Feature(recorded="none"),
        "column": Feature(recorded="precision"), "absent": Feature(recorded="nosuch", kept="no.json"),
        "file": Feature(recorded="nosuch", kept="kept.json"), "gone": Feature(kept="no.json"),
    }  # fmt: skip
    monkeypatch.setattr(sweep_tables, "FEATURES", features)
    assert SweepTables.of(store).features == ["always", "command", "column", "file"]


def test_blocks_are_diagnosed_from_four_on_and_threaten_from_twelve() -> None:
    def found(number: int, ratios: np.ndarray) -> list[dict]:  # type: ignore[type-arg]
        rows = [
            run(c, f"b{n}", 100.0 * (ratios[n] if c == "cell" else 1), minute=n, precision=c)
            for n in range(number) for c in ("base", "cell")
        ]  # fmt: skip
        tables = from_runs(table(*rows), {"base": "base", "cell": "base"})
        return diagnostics(tables.runs, tables.baselines).to_dict("records")

    slow = 1 + 0.3 * np.sin(np.arange(20) / 4)
    assert found(3, slow) == []
    assert found(6, np.ones(6)) == []
    for number, threatens in ((4, False), (11, False), (12, True)):
        [row] = found(number, slow)
        assert (row["num_runs"], row["threatens"], bool(row["sentence"])) == (
            number - 1,
            threatens,
            threatens,
        )
    [row] = found(12, 1 + 0.3 * (-1) ** np.arange(12))
    assert not row["threatens"]
    assert row["estimate"] == -0.99
