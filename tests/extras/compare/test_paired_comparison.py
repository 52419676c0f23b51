"""Two settings measured in turns, as a user types it."""

import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import pytest

import vitsweep
from tests.builders import of_present_code, run
from tests.command import QUICK, ROOT, Command, fault
from tests.said import opening
from vitsweep import extras
from vitsweep.cli import SCHEMA
from vitsweep.cli.main import run as front_door
from vitsweep.extras.compare.pair import PairRounds, plan_pair
from vitsweep.extras.compare.verb_compare import comparison_request
from vitsweep.planning.freeze import code_state
from vitsweep.rates.profile import cpu_model
from vitsweep.results.record import SCREENING
from vitsweep.results.store import Store
from vitsweep.tables.stats import Claim

FAST = ("compare", "optimizer=adamw_foreach", "optimizer=adamw_loop", *QUICK)
ONE_BLOCK = "--minutes=0.001"


def compare(*arguments: str) -> int:
    return front_door(["compare", *arguments])


def test_a_setting_is_one_word_of_overrides_and_the_rest_is_for_both() -> None:
    options = comparison_request(
        ["precision=O1 sharding=fsdp", "--width", "0.02", "", "seed=3", "--", "~data.x", "--minutes=5"]
    )  # fmt: skip
    assert options.variant == ("precision=O1", "sharding=fsdp")
    assert options.baseline == ()
    assert options.common == ("seed=3", "~data.x")
    assert (options.width, options.minutes) == (0.02, 5)
    assert options.names == ("precision=O1 sharding=fsdp", "the default")


def test_what_is_special_to_a_setting_wins_over_what_is_for_both() -> None:
    options = comparison_request(["seed=1", "", "seed=2", "sweep.name=mine"])
    plan, settings, *_ = plan_pair(options)
    assert [entry.spec.seed for entry in plan.entries.values()] == [1, 2]
    assert set(plan.baselines.values()) == {list(plan.entries)[1]}
    assert settings.name == "mine"
    assert re.search("seed=1 .*default", settings.question)


