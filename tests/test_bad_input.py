"""What a user may get wrong, or find wrong: each ends with an exit code and words that help.

Every line is (what is typed or how the machine is, words of the message). No line may end in a
traceback, hang, or lose what was measured. A new way of failing gets a line here first.
"""

import io
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.text import Text

from tests.builders import run as record_of
from tests.cells import LAPTOP, composer, entry
from tests.extras import ABSENT_VERBS
from vitsweep.cli.cells import read_line
from vitsweep.cli.main import run
from vitsweep.composition.grid import expand
from vitsweep.composition.overrides import refuse_ignored
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.console import open_console
from vitsweep.errors import VitsweepError
from vitsweep.planning.machine_defaults import machine_sizes
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.results.store import Store
from vitsweep.results.trackers import check_tracker
from vitsweep.results.user_metrics import check_metrics
from vitsweep.streams import prepare_streams

HUGE = 10**30

REFUSED_BEFORE_HYDRA = [
    ("", "plna", "did you mean `python -m vitsweep plan`?"),
    ("", "precision", "`precision` has no value: type `precision=...`"),
    ("", "help", "did you mean `python -m vitsweep --help`?"),
    ("", "--verison", "did you mean `--version`?"),
    ("", "--precision O1", "did you mean `precision=O1`?"),
    ("", "--sweep=first", "did you mean `+sweep=first`?"),
    ("", "--batch.images_per_step=8", "did you mean `batch.images_per_step=8`?"),
    ("", "precision=O9", "`precision` has no choice `O9`; it has `O0`, `O1`, "),
    ("", "precision=01", "did you mean `precision=O1`?"),
    ("", "++sweep=first", "a named sweep is `+sweep=first`"),
    ("", "optimizer.lr", "`python -m vitsweep show optimizer` lists what there is"),
    ("", "optimizer.lr=0.1", "did you mean `optimizer.learning_rate=0.1`?"),
    ("", "-m precision=O1, O2", "no space after a comma"),
    ("", "precision=O1,O2", "add `-m`"),
    ("", "sweep.name=a,b", "add `-m`"),
    ("", "++precision=O2 plan", "The verb comes first: `python -m vitsweep plan ++precision=O2`"),
    ("", "--config-dir conf plan", "The verb comes first"),
    ("", "sweep=meta_speedups", "a named sweep is `+sweep=meta_speedups`"),
    ("", "+sweep=nosuch", "`+sweep` has no choice `nosuch`"),
    ("", "-m +sweep=meta_speedup", "did you mean `+sweep=meta_speedups`?"),
    ("", "hydra.sweep.dir=/x", "changes nothing"),
    ("", "hydra.run.dir=/x", "`sweep.folder`/`sweep.name`"),
    ("", "hydra.job.chdir=true", "changes nothing"),
    ("", "hydra.job={}", "a cell has processes of its own"),
    ("", "+hydra.job.env_set.A=1", "`'runtime.variables={NAME:value}'`"),
    ("", "hydra.runtime.cwd=/x", "changes nothing"),
    ("", "hydra.verbose=true", "Hydra prints and calls nothing here"),
    ("", "hydra.help.template=x", "changes nothing"),
    ("", "hydra.launcher=slurm", "did you mean `hydra/launcher=slurm`?"),
    ("", "hydra.launcher.partition=gpu", "need `hydra/launcher=slurm` beside them"),
    ("", "hydra.sweeper.n_trials=5", "vitsweep has one sweeper, its own"),
    ("", "-m hydra/sweeper=optuna seed=1,2", "where the grid is large add `sweep.search=race`."),
    ("plan", "hydra/sweeper=basic seed=1,2", "vitsweep has one sweeper, its own"),
    ("", "hydra.launcher.objective=speedup", "`hydra.launcher.objective` was left out"),
    ("", "check conf", "`python -m vitsweep check` was left out"),
    ("", "data=glyphs", "`data=glyphs` was left out: use `data=digits`"),
    ("", "sweep.minute=3", "did you mean `sweep.minutes=3`?"),
    ("", "+sweep=first sweep.baselin=null", "did you mean `sweep.baseline=null`?"),
    ("", "hydra/launcher=slrm", "did you mean `hydra/launcher=slurm`?"),
    (
        "",
        "hydra/launcher=slurm hydra.launcher.partion=x",
        "did you mean `hydra.launcher.partition=x`?",
    ),
    ("plan", "--parquet /nosuch/x.parquet precision=O1", "`mkdir -p /nosuch` makes it"),
    ("plan", "--parquet / precision=O1", "`--parquet /` is a folder"),
    ("plan", "-m precision=O1,O2 --rows 2", "`--rows` is no option of vitsweep"),
    ("", "precision=ü", "\"precision='ü'\""),
    ("", "sweep.name=über", "stands in quotes, and in others for the shell"),
    ("", "sweep.name=it's", r"sweep.name='it\'s'"),
    ("", "sweep.name=a#b", "\"sweep.name='a#b'\""),
    ("", "sweep.name=a(b", "\"sweep.name='a(b'\""),
    ("", "sweep.question=what=why", "\"sweep.question='what=why'\""),
    ("", "sweep.baseline=[precision=O1]", "such as `sweep.baseline=['a=b']`"),
    ("", "sweep.cells=[[precision=O9]]", "a text in a list or section"),
    ("", "seed=[1", "brackets must close"),
    ("", "-m precision=O1,,O2", "a value is missing next to a comma"),
    ("", "-m precision=O1,", "a value is missing next to a comma"),
    ("status", "nosuch", "There is no sweep `nosuch`"),
    ("status", "../nosuch", "There is no sweep `../nosuch`"),
    ("report", "nosuch", "There is no sweep `nosuch`"),
    ("collect", "nosuch", "There is no sweep `nosuch`"),
    ("retry", "nosuch", "There is no sweep `nosuch`"),
    ("cancel", "nosuch", "There is no sweep `nosuch`"),
    ("gate", "nosuch --against x", "There is no sweep `nosuch`"),
    ("gate", "", "--against"),
    ("report", "a b c", "c"),
    ("status", "--wach", "--wach; did you mean `--watch`?"),
    ("judge", "HEAD~1 HEAD --stepp a.py:f", "did you mean `--step`?"),
    ("compare", "precision=O1 precision=O2 --minuts=1", "did you mean `--minutes`?"),
    ("doctor", "foo", "foo"),
    ("retry", "one two", "One sweep at a time"),
    ("retry", "--status faild", "`--status faild`: name some of"),
    ("compare", "", "needs two settings"),
    ("compare", "precision=O1", "needs two settings"),
    ("compare", "precision=O1 precision=O2 --width -1", "`--width -1` must be a number above 0"),
    ("compare", "precision=O1 precision=O2 --width nan", "`--width nan` must be a number above 0"),
    ("compare", "precision=O1 precision=O2 --minutes x", "--minutes"),
    ("compare", "precision=O1 precision=O2 --nosuch", "--nosuch"),
]
"""(verb or "", the rest of the line, words of the message): refused without Hydra, in milliseconds."""


