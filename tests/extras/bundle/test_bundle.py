"""A bundle claims what its records say, and its check finds what was edited."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.extras.laboratory import laboratory, with_steps
from tests.refusals import require
from vitsweep.cli.main import run
from vitsweep.errors import VitsweepError
from vitsweep.extras.bundle.archive import (
    SUMS,
    checksum_faults,
    checksums,
    extract,
    files_of,
    write_archive,
    write_bundle,
)
from vitsweep.extras.bundle.claims import Claim, Verdict, check
from vitsweep.extras.compare.comparison import Comparison, blocks_wanted, compared
from vitsweep.files import write_atomically
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return laboratory(tmp_path_factory.mktemp("lab") / "first", "optimizer=adamw_foreach")


@pytest.fixture(scope="module")
def original(sweep: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a bundle of the sweep is extracted to."""
    place = tmp_path_factory.mktemp("original")
    write_bundle(sweep, place / "first.tar.gz")
    return extract(place / "first.tar.gz", place)


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "first"))


@pytest.mark.smoke
def test_a_bundle_is_the_same_for_the_same_sweep_and_its_check_finds_nothing(
    sweep: Store, tmp_path: Path
) -> None:
    once, again = tmp_path / "once.tar.gz", tmp_path / "again.tar.gz"
    [claim], left = write_bundle(sweep, once)
    write_bundle(sweep, again)
    assert once.read_bytes() == again.read_bytes()
    assert left == []
    assert claim.low < 1.5 < claim.high
    assert claim.margin == 0.1
    root = extract(once, tmp_path / "place")
    assert checksum_faults(root) == []
    assert check(Store(root)) == ([claim], [])
    listed = {line.split("  ")[1] for line in (root / SUMS).read_text().splitlines()}
    assert {"claims.json", "cells.csv", "samples.parquet"} <= listed
    assert any(name.endswith(".diff") for name in listed)


def a_run(root: Path) -> tuple[Path, RunRecord]:
    path = next(iter(sorted(root.glob("cells/*/runs/*.json"))))
    return path, RunRecord.from_json(path.read_text())


def record_without_its_checksum(root: Path) -> None:
    path, _ = a_run(root)
    path.write_text(path.read_text().replace('"attempt": 1', '"attempt": 2', 1))


def faster_record(root: Path) -> None:
    path, record = a_run(root)
    steps = [t / 2 for t in record.samples["step_time_ms"][0]]
    path.write_text(with_steps(record, steps).to_json())


def in_claims(root: Path, change: Callable[[dict[str, float]], object]) -> None:
    document = json.loads((root / "claims.json").read_text())
    change(document["claims"][0])
    document["claims"] = [claim for claim in document["claims"] if claim]
    (root / "claims.json").write_text(json.dumps(document))


def higher_claim(root: Path) -> None:
    in_claims(root, lambda c: c.update(ratio=2 * c["ratio"], low=2 * c["low"], high=2 * c["high"]))


def no_claim(root: Path) -> None:
    in_claims(root, lambda claim: claim.clear())


PLANTED = {
    faster_record: "`claims.json` is not what the records say.",
    higher_claim: "`claims.json` is not what the records say.",
    no_claim: "`claims.json` is not what the records say.",
    record_without_its_checksum: "cannot be read.",
}


def test_what_is_planted_is_found_also_where_the_checksums_are_edited_along(
    original: Path, tmp_path: Path
) -> None:
    for plant, said in PLANTED.items():
        copy = Path(shutil.copytree(original, tmp_path / plant.__name__))
        plant(copy)
        [fault] = checksum_faults(copy)
        assert "another checksum" in fault
        write_atomically(copy / SUMS, checksums(copy))
        assert checksum_faults(copy) == []
        assert any(said in fault for fault in check(Store(copy))[1]), plant


def test_another_margin_or_format_is_a_fault(copy: Path) -> None:
    document = json.loads((copy / "claims.json").read_text())
    (copy / "claims.json").write_text(json.dumps(document | {"margin": 10.0}))
    [fault] = check(Store(copy))[1]
    require(fault, "`claims.json`")
    (copy / "claims.json").write_text(json.dumps(document | {"format": 2}))
    with pytest.raises(VitsweepError, match="`format=3`"):
        check(Store(copy))


def test_a_claim_is_as_wide_as_the_further_end_of_its_interval() -> None:
    named = {"cell_id": "a", "baseline_cell_id": "b", "cell": "O1", "device": "", "claim": "faster"}
    for ratio, low, high in ((1.2, 1.0, 1.25), (1.0, 0.95, 1.2)):
        claim = Claim(**named, ratio=ratio, low=low, high=high, num_pairs=5, margin=0.1)
        assert claim.half_width == pytest.approx(0.2)


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


MARK = re.compile(r"^mark: '?[0-9a-f]+'?\n", re.MULTILINE)


def test_cells_of_others_are_measured_and_their_text_needs_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = laboratory(tmp_path / "first", "optimizer=adamw_foreach")
    for path in sweep.cells.glob("*/cell.yaml"):
        path.write_text(MARK.sub("", path.read_text()))  # somebody else's
    write_bundle(sweep, tmp_path / "first.tar.gz")
    assert run(["reproduce", "first.tar.gz", "--check"]) == 0
    assert run(["reproduce", "first.tar.gz", "--minutes", "0.01"]) == 4, "plain cells"
    assert "too noisy" in capsys.readouterr().out
    assert [path.name[:15] for path in (tmp_path / "results").iterdir()] == ["reproduce-first"]
    for path in sweep.cells.glob("*/cell.yaml"):
        path.write_text(path.read_text().replace("held_out: null", "held_out: evil.f"))
    write_bundle(sweep, tmp_path / "named.tar.gz")
    assert run(["reproduce", "named.tar.gz"]) == 2
    said = capsys.readouterr()
    assert "  - task.held_out=evil.f" in said.err
    assert "--trust" in said.err


def test_a_bundle_is_not_written_over_a_file_nor_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(VitsweepError, match="nothing to claim"):
        write_bundle(Store(tmp_path / "empty").create(), tmp_path / "x.tar.gz")
    assert not (tmp_path / "x.tar.gz").exists()


def test_what_is_no_file_of_a_bundle_is_refused(copy: Path, tmp_path: Path) -> None:
    (copy / "cells" / "pack.jsonl").write_text("{}")
    write_archive(copy, tmp_path / "with_index.tar.gz")
    with pytest.raises(VitsweepError, match=r"cells/pack\.jsonl"):
        extract(tmp_path / "with_index.tar.gz", tmp_path / "place")
    assert files_of(tmp_path / "place") == [] or "first/cells/pack.jsonl" not in files_of(
        tmp_path / "place"
    )
