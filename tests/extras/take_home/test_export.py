"""An exported file is plain PyTorch, and trains as its cell does."""

import ast
import random
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from tests.cells import GPU_NODE, TINY, composer, entry
from tests.command import ROOT
from tests.ranks import RankFailedError, on_ranks
from vitsweep.composition.grid import expand
from vitsweep.errors import BadValueError, ImpossibleCellError
from vitsweep.extras.take_home.prove import OWN_SIZE, compared, sizes
from vitsweep.extras.take_home.refusals import refusals
from vitsweep.extras.take_home.verb_export import chosen, timed_steps_of
from vitsweep.extras.take_home.write import written
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

OWN = ("model=module", "model.target=tests.user_modules.build_model", "batch.images_per_step=16")
TWO, HALF = "resources.ranks_per_node=2", "precision.half_dtype=float16"
FOCAL = "objective=module", "objective.target=tests.user_modules.focal"
CELLS = (
    ("sharding=none", "precision=O2", "optimizer.clip_norm=0.1", "batch.accumulation_steps=2"),
    (
        "sharding=fsdp",
        "precision=O2",
        HALF,
        "memory=recompute_blocks",
        "optimizer.clip_norm=0.1",
        TWO,
    ),
    (
        "model=module",
        "model.target=tests.user_modules.with_complex_filters",
        "sharding=none",
        "precision=O2",
        "optimizer=adamw_foreach",
        "batch.images_per_step=16",
        "optimizer.clip_norm=0.1",
    ),
)
KNOBS = {
    "precision": ("fp32", "bf16", "O1", "O2", "O3", "bf16_masters"),
    "sharding": ("ddp", "zero2", "fsdp"),
    "optimizer": ("adamw_loop", "adamw_foreach", "adamw_fused", "sgd_foreach"),
    "memory": ("keep_all", "recompute_blocks", "recompute_selected"),
    "compilation": ("eager", "eager", "eager", "compile_blocks"),
    "layout": ("batch_first", "batch_second"),
    "batch.accumulation_steps": ("1", "2"),
    "optimizer.clip_norm": ("null", "0.1"),
}

LONG = "measurement.timeout_min=240"  # one process of each side trains all cells, one after another
SMALL = (
    *("model=vit_nano", *TINY, "batch.resolution_px=8"),
    *("resources.nodes=1", "resources.threads_per_rank=1", LONG),
)
FEW, MANY = 10, 100
NOT_TECHNIQUES = ("sweep", "data.", "model.", "batch", "measurement", "seed")


def cell(*overrides: str, ranks: int = 1) -> CellSpec:
    model = () if overrides[0].startswith("model=") else TINY
    size = (f"resources.ranks_per_node={ranks}", "resources.threads_per_rank=1")
    found = entry(*model, *size, *overrides)
    assert not found.reasons
    return found.spec


def drawn(ranks: int, count: int) -> list[CellSpec]:
    rng, found = random.Random(ranks), []
    while len(found) < count:
        choice = [f"{knob}={rng.choice(values)}" for knob, values in KNOBS.items()]
        size = (f"resources.ranks_per_node={ranks}", "resources.threads_per_rank=1", LONG)
        one = entry(*rng.choice((TINY, TINY, OWN)), *size, *choice)
        if not one.reasons:
            found.append(one.spec)
    return found


def test_the_first_line_names_a_model_of_ones_own() -> None:
    first = written(cell(*OWN, "sharding=none"), "own.py", []).splitlines()[0]
    assert "user_modules.build_model on 1 rank" in first


@pytest.mark.slow  # 20 s: two files trained against their cells on real ranks, and a broken one
def test_the_file_alone_trains_as_the_cell_and_a_fault_in_it_is_found(tmp_path: Path) -> None:
    for overrides in CELLS:
        spec, at = cell(*overrides), tmp_path / overrides[0]
        [leg] = compared({at: spec})
        assert leg.equal, str(leg)
        assert set(leg.differences) == {"losses", "gradients", "weights", "masters"}
        if overrides is CELLS[0]:
            file = at / "train.py"
            file.write_text(file.read_text().replace("betas=(0.9, 0.999)", "betas=(0.9, 0.99)"))
            (at / "file.pt").unlink()
            [leg] = compared({at: spec})
            assert not leg.equal