def test_warnings_are_sentences_and_what_steers_a_terminal_is_escaped(monkeypatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "utf-8"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), "ascii"))
    monkeypatch.setenv("COLUMNS", "40")
    prepare_streams()
    shown = warnings.formatwarning("a.json is damaged", UserWarning, "views.py", 26)
    assert shown == "Note: a.json is damaged\n"
    foreign = "\u202egnp.\u2066\U000e0041\x1b[2J\x9b1m\r"
    print(foreign, "ä 中\t\n")
    open_console().print(Text(foreign, "bold"))
    sys.stdout.flush()
    escaped = r"\u202egnp.\u2066\U000e0041\x1b[2J\x9b1m"
    assert written.getvalue().decode() == f"{escaped}\\r ä 中\t\n\n{escaped}\n"


def test_a_key_typed_twice_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    read_line(["-m", "precision=O1", "precision=O2,O3", "seed=1"])
    said = capsys.readouterr().err
    assert "`precision` is given 2 times (`precision=O1`, `precision=O2,O3`): the last one" in said
    assert "`-m precision=O1,O2,O3`" in said
    assert "seed" not in said


@pytest.mark.parametrize(
    ("verb", "typed", "words"), [r for r in REFUSED_BEFORE_HYDRA if r[0] not in ABSENT_VERBS]
)
def test_a_line_is_refused_in_a_sentence(
    verb: str,
    typed: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*filter(None, [verb]), *typed.split()]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert not any(tmp_path.iterdir())


