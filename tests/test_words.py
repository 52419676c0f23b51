"""The field's words lead to what vitsweep has for them; names that are gone say so; numbers have units."""

import re
from pathlib import Path

import pytest

from tests.cells import LAPTOP, composer
from tests.extras import ABSENT_VERBS
from vitsweep.api.session import as_overrides
from vitsweep.cli import VERBS
from vitsweep.cli.cells import QUIET, read_line
from vitsweep.cli.main import run
from vitsweep.composition.composer import ComposedCell
from vitsweep.composition.grid import expand
from vitsweep.errors import VitsweepError
from vitsweep.rates.profile import profile_names
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.menu import choices
from vitsweep.spec.resolve import resolve
from vitsweep.words import (
    _table,
    _words,
    did_you_mean,
    gone_names,
    plain,
    plain_number,
    with_launcher_typed,
)

LEFT_OUT = (Path(__file__).parents[1] / "docs" / "left_out.md").read_text()


def test_names_that_are_gone_are_few_and_stand_in_the_page_of_what_is_left_out() -> None:
    assert len(gone_names()) <= 40
    for name, instead in gone_names().items():
        assert name.removeprefix("python -m vitsweep ") in LEFT_OUT, name
        assert instead.strip() == instead
        assert not instead.endswith(".")


def test_the_settings_to_use_instead_of_a_name_that_is_gone_compose() -> None:
    others = {True: ["hydra/launcher=slurm"], False: []}
    for instead in gone_names().values():
        for words in re.findall(r"`([^`]+)`", instead):
            key, is_setting, _ = words.partition("=")
            if is_setting and not key.isupper() and " " not in key:
                first = words if "{" in words else words.partition(",")[0]
                composer().compose([*others["hydra.launcher" in key], *first.split()])


def test_no_name_that_is_gone_is_there() -> None:
    options = {o for v in VERBS.values() for o in v.parser()._option_string_actions}
    for name in gone_names():
        group, _, choice = name.partition("=")
        assert choice not in choices(group)
        assert name not in options
        assert name.removeprefix("python -m vitsweep ") not in VERBS


def test_a_name_that_is_gone_is_reported_before_one_that_is_close() -> None:
    told = did_you_mean("glyphs", ["glyph"], lambda name: f"data={name}")
    assert told == f"; vitsweep has no `data=glyphs`: {gone_names()['data=glyphs']}."
    assert did_you_mean("glyphs", ["glyph"], lambda name: f"mine={name}").startswith(
        "; did you mean"
    )


VALUES = (
    *("1", "0.5", "/a", "true", "first", "rotary", "gelu", "bfloat16", "timm", "twin", "final"),
    *("race", "throughput"),
)
SETTINGS = {"optimizer.momentum": "optimizer=sgd_loop", "data.num_workers": "data=image_folder",
            "data.prefetch_batches": "data=image_folder", "hydra.launcher": "hydra/launcher=slurm",
            "tracker.project": "tracker=wandb", "precision.": "precision=O1",
            "sharding.": "sharding=fsdp", "objective.kept_share": "objective=masked_autoencoder",
            "objective.": "objective=flow_matching",
            "data.num_classes": "data=synthetic",
            "data.num_frames": "data=synthetic_video", "data.": "data=image_folder"}  # fmt: skip
"""What a setting is of, where that is not plain."""


def test_every_answer_of_the_table_is_there_and_composes() -> None:
    """No choice or setting that is renamed leaves a suggestion behind."""
    table, wrong = _table(), []
    for section in ("settings", "choices"):
        for answer in table[section]:
            words = _words(answer)
            if words.startswith("--hardware"):
                assert words.split()[1] in (*profile_names(), "*")
                continue
            key = words.split()[-1].partition("=")[0]
            others = [choice for start, choice in SETTINGS.items() if key.startswith(start)]
            words = words.replace(" data.folder=*", "")  # which must be there
            if not any(composer().takes(words.replace("*", v), others[:1]) for v in VALUES):
                wrong.append(words)
    assert not wrong
    options = {o for v in VERBS.values() for o in v.parser()._option_string_actions}
    known = (*VERBS, *ABSENT_VERBS, *options, *QUIET, "*", "-m", "--help", "--version")
    for answer in table["verbs"]:
        rest = _words(answer).removeprefix("python -m vitsweep").split()
        of_absent = bool(ABSENT_VERBS) and rest[:1] != [] and rest[0].startswith("-")
        assert not rest or of_absent or rest[0] in known
    assert all(
        group in (*composer().default_choices, "resources.device", "hydra/launcher", "--hardware")
        for group in table["groups"]
    )
    names = [plain(name) for others in table["choices"].values() for name in others]
    assert all(names)


