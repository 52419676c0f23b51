"""A wrong key or value is refused by name, as it was typed, with what is allowed."""

import pytest

from tests.cells import TINY, entry
from vitsweep.errors import BadValueError
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.resources import Machine


def told(*overrides: str) -> str:
    with pytest.raises(BadValueError) as error:
        entry(*overrides)
    return str(error.value)


WHOLE = "must be a valid integer."


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("batch.images_per_step=abc", f"`batch.images_per_step=abc`: {WHOLE}"),
        ("batch.images_per_step=-1", "`batch.images_per_step=-1`: must be greater than 0."),
        ("batch.images_per_step=0", "`batch.images_per_step=0`: must be greater than 0."),
        ("batch.images_per_step=1.5", f"`batch.images_per_step=1.5`: {WHOLE}"),
        ("batch.images_per_step=null", f"`batch.images_per_step=null`: {WHOLE}"),
        ("batch.images_per_step=true", f"`batch.images_per_step=true`: {WHOLE}"),
        ("batch.images_per_step=[1,2]", f"`batch.images_per_step=[1, 2]`: {WHOLE}"),
        ("batch.images_per_step='3'", f'`batch.images_per_step="3"`: {WHOLE}'),
        ("batch.images_per_step={a:1}", '`batch.images_per_step={"a": 1}`: ' + WHOLE),
        ("batch.scope=world", "`batch.scope=world`: must be 'total' or 'per_replica'."),
        ("model.depth=0", "`model.depth=0`: must be greater than 0."),
        ("model.norm_eps=0", "`model.norm_eps=0`: must be greater than 0."),
        ("seed=-1", "`seed=-1`: must be greater than or equal to 0."),
        (f"seed={2**63}", f"`seed={2**63}`: must be at most {2**63 - 1}."),
        (f"batch.images_per_step={10**30}", f"must be at most {2**63 - 1}."),
        ("~precision", "`~precision` removes a group, but a cell has one choice of `precision`"),
        ("precision=[O1,O2]", "sweep over several with `-m precision=O1,O2`."),
        ("task.epochs=-1", "`task.epochs=-1`: must be greater than or equal to 0."),
        ("task.label_smoothing=2", "`task.label_smoothing=2`: must be less than or equal to 1."),
        ("measurement.blocks=0", "`measurement.blocks=0`: must be greater than or equal to 1."),
        ("measurement.timeout_min=0", "`measurement.timeout_min=0`: must be greater than 0."),
        ("measurement.trace=maybe", "`measurement.trace=maybe`: must be a valid boolean."),
        ("optimizer.learning_rate=abc", "`optimizer.learning_rate=abc`: must be a valid number."),
        ("optimizer.learning_rate=-1", "`optimizer.learning_rate=-1`: must be greater than 0."),
        (
            "optimizer.learning_rate=nan",
            "`optimizer.learning_rate=NaN`: must be a finite number.",
        ),
        ("optimizer.clip_norm=0", "`optimizer.clip_norm=0`: must be greater than 0."),
        (
            "optimizer.weight_decay=-1",
            "`optimizer.weight_decay=-1`: must be greater than or equal to 0.",
        ),
        ("optimizer.beta1=1", "`optimizer.beta1=1`: must be less than 1."),
        (
            "precision.dtype=float33",
            "must be 'float32' or 'float64'; did you mean `precision.dtype=float32`?",
        ),
        ("resources.device=tpu", "must be one of `auto`, `cpu`, `cuda`."),
        ("resources.threads_per_rank=0", "`resources.threads_per_rank=0`: must be greater than 0."),
        ("resources.nodes=0", "`resources.nodes=0`: a whole number of at least 1 is needed."),
        ("resources.nodes=abc", "`resources.nodes=abc`: a whole number of at least 1 is needed."),
        ("resources.ranks_per_node=-1", "`resources.ranks_per_node=-1`: a whole number of at"),
        ("resources.memory_gib_per_rank=0", "must be greater than 0."),
        ("mesh.shard=0", "`mesh.shard=0`: a whole number of at least 1, or `auto`."),
        ("mesh.tensor=abc", "`mesh.tensor=abc`: a whole number of at least 1, or `auto`."),
    ],
)
def test_a_wrong_value_is_told_as_typed_with_what_is_needed(typed: str, sentence: str) -> None:
    assert sentence in told(typed)


def test_a_loss_scale_may_be_a_number_or_a_word_and_both_are_told() -> None:
    sentence = told("precision=O1", "precision.loss_scale=-3")
    assert sentence == ("`precision.loss_scale=-3`: must be greater than 0; or must be 'dynamic'.")


def test_an_unknown_key_is_told_with_the_keys_there_are_and_the_nearest() -> None:
    assert told("+batch.imgs_per_step=3") == (
        "`batch.imgs_per_step` does not exist; did you mean `batch.images_per_step`?"
    )
    assert "did you mean `optimizer.beta2`?" in told("+optimizer.beta3=1")
    assert "did you mean" not in told("+precision.xyz=1")


def test_a_missing_key_is_named() -> None:
    assert told("~batch.scope") == "`batch.scope` is missing."
    assert told("~task.epochs") == "`task.epochs` is missing."


def test_a_missing_group_is_named() -> None:
    tree = entry().tree
    del tree["memory"], tree["seed"]
    with pytest.raises(BadValueError, match="lacks `memory`, `seed`"):
        cell_from_tree(tree)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (
            "vitsweep.techniques.sharding.ddp.Ddp",
            "`precision._target_` names `Ddp`, which is no Precision.",
        ),
        ("nothing", "`precision._target_=nothing` must name a class, like `package.module.Class`."),
        ("3", "`precision._target_=3` must name a class"),
        (
            "mine.nothing.X",
            "cannot be imported (No module named 'mine'): install it, or put its folder on `PYTHONPATH`.",
        ),
        (
            "__main__.Mine",
            "notebook or script defines: put the class or function into a file).",
        ),
        (
            "vitsweep.techniques.sharding.ddp.Nix",
            "`precision._target_=vitsweep.techniques.sharding.ddp.Nix` cannot be",
        ),
    ],
)
def test_a_wrong_target_is_told(target: str, sentence: str) -> None:
    assert sentence in told(f"precision._target_={target}")


def test_all_wrong_values_of_a_cell_are_told_at_once() -> None:
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
    with pytest.raises(BadValueError, match="`seed` takes a single value, not a section"):
        cell_from_tree(tree | {"seed": {"a": 1}})
    with pytest.raises(BadValueError, match="`batch=3` is no choice of the group `batch`"):
        cell_from_tree(tree | {"batch": 3})


def test_values_of_the_right_kind_pass() -> None:
    given = ["optimizer.learning_rate=1", "optimizer.clip_norm=null", "task.label_smoothing=1"]
    cell = entry(
        *TINY, *given, machine=Machine(device="cpu", cores_per_node=2, devices_per_node=0)
    ).spec
    assert cell.optimizer.learning_rate == 1.0
    assert isinstance(cell.optimizer.learning_rate, float)
    assert cell.optimizer.clip_norm is None
