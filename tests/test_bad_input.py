"""What a user may get wrong, or find wrong: each ends with an exit code and a message that helps.

Every line is (what is typed or how the machine is, what the message names: settings, values, ways out).
No line may end in a traceback, hang, or lose what was measured. A new way of failing gets a line here first.
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
from tests.refusals import require
from vitsweep import extras
from vitsweep.cli.cells import read_line
from vitsweep.cli.main import run
from vitsweep.composition.grid import expand
from vitsweep.composition.hydra import refuse_ignored
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.console import open_console, prepare_streams
from vitsweep.errors import VitsweepError
from vitsweep.planning.machine_defaults import machine_sizes
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.results.store import Store
from vitsweep.results.user_metrics import check_metrics

HUGE = 10**30
ARGPARSE = ("Unrecognized arguments", "Argument ", "The following", "One sweep")

REFUSED_BEFORE_HYDRA = [
    ("", "plna", "`python -m vitsweep plan`"),
    ("", "precision", "`precision` `precision=...`"),
    ("", "help", "`python -m vitsweep --help`"),
    ("", "--verison", "`--version`"),
    ("", "--precision O1", "`precision=O1`"),
    ("", "--sweep=first", "`+sweep=first`"),
    ("", "--batch.images_per_step=8", "`batch.images_per_step=8`"),
    ("", "precision=O9", "`precision` `O9` `O0` `O1`"),
    ("", "precision=01", "`precision=O1`"),
    ("", "++sweep=first", "`+sweep=first`"),
    ("", "optimizer.lr", "`python -m vitsweep show optimizer`"),
    ("", "optimizer.lr=0.1", "`optimizer.learning_rate=0.1`"),
    ("", "-m precision=O1, O2", "`precision=O1, O2` `precision=O1,O2`"),
    ("", "precision=O1,O2", "`-m`"),
    ("", "sweep.name=a,b", "`-m`"),
    ("", "++precision=O2 plan", "`python -m vitsweep plan ++precision=O2`"),
    ("", "--config-dir", "`--config-dir FOLDER`"),
    ("", "--config-name -m", "`--config-name NAME`"),
    ("", "hydra.searchpath=[nosuch]", "`hydra.searchpath` `nosuch`"),
    ("", "-m hydra.searchpath=[file://nosuch] seed=1,2", "`hydra.searchpath` `nosuch`"),
    ("", "--config-dir conf plan", "`python -m vitsweep plan --config-dir conf`"),
    ("", "sweep=meta_speedups", "`+sweep=meta_speedups`"),
    ("", "+sweep=nosuch", "`+sweep` `nosuch`"),
    ("", "-m +sweep=meta_speedup", "`+sweep=meta_speedups`"),
    ("", "hydra.sweep.dir=/x", "`hydra.sweep.dir=/x` `sweep.folder` `sweep.name`"),
    ("", "hydra.run.dir=/x", "`sweep.folder` `sweep.name`"),
    ("", "hydra.job.chdir=true", "`hydra.job.chdir=true` `sweep.folder` `sweep.name`"),
    ("", "hydra.job={}", "`hydra.job={}`"),
    ("", "+hydra.job.env_set.A=1", "`'runtime.variables={NAME:value}'`"),
    ("", "hydra.runtime.cwd=/x", "`hydra.runtime.cwd=/x`"),
    ("", "hydra.verbose=true", "`hydra.verbose=true`"),
    ("", "hydra.help.template=x", "`hydra.help.template=x`"),
    ("", "hydra.launcher=slurm", "`hydra/launcher=slurm`"),
    ("", "hydra.launcher.partition=gpu", "`hydra/launcher=slurm`"),
    ("", "hydra.sweeper.n_trials=5", "`hydra.sweeper.n_trials=5`"),
    ("", "-m hydra/sweeper=optuna seed=1,2", "`sweep.search=race`"),
    ("plan", "hydra/sweeper=basic seed=1,2", "`hydra/sweeper=basic`"),
    ("", "check conf", "`python -m vitsweep check`"),
    ("", "data=glyphs", "`data=glyphs` `data=digits`"),
    ("", "sweep.minute=3", "`sweep.minutes=3`"),
    ("", "+sweep=first sweep.baselin=null", "`sweep.baseline=null`"),
    ("", "hydra/launcher=slrm", "`hydra/launcher=slurm`"),
    (
        "",
        "hydra/launcher=slurm hydra.launcher.partion=x",
        "`hydra.launcher.partition=x`",
    ),
    ("plan", "--parquet /nosuch/x.parquet precision=O1", "`mkdir -p /nosuch`"),
    ("plan", "--parquet / precision=O1", "`--parquet /`"),
    ("plan", "-m precision=O1,O2 --rows 2", "`--rows`"),
    ("", "precision=ü", "`precision=ü` `.-_/` `\"precision='ü'\"`"),
    ("", "sweep.name=über", "`sweep.name=über` `.-_/` `\"sweep.name='über'\"`"),
    ("", "sweep.name=it's", "`sweep.name=it's` `.-_/` `\"sweep.name='it\\'s'\"`"),
    ("", "sweep.name=a#b", "`sweep.name=a#b` `.-_/` `\"sweep.name='a#b'\"`"),
    ("", "sweep.name=a(b", "`sweep.name=a(b` `.-_/` `\"sweep.name='a(b'\"`"),
    (
        "",
        "sweep.question=what=why",
        "`sweep.question=what=why` `.-_/` `\"sweep.question='what=why'\"`",
    ),
    ("", "sweep.baseline=[precision=O1]", "`sweep.baseline=['a=b']`"),
    (
        "",
        "sweep.cells=[[precision=O9]]",
        "`sweep.cells=[[precision=O9]]` `.-_/` `sweep.cells=['a=b']`",
    ),
    ("", "seed=[1", "`seed=[1` `.-_/` `seed=['a=b']`"),
    ("", "-m precision=O1,,O2", "`precision=O1,,O2`"),
    ("", "-m precision=O1,", "`precision=O1,`"),
    ("status", "nosuch", "`nosuch`"),
    ("status", "../nosuch", "`../nosuch`"),
    ("report", "nosuch", "`nosuch`"),
    ("collect", "nosuch", "`nosuch`"),
    ("retry", "nosuch", "`nosuch`"),
    ("cancel", "nosuch", "`nosuch`"),
    ("gate", "nosuch --against x", "`nosuch`"),
    ("gate", "", "--against"),
    ("report", "a b c", "c"),
    ("status", "--wach", "`--watch`"),
    ("judge", "nosuch", "`cd`"),
    ("judge", "HEAD --width 5", "`--width 5` 0 0.99 0.05"),
    ("judge", "HEAD --quality los", "`--quality los` `--step` `--quality loss`"),
    ("judge", "HEAD~1 HEAD --stepp a.py:f", "`--step`"),
    ("compare", "precision=O1 precision=O2 --minuts=1", "`--minutes`"),
    ("doctor", "foo", "foo"),
    ("retry", "one two", "One sweep at a time"),
    ("retry", "--status faild", "`--status faild`"),
    ("compare", "", "`compare`"),
    ("compare", "precision=O1", "`compare`"),
    ("compare", "precision=O1 vs precision=fp32", "`vs`"),
    ("export", "--best", "`--cell best`"),
    ("", "precision=O1 -o out", "`sweep.folder=out`"),
    ("", "model=module model.seams=attend", "`model.seams=attend` `[attend]`"),
    ("compare", "precision=O1 precision=O2 --width -1", "`--width -1` 0"),
    ("compare", "precision=O1 precision=O2 --width nan", "`--width nan` 0"),
    ("compare", "precision=O1 precision=O2 --minutes x", "--minutes"),
    ("compare", "precision=O1 precision=O2 --nosuch", "--nosuch"),
]
"""(verb or "", the rest of the line, what the message names): refused without Hydra, in milliseconds."""


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


def test_a_key_typed_twice_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    read_line(["-m", "precision=O1", "precision=O2,O3", "seed=1"])
    said = capsys.readouterr().err
    assert all(name in said for name in ("`precision`", "`precision=O1`", "`precision=O2,O3`"))
    assert "`-m precision=O1,O2,O3`" in said
    assert "seed" not in said


@pytest.mark.parametrize(
    ("verb", "typed", "names"), [r for r in REFUSED_BEFORE_HYDRA if r[0] not in ABSENT_VERBS]
)
def test_a_line_is_refused_in_a_sentence(
    verb: str,
    typed: str,
    names: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*filter(None, [verb]), *typed.split()]) == 2
    shown = capsys.readouterr()
    said = shown.err.partition("usage: ")[0].strip()
    if said.startswith(ARGPARSE):
        assert names in said
    else:
        require(said, names)
    assert shown.out == ""
    assert not any(tmp_path.iterdir())


REFUSED_IN_A_PLAN = [
    ("measurement.blocks=1000000000", "`measurement.blocks=1000000000`"),
    ("measurement.min_seconds=1,2", "`measurement.min_seconds` 1 2 `sweep.name=NAME`"),
    ("sweep.name='~'", "`sweep.name=~` `first_try` `sweep.folder`"),
    ("~precision", "`~precision` `precision` `-m precision=a,b`"),
    ("~model", "`~model` `model` `-m model=a,b`"),
    ("~sweep.name", "`sweep.name`"),
    ("~batch.images_per_step", "`batch.images_per_step`"),
    ("~nosuch", "`~nosuch`"),
    ("precision=[O1,O2]", "`-m precision=O1,O2`"),
    ("precision=null", "`precision` `null`"),
    ("precision=", "`precision` ``"),
    ("precision=O9", "`precision` `O9`"),
    ("precision=o1", "`precision=O1`"),
    ("precison=O1", "`precision=O1`"),
    ("precision._target_=os.system", "`precision._target_=os.system`"),
    ("precision._target_=pathlib.Path", "`precision._target_=pathlib.Path`"),
    ("precision._target_=nosuch", "`precision._target_=nosuch` `package.module.Class`"),
    ("precision._target_=no.such.X", "`precision._target_=no.such.X` `PYTHONPATH`"),
    ("batch=1", "`batch` `1`"),
    ("batch.nosuch=1", "`batch=base` `nosuch`"),
    ("nosuch.x=1", "`nosuch`"),
    ("batch.images_per_step=range(2,9,0)", "`batch.images_per_step=range(2,9,0)`"),
    ("batch.images_per_step=range(9,2)", "`batch.images_per_step=range(9,2)`"),
    ("batch.images_per_step=range(1,2,0.5)", "`batch.images_per_step=1.0`"),
    ("precision=glob(x*)", "`precision=glob(x*)`"),
    (f"batch.images_per_step={HUGE}", f"`batch.images_per_step={HUGE}` {2**63 - 1}"),
    (f"seed={2**63}", f"`seed={2**63}` {2**63 - 1}"),
    (f"resources.nodes={10**18}", f"`resources.nodes={10**18}` x `resources.ranks_per_node=2`"),
    ("resources.device=[cpu]", "`auto` `cpu` `cuda`"),
    ("resources.device=tpu", "`auto` `cpu` `cuda`"),
    ("resources.memory_gib_per_rank=1e30", "`resources.memory_gib_per_rank=1e+30`"),
    ("measurement.timeout_min=1e30", "`measurement.timeout_min=1e+30`"),
    ("sweep.baseline=foo", "`sweep.baseline=foo` `foo`"),
    ("sweep.baseline=[foo]", "`sweep.baseline=[foo]` `foo`"),
    ("sweep.baseline=1", "`sweep.baseline=1`"),
    ("sweep.baseline='precision=O9'", "`precision` `O9`"),
    ("sweep.match=foo", "`sweep.match=foo` `[foo]`"),
    ("sweep.match=[foo]", "`sweep.match` `foo`"),
    ("sweep.retry=[foo]", "`sweep.retry=[foo]`"),
    ("sweep.zip=[[a,b]]", "`sweep.zip` `a`"),
    ("sweep.zip=[a,b]", "`sweep.zip` `a`"),
    ("sweep.cells=foo", "`sweep.cells=foo` `[foo]`"),
    ("metric.columns=5", "`metric.columns=5`"),
    ("sweep.replicate=foo", "`sweep.replicate=foo`"),
    ("sweep.limit=foo", "`sweep.limit`"),
    ("sweep.limit.first=0", "`sweep.limit.first=0` 0"),
    ("sweep.remeasure=maybe", "`sweep.remeasure=maybe`"),
    ("sweep.cells_per_block=0", "`sweep.cells_per_block=0`"),
    ("sweep.name=null", "`sweep.name=null`"),
    ("sweep.name=[a]", '`sweep.name=["a"]`'),
    ("sweep.name=", "`sweep.name=`"),
    ("sweep.name=../../x", "`sweep.name=../../x` `first_try` `sweep.folder`"),
    ("sweep.name='[tensorboard]'", "`sweep.name=[tensorboard]` `first_try` `sweep.folder`"),
    ("sweep.name='a\x1b[31mb'", "`sweep.name='a\\x1b[31mb'` `first_try` `sweep.folder`"),
    (f"sweep.name={'x' * 300}", "200 `sweep.folder`"),
    ("sweep.folder=null", "`sweep.folder=null`"),
    ("sweep.folder=", "`sweep.folder=` `results`"),
    ("sweep.question=[a]", "`sweep.question=["),
    ("tracker=nosuch", "`tracker` `nosuch`"),
    ("tracker.mode=foo", "`tracker.mode=foo` `none`"),
    ("tracker.mode=null", "`tracker.mode=None` `none`"),
    ("tracker=wandb tracker.project=null", "`tracker.project=None`"),
    ("tracker=wandb tracker.time_limit_s=0", "`tracker.time_limit_s=0`"),
    ("tracker=wandb tracker.time_limit_s=1e30", "`tracker.time_limit_s=1e+30`"),
    ("data=image_folder", "`data.folder=PATH`"),
    (
        "data=image_folder data.folder=/nosuch",
        "`data.folder=/nosuch`",
    ),
    ("model=vit_base", "`batch.resolution_px=8` `model.patch_px=16`"),
    (
        "batch.images_per_step=3",
        "`batch.images_per_step=3` `batch.accumulation_steps=1` `batch.images_per_step=2`",
    ),
    ("mesh.tensor=2", "`mesh.tensor=2` `tensor_parallel=none`"),
    ("mesh.shard=3", "`mesh.shard=3` 2"),
    (
        "resources.device=cuda",
        "`resources.device=cuda` `resources.device=cpu` `hydra/launcher=slurm`",
    ),
    ("model.num_classes=2", "`model.num_classes=2` 10"),
]
"""(overrides, what the message names): what `plan` and a sweep refuse or list as invalid."""


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
        extras.tracker(cell.tree["tracker"])
        check_metrics(cell.tree["metric"]["columns"])
    plan = plan_of(cells, LAPTOP, composer())
    return " ".join(reason for planned in plan.entries.values() for reason in planned.reasons)


@pytest.mark.parametrize(("typed", "names"), REFUSED_IN_A_PLAN)
def test_a_cell_that_cannot_run_says_why(
    typed: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if typed.startswith("tracker") and "tracker=wandb" not in extras.OPTIONS:
        pytest.skip("the feature `mirror` is not there")
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nosuch")
    overrides = [typed] if "\n" in typed or "'" in typed else typed.split()
    try:
        said = answer(overrides)
    except VitsweepError as error:
        said = str(error)
    require(said, names)


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
    """A value is refused by the name of its setting, or can be frozen, read and put in a column.

    In `make test` each setting meets every other value, and the next one those that it does not.
    """
    lines, unnamed = 0, list[str]()
    for number, (choice, key) in enumerate(knobs(all_choices)):
        for value in VALUES if all_choices else VALUES[number % 2 :: 2]:
            lines += 1
            typed = [choice, f"{key}={value}"]
            try:
                planned = entry(*typed)
                if "tracker=wandb" in extras.OPTIONS:
                    extras.tracker(planned.composed.tree["tracker"])
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
    assert lines > 300


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
    require(done.stderr.strip(), "`batch.images_per_step=abc`")
    assert done.stdout == "set()\n"