def test_a_file_whose_weights_are_no_numbers_is_not_equal(tmp_path: Path) -> None:
    tensors = {name: torch.ones(3) for name in ("first", "second")}
    wanted = {"losses": [2.0, 1.0], "gradients": tensors, "weights": tensors, "masters": tensors}
    nan = tensors | {"second": torch.full((3,), torch.nan)}
    for kind, wrong in (("losses", [2.0, float("nan")]), ("gradients", nan), ("weights", nan)):
        folder = tmp_path / kind
        folder.mkdir()
        torch.save(wanted, folder / "cell.pt")
        torch.save({**wanted, kind: wrong}, folder / "file.pt")
        [leg] = compared({folder: cell(*CELLS[0])})
        assert not leg.equal, str(leg)


def test_arguments_stand_in_the_file_as_they_are() -> None:
    spec = cell("model=module", "model.target=tests.user_modules.with_words", "sharding=none",
                "++model.arguments.words=[]", "batch.images_per_step=16")  # fmt: skip
    words = ["it's", 'so "called"', "back\\slash\n", [1, 0.5, True, None]]
    tree = ast.parse(
        written(replace(spec, model=replace(spec.model, arguments={"words": words})), "own.py", [])
    )
    found = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "words"
    ]
    assert [*map(ast.literal_eval, found)] == [words]


def _step_of_five(world: World, file: Path) -> None:
    train = SimpleNamespace(**runpy.run_path(str(file)))
    training = train.Training(train.build_model(), train.start())
    side = train.IMAGE_SIDE
    training.step(torch.randn(5, train.CHANNELS, side, side), torch.zeros(5).long())


def test_a_file_takes_no_batch_that_does_not_split_evenly(tmp_path: Path) -> None:
    spec, file = cell(*CELLS[0]), tmp_path / "train.py"
    file.write_text(written(spec, file.name, ["Header."]))
    with pytest.raises(RankFailedError, match=r"ValueError: 5 .* 2 equal parts"):
        on_ranks(1, _step_of_five, spec, file, folder=tmp_path)


def of_named_sweeps(ranks: int) -> list[CellSpec]:
    """Every set of techniques of a named sweep that can be written, its best among them, on a tiny model.

    Of a sweep with many cells (`everything`) some are drawn.
    """
    size = (*SMALL, f"resources.ranks_per_node={ranks}")
    found: dict[str, CellSpec] = {}
    for path in sorted((ROOT / "conf" / "sweep").glob("*.yaml")):
        cells = [c.overrides for c in expand([f"+sweep={path.stem}"], composer())]
        if len(cells) > MANY:
            cells = random.Random(0).sample(cells, FEW)
        for overrides in cells:
            own = [o for o in overrides if not o.lstrip("+").startswith(NOT_TECHNIQUES)]
            one = entry(*own, *size, "data=synthetic")
            if not one.reasons and not refusals(one.spec):
                found[one.cell_id] = one.spec
    return [*found.values()]


