"""A bundle shows what its records say, and a planted falsehood is refused or not reproduced."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.extras.bundle.bundling import HERE, bundled
from tests.extras.laboratory import laboratory, with_steps
from vitsweep.cli.main import run
from vitsweep.errors import VitsweepError
from vitsweep.extras.bundle import pack
from vitsweep.extras.bundle.check import check, code_lines
from vitsweep.extras.bundle.claims import Claim, Verdict
from vitsweep.extras.bundle.pack import (
    SUMS,
    checksums,
    extract,
    files_of,
    write_archive,
    write_bundle,
)
from vitsweep.files import append_line, write_atomically
from vitsweep.report import figures
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.tables.comparison import Comparison, blocks_wanted, compared


@pytest.fixture(autouse=True)
def one_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all charts one is drawn: they take seconds."""
    monkeypatch.setattr(figures, "CHARTS", [c for c in figures.CHARTS if c.name == "speedup"])


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return laboratory(tmp_path_factory.mktemp("lab") / "first", "optimizer=adamw_foreach")


@pytest.fixture(scope="module")
def original(sweep: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a bundle of the sweep is extracted to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "CHARTS", [c for c in figures.CHARTS if c.name == "speedup"])
        place = tmp_path_factory.mktemp("original")
        return extract(bundled(sweep, place / "first.tar.gz"), place)


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "first"))


def test_a_bundle_is_the_same_for_the_same_sweep_and_its_check_finds_nothing(
    sweep: Store, tmp_path: Path
) -> None:
    once = bundled(sweep, tmp_path / "once.tar.gz")
    again = write_bundle(sweep, tmp_path / "again.tar.gz", drawn_by=HERE)
    assert once.read_bytes() == (tmp_path / "again.tar.gz").read_bytes()
    [claim] = again.claims
    assert claim.low < 1.5 < claim.high
    assert claim.margin == 0.1
    checked = check(extract(once, tmp_path / "place"), HERE)
    assert (checked.faults, checked.unsure, len(checked.passed)) == ((), (), 5)
    assert list(checked.claims) == again.claims
    listed = {line.split("  ")[1] for line in (checked.store.root / SUMS).read_text().splitlines()}
    assert {"claims.json", "packages.txt", "figures/speedup.svg", "samples.parquet"} <= listed
    assert [*code_lines(checked.store, {"abc": ["vitsweep/cell.py"]})] == [
        "commit 0123abcd, with uncommitted changes",
        next(
            line
            for line in code_lines(checked.store, {})
            if "`vitsweep/cell.py` (+1 -0 lines)" in line
        ),
        "code abc: other here: `vitsweep/cell.py`",
    ]


def test_records_and_cells_of_wrong_types_are_faults_and_no_crash(copy: Path) -> None:
    path, record = a_run(copy)
    ragged = record.samples | {
        "step_time_ms": [[1.0, 2.0], [3.0, None, 1e-9]],
        "skipped": [False] * 3,
    }
    path.write_text(replace(record, samples=ragged).to_json())
    cells = sorted(copy.glob("cells/*/cell.yaml"))
    cells[0].write_text("cell: {model: 3, data: [1], seed: {a: b}}\n")
    cells[1].write_text("[" * 5000)
    write_atomically(copy / SUMS, checksums(copy))
    faults = check(copy, HERE).faults
    assert any("and its steps say" in fault for fault in faults)


def a_run(root: Path) -> tuple[Path, RunRecord]:
    path = next(iter(sorted(root.glob("cells/*/runs/*.json"))))
    return path, RunRecord.from_json(path.read_text())


def faster_record(root: Path) -> None:
    path, record = a_run(root)
    metrics = record.metrics | {
        "images_per_second": 2 * float(record.metrics["images_per_second"] or 0)
    }
    path.write_text(replace(record, metrics=metrics).to_json())


def record_without_its_checksum(root: Path) -> None:
    path, _ = a_run(root)
    path.write_text(path.read_text().replace('"attempt": 1', '"attempt": 2', 1))


def faster_steps(root: Path) -> None:
    path, record = a_run(root)
    steps = [t / 2 for t in record.samples["step_time_ms"][0]]
    path.write_text(with_steps(record, steps).to_json())


def run_without_record(root: Path) -> None:
    _, record = a_run(root)
    ended = {"event": "end", "run_id": "b9-gone", "attempt": 1, "exit_codes": [0, 0]}
    append_line(root / "cells" / record.cell_id / "attempts.jsonl", ended)


def other_settings(root: Path) -> None:
    path, record = a_run(root)
    path.write_text(replace(record, spec=record.spec | {"model.depth": 12}).to_json())


def other_cell(root: Path) -> None:
    path = next(iter(sorted(root.glob("cells/*/cell.yaml"))))
    path.write_text(path.read_text().replace("depth: 2", "depth: 4", 1))