REFUSED_IN_A_PLAN = [
    ("sweep.published=[{figures:{source:x}}]", "must be sections of `figures`, `column`, `cell`"),
    (
        "sweep.published=[{figures:{source:x},column:speedup,cell:{precision:O1},conditions:{}}]",
        "names {'source': 'x'}, which no row of `vitsweep/tables/published.csv` has",
    ),
    ("measurement.blocks=1000000000", "must be less than or equal to 10000"),
    ("sweep.name='~'", "must name a folder"),
    ("~precision", "removes a group"),
    ("~model", "removes a group"),
    ("~sweep.name", "`sweep.name` is missing"),
    ("~batch.images_per_step", "`batch.images_per_step` is missing"),
    ("~nosuch", "`~nosuch` cannot be composed: Could not delete from config. 'nosuch' does not"),
    ("precision=[O1,O2]", "sweep over several with `-m precision=O1,O2`"),
    ("precision=null", "`precision` has no choice `null`"),
    ("precision=", "`precision` has no choice ``"),
    ("precision=O9", "`precision` has no choice `O9`"),
    ("precision=o1", "did you mean `precision=O1`?"),
    ("precison=O1", "did you mean `precision=O1`?"),
    ("+precision=O2", "`+precision=O2`"),
    ("precision._target_=os.system", "`precision._target_=os.system` names no class of settings"),
    ("precision._target_=pathlib.Path", "names no class of settings"),
    ("precision._target_=nosuch", "must name a class"),
    ("precision._target_=no.such.X", "cannot be imported"),
    ("batch=1", "`batch` has no choice `1`"),
    ("batch.nosuch=1", "`batch=base` has no key `nosuch`"),
    ("nosuch.x=1", "there is no group or key `nosuch`"),
    ("batch.images_per_step=range(2,9,0)", "cannot be enumerated"),
    ("batch.images_per_step=range(9,2)", "holds no value"),
    ("batch.images_per_step=range(1,2,0.5)", "`batch.images_per_step=1.0`: a whole number"),
    ("precision=glob(x*)", "`precision=glob(x*)` holds no value"),
    (f"batch.images_per_step={HUGE}", f"must be at most {2**63 - 1}"),
    (f"seed={2**63}", f"`seed={2**63}`: must be at most {2**63 - 1}"),
    (f"resources.nodes={10**18}", f"`resources.nodes={10**18}` x `resources.ranks_per_node=2`"),
    ("resources.device=[cpu]", "must be one of `auto`, `cpu`, `cuda`"),
    ("resources.device=tpu", "must be one of `auto`, `cpu`, `cuda`"),
    ("resources.memory_gib_per_rank=1e30", "must be less than or equal to 1048576"),
    ("measurement.timeout_min=1e30", "must be less than or equal to 525600"),
    ("sweep.baseline=foo", "`sweep.baseline=foo`: `foo` is no override"),
    ("sweep.baseline=[foo]", "`sweep.baseline=[foo]`: `foo` is no override"),
    ("sweep.baseline=1", "`sweep.baseline=1`"),
    ("sweep.baseline='precision=O9'", "`precision` has no choice `O9`"),
    ("sweep.match=foo", "must be a list"),
    ("sweep.match=[foo]", "`sweep.match` names `foo`, which is no group"),
    ("sweep.retry=[foo]", "`sweep.retry=[foo]`: cells can run again whose status is"),
    ("sweep.zip=[[a,b]]", "`sweep.zip` names `a`"),
    ("sweep.zip=[a,b]", "`sweep.zip` names `a`"),
    ("sweep.cells=foo", "must be a list"),
    ("metric.columns=5", "`metric.columns=5` must be a section"),
    ("sweep.replicate=foo", "`sweep.replicate=foo`: must be"),
    ("sweep.limit=foo", "`sweep.limit` is a section"),
    ("sweep.limit.first=0", "`sweep.limit.first=0`: must be greater than 0"),
    ("sweep.remeasure=maybe", "must be a valid boolean"),
    ("sweep.cells_per_block=0", "must be greater than 0"),
    ("sweep.name=null", "`sweep.name=null`: must be a valid string"),
    ("sweep.name=[a]", '`sweep.name=["a"]`: must be a valid string'),
    ("sweep.name=", "`sweep.name=` must name a folder"),
    ("sweep.name=../../x", "must name a folder"),
    ("sweep.name='[tensorboard]'", "must name a folder"),
    ("sweep.name='a\x1b[31mb'", "must name a folder"),
    (f"sweep.name={'x' * 300}", "at most 200 letters"),
    ("sweep.folder=null", "`sweep.folder=null`: must be a valid string"),
    ("sweep.folder=", "is no path of a folder"),
    ("sweep.question=[a]", "`sweep.question=["),
    ("tracker=nosuch", "`tracker` has no choice `nosuch`"),
    ("tracker.mode=foo", "`tracker.mode=foo`: must be one of `none`"),
    ("tracker.mode=null", "`tracker.mode=None`: must be one of `none`"),
    ("tracker=wandb tracker.project=null", "must be the name of a project"),
    ("tracker=wandb tracker.time_limit_s=0", "must be a number of seconds above 0"),
    ("tracker=wandb tracker.time_limit_s=1e30", "at most 86400"),
    ("data=image_folder", "`data.folder=PATH`"),
    ("data=image_folder data.folder=/nosuch", "/nosuch"),
    ("model=vit_base", "`batch.resolution_px=8` is not divisible by `model.patch_px=16`"),
    ("batch.images_per_step=3", "does not split evenly over 2 replicas"),
    ("mesh.tensor=2", "`mesh.tensor=2` is not used by `tensor_parallel=none`"),
    ("mesh.shard=3", "`mesh.shard=3` does not divide the 2 ranks"),
    ("resources.device=cuda", "needs a GPU, which is not here"),
    ("model.num_classes=2", "`model.num_classes=2` is fewer than the 10"),
]
"""(overrides, words of the message): what `plan` and a sweep refuse or list as invalid."""