SLIPS = """
sharding=zero3 -> `sharding=fsdp`?
zero_stage=2 -> `sharding=zero2`?
strategy=ddp -> `sharding=ddp`?
fsdp=true -> `sharding=fsdp`?
precision=bf16-mixed -> `precision=bf16`?
precision=half -> mixed: `precision=O1` or all in half: `precision=O3`?
model=ViT-B/16 -> `model=vit_base`?
model=vit_base_patch32_224 -> `model=vit_base model.patch_px=32`?
model=facebook/dinov2-large -> `model=dinov2_large`?
model=convnext_tiny -> `model=timm model.name=convnext_tiny`?
bs=8 -> in all: `batch.images_per_step=8` or per replica: `batch.images_per_step=8 batch.scope=per_replica`?
lr=3e-4 -> `optimizer.learning_rate=3e-4`?
+seeds=0,1,2 -> `seed=0,1,2`?
objective=mse -> `objective=module objective.target=...`?
objective.target=my.loss -> `objective=module` has it.
model=module model.arguments.depth=2 -> `++model.arguments.depth=2`?
model=module model.twin_arguments.depth=2 -> `++model.twin_arguments.depth=2`?
lr=abc -> `python -m vitsweep show` lists all.
seeds=1,2 -> a number of repetitions: `measurement.blocks=1,2` or the seed itself: `seed=1,2`?
data.dir=/data/images -> `data=image_folder data.folder=/data/images`?
data=/data/images -> `data=image_folder data.folder=/data/images`?
scaling=strong -> `resources.ranks_per_node=1,2,4`?
precision:O1 -> `precision=O1`?
optimizer=adamw_* -> `'optimizer=glob(adamw_*)'`?
workers=2 data=image_folder -> `data.num_workers=2`?
workers=2 -> `data=image_folder data.num_workers=2 data.folder=...`?
sharding=ulysses -> `sequence_parallel=ulysses`?
strategy=ddp,deepspeed_stage_3 -> `sharding=ddp,fsdp`?
optimiser=adamw -> `optimizer=adamw_loop` or `optimizer=adamw_fused`?
use_wandb=true -> `tracker=wandb`?
--use-flash-attn -> `attention=sdpa_flash`?
--precision 16-mixed -> `precision=O1`?
sweep.blocks=3 -> `measurement.blocks=3`?
images_per_step=8 -> `batch.images_per_step=8`?
model=vit_nao -> `model=vit_nano`?
optim=adafactor -> `python -m vitsweep show optimizer` lists all.
--time=01:00:00 -> `hydra/launcher=slurm hydra.launcher.timeout_min=60`?
-p gpu -> `hydra/launcher=slurm hydra.launcher.partition=gpu`?
model=module model.arguments.fail=3 -> `++model.arguments.fail=3`?
precision/O1 -> `precision=O1`?
precision =O1 -> no space next to `,` or `=`: `precision=O1`.
epochs=3 gpus=2 -> `task=train task.epochs=3`?
compile=true -> whole model: `compilation=compile_model` or each block: `compilation=compile_blocks`?
precision=amp -> mixed: `precision=O1` or no loss scale: `precision=bf16`?
precision=O1 loss_scale=128 -> `precision.loss_scale=128`?
precision=fp8_e4m3 -> `precision=fp8`?
pipeline_parallel=vpp -> `pipeline_parallel=one_f_one_b`?
global_pool=avg -> `classifier=pooled`?
vit_block=stochastic_depth -> `vit_block=drop_samples`?
partition=gpu -> `hydra/launcher=slurm hydra.launcher.partition=gpu`?
compile=false -> `compilation=eager`?
attention=flash -> `attention=sdpa_flash`?
resources.device=gpu -> `resources.device=cuda`?
gradient_checkpointing=true -> `memory=recompute_blocks`?
launcher=slurm -> `hydra/launcher=slurm`?
wait=false hydra/launcher=slurm_example_site -> did you mean `hydra.launcher.wait=false`?
slurm.partition=gpu hydra/launcher=slurm -> did you mean `hydra.launcher.partition=gpu`?
--dry-run precision=O1,O2 -> `python -m vitsweep plan -m precision=O1,O2`?
--fp16 precision=O2 -> `precision=O1`?
--batch-size 8 -> or per replica: `batch.images_per_step=8 batch.scope=per_replica`?
-b 8 -> or per replica: `batch.images_per_step=8 batch.scope=per_replica`?
trainer.precision=16-mixed -> `precision=O1`?
zero_optimization.stage=3 -> `sharding=fsdp`?
--seed 3 -> `seed=3`?
opt=Lion -> use `optimizer=adamw_fused`.
precision:O1 -> `precision=O1`?
+experiment=first -> a named sweep: `+sweep=first` or a name: `sweep.name=first`?
sharding=ddp/fsdp -> `sharding=ddp,fsdp`?
precision=01,02 -> `precision=O1,O2`?
sharding=ddp,fsdpp -> `sharding=ddp,fsdp`?
precision = O1, O2 -> no space next to `,` or `=`: `precision=O1,O2`.
objective=masked_autoencoder objective.mask_ratio=0.75 -> did you mean `objective.kept_share=0.25`?
objective.mask_ratio=0.75 -> did you mean `objective=masked_autoencoder objective.kept_share=0.25`?
objective=masked_autoencoder mask_ratio=0.6 -> `tokens=drop tokens.keep=0.4` or `objective.kept_share=0.4`?
patch_dropout=0.3 -> `tokens=drop tokens.keep=0.7`?
batch.image=3 -> did you mean `batch.images_per_step=3`?
optimizer.learning=0.1 -> did you mean `optimizer.learning_rate=0.1`?
precision=O1 precision.loss_scale=bf16 -> must be a number or `dynamic`.
measurement.start=soon -> must be `auto`, `forked` or `spawned`.
measurement.start=fork -> did you mean `measurement.start=forked`?
measurement.blocks=soon -> must be a whole number.
measurement.blocks=three -> `measurement.blocks=3`?
limit_train_batches=0.1 -> `measurement=smoke`?
limit_train_batches=20 -> `measurement.measured_steps=20`?
train seed=3 -> `python -m vitsweep -m seed=3` or to an accuracy: `python -m vitsweep -m seed=3 task=train`?
"""
"""What is typed after `-m` -> how the sentence ends."""