REFUSED = {
    "one setting": (["precision=O1"], "needs two settings"),
    "a sweep": (["precision=O1,O2", "precision=fp32"], "`precision=O1,O2` is several settings"),
    "multirun": (["precision=O1", "precision=fp32", "-m"], "Unrecognized arguments: -m"),
    "no width": (["seed=1", "seed=2", "--width", "0"], "`--width 0` must be above 0"),
    "a percentage as a width": (["seed=1", "seed=2", "--width", "3"], "0.99 at most: 3 % is 0.03."),
    "a width of all": (["seed=1", "seed=2", "--width", "1000"], "must be above 0, and 0.99 at most."),
    "no budget": (["seed=1", "seed=2", "--minutes=nan"], "`--minutes nan` must be a number above"),
    "no number": (["seed=1", "seed=2", "--width", "wide"], "invalid float value: 'wide'"),
    "a choice that is not": (["precision=fp33", ""], "did you mean `precision=fp32`?"),
    "a cluster": (["seed=1", "seed=2", "hydra/launcher=slurm"], "`hydra/launcher=allocation`"),
    "a launcher of one": (["seed=1 hydra/launcher=local", "seed=2"], "after A and B"),
    "another folder for one": (["sweep.name=a seed=1", "seed=2"], "`sweep.*` is one for A and B"),
    "nodes that are not here": (["resources.nodes=1", "resources.nodes=2"], "nodes=2`: this machine"),
    "cannot run": (["sharding=hsdp", ""], "at least 2 replicas"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_reported_before_anything_is_made(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compare(*arguments) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [5, None, {"precision": "O1"}, b"O1", True])
def test_what_is_no_list_of_overrides_is_refused(wrong: object) -> None:
    for pair in (("precision=O1", wrong), (wrong, "precision=O1")):
        with pytest.raises(vitsweep.BadValueError, match=re.escape(f"`{wrong!r}`")):
            vitsweep.compare(*pair)


@pytest.mark.parametrize("wrong", [0, 3, 1000, "0.1", True])
def test_a_width_that_is_no_share_is_refused(wrong: object) -> None:
    with pytest.raises(
        vitsweep.BadValueError, match=f"^`width={wrong!r}` must be a number above 0, and"
    ):
        vitsweep.compare("precision=O1", "", width=wrong)  # type: ignore[call-overload]


def test_two_measured_sweeps_are_compared_and_a_sweep_with_a_setting_is_not() -> None:
    sample = vitsweep.load(ROOT / "analysis" / "sample")
    if "gate" in extras.FEATURES:
        assert {"change", "claim"} <= set(vitsweep.compare(sample, sample))
    with pytest.raises(vitsweep.VitsweepError, match=r"^`compare` "):
        vitsweep.compare(sample, "precision=O1")
    with pytest.raises(vitsweep.VitsweepError, match="--config-dir nosuch"):
        vitsweep.compare("seed=1", "seed=2", config_dir="nosuch")


def kept_blocks(folder: Path, *ratios: float, device: str = "") -> None:
    """Blocks of the cells of `seed=1` and `seed=2` with these ratios, as if measured here."""
    plan, *_ = plan_pair(comparison_request(["seed=1", "seed=2"]))
    here = {"device": device or cpu_model(), "torch": version("torch"), "any_look": True}
    store = Store(folder / "results" / "compare").create()
    for n, ratio in enumerate(ratios):
        for cell_id, speed in zip(plan.entries, (100 * ratio, 100), strict=True):
            record = run(cell_id, f"b{n}", speed, minute=n, environment=here, sweep="compare")
            store.save_run(of_present_code(plan, [record])[0])


def test_blocks_that_are_there_already_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept_blocks(tmp_path, 1.5, 1.51, 1.49, 1.5, 1.52, 1.5)
    monkeypatch.chdir(tmp_path)
    assert compare("seed=1", "seed=2") == 0
    printed = capsys.readouterr()
    assert printed.err, "progress is not printed among the results"
    told = " ".join(printed.out.split())
    values = {"size": "1.50x [1.48, 1.52]", "blocks": "6 blocks"}
    assert opening("compared", name="seed=1", base="seed=2", **values) in told
    assert re.search(r"\+- 1.4 %.* \+- 5 %", told)
    assert "Report: results/compare/report/index.html" in told
    assert len(list(Store(tmp_path / "results" / "compare").runs())) == 12, "nothing ran"
    assert in_report(tmp_path, told, "seed=1")
    ids = plan_pair(comparison_request(["seed=1", "seed=2"])).cells
    cells = comparison_request([*ids, "--sweep", "compare", "--config-dir", "conf"])
    assert cells.names == ("seed=1", "seed=2"), "as `explain` and `export` name cells"
    assert cells.config_dir == "conf"


def in_report(folder: Path, printed: str, variant: str) -> bool:
    """Return whether the sentence about A that the terminal shows is in the report too."""
    sentence = re.search(rf"{variant} has \d.*?: [a-z ]+\.", printed)
    assert sentence
    page = folder / "results" / "compare" / "report" / "index.html"
    return sentence[0] in page.read_text()


def test_render_table_and_report_agree_where_earlier_blocks_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept_blocks(tmp_path, 3.0, 3.0, 1.5, 1.51, 1.49, 1.5, 1.52, 1.5)
    store = Store(tmp_path / "results" / "compare")
    for run_ in list(store.runs()):
        if run_.block in ("b0", "b1"):
            store.save_run(replace(run_, environment=run_.environment | {"torch": "1.13.0"}))
    monkeypatch.chdir(tmp_path)
    assert compare("seed=1", "seed=2") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "1.50x [1.48, 1.52]" in told
    assert in_report(tmp_path, told, "seed=1")
    variant, baseline = next((c, b) for c, b in store.baselines().items() if c != b)
    cells = pd.read_parquet(store.root / "cells.parquet").set_index("cell_id")
    assert cells.loc[variant, "num_pairs"] == 6
    rates = cells["images_per_second"]
    assert rates[variant] / rates[baseline] == pytest.approx(
        cells.loc[variant, "speedup"], rel=0.01
    )

    assert compare("seed=2", "seed=1") == 0
    other = " ".join(capsys.readouterr().out.split())
    assert in_report(tmp_path, other, "seed=2")
    assert in_report(tmp_path, told, "seed=1"), "earlier pairs stay"


def rounds_here(folder: Path, *typed: str) -> PairRounds:
    planned = plan_pair(comparison_request([*typed, "--minutes=0.001"]))
    store = Store(folder / "results" / "compare")
    return PairRounds(planned, planned.plan, planned.settings, list(store.runs()), code_state())


def test_blocks_of_another_device_do_not_count(tmp_path: Path) -> None:
    kept_blocks(tmp_path, 1.5, 1.51, 1.49, 1.5, 1.52, 1.5, device="Cray-1")
    rounds = rounds_here(tmp_path, "seed=1", "seed=2")
    assert list(rounds.state(()).missing_blocks.values()) == [3]
    kept_blocks(tmp_path, 1.5, 1.51, 1.49, 1.5, 1.52, 1.5)
    assert rounds_here(tmp_path, "seed=1", "seed=2").next(()) == []


def test_a_command_adds_a_block_whatever_its_budget_and_a_cell_and_itself_run_twice_in_it(
    tmp_path: Path,
) -> None:
    kept_blocks(tmp_path, 1.5, 0.5)
    rounds = rounds_here(tmp_path, "seed=1", "seed=2")
    rounds._end -= 1  # s: the budget is over, however fast this machine is
    [block] = rounds.next(())
    assert [entry.spec.seed for entry in sorted(block.entries, key=lambda e: e.spec.seed)] == [1, 2]
    done = [
        run(e.cell_id, block.name, 100, minute=9, environment={"device": cpu_model()})
        for e in block.entries
    ]
    assert rounds.next(of_present_code(rounds._plan, done)) == []
    [twice] = rounds_here(tmp_path, "seed=3", "seed=3").next(())
    assert [entry.spec.seed for entry in twice.entries] == [3, 3]


@pytest.mark.parametrize("slower", [0, 1])
def test_settings_that_differ_much_are_pruned_after_screening(tmp_path: Path, slower: int) -> None:
    plan, *_ = plan_pair(comparison_request(["seed=1", "seed=2"]))
    store, here = Store(tmp_path / "results" / "compare").create(), {"device": cpu_model()}
    for n, cell_id in enumerate(plan.entries):
        speed = 10 if n == slower else 100
        screened = run(
            cell_id, "screening", speed, environment=here | {"purpose": SCREENING}, sweep="compare"
        )
        store.save_run(of_present_code(plan, [screened])[0])
    rounds = rounds_here(tmp_path, "seed=1", "seed=2")
    assert rounds.next(()) == []
    assert rounds.state(()).pruned == set(plan.entries)
    assert rounds_here(tmp_path, "seed=1", "seed=2", "measurement.blocks=5").next(())


@pytest.mark.full
def test_blocks_are_added_until_the_budget_is_spent_and_the_same_command_goes_on(
    vitsweep: Command,
) -> None:
    first = vitsweep(*FAST, ONE_BLOCK, quick=False)
    assert first.returncode == 0, first.stderr
    assert f": {Claim.too_few_blocks}." in first.stdout
    assert re.search(r"\+- 5 %.* 2 more blocks", first.stdout)

    second = vitsweep(*FAST, ONE_BLOCK, quick=False)
    assert "over 2 blocks" in second.stdout
    assert "left out" not in second.stdout, "screening runs are no blocks"
    cells = vitsweep.cells("compare").set_index("optimizer")
    assert cells["blocks"].tolist() == [2, 2]
    assert cells.loc["adamw_foreach", "baseline_cell_id"] == cells.loc["adamw_loop", "cell_id"]
    store = Store(vitsweep.folder / "results" / "compare")
    blocks: dict[str, set[str]] = {}
    for record in store.runs():
        blocks.setdefault(record.block, set()).add(record.cell_id)
    assert all(cells == set(store.baselines()) for cells in blocks.values())
    assert [" compare " in command["command"] for command in store.commands()] == [True, True]

    anew = vitsweep(*FAST, ONE_BLOCK, "sweep.remeasure=true", quick=False)
    assert "over 3 blocks" in anew.stdout, "as in a grid, earlier blocks stay in the tables"
    assert len(list(store.runs())) == 6

    retried = vitsweep("retry", "compare", quick=False)
    assert retried.returncode == 2
    assert "`compare`" in retried.stderr


@pytest.mark.full
@pytest.mark.slow
def test_ctrl_c_ends_the_run_at_once_and_keeps_what_was_measured(vitsweep: Command) -> None:
    asked = ("compare", "seed=1", "seed=2", *QUICK, "measurement.measured_steps=100000")
    running = vitsweep.start(*asked, quick=False)
    logs = vitsweep.folder.glob
    wait_for(lambda: any(logs("results/compare/cells/*/attempts/*/rank1.log")))
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 130, err
    assert "Stopped." in out
    assert vitsweep.cells("compare")["status"].isna().all()


@pytest.mark.full
def test_a_setting_that_fails_is_reported_and_not_repeated_unasked(vitsweep: Command) -> None:
    failing = " ".join(fault("Raise"))
    asked = ("compare", failing, "seed=0", *QUICK)
    done = vitsweep(*asked, quick=False)
    assert done.returncode == 3, done.stderr
    assert "KeyError" in done.stdout
    runs = list(Store(vitsweep.folder / "results" / "compare").runs())
    assert len(runs) == 2

    again = vitsweep(*asked, quick=False)
    assert again.returncode == 3
    assert "`sweep.retry=[failed]`" in again.stderr
    assert len(list(Store(vitsweep.folder / "results" / "compare").runs())) == 2


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.smoke
def test_a_setting_compared_with_itself_tests_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, *_ = plan_pair(comparison_request(["seed=1", "seed=1"]))
    [cell_id] = plan.entries
    store = Store(tmp_path / "results" / "compare").create()
    here = {"device": cpu_model(), "torch": version("torch"), "any_look": True}
    for n in range(8):
        for position, speed in enumerate((100.0, 101.0)):
            record = run(cell_id, f"b{n}", speed, minute=n, environment=here, sweep="compare")
            name = f"{record.run_id}-{position}"
            [record] = of_present_code(plan, [record])
            store.save_run(replace(record, run_id=name, position=position))
    monkeypatch.chdir(tmp_path)
    assert compare("seed=1", "seed=1") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"seed=1 \D* \d\.\d+x \[.*\] .* seed=1 over 8 blocks", shown)
    assert in_report(tmp_path, shown, "seed=1")


@pytest.mark.slow
def test_json_has_what_the_page_promises(vitsweep: Command) -> None:
    done = vitsweep("compare", "precision=O1", "precision=fp32", "--minutes=0.05", "--json")
    tree = json.loads(done.stdout)
    assert tree.pop("schema") == SCHEMA
    assert [*tree] == "a b ratio low high blocks claim stop_reason sentences folder".split()


@pytest.mark.full
def test_a_self_test_runs_the_cell_twice_in_each_block(vitsweep: Command) -> None:
    vitsweep("compare", "seed=1", "seed=1", *QUICK, ONE_BLOCK, quick=False)
    runs = pd.DataFrame([r.row() for r in Store(vitsweep.folder / "results" / "compare").runs()])
    assert runs["cell_id"].nunique() == 1
    assert set(runs.sort_values("position").groupby("block")["position"].apply(tuple)) == {(0, 1)}