def answer(typed: list[str]) -> str:
    """What `python -m vitsweep -m` says of a line before it runs a cell; "" if it would run.

    The steps of `cli.multirun` with one composer for all lines: to start Hydra takes a second each.

    Raises:
        VitsweepError: the line is refused.
    """
    overrides = read_line(["-m", *typed]).overrides
    refuse_ignored(overrides, has_own_conf=True)
    cells = expand(overrides, composer())
    for cell in cells:
        sweep_settings(cell.tree)
        check_tracker(cell.tree["tracker"])
        check_metrics(cell.tree["metric"]["columns"])
    plan = plan_of(cells, LAPTOP, composer())
    return " ".join(reason for planned in plan.entries.values() for reason in planned.reasons)


@pytest.mark.parametrize(("typed", "words"), REFUSED_IN_A_PLAN)
def test_a_cell_that_cannot_run_says_why(
    typed: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nosuch")
    overrides = [typed] if "\n" in typed or "'" in typed else typed.split()
    try:
        said = answer(overrides)
    except VitsweepError as error:
        said = str(error)
        assert "https://" not in said
    assert words in said


VALUES = ("-1", "0", "1e30", str(2**63), "text", "null", "[1]", "'ümlaut [bold]x'")


def knobs(all_choices: bool) -> Iterator[tuple[str, str]]:
    """Yield (choice, key) for every setting of every group; each key once, or once per class."""
    seen = set()
    for group in composer().default_choices:
        for choice in composer().options(group):
            node = composer().compose([f"{group}={choice}"]).tree[group]
            for key in node if isinstance(node, dict) else ():
                kind = node.get("_target_") if all_choices else ""
                if key not in ("_target_", "name") and (kind, key, group) not in seen:
                    seen.add((kind, key, group))
                    yield f"{group}={choice}", f"{group}.{key}"


@pytest.mark.parametrize("all_choices", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_setting_takes_or_names_every_value(all_choices: bool) -> None:
    """A value is refused by the name of its setting, or can be frozen, read and put in a column."""
    lines, unnamed = 0, list[str]()
    for choice, key in knobs(all_choices):
        for value in VALUES:
            lines += 1
            typed = [choice, f"{key}={value}"]
            try:
                planned = entry(*typed)
                check_tracker(planned.composed.tree["tracker"])
                check_metrics(planned.composed.tree["metric"]["columns"])
                machine_sizes(planned.composed.tree["machine"])
            except VitsweepError as error:
                if key not in str(error) and not _refused_alone(choice):
                    unnamed.append(f"{typed}: {error}")
                continue
            frozen = yaml.load(yaml.dump(planned.tree, Dumper=yaml.CSafeDumper), yaml.CSafeLoader)
            assert frozen == planned.tree
            assert all(map(_fits_a_column, _leaves(planned.tree))), typed
    assert not unnamed
    assert lines > 500


def _refused_alone(choice: str) -> bool:
    try:
        return bool(entry(choice).reasons)
    except VitsweepError:
        return True


def _leaves(node: Any) -> Iterator[Any]:
    for part in node.values() if isinstance(node, dict) else node:
        yield from _leaves(part) if isinstance(part, dict | list) else [part]


def _fits_a_column(value: Any) -> bool:
    return not isinstance(value, int | float) or (
        math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63
    )


def test_a_folder_that_holds_a_number_beyond_every_column_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that did not refuse such values have left such records."""
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "results" / "old").create()
    store.save_run(record_of("fine"))
    store.save_run(record_of("huge", seed=2**63, images_per_step=HUGE))
    invalid = store.cell("refused") / "record.json"
    invalid.parent.mkdir()
    row = {"cell_id": "refused", "sweep": "old", "status": "invalid", "reason": "no", "seed": HUGE}
    invalid.write_text(json.dumps(row), encoding="utf-8")
    unrun = store.cell("unrun") / "cell.yaml"
    unrun.parent.mkdir()
    unrun.write_text(f"cell: {{seed: {HUGE}}}", encoding="utf-8")

    assert run(["collect", "old"]) == 0
    assert run(["collect", "old"]) == 0
    assert run(["report", "old"]) == 0


def test_text_in_brackets_and_colons_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from vitsweep.console import open_console

    open_console().print("pip install 'vitsweep[fp8]' :smile: [/b]")
    assert capsys.readouterr().out.strip() == "pip install 'vitsweep[fp8]' :smile: [/b]"


def test_a_wrong_value_waits_for_no_heavy_import() -> None:
    code = (
        "import sys; from vitsweep.cli.main import run; run(['batch.images_per_step=abc']);"
        "print({'torch', 'matplotlib'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "must be a valid integer" in done.stderr
    assert done.stdout == "set()\n"