def cells_of(typed: str) -> list[ComposedCell]:
    return expand(read_line(["-m", *typed.split()]).overrides, composer())


def test_a_word_of_the_field_gets_the_words_to_type() -> None:
    for slip in SLIPS.strip().splitlines():
        typed, _, end = slip.partition(" -> ")
        with pytest.raises(VitsweepError) as refused:
            [cell_from_tree(resolve(cell.tree, LAPTOP)) for cell in cells_of(typed)]
        said = with_launcher_typed(str(refused.value), typed.split())
        assert said.endswith(end)
        assert len(said.splitlines()) == 1
        assert ". " not in said


def test_a_number_with_a_unit_is_the_plain_number_where_the_key_has_that_unit() -> None:
    for key, typed, number in (
        ("sweep.minutes", "5min", "5"),
        ("sweep.minutes", "2h", "120"),
        ("sweep.max_gpu_hours", "30min", "0.5"),
        ("measurement.min_seconds", "500ms", "0.5"),
        ("measurement.warmup_min_seconds", "2s", "2"),
        ("resources.memory_gib_per_rank", "16GiB", "16"),
        ("resources.memory_gib_per_rank", "16GB", repr(16e9 / 2**30)),
        ("hydra.launcher.mem_gb", "64GB", "64"),
        ("batch.resolution_px", "224px", "224"),
        ("model.patch_px", "16x16", "16"),
        ("model.patch_px", "16x8", "16x8"),
        ("sweep.indifference", "5%", "0.05"),
        ("--width", "5%", "0.05"),
        ("--minutes", "1h", "60"),
        ("hydra.launcher.timeout_min", "1-02:30:00", "1590"),
        ("batch.resolution_px", "01:00:00", "3600s"),
        ("sweep.minutes", "5GB", "5GB"),
        ("model.width", "5%", "5%"),
        ("seed", "5min", "5min"),
        ("optimizer.eps", "1e-8", "1e-8"),
    ):
        assert plain_number(key, typed) == number, (key, typed)
    assert as_overrides("sweep.minutes=2h,90s precision=O1", {}) == [
        "sweep.minutes=120,1.5",
        "precision=O1",
    ]


def test_a_unit_is_read_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep.minutes=2h", "sweep.indifference=500%"]) == 2
    assert capsys.readouterr().err.startswith("`sweep.indifference=5`: ")
