"""The state of a trainer as one dictionary, saved and loaded on as many ranks (needs torch)."""

from collections.abc import Mapping
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.training.checkpoint import (
    NON_FINITE,
    OPTIMIZER,
    allocate_state,
    drop_unsaved_state,
    group_numbers,
    restore_numbers,
    shards_of_training,
    state_dict_of,
)
from vitsweep.training.shards import Shard, whole
from vitsweep.training.trainer import Trainer


def state_dict(trainer: Trainer) -> dict[str, Any]:
    """Return copies of all tensors and numbers that further steps depend on.

    Returns:
        `tensors`: what this rank holds of model (masters where there are any), optimizer state and
        averaged weights, by name and place in the whole tensor; `scaler`, `groups` (numbers of the
        parameter groups) and `step`. `torch.save` writes it rank by rank,
        `torch.distributed.checkpoint.save` all ranks at once.
    """
    return {
        "tensors": {key: t.detach().clone() for key, t in state_dict_of(_shards(trainer)).items()},
        "scaler": trainer.scaler.state() if trainer.scaler else {},
        "groups": [group_numbers(group) for group in trainer.optimizer.param_groups],
        "step": trainer.steps_taken,
    }


def load_state_dict(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Go on from what `state_dict` returned on this rank, for the same model, techniques and ranks.

    Raises:
        VitsweepError: the state is of another model, or other techniques or ranks; nothing is changed.
    """
    saved = state["tensors"]
    held = {key: tensor for key, tensor in state_dict_of(_shards(trainer)).items()}
    for key, tensor in held.items():
        if OPTIMIZER not in key and (key not in saved or saved[key].shape != tensor.shape):
            raise VitsweepError(
                f"The state does not hold `{key}` of shape {tuple(tensor.shape)}: load it with the model, "
                "techniques and ranks that saved it."
            )
    if any(OPTIMIZER in key for key in saved):
        allocate_state(trainer.optimizer)
    for key, tensor in state_dict_of(_shards(trainer)).items():
        if key in saved:
            tensor.copy_(saved[key])
    drop_unsaved_state(trainer, {key.rpartition("@")[0]: None for key in saved})
    trainer.publish()
    restore_numbers(trainer.optimizer, state["groups"])
    if trainer.scaler and state["scaler"]:
        trainer.scaler.restore(state["scaler"])
    trainer.steps_taken = state["step"]


def _shards(trainer: Trainer) -> list[Shard]:
    flag = whole(f"rank{trainer.world.rank}{NON_FINITE}", trainer.non_finite)
    return [*shards_of_training(trainer), flag]