def assert_equal(cells: list[CellSpec], folder: Path, *, twins: bool = True) -> None:
    groups: dict[tuple[object, ...], dict[Path, CellSpec]] = {}
    for number, spec in enumerate(cells):  # by how its processes are started
        group = (spec.sharding.name == "none", *spec.runtime.rank_environment.items())
        legs = sizes(spec) if twins else {OWN_SIZE: spec}
        own = {folder / str(number) / name: leg for name, leg in legs.items()}
        groups.setdefault(group, {}).update(own)
    differing = []
    for legs_of in groups.values():
        for leg, (at, spec) in zip(compared(legs_of), legs_of.items(), strict=True):
            print(at.parent.name, leg)
            if not leg.equal:
                differing.append((str(leg), {g: t.name for g, t in spec.techniques.items()}))
    assert not differing


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_drawn_cells_do(ranks: int, tmp_path: Path) -> None:
    assert_equal(drawn(ranks, 20), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_cells_of_named_sweeps_do(ranks: int, tmp_path: Path) -> None:
    assert_equal(of_named_sweeps(ranks), tmp_path, twins=False)


DIGITS = ("data=digits", "batch.images_per_step=16", "++model.arguments.patch_size=2")
RARER = {
    1: (
        ("compilation=compile_blocks", "optimizer=adamw_foreach"),
        ("optimizer=sgd_fused",),
        (*OWN, *FOCAL, "sharding=none", "precision=O1", "batch.accumulation_steps=2"),
        (
            "classifier=pooled",
            "attention=sdpa_math",
            "layout.channels_last=true",
            "sharding=none",
        ),
        ("layout=batch_second", "layout.patch_embedding=linear"),
        ("layout=batch_second", "classifier=pooled", "precision=O2"),
    ),
    2: (
        ("compilation=compile_model", "sharding=fsdp", "precision=bf16_masters"),
        ("precision=O2", HALF, "sharding=ddp", "optimizer.clip_norm=0.1"),
        ("sharding=fsdp", "sharding.gradient_dtype=bfloat16"),
        (
            "model=transformers",
            "model.name=vit",
            *DIGITS,
            "precision=O3",
            "memory=recompute_selected",
            "++model.arguments.num_hidden_layers=2",
            "++model.arguments.hidden_size=48",
            "++model.arguments.num_attention_heads=3",
            "++model.arguments.intermediate_size=64",
        ),
        (
            *OWN[:1],
            "model.target=tests.user_modules.frozen",
            OWN[2],
            "precision=O2",
            "sharding=fsdp",
        ),
        (*OWN, "memory=recompute_blocks", "sharding=fsdp"),
    ),
    4: (("precision=O2", "sharding=hsdp", "batch.accumulation_steps=2"),),
}
TIMM = (
    "model=timm",
    "model.name=vit_tiny_patch16_224",
    *DIGITS,
    "++model.arguments.depth=2",
    "++model.arguments.embed_dim=48",
    "sharding=fsdp",
    "precision=O2",
    "memory=recompute_blocks",
)


@pytest.mark.full
@pytest.mark.parametrize("ranks", RARER)
def test_rarer_settings_and_models_of_others_do(ranks: int, tmp_path: Path) -> None:
    others = [TIMM] if ranks == 2 and find_spec("timm") else []
    assert_equal([cell(*o, ranks=ranks) for o in (*RARER[ranks], *others)], tmp_path)


def test_what_is_no_plain_pytorch_is_refused_by_name() -> None:
    for overrides, typed in [
        (("tensor_parallel=megatron", TWO), "tensor_parallel=megatron"),
        (("sequence_parallel=ulysses", TWO), "sequence_parallel=ulysses"),
        (("pipeline_parallel=gpipe", TWO, "batch.images_per_step=32"), "pipeline_parallel=gpipe"),
        (("sharding=zero1", TWO), "sharding=zero1"),
        (
            ("sharding=ddp", "sharding.gradient_dtype=bfloat16", TWO),
            "sharding.gradient_dtype=bfloat16",
        ),
        (("optimizer=muon",), "optimizer=muon"),
        (("optimizer=adamw_contiguous",), "optimizer=adamw_contiguous"),
        (("averaging=ema",), "averaging=ema"),
        (("sharding=fsdp", "sharding.blocks_per_unit=2", TWO), "sharding.blocks_per_unit=2"),
        (("sharding=fsdp", "sharding.prefetch_forward=1", TWO), "sharding.prefetch_forward=1"),
        (("tokens=drop",), "tokens=drop"),
        (("tokens=registers",), "tokens=registers"),
        (("model.mlp=swiglu", "model.layer_scale=0.1"), "model.layer_scale=0.1"),
        (("task=train", "data=digits"), "task=train"),
        (("task.label_smoothing=0.1",), "task.label_smoothing=0.1"),
        (("vit_block=parallel",), "vit_block=parallel"),
        (
            (*OWN, "++model.arguments.stem={_target_:torch.nn.Identity}"),
            "model.arguments with _target_: torch.nn.Identity",
        ),
        (("attention=linear",), "attention=linear"),
        (("precision=fp8", "precision.emulate=true"), "precision=fp8"),
        (("model=axial_vit_nano",), "model=axial_vit_nano"),
    ]:
        spec = entry(*(() if "model=" in overrides[0] else TINY), *overrides).spec
        with pytest.raises(ImpossibleCellError) as no:
            written(spec, "train.py", [])
        assert [r for r in no.value.reasons if f"`{typed}`" in r and "vitsweep.apply" in r]


WRITTEN = (
    ("sharding=none", "precision=O2", HALF),
    ("precision=O1", "compilation=compile_blocks", "batch.accumulation_steps=2", TWO),
    (
        "precision=O2",
        "sharding=fsdp",
        "memory=recompute_blocks",
        TWO,
        "optimizer.clip_norm=1",
        HALF,
    ),
    (
        "precision=O3",
        "sharding=zero2",
        "memory=recompute_selected",
        TWO,
    ),
    ("precision=O2", "sharding=hsdp", "resources.ranks_per_node=4"),
    (
        "compilation=compile_model",
        "classifier=pooled",
        "attention=sdpa_math",
        "layout.channels_last=true",
    ),
    ("layout=batch_second", "layout.patch_embedding=linear"),
    ("layout=batch_second", "classifier=pooled"),
    ("optimizer=sgd_fused", "precision=O2", "sharding=ddp"),
    (*OWN, "memory=recompute_blocks", "sharding=fsdp", "precision=O3", TWO),
    (
        "model=transformers",
        "model.name=vit",
        "++model.arguments.patch_size=2",
        "memory=recompute_selected",
    ),
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_files_are_short_clean_and_know_nothing_of_vitsweep(device: str, tmp_path: Path) -> None:
    machine = {"machine": GPU_NODE} if device == "cuda" else {}
    for number, overrides in enumerate(WRITTEN):
        model = () if overrides[0].startswith("model=") else TINY
        size = ("resources.ranks_per_node=1",) if overrides[0] == "sharding=none" else ()
        spec = entry(*model, *size, *overrides, **machine).spec
        text = written(spec, "train.py", ["Header."])
        file = tmp_path / f"{number}.py"
        file.write_text(text)
        assert len(text.splitlines()) < 370
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
        imported = [getattr(n, "module", None) or n.names[0].name for n in nodes]
        assert not [name for name in imported if name.startswith("vitsweep")]
    for command in (("check", "--select", "E,F,W,I,UP,B"), ("format", "--diff")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", str(tmp_path)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_variables_travel_as_comments() -> None:
    spec = cell("sharding=ddp", "runtime.variables={NCCL_ALGO:'Ring;Tree',A:1}")
    text = written(spec, "train.py", [])
    assert "#     export NCCL_ALGO='Ring;Tree'\n#     export A=1\n" in text
    assert "os.environ.setdefault" not in text


def test_of_a_training_the_timed_step_is_written() -> None:
    training = cell("sharding=none", "task=train", "data=digits", "recipe=digits", "task.epochs=1")
    timed = timed_steps_of(training)
    assert refusals(training)
    assert not refusals(timed)
    assert timed == cell("sharding=none", "data=digits")


def test_cells_are_named_by_best_id_and_settings() -> None:
    cells = pd.DataFrame(
        {
            "cell_id": ["a", "b", "c"],
            "precision": ["O1", "O2", "O2"],
            "sharding": ["ddp", "ddp", "fsdp"],
            "speedup": [1.0, 1.5, None],
            "images_per_second": [10.0, 15.0, None],
            "status": ["measured", "measured", "failed"],
            "baseline_cell_id": ["a", "a", "a"],
        }
    )
    found = {
        words: chosen(cells, words.split())["cell_id"]
        for words in ("best", "a", "O2 fsdp", "precision=O2", "baseline", "best O1", "best ddp")
    }
    assert list(found.values()) == ["b", "a", "c", "b", "a", "a", "b"]
    for words, said in (
        ("precison=O2", "names no cell"),
        ("d", "`O2 . fsdp`, or a cell id"),
        ("best fsdp", "was measured"),
    ):
        with pytest.raises(BadValueError, match=said):
            chosen(cells, words.split())