def other_diff(root: Path) -> None:
    [path] = (root / "code").glob("*.diff")
    path.write_text(path.read_text() + "+another line\n")


def in_claims(root: Path, change: Callable[[dict[str, float]], object]) -> None:
    document = json.loads((root / "claims.json").read_text())
    change(document["claims"][0])
    document["claims"] = [claim for claim in document["claims"] if claim]
    (root / "claims.json").write_text(json.dumps(document))


def higher_claim(root: Path) -> None:
    in_claims(root, lambda c: c.update(ratio=2 * c["ratio"], low=2 * c["low"], high=2 * c["high"]))


def no_claim(root: Path) -> None:
    in_claims(root, lambda claim: claim.clear())


def other_figure(root: Path) -> None:
    path = root / "figures" / "speedup.svg"
    path.write_text(path.read_text().replace('width="', 'width="1', 1))


def other_table(root: Path) -> None:
    text = (root / "cells.csv").read_text()
    (root / "cells.csv").write_text(
        text.replace("no difference shown", "faster").replace("1.5", "1.7")
    )


def unreadable_cell(root: Path) -> None:
    next((root / "cells").glob("*/cell.yaml")).write_text("spec: [1")


def broken_command(root: Path) -> None:
    with (root / "commands.jsonl").open("a") as file:
        file.write("{\n")


PLANTED: list[dict[Callable[[Path], None], str]] = [
    {
        faster_record: "its steps say",
        other_diff: "not the diff",
        other_figure: "`figures/speedup.svg`",
        no_claim: "was left out",
    },
    {faster_steps: "is not what the records say", other_cell: "other settings"},
    {
        other_settings: "other settings",
        higher_claim: "is not what the records say",
        other_table: "`cells.csv` is not what the records say",
    },
    {run_without_record: "ended well, and its record is missing"},
    {record_without_its_checksum: "cannot be read"},
    {unreadable_cell: "`cell.yaml` of cell", broken_command: "of `commands.jsonl` cannot be read"},
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: "-".join(plant.__name__ for plant in p))
def test_what_is_planted_is_found_also_where_the_checksums_are_edited_along(
    planted: dict[Callable[[Path], None], str], copy: Path
) -> None:
    for plant in planted:
        plant(copy)
    assert len(pack.checksum_faults(copy)) == len(planted)
    write_atomically(copy / SUMS, checksums(copy))
    faults = check(copy, HERE).faults
    assert not any("another checksum" in fault for fault in faults)
    for said in planted.values():
        assert any(said in fault for fault in faults), faults


def test_a_margin_that_nothing_can_miss_is_refused(copy: Path) -> None:
    in_claims(copy, lambda claim: claim.update(margin=10))
    with pytest.raises(VitsweepError, match=r"margin .* is 10: it must be from"):
        check(copy, HERE)


def test_a_claim_is_as_wide_as_the_further_end_of_its_interval() -> None:
    named = {"cell_id": "a", "baseline_cell_id": "b", "cell": "O1", "device": "", "claim": "faster"}
    for ratio, low, high in ((1.2, 1.0, 1.25), (1.0, 0.95, 1.2)):
        claim = Claim(**named, ratio=ratio, low=low, high=high, num_pairs=5, margin=0.1)
        assert claim.half_width == pytest.approx(0.2)


def test_figures_of_other_versions_are_not_called_false(copy: Path) -> None:
    other_figure(copy)
    write_atomically(copy / SUMS, checksums(copy))
    checked = check(copy, "other code")
    assert not checked.faults
    assert "were drawn by other versions" in checked.unsure[0]


def claim(ratio: float, low: float, high: float, margin: float) -> Claim:
    return Claim(
        cell_id="a", baseline_cell_id="b", cell="a", device="cpu", ratio=ratio, low=low, high=high,
        num_pairs=5, claim="faster", margin=margin,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.95, 2.1, Verdict.reproduced),
        (2.3, 2.6, Verdict.not_reproduced),
        (1.0, 1.8, Verdict.not_reproduced),
        (1.7, 2.1, Verdict.too_noisy),
        (1.0, 4.0, Verdict.too_noisy),
        (np.nan, np.nan, Verdict.too_noisy),
    ],
)
def test_a_claim_is_judged_by_its_margin(low: float, high: float, verdict: Verdict) -> None:
    assert claim(2.0, 1.9, 2.1, 0.1).verdict(Comparison(2.0, low, high, 5)) is verdict


