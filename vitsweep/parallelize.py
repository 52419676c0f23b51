"""The one order in which techniques are applied to a model, each line with its reason.

What apex's levels mean under each sharding (params = what forward and backward compute with;
"half" is float16 or bfloat16, `keep_norm_fp32` spares LayerNorm):

|    | none, ddp, zero1                             | zero2, fsdp, hsdp                              |
|----|----------------------------------------------|------------------------------------------------|
| O0 | params, gradients, state float32             | the same in shards                             |
| O1 | float32 params, autocast to half             | float32 shards, gathered float32, autocast     |
| O2 | half params, half gradients exchanged,       | float32 shards are the masters; gathered half, |
|    | float32 masters in the optimizer             | gradients reduced in float32; norms in units   |
|    |                                              | of their own, float32                          |
| O3 | everything half, state too                   | half shards, half gradients, half state        |
"""

from functools import partial

import torch
from torch import Tensor, nn

from vitsweep.errors import VitsweepError
from vitsweep.model.initialize import Draws, materialize, plain_name
from vitsweep.model.precision import autocast, cast_model, set_process_flags
from vitsweep.objectives.base import OpenObjective, Pair
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.averaging.ema import MovingAverage
from vitsweep.training.regularize import StochasticDepth
from vitsweep.training.trained_parameters import TrainedParameters
from vitsweep.training.trainer import Trainer
from vitsweep.training.update import LocalShards, LossScaler, MasterWeights, parameter_groups
from vitsweep.world import World


def parallelize(
    model: nn.Module,
    cell: CellSpec,
    world: World,
    drop_path: float = 0.0,
    objective: OpenObjective | None = None,
) -> Trainer:
    """Apply every technique of `cell` to a reference model on this rank's device, or on `meta`.

    From `meta` each rank allocates and draws only its own part of the weights.

    Args:
        model: plain.
        cell: its techniques.
        world: ranks and mesh.
        drop_path: rate of stochastic depth at the last block, of a recipe that trains.
        objective: in place of the cell's.

    Raises:
        VitsweepError: the world has the mesh of another cell, over whose groups gradients would be
            averaged wrongly.
    """
    if world.shape != cell.mesh:
        raise VitsweepError(
            f"The ranks lie on a mesh of {world.shape}, and the cell has {cell.mesh}: build its mesh with "
            "`vitsweep.world.device_mesh`."
        )
    names = {plain_name(name): name for name in model.state_dict()}
    plan = cell.precision.plan()
    set_process_flags(cell)  # before the first convolution
    sharded = cell.sharding.shards_parameters
    draws = Draws(cell.seed, world.data_parallel_rank)
    vars(model)["draws"] = draws  # a stage of a pipeline and wrappers share it
    # Steps of a user's module may use other parameters on each rank: shardings then look for them.
    vars(model)["may_lack_gradients"] = may_lack = cell.model.may_lack_gradients
    model = cell.vit_block.apply(model)  # what is computed, before anyone changes how
    model = cell.tokens.apply(model)  # before tokens are dealt out to ranks
    model = cell.precision.convert(model)  # swaps linears: before anyone wraps or splits them
    model = cast_model(model, plan, sharded_masters=sharded)  # unsharded still, before views
    model = cell.tensor_parallel.apply(model, world)  # splits those linears
    model = cell.attention.apply(model)  # the kernel that sequence parallelism will call
    model = cell.sequence_parallel.apply(model, world)  # replaces `attend`, splits tokens
    # On the attention modules as they are now.
    depth = StochasticDepth(model, drop_path, cell, world) if drop_path else None
    forward_context = partial(autocast, plan, world.device)
    model = cell.pipeline_parallel.stage(model, world, forward_context)  # of finished blocks
    if not sharded:
        # only what this rank keeps; hooks on parameters come later
        materialize(model, world.device)
    model = cell.memory.apply(model)  # wraps blocks with all that is in them
    model = cell.compilation.apply(model)  # compiles what that wrapped
    decay = cell.optimizer.weight_decay
    groups = [] if sharded else parameter_groups(model, decay)  # names are plainest before wrapping
    model = cell.sharding.apply(model, plan, world)  # outermost: it owns parameters and gradients
    if sharded:
        # no rank ever holds the whole model; shards are padded here
        materialize(model, world.device)
        groups = parameter_groups(model, decay)  # FSDP2 replaces parameters by shards
    groups = cell.sharding.optimizer_groups(groups, model)
    masters = local_shards = None
    if plan.master_weights and not sharded:
        masters = MasterWeights(groups)
        groups = masters.groups
    if sharded and cell.optimizer.updates_shards:
        local_shards = LocalShards(groups)
        groups = local_shards.groups
    # users save its groups: without `parts`, which hold process groups
    if cell.optimizer.elementwise:
        groups = [{k: v for k, v in group.items() if k != "parts"} for group in groups]
    optimizer = cell.optimizer.build(groups)  # may move parameters into buffers of its own
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    objective = objective or cell.objective.open(cell)

    def loss_of_labels(outputs: Tensor, labels: Tensor) -> Tensor:
        return trainer.criterion(outputs, Pair(label=labels), trainer.at())

    trainer = Trainer(
        cell=cell,
        world=world,
        plan=plan,
        model=model,
        pipeline=cell.pipeline_parallel.runner(model, loss_of_labels, world),
        optimizer=optimizer,
        masters=masters,
        local_shards=local_shards,
        scaler=LossScaler(plan.loss_scale, world.device.type) if plan.loss_scale else None,
        skipped=[],
        non_finite=torch.zeros((), dtype=torch.bool, device=world.device),
        draws=draws,
        objective=objective,
        depth=depth,
        average=(
            MovingAverage(updated, objective.momentum)
            if objective.momentum
            else cell.averaging.build(updated)
        ),
        trained=TrainedParameters(model, cell, world) if may_lack else None,
        names=names,
    )
    return trainer
