"""What cannot run is refused in sentences that name the knob, the rule and the way out."""

import pytest

from tests.cells import entry
from tests.refusals import require

VIDEO = ("model=video_vit_nano", "data=moving_digits")


def reasons(*overrides: str, ranks: int = 4) -> str:
    return "\n".join(entry(f"resources.ranks_per_node={ranks}", *overrides).reasons)


def test_a_reason_names_the_knob_the_rule_and_the_way_out() -> None:
    for overrides, names in [
        (
            ["sequence_parallel=ulysses", "model.num_heads=2"],
            "`mesh.ulysses=4` `model.num_heads=2` `mesh.ulysses=2` `sequence_parallel=ring`",
        ),
        (
            ["sequence_parallel=usp", "mesh.ulysses=4", "model.num_heads=2"],
            "`mesh.ulysses=4` `model.num_heads=2`",
        ),
        (
            [
                "sequence_parallel=ulysses",
                "tensor_parallel=megatron",
                "mesh.tensor=2",
                "model.num_heads=2",
            ],
            "`mesh.ulysses=2` `model.num_heads=2` `mesh.tensor=2`",
        ),
        (
            ["sequence_parallel=dsp"],
            "`sequence_parallel=dsp` `model=vit_nano` `video_vit_*` `sequence_parallel=ulysses`",
        ),
        (
            ["sequence_parallel=lasp"],
            "`sequence_parallel=lasp` `attention=sdpa_auto` `attention=linear`",
        ),
        (
            ["sequence_parallel=lasp", "attention=linear"],
            "`attention.causal=true` `sequence_parallel=lasp2`",
        ),
        (
            ["attention=linear", "attention.decay=0.5"],
            "`attention.decay=0.5` `attention.causal=true`",
        ),
        (
            ["sequence_parallel=lss", "attention=sdpa_causal", "classifier=pooled"],
            "`attention=sdpa_causal` `attention=sdpa_auto`",
        ),
        (
            ["sequence_parallel=lss", "attention=linear"],
            "`sequence_parallel=ulysses`",
        ),
        (
            ["sequence_parallel=ring", "mesh.ring=3"],
            "`mesh.ring=3` 4",
        ),
        (
            ["sequence_parallel=ring", "mesh.ulysses=2"],
            "`mesh.ulysses=2` `sequence_parallel=ring` `sequence_parallel`",
        ),
        (
            ["sequence_parallel=ring", "sequence_parallel.order=zigzag"],
            "`attention=sdpa_auto` `sequence_parallel.order=contiguous`",
        ),
        (
            ["sequence_parallel=ring", "attention=sdpa_math"],
            "`attention=sdpa_math` `attention=sdpa_auto`",
        ),
        (
            ["sequence_parallel=megatron_sp", "tensor_parallel=megatron"],
            "`tensor_parallel=none` `megatron`",
        ),
        (
            ["tensor_parallel=megatron", "model.num_heads=2"],
            "`mesh.tensor=4` `tensor_parallel=megatron` `model.num_heads=2` `model.mlp_width=512`",
        ),
        (
            ["pipeline_parallel=gpipe", "model.depth=2"],
            "`model.depth=2` `mesh.pipeline=2` 4",
        ),
        (
            ["pipeline_parallel=gpipe", "pipeline_parallel.microbatches=3"],
            "`pipeline_parallel.microbatches=3` 128",
        ),
        (
            ["pipeline_parallel=one_f_one_b", "pipeline_parallel.microbatches=2"],
            "`pipeline_parallel.microbatches=2` 4",
        ),
        (
            ["pipeline_parallel=gpipe", "batch.accumulation_steps=2"],
            "`batch.accumulation_steps=1` `pipeline_parallel.microbatches`",
        ),
        (
            ["sequence_parallel=dsp", *VIDEO, "sharding=none"],
            "`sharding=none` 4",
        ),
        (
            [*VIDEO[:1]],
            "`model=video_vit_nano` `data=digits`",
        ),
        ([*VIDEO[1:]], "`data=moving_digits` 8"),
        ([*VIDEO, "layout=batch_second"], "`layout=batch_first`"),
        ([*VIDEO, "classifier=pooled"], "`model=video_vit_nano`"),
        (["attention=sdpa_causal"], "`classifier=pooled`"),
    ]:
        require(reasons(*overrides), names)


@pytest.mark.parametrize(
    ("overrides", "axis", "degree"),
    [
        (["sequence_parallel=ulysses", "model.num_heads=6"], "ulysses", 2),
        (["tensor_parallel=megatron", "model.num_heads=6"], "tensor", 2),
        (["sequence_parallel=ulysses", "mesh.ulysses=4", "model.num_heads=6"], "ulysses", 2),
        (["pipeline_parallel=gpipe", "model.depth=7"], "pipeline", 4),
    ],
)
def test_hints_offer_degrees_that_divide_the_heads_and_the_world(
    overrides: list[str], axis: str, degree: int
) -> None:
    width = "model.width=48"
    assert f"ry `mesh.{axis}={degree}`" in reasons(*overrides, width, ranks=8)
    assert not reasons(*overrides, width, f"mesh.{axis}={degree}", ranks=8)


@pytest.mark.parametrize(
    "overrides",
    [
        ["sequence_parallel=usp"],
        ["sequence_parallel=usp", "mesh.ring=4", "model.num_heads=1"],
        ["sequence_parallel=dsp", *VIDEO, "mesh.sequence=2", "sharding=hsdp"],
        ["sequence_parallel=ulysses", "tensor_parallel=megatron", "mesh.tensor=2"],
        ["pipeline_parallel=one_f_one_b", "model.depth=8"],
    ],
)
def test_what_fits_is_not_refused(overrides: list[str]) -> None:
    assert not reasons(*overrides)


@pytest.mark.parametrize(
    ("ranks", "heads", "degrees"),
    [(2, 4, (2, 1)), (4, 4, (2, 2)), (8, 4, (4, 2)), (8, 3, (1, 8)), (8, 2, (2, 4))],
)
def test_usp_left_alone_splits_the_ranks_by_the_heads(
    ranks: int, heads: int, degrees: tuple[int, int]
) -> None:
    mesh = entry(
        "sequence_parallel=usp", f"model.num_heads={heads}", f"resources.ranks_per_node={ranks}"
    ).spec.mesh
    assert (mesh.ulysses, mesh.ring) == degrees
