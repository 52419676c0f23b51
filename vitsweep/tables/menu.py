"""The order of known choices: plain first, then as a reader meets them. Tables and colours use it."""

from collections.abc import Iterable

ORDER: dict[str, str] = {
    "precision": "fp32 O1 O2 O3 bf16 tf32 bf16_params fp8 O0",
    "sharding": "ddp fsdp zero1 zero2 hsdp none",
    "optimizer": "adamw_loop adamw_foreach adamw_fused adamw_contiguous adamw_apex "
    "sgd_loop sgd_foreach sgd_fused sgd_contiguous",
    "layout": "batch_first batch_second",
    "classifier": "token pooled",
    "attention": "sdpa_auto mha_module sdpa_math sdpa_flash sdpa_efficient sdpa_cudnn flex linear "
    "sdpa_causal",
    "sequence_parallel": "none ulysses ring dsp usp lasp lasp2 megatron_sp lss",
    "tensor_parallel": "none megatron",
    "pipeline_parallel": "none gpipe one_f_one_b interleaved",
    "memory": "keep_all recompute_blocks recompute_selected offload_activations",
    "compilation": "eager compile_blocks compile_model cuda_graphs",
    "model": "vit_nano vit_tiny vit_small vit_base vit_large vit_huge_16 vit_huge_14 vit_giant_14 "
    "vit_10b axial_vit_nano axial_vit_base video_vit_nano video_vit_720m video_vit_3b "
    "resnet_50 resnet_nano",
    "batch": "base blog_560 blog_384_256px",
    "status": "measured out_of_memory diverged wrong timed_out preempted killed failed invalid",
}


def in_menu_order(group: str, choices: Iterable[str]) -> list[str]:
    """Return the choices, known ones in menu order, others behind them by name."""
    known = ORDER.get(group, "").split()
    place = {choice: i for i, choice in enumerate(known)}
    return sorted(set(choices), key=lambda c: (place.get(c, len(known)), c))