@pytest.mark.full
@pytest.mark.parametrize("spread", [0.02, 0.05])
def test_true_claims_pass_in_100_laboratories_and_false_ones_do_not(spread: float) -> None:
    """Blocks are added by the rule of `compare`; noise is Student's t with 4 degrees of freedom.

    True claims are not reproduced in fewer than 1 of 20, and are reproduced in most; claims that are off
    by 1.5 times the margins are never reproduced.
    """
    rng = np.random.default_rng(7)

    def logs(number: int) -> list[float]:
        return list(np.log(1.3) + spread * rng.standard_t(4, number) / np.sqrt(2))

    found = {1.0: [], 1.35: []}  # type: dict[float, list[Verdict]]
    for _ in range(100):
        own = compared(logs(5))  # wider than the fixed interval: a margin that is not too narrow
        for factor, verdicts in found.items():
            ratio, low, high = (factor * v for v in (own.ratio, own.low, own.high))
            wide = max(0.1, max(high / ratio, ratio / low) - 1)
            if wide > 0.15:
                continue  # the margins of the two would meet
            new = logs(3)
            while len(new) < min(blocks_wanted(new, wide / 2), 60):
                new += logs(1)
            result = compared(new)
            verdicts.append(claim(ratio, low, high, wide).verdict(result))
    true, false = found[1.0], found[1.35]
    assert true.count(Verdict.not_reproduced) / len(true) < 0.05
    assert true.count(Verdict.reproduced) / len(true) > 0.8
    assert false.count(Verdict.reproduced) == 0


def test_cells_of_others_are_listed_and_their_text_needs_trust(
    sweep: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = bundled(
        sweep, tmp_path / "first.tar.gz", anonymous=True
    )  # without the marks of its user
    assert run(["reproduce", str(bundle), "--minutes", "0.01"], {}) == 4, "plain cells"
    said = capsys.readouterr()
    assert "commit 0123abcd, with uncommitted changes" in said.out
    assert "too noisy to say" in said.out
    assert [path.name[:15] for path in (tmp_path / "results").iterdir()] == ["reproduce-first"]

    before = with_text(sweep)
    named = bundled(sweep, tmp_path / "named.tar.gz", anonymous=True)
    for path, text in before.items():
        path.write_text(text)
    assert run(["reproduce", str(named)], {}) == 2
    said = capsys.readouterr()
    assert "commit 0123abcd, with uncommitted changes" in said.out
    assert "  - task.held_out=evil.f" in said.err
    assert "--trust" in said.err


def with_text(sweep: Store) -> dict[Path, str]:
    """Let all cells name a function; return file -> text before."""
    before = {p: p.read_text() for p in sweep.cells.glob("*/cell.yaml")}
    for path, text in before.items():
        path.write_text(text.replace("held_out: null", "held_out: evil.f"))
    return before


def test_files_are_compared_for_each_cell_with_those_that_it_uses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = ("optimizer=adamw_foreach", "memory=keep_all,recompute_blocks")
    store = laboratory(tmp_path / "first", *choices)
    with_text(store)
    files = {}
    for path in (store.root / "code").glob("*.json"):
        is_recomputing = "memory/recompute.py" in path.read_text()
        files["recompute_blocks" if is_recomputing else "keep_all"] = path
    for record in [*store.runs()]:
        code = files[record.spec["memory"]].stem
        store.save_run(replace(record, environment=record.environment | {"code_hash": code}))
    recomputing = files["recompute_blocks"]

    def said() -> list[str]:
        bundle = bundled(store, tmp_path / "first.tar.gz", anonymous=True)
        assert run(["reproduce", str(bundle)], {}) == 2
        bundle.unlink()
        return [line for line in capsys.readouterr().out.splitlines() if "applied): code " in line]

    line = "Its code (the diff is not applied): code"
    same = "its source files are those here"
    assert said() == [f"{line} {code}: {same}" for code in sorted(p.stem for p in files.values())]
    changed = {"vitsweep/techniques/memory/recompute.py": "0123456789ab", "\x1b[1Anobody": "0"}
    recomputing.write_text(json.dumps(json.loads(recomputing.read_text()) | changed))
    other = "other here: `?[1Anobody`, `vitsweep/techniques/memory/recompute.py`"
    lines = {recomputing.stem: other, files["keep_all"].stem: same}
    assert said() == [f"{line} {code}: {lines[code]}" for code in sorted(lines)]
    recomputing.unlink()
    assert f"{line} {recomputing.stem}: its source files are not listed" in said()


def test_a_bundle_is_not_written_over_a_file_nor_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(VitsweepError, match="nothing to claim"):
        write_bundle(Store(tmp_path / "empty").create(), tmp_path / "x.tar.gz", drawn_by=HERE)
    assert not (tmp_path / "x.tar.gz").exists()


def test_what_is_no_file_of_a_bundle_is_refused(copy: Path, tmp_path: Path) -> None:
    (copy / "cells" / "pack.jsonl").write_text("{}")
    write_archive(copy, tmp_path / "with_index.tar.gz")
    with pytest.raises(VitsweepError, match=r"pack\.jsonl.*no file of a bundle"):
        extract(tmp_path / "with_index.tar.gz", tmp_path / "place")
    assert files_of(tmp_path / "place") == [] or "first/cells/pack.jsonl" not in files_of(
        tmp_path / "place"
    )
