"""A wrong key or value is refused by name, as it was typed, with what is allowed."""

import pytest

from tests.cells import TINY, entry
from tests.refusals import named, require
from vitsweep.errors import BadValueError
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.resources import Machine


def told(*overrides: str) -> str:
    with pytest.raises(BadValueError) as error:
        entry(*overrides)
    return str(error.value)


def test_a_wrong_value_is_reported_as_typed_with_what_is_needed() -> None:
    for typed, names in [
        ("batch.images_per_step=abc", "`batch.images_per_step=abc`"),
        ("batch.images_per_step=-1", "`batch.images_per_step=-1` 0"),
        ("batch.images_per_step=0", "`batch.images_per_step=0` 0"),
        ("batch.images_per_step=1.5", "`batch.images_per_step=1.5`"),
        ("batch.images_per_step=null", "`batch.images_per_step=null`"),
        ("batch.images_per_step=true", "`batch.images_per_step=true`"),
        ("batch.images_per_step=[1,2]", "`batch.images_per_step=[1, 2]`"),
        ("batch.images_per_step='3'", '`batch.images_per_step="3"`'),
        ("batch.images_per_step={a:1}", '`batch.images_per_step={"a": 1}`'),
        ("batch.scope=world", "`batch.scope=world`"),
        ("model.depth=0", "`model.depth=0` 0"),
        ("model.norm_eps=0", "`model.norm_eps=0` 0.0"),
        ("seed=-1", "`seed=-1` 0"),
        (f"seed={2**63}", f"`seed={2**63}` {2**63 - 1}"),
        (f"batch.images_per_step={10**30}", f"`batch.images_per_step={10**30}` {2**63 - 1}"),
        ("~precision", "`~precision` `precision`"),
        ("precision=[O1,O2]", "`-m precision=O1,O2`"),
        ("task.epochs=-1", "`task.epochs=-1` 0"),
        ("task.label_smoothing=2", "`task.label_smoothing=2` 1.0"),
        ("measurement.blocks=0", "`measurement.blocks=0` 1"),
        ("measurement.timeout_min=0", "`measurement.timeout_min=0` 0.0"),
        ("measurement.trace=maybe", "`measurement.trace=maybe`"),
        ("optimizer.learning_rate=abc", "`optimizer.learning_rate=abc`"),
        ("optimizer.learning_rate=-1", "`optimizer.learning_rate=-1` 0.0"),
        (
            "optimizer.learning_rate=nan",
            "`optimizer.learning_rate=NaN`",
        ),
        ("optimizer.clip_norm=0", "`optimizer.clip_norm=0` 0.0"),
        ("optimizer.weight_decay=-1", "`optimizer.weight_decay=-1` 0.0"),
        ("optimizer.beta1=1", "`optimizer.beta1=1` 1.0"),
        (
            "precision.dtype=float33",
            "`precision.dtype=float32`",
        ),
        ("resources.device=tpu", "`auto` `cpu` `cuda`"),
        ("resources.threads_per_rank=0", "`resources.threads_per_rank=0` 0"),
        ("resources.nodes=0", "`resources.nodes=0` 1"),
        ("resources.nodes=abc", "`resources.nodes=abc` 1"),
        ("resources.ranks_per_node=-1", "`resources.ranks_per_node=-1`"),
        ("resources.memory_gib_per_rank=0", "`resources.memory_gib_per_rank=0` 0.0"),
        ("mesh.shard=0", "`mesh.shard=0` `auto` 1"),
        ("mesh.tensor=abc", "`mesh.tensor=abc` `auto` 1"),
    ]:
        require(told(typed), names)


def test_a_loss_scale_may_be_a_number_or_a_word_and_both_are_reported() -> None:
    said = told("precision=O1", "precision.loss_scale=-3")
    require(said, "`precision.loss_scale=-3` 0.0")
    assert "or `dynamic`" in said


def test_an_unknown_key_is_reported_with_the_keys_there_are_and_the_nearest() -> None:
    require(told("+batch.imgs_per_step=3"), "`batch.imgs_per_step` `batch.images_per_step`")
    require(told("+optimizer.beta3=1"), "`optimizer.beta3` `optimizer.beta2`")
    assert not told("+precision.xyz=1").endswith("?")


def test_a_missing_key_is_named() -> None:
    for key in ("batch.scope", "task.epochs"):
        assert named(told(f"~{key}")) == {f"`{key}`"}


def test_a_missing_group_is_named() -> None:
    tree = entry().tree
    del tree["memory"], tree["seed"]
    with pytest.raises(BadValueError, match="`memory`, `seed`"):
        cell_from_tree(tree)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (
            "vitsweep.techniques.sharding.ddp.Ddp",
            "`precision._target_` `Ddp`",
        ),
        ("nothing", "`precision._target_=nothing` `package.module.Class`"),
        ("3", "`precision._target_=3`"),
        (
            "mine.nothing.X",
            "`PYTHONPATH`",
        ),
        (
            "__main__.Mine",
            "`precision._target_=__main__.Mine`",
        ),
        (
            "vitsweep.techniques.sharding.ddp.Nix",
            "`precision._target_=vitsweep.techniques.sharding.ddp.Nix`",
        ),
    ],
)
def test_a_wrong_target_is_reported(target: str, names: str) -> None:
    require(told(f"precision._target_={target}"), names)


def test_all_wrong_values_of_a_cell_are_reported_at_once() -> None:
    wrong = ["batch.images_per_step=0", "model.depth=abc", "seed=-1", "~task.epochs", "+memory.x=1"]
    sentences = told(*wrong).splitlines()
    assert len(sentences) == len(wrong)
    for knob in (
        "batch.images_per_step=0",
        "model.depth=abc",
        "seed=-1",
        "task.epochs",
        "memory.x",
    ):
        assert sum(f"`{knob}`" in sentence for sentence in sentences) == 1


def test_a_section_where_a_value_belongs_and_the_reverse() -> None:
    tree = entry().tree
    with pytest.raises(BadValueError, match="`seed`"):
        cell_from_tree(tree | {"seed": {"a": 1}})
    with pytest.raises(BadValueError, match=r"`batch=3`.*`batch`"):
        cell_from_tree(tree | {"batch": 3})


def test_values_of_the_right_kind_pass() -> None:
    given = ["optimizer.learning_rate=1", "optimizer.clip_norm=null", "task.label_smoothing=1"]
    cell = entry(
        *TINY, *given, machine=Machine(device="cpu", cores_per_node=2, devices_per_node=0)
    ).spec
    assert cell.optimizer.learning_rate == 1.0
    assert isinstance(cell.optimizer.learning_rate, float)
    assert cell.optimizer.clip_norm is None
