"""What cannot run is refused in sentences that name the knob, the rule and the way out."""

import pytest

from tests.cells import entry

VIDEO = ("model=video_vit_nano", "data=moving_digits")


def reasons(*overrides: str, ranks: int = 4) -> str:
    return "\n".join(entry(f"resources.ranks_per_node={ranks}", *overrides).reasons)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["sequence_parallel=ulysses", "model.num_heads=2"],
            "`mesh.ulysses=4` must divide `model.num_heads=2`: `sequence_parallel=ulysses` gives "
            "whole heads to each rank. Try `mesh.ulysses=2`, or `sequence_parallel=ring`, which "
            "has no such limit.",
        ),
        (
            ["sequence_parallel=usp", "mesh.ulysses=4", "model.num_heads=2"],
            "`mesh.ulysses=4` must divide `model.num_heads=2`",
        ),
        (
            ["sequence_parallel=ulysses", "tensor_parallel=megatron", "mesh.tensor=2",
             "model.num_heads=2"],
            "`mesh.ulysses=2` must divide `model.num_heads=2` / `mesh.tensor=2`",
        ),
        (
            ["sequence_parallel=dsp"],
            "`sequence_parallel=dsp` switches between the sequence axes of a model, and "
            "`model=vit_nano` has one: use a `video_vit_*` or `axial_vit_*`, or "
            "`sequence_parallel=ulysses`.",
        ),
        (
            ["sequence_parallel=lasp"],
            "`sequence_parallel=lasp` exchanges the states of linear attention, and "
            "`attention=sdpa_auto` has none: use `attention=linear`",
        ),
        (
            ["sequence_parallel=lasp", "attention=linear"],
            "needs `attention.causal=true`; got false. Use `sequence_parallel=lasp2`",
        ),
        (
            ["attention=linear", "attention.decay=0.5"],
            "`attention.decay=0.5` needs `attention.causal=true`",
        ),
        (
            ["sequence_parallel=lss", "attention=sdpa_causal", "classifier=pooled"],
            "`attention=sdpa_causal` is not defined here: use `attention=sdpa_auto`",
        ),
        (
            ["sequence_parallel=lss", "attention=linear"],
            "or `sequence_parallel=ulysses`, which runs any attention.",
        ),
        (
            ["sequence_parallel=ring", "mesh.ring=3"],
            "`mesh.ring=3` does not divide the 4 ranks",
        ),
        (
            ["sequence_parallel=ring", "mesh.ulysses=2"],
            "`mesh.ulysses=2` is not used by `sequence_parallel=ring`: leave it at auto, or choose "
            "another `sequence_parallel`.",
        ),
        (
            ["sequence_parallel=ring", "sequence_parallel.order=zigzag"],
            "`attention=sdpa_auto` has none: use `sequence_parallel.order=contiguous`",
        ),
        (
            ["sequence_parallel=ring", "attention=sdpa_math"],
            "which `attention=sdpa_math` does not give: use `attention=sdpa_auto`",
        ),
        (
            ["sequence_parallel=megatron_sp", "tensor_parallel=megatron"],
            "use `tensor_parallel=none` instead of `megatron`.",
        ),
        (
            ["tensor_parallel=megatron", "model.num_heads=2"],
            "`mesh.tensor=4` of `tensor_parallel=megatron` must divide `model.num_heads=2` and "
            "`model.mlp_width=512`",
        ),
        (
            ["pipeline_parallel=gpipe", "model.depth=2"],
            "makes 4 stages of `model.depth=2` blocks: try `mesh.pipeline=2` or more blocks.",
        ),
        (
            ["pipeline_parallel=gpipe", "pipeline_parallel.microbatches=3"],
            "`pipeline_parallel.microbatches=3` must divide the 128 images of a replica",
        ),
        (
            ["pipeline_parallel=one_f_one_b", "pipeline_parallel.microbatches=2"],
            "`pipeline_parallel.microbatches=2` must be at least the 4 stages",
        ),
        (
            ["pipeline_parallel=gpipe", "batch.accumulation_steps=2"],
            "use `batch.accumulation_steps=1` and more `pipeline_parallel.microbatches`",
        ),
        (
            ["sequence_parallel=dsp", *VIDEO, "sharding=none"],
            "`sharding=none` leaves 4 ranks that never exchange gradients",
        ),
        ([*VIDEO[:1]], "`model=video_vit_nano` takes videos, and `data=digits` gives single images"),
        ([*VIDEO[1:]], "`data=moving_digits` gives videos of 8 frames"),
        ([*VIDEO, "layout=batch_second"], "use `layout=batch_first`"),
        ([*VIDEO, "classifier=pooled"], "changes nothing with `model=video_vit_nano`"),
        (["attention=sdpa_causal"], "use `classifier=pooled`."),
    ],
)  # fmt: skip
def test_a_reason_names_the_knob_the_rule_and_the_way_out(
    overrides: list[str], sentence: str
) -> None:
    assert sentence in reasons(*overrides)


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
