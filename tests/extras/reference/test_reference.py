"""Records of another machine stand beside equal cells on the same kind of GPU, never as a speedup."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.builders import run
from tests.refusals import require
from vitsweep.api.plan import machine_with
from vitsweep.cli.main import run as main
from vitsweep.composition.composer import Composer
from vitsweep.errors import BadValueError
from vitsweep.extras.reference.records import FACTS, kept, problems, records
from vitsweep.extras.reference.shown import ReferenceTable, beside, section, slow
from vitsweep.planning.machine_defaults import cells_for
from vitsweep.planning.sweep_plan import SweepPlan, plan_of
from vitsweep.rates.profile import profile_named
from vitsweep.results.store import Store
from vitsweep.tables.sweep_tables import SweepTables

SAMPLE = Path("analysis/sample_h200")
H200 = "NVIDIA H200"


def planned(*typed: str, cores: int = 16) -> SweepPlan:
    """Plan cells for one H200 of a host with so many cores."""
    machine = replace(machine_with(profile_named("h200")), devices_per_node=1, cores_per_node=cores)
    composer = Composer()
    return plan_of(cells_for([*typed], composer, machine)[0], machine, composer)


def test_cells_match_whatever_cores_a_host_has() -> None:
    table = records("h200")
    for cores in (16, 96):
        plan = planned("+sweep=meta_speedups", cores=cores)
        found = {row["cell_id"]: row["images_per_second"] for row in kept(plan, "h200")}
        assert len(found) == len(table) == 17
        for cell_id, entry in plan.entries.items():
            assert entry.spec.resources.threads_per_rank == cores
            if cores == 16:
                assert found[cell_id] == table.set_index("cell_id")["images_per_second"][cell_id]
    base = ["model=vit_base", "data=synthetic", "batch.images_per_step=256"]
    assert [row["images_per_second"] for row in kept(planned("precision=fp32", *base), "h200")]
    for other in (["precision=bf16"], ["precision=fp32", "batch.accumulation_steps=2"]):
        plan = planned(*base, *other, "sweep.baseline=null")
        assert kept(plan, "h200") == [], other


def test_a_sweep_its_bundle_and_its_table_are_the_same_reference(tmp_path: Path) -> None:
    archive = tmp_path / "h200.tar.gz"
    assert main(["bundle", str(SAMPLE), "--to", str(archive)]) == 0
    table = records("h200")
    for named in (SAMPLE, archive, "vitsweep/extras/reference/h200.csv"):
        found = records(str(named)).sort_values("cell_id", ignore_index=True)
        assert found["cell_id"].tolist() == table["cell_id"].tolist()
        assert found["images_per_second"].tolist() == pytest.approx(
            table["images_per_second"].tolist(), rel=1e-5
        )


def sweep(
    folder: Path, quotient: float, cells: int = 3, there: str = H200, **facts: Any
) -> SweepTables:
    """Make a sweep whose cells reach this quotient of the records."""
    store = Store(folder / "mine").create()
    rows = []
    for n in range(cells):
        of_gpu = {"device": H200, "device_type": "cuda", "driver": "550.1"} | facts
        store.save_run(run(f"c{n}", "b0", 100.0 * (n + 1), minute=n, environment=of_gpu))
        rate = 100.0 * (n + 1) / quotient
        row = {"cell_id": f"c{n}", "source": "h200", "device": there, "torch": "2.11.0+cu130"}
        rows.append(row | {"driver": "580.2", "images_per_second": rate, "sm_clock_mhz": 1980.0})
    hostile: list[Any] = [1, {}, {**rows[0], "images_per_second": "x"}, {**rows[0], "driver": 5j}]
    hostile[-1] = {**rows[0], "driver": []}
    store.append_command({"command": "", "baselines": {}, "reference": [*rows, *hostile]})
    return SweepTables.of(store)


@pytest.mark.smoke
def test_fifteen_percent_are_told_and_five_are_not(tmp_path: Path) -> None:
    tables = sweep(tmp_path / "15", 1 / 1.15, sm_clock_mhz=1410.0, power_capped_share=0.4)
    said = slow(beside(tables))
    for word in ("3 cells", "0.87", "1,410 MHz", "1,980 MHz", "40%", "550.1", "580.2", "other pro"):
        assert word in said, said
    assert not slow(beside(sweep(tmp_path / "5", 1 / 1.05)))
    assert not slow(beside(sweep(tmp_path / "two", 1 / 1.15, cells=2)))
    assert beside(sweep(tmp_path / "other", 0.5, there="NVIDIA H100 80GB HBM3")).empty
    file = io.StringIO()
    Console(file=file, width=200).print(ReferenceTable(tables))
    screen = file.getvalue()
    page = str(section(tables))
    for shown in (screen, page):
        assert "0.87" in shown
        assert "115" in shown, "the record"
        assert "100" in shown, "this machine"
        assert ("2.13" in shown, "2.11" in shown) == (True, True)
        assert "speedup" not in shown.lower()
        assert "[" not in shown.replace("[0", ""), "no interval"
    assert not section(sweep(tmp_path / "none", 0.5, there="NVIDIA H100 80GB HBM3"))


def test_the_line_of_a_command_keeps_the_records(tmp_path: Path) -> None:
    tables = sweep(tmp_path, 0.5)
    assert {*beside(tables)} >= {f"{fact}_there" for fact in FACTS}
    assert tables.features.count("reference") == 1
    assert "reference" not in SweepTables.of(Store(SAMPLE)).features


def test_doctor_shows_the_latest_sweep_beside_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(tmp_path / "results", 1 / 1.15)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "0.87" in said
    assert "Look at clocks" in said


def test_versions_are_texts_and_a_missing_one_is_missing(tmp_path: Path) -> None:
    table = records("h200")
    table.loc[0, "driver"], table.loc[1, "driver"] = "550.100", None
    table[:2].to_csv(tmp_path / "own.csv", index=False)
    found = records(str(tmp_path / "own.csv"))["driver"]
    assert found[0] == "550.100"
    assert found[1] != found[1]


def test_what_is_no_reference_is_refused(tmp_path: Path) -> None:
    [said] = problems(str(tmp_path / "gone"))
    require(said, "`h200`")
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("cell_id\nx\n")
    with pytest.raises(BadValueError, match=r"`sweep\.reference="):
        planned("precision=O1", f"sweep.reference={wrong}")
    assert kept(planned("precision=O1", "sweep.reference=h200"), "h200") is not None
