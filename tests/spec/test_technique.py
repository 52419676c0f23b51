"""What the choices of the menu say of themselves: which have each property, and the values of the others."""

import pytest

from vitsweep.errors import VitsweepError
from vitsweep.spec.cell_spec import GROUPS, Batch
from vitsweep.spec.menu import choices, class_of
from vitsweep.spec.technique import AttentionPattern, Runtime, _problem, _texts

TRUE = {
    "changes_model": "classifier=pooled attention=linear attention=sdpa_causal vit_block=drop_samples "
    "vit_block=parallel tokens=drop tokens=registers",
    "rounds_apart": "compilation=compile_blocks compilation=compile_model",
    "part_of_training": "classifier=token classifier=pooled vit_block=plain vit_block=drop_samples "
    "vit_block=parallel tokens=all tokens=drop tokens=registers averaging=none averaging=ema "
    "schedule=constant",
    "float8": "precision=fp8 precision=fp8_masters precision=mxfp8",
    "shards_parameters": "sharding=fsdp sharding=zero2 sharding=hsdp",
    "shards_optimizer": "sharding=zero1",
    "keeps_gradient_views": "optimizer=adamw_contiguous optimizer=sgd_contiguous",
    "elementwise": "optimizer=adamw_loop optimizer=adamw_foreach optimizer=adamw_fused "
    "optimizer=adamw_contiguous optimizer=sgd_loop optimizer=sgd_foreach optimizer=sgd_fused "
    "optimizer=sgd_contiguous",
    "wraps_blocks": "memory=recompute_blocks memory=recompute_selected",
}
"""Property of a class -> the choices that have it."""
OTHERS = {
    "forwards_per_step": {
        1: "memory=keep_all",
        2: "memory=recompute_blocks memory=recompute_selected",
    },
    "scope": {
        "nothing": "compilation=eager",
        "block": "compilation=compile_blocks",
        "model": "compilation=compile_model",
    },
    "collects_garbage": {
        "paused": "runtime=plain runtime=bind_cores runtime=bind_numa",
        "automatic": "runtime=gc_automatic",
        "scheduled": "runtime=gc_scheduled",
    },
}


def test_each_property_is_that_of_the_choices_that_have_it() -> None:
    menu = {f"{group}={c}": class_of(group, c) for group in GROUPS for c in choices(group)}
    for name, typed in TRUE.items():
        assert {key for key, cls in menu.items() if getattr(cls, name, False)} == {*typed.split()}
    for name, values in OTHERS.items():
        found = {key: getattr(cls, name) for key, cls in menu.items() if hasattr(cls, name)}
        assert found == {key: value for value, typed in values.items() for key in typed.split()}


def test_a_sequence_has_so_many_pairs() -> None:
    for tokens, all_to_all, causal in ((1, 1, 1), (2, 4, 3), (5, 25, 15)):
        assert AttentionPattern().pairs(tokens) == all_to_all
        assert AttentionPattern(causal=True).pairs(tokens) == causal


def test_images_of_a_step_are_counted_as_the_scope_says() -> None:
    for scope, total, micro_batch in (("total", 48, 4), ("per_replica", 192, 16)):
        batch = Batch(
            name="b", images_per_step=48, scope=scope, accumulation_steps=3, resolution_px=8
        )  # type: ignore[arg-type]
        assert (batch.total(4), batch.micro_batch(4)) == (total, micro_batch)


def test_a_variable_that_no_cell_can_set_is_refused() -> None:
    for name, value in (
        ("1A", "x"), ("A-B", "x"), ("", "x"), ("OMP_NUM_THREADS", "1"), ("rank", "1"), ("WORLD_SIZE", "1"),
        ("SLURM_NTASKS", "1"), ("LD_PRELOAD", "x"), ("PYTHONPATH", "x"), ("WANDB_API_KEY", "x"),
        ("SSHPASS", "x"), ("GITHUB_PAT", "x"), ("MY_TOKEN", "x"), ("A", 1.5), ("A", True), ("A", "a\nb"),
    ):  # fmt: skip
        assert _problem(name, value), name
    for name, value in (
        ("A", ""), ("_a1", "x y"), ("TOKENIZERS_PARALLELISM", "false"), ("PATHS", "x"), ("RANKS", "1"),
        ("KEYSTONE", "x"), ("COMPASS_X", "y"),
    ):  # fmt: skip
        assert _problem(name, value) == "", name
    assert _texts({"a": 1, "b": True, "c": 1.5, "d": "2"}) == {
        "a": "1", "b": True, "c": 1.5, "d": "2",
    }  # fmt: skip
    assert _texts([1]) == [1]


def test_a_rank_that_lacks_its_variables_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITSWEEP_A", "1")
    monkeypatch.delenv("VITSWEEP_B", raising=False)
    cell: object = None
    Runtime(name="x").set_up(cell, 0)  # type: ignore[arg-type]
    Runtime(name="x", variables={"VITSWEEP_A": "1"}).set_up(cell, 0)  # type: ignore[arg-type]
    for value, typed in (("2", "`VITSWEEP_A=2 VITSWEEP_B='x y'`"), ("1", "`VITSWEEP_B='x y'`")):
        runtime = Runtime(name="x", variables={"VITSWEEP_A": value, "VITSWEEP_B": "x y"})
        with pytest.raises(VitsweepError, match=typed):
            runtime.set_up(cell, 0)  # type: ignore[arg-type]
