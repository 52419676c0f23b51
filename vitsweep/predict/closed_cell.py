"""A cell as the closed formulas see it: its transformer, its number formats, its layout (no torch)."""

from dataclasses import replace

from vitsweep.predict.closed_memory import Formats, Layout, Transformer, memory
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_parallel import BYTES
from vitsweep.spec.model_spec import TransformerSpec

RECOMPUTE = {"keep_all": "none", "recompute_selected": "selected", "recompute_blocks": "blocks"}
SAFETY = 2.0
"""How many times the formula's memory a device must have, for a cell to fit without being traced."""


def shape_of(cell: CellSpec) -> Transformer:
    """Return the shape of a cell's model, with the products of its embedding and head."""
    from vitsweep.model.flops import num_parameters

    spec, side = cell.transformer, cell.batch.resolution_px
    tokens = spec.num_tokens(side, cell.classifier.pooling)
    patches = (side // spec.patch_px) ** 2
    total = num_parameters(spec, side, cell.classifier.pooling)
    shape = Transformer(
        depth=spec.depth,
        width=spec.width,
        heads=spec.num_heads,
        mlp_width=spec.mlp_width * spec.mlp_matrices // 2,
        tokens=tokens,
        edge_parameters=0,
        edge_products=(
            (patches, spec.width, spec.in_channels * spec.patch_px**2),
            (1, spec.num_classes, spec.width),
        ),
    )
    return replace(shape, edge_parameters=total - shape.parameters)


def formats_of(cell: CellSpec) -> Formats:
    """Return the bytes of numbers where parameters are sharded: masters in float32, except under O3."""
    plan = cell.precision.plan()
    param = BYTES[plan.param_dtype]
    half_state = param == 2 and not plan.master_weights
    held = 2 if half_state else 4
    compute = plan.autocast_dtype or plan.param_dtype
    return Formats(
        compute="float8_e4m3fn" if cell.precision.float8 else compute,
        stream=param,
        inner=BYTES[compute],
        parameter=held,
        gradient=held,
        optimizer=_moments(cell) * held,
        gathered=param,
        exchanged=held,
    )


def held_whole(formats: Formats, cell: CellSpec) -> Formats:
    """Return the same where parameters are not sharded: half-precision ones beside float32 masters."""
    plan = cell.precision.plan()
    param = BYTES[plan.param_dtype]
    masters = 4 if plan.master_weights else 0
    moments = _moments(cell) * (4 if masters else param)
    return replace(formats, parameter=param, gradient=param, optimizer=moments + masters)


def _moments(cell: CellSpec) -> int:
    return 2 if cell.optimizer.name.startswith("adam") else 1


def layout_of(cell: CellSpec) -> Layout:
    """Return how a cell's step is spread over its ranks."""
    pipelined = cell.mesh.pipeline > 1
    parts = cell.pipeline_parallel.microbatches if pipelined else cell.batch.accumulation_steps
    recompute = RECOMPUTE.get(cell.memory.name, "none")
    update = cell.optimizer.name.rpartition("_")[2]
    return Layout(
        mesh=cell.mesh,
        ranks_per_node=cell.resources.ranks_per_node,
        micro_batch=cell.micro_batch // (parts if pipelined else 1),
        micro_batches=parts,
        stages_per_rank=cell.pipeline_parallel.stages_per_rank,
        sharded=cell.sharding.shards_parameters,
        recompute=recompute,  # type: ignore[arg-type]
        update=update if update in ("fused", "foreach", "loop") else "foreach",  # type: ignore[arg-type]
    )


def surely_fits(cell: CellSpec, limit_bytes: float) -> bool:
    """Whether a formula says that a rank needs much less than `limit_bytes`; False where it cannot tell."""
    if not isinstance(cell.model, TransformerSpec):
        return False
    formats = formats_of(cell)
    if not cell.sharding.shards_parameters:
        formats = held_whole(formats, cell)
    # Kernels that write scores to memory say that they do not compute them again.
    shape = replace(shape_of(cell), fused_attention=cell.attention.recomputes_scores)
    return SAFETY * memory(shape, layout_of(cell), formats).peak < limit_bytes
