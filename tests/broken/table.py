"""Breakage -> what is typed for it beside `--config-dir tests/broken/conf`, and where it acts."""

from dataclasses import dataclass
from pathlib import Path

CONF = Path(__file__).with_name("conf")
PRECISIONS = ("fp32", "bf16", "O1", "O2", "O3")
HALF = PRECISIONS[1:]
F16 = "precision.half_dtype=float16"
ONE = ("resources.ranks_per_node=1", "sharding=none", "batch.images_per_step=8")
TWO = ("resources.ranks_per_node=2", "batch.images_per_step=16")


@dataclass(frozen=True)
class Breakage:
    """One fault.

    Attributes:
        words: what is typed beside a small cell.
        acts: precisions in which it changes what is computed.
    """

    words: tuple[str, ...]
    acts: tuple[str, ...] = PRECISIONS

    @property
    def ranks(self) -> int:
        return 2 if TWO[0] in self.words else 1

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those whose cells have the settings."""
        return PRECISIONS[2:] if F16 in self.words else PRECISIONS


def _of(group: str, choice: str, faults: str, *words: str) -> dict[str, Breakage]:
    return {
        fault: Breakage((f"{group}={choice}", f"{group}.fault={fault}", *words))
        for fault in faults.split()
    }


def _half(faults: str, *words: str, acts: tuple[str, ...] = HALF) -> dict[str, Breakage]:
    return {
        fault: Breakage(("memory=broken", f"memory.fault={fault}", *words), acts)
        for fault in faults.split()
    }


IN_ANY_PRECISION = {
    **_of(
        "memory",
        "broken",
        "gradients_doubled gradients_halved gradients_x_1_05 one_bias_gradient_x_1_02 "
        "one_gradient_negated one_bias_without_gradient class_token_without_gradient scale_missing "
        "scores_x_1_03 causal_mask heads_swapped attends_to_padding "
        "keys_of_the_batch_before weights_x_1_01 branch_without_gradient third_block_x_0_9 "
        "half_of_the_images_without_norm tokens_shifted norms_eps_1e_5 gelu_by_tanh "
        "last_position_of_the_token_before gradients_lost_from_the_second_step "
        "images_of_the_third_step_ever_after",
        *ONE,
    ),
    **_of(
        "memory",
        "broken",
        "forgets_above_32_tokens",
        *ONE,
        "data=synthetic",
        "batch.resolution_px=48",
    ),
    **_of(
        "memory",
        "broken",
        "keys_after_the_64th_not_rescaled",
        *ONE,
        "data=synthetic",
        "batch.resolution_px=24",
    ),
    **_of("memory", "broken", "last_micro_batch_alone", *ONE, "batch.accumulation_steps=2"),
    **_of(
        "memory",
        "broken",
        "nothing_clipped each_tensor_clipped_by_itself",
        *ONE,
        "optimizer.clip_norm=0.5",
    ),
    **_of(
        "memory",
        "broken",
        "clipped_by_the_norm_of_one_rank",
        *TWO,
        "sharding=zero1",
        "optimizer.clip_norm=0.5",
    ),
    "another_eps_in_the_repetition": Breakage(("memory=broken_recompute", *ONE)),
    **_of(
        "optimizer",
        "broken",
        "never_updates half_of_the_tensors_skipped learning_rate_doubled beta1_of_0_8 beta2_of_0_9 "
        "beta2_of_0_99 eps_of_1e_4 no_weight_decay decay_of_everything largest_mean_square_kept "
        "no_bias_correction signs_alone steps_counted_twice decay_through_the_gradient "
        "biases_learn_half_as_fast first_weight_grows state_is_lost mean_square_is_lost "
        "momentum_lost_after_the_tenth_step zeros_are_skipped numbers_after_32768_are_left",
        *ONE,
    ),
    **_of(
        "sharding",
        "broken_ddp",
        "no_exchange rank_1_begins_elsewhere summed_for_averaged last_gradient_before_it_arrived "
        "rank_1_keeps_its_own rank_1_without_update first_bucket_alone",
        *TWO,
    ),
    **_of(
        "sharding",
        "broken_zero1",
        "last_piece_of_a_rank_not_updated parameters_gathered_every_other_time",
        *TWO,
    ),
    "padding_is_attended_to_by_lss": Breakage(
        (
            "sequence_parallel=broken_lss",
            *TWO,
            "classifier=pooled",
            "batch.resolution_px=18",  # 81 tokens on 2 ranks
            "data=synthetic",
        )
    ),
}
"""Acts in every number format, and is found by the comparison in float64."""

IN_HALF_ALONE = {
    **_half(
        "half_scores_x_1_03 half_causal half_last_key_missed half_weights_x_1_01 "
        "half_third_block_x_0_9 half_logits_in_three_bits half_branch_without_gradient half_clamped "
        "half_gelu_by_tanh half_gradients_x_1_05 half_gradients_below_1e_3_flushed half_bias_gradients_x_0_9",
        *ONE,
    ),
    **_half(
        "half_scores_rounded half_exponentials_by_a_cubic half_loss_of_half_of_the_images",
        *TWO,
    ),
    # norms have an input in float32 under autocast
    **_half("half_variance_in_one_pass", *TWO, acts=("O2", "O3")),
    **_half(
        "masters_in_half masters_truncated masters_published_a_step_late masters_never_published "
        "masters_gradients_of_the_first_step masters_gradients_in_three_bits masters_one_gradient_lost",
        *ONE,
        acts=("O2",),
    ),
    **_half("masters_published_on_rank_0", *TWO, "sharding=ddp", acts=("O2",)),
    **_half(
        "unscaling_lost unscaled_by_half_the_scale unscaled_in_half",
        *ONE,
        F16,
        acts=("O1", "O2"),
    ),
    **_half("clipped_before_unscaling", *ONE, F16, "optimizer.clip_norm=100", acts=("O1", "O2")),
    **_half("overflow_on_one_rank_alone", *TWO, F16, acts=("O1", "O2")),
    "exchanged_in_three_bits": Breakage(
        ("sharding=broken_ddp", "sharding.fault=exchanged_in_three_bits_if_half", *TWO), HALF
    ),
    "reduced_in_bfloat16": Breakage(
        ("sharding=broken_ddp", "sharding.fault=reduced_in_bfloat16_if_half", *TWO),
        ("bf16", "O1", "O2"),  # O2: gradients of the norms, which stay in float32
    ),
}
"""Acts where a number format is below float32."""

BREAKAGES = IN_ANY_PRECISION | IN_HALF_ALONE

LARGER = ("memory=broken", *ONE[:2], "model.depth=4")
TIMED = {
    "images_above_the_eighth_are_dropped": Breakage(
        (*LARGER, "batch.images_per_step=16", "model.width=128", "model.mlp_width=512")
    ),
    "fourth_block_gradients_x_1_01": Breakage((*LARGER, "batch.images_per_step=8"), ("fp32",)),
    "norms_sum_gradients_of_1024_rows": Breakage((*LARGER, "batch.images_per_step=96"), ("fp32",)),
    "keys_after_the_128th_not_rescaled": Breakage(
        (*LARGER, "batch.images_per_step=8", "data=synthetic", "batch.resolution_px=24"), ("fp32",)
    ),
}
"""Acts on more blocks, keys, rows or images than a twin has: the first timed steps show it."""

HIDDEN: dict[str, tuple[str, ...]] = {}
"""Breakage -> precisions in which rounding does as much."""

BLAMED = {
    "memory": ("memory=broken", "memory.fault=third_block_x_0_9", *ONE, "attention=sdpa_math",
               "layout=batch_second"),
    "memory beside clipping": ("memory=broken", "memory.fault=gradients_x_1_05", *ONE,
                               "optimizer.clip_norm=0.5", "attention=sdpa_math"),
    "memory in half": ("memory=broken", "memory.fault=half_scores_x_1_03", *ONE, "precision=O2",
                       "optimizer.clip_norm=0.5"),
    "memory beside tensor_parallel": ("memory=broken", "memory.fault=weights_x_1_01", *TWO, "sharding=ddp",
                                      "tensor_parallel=megatron"),
    "memory beside sharding": ("memory=broken_recompute", *TWO, "sharding=fsdp", "precision=O2"),
    "sharding": ("sharding=broken_ddp", "sharding.fault=no_exchange", *TWO, "memory=recompute_blocks",
                 "attention=sdpa_math", "precision=O1"),
    "sharding beside optimizer": ("sharding=broken_zero1",
                                  "sharding.fault=last_piece_of_a_rank_not_updated", *TWO,
                                  "memory=recompute_blocks", "optimizer=adamw_fused"),
    "sequence_parallel": (*IN_ANY_PRECISION["padding_is_attended_to_by_lss"].words, "sharding=fsdp",
                          "memory=recompute_blocks"),
    "optimizer": ("optimizer=broken", "optimizer.fault=never_updates", *ONE, "memory=recompute_blocks"),
    "sharding by itself": ("memory=recompute_blocks", *TWO, "sharding=ddp", "attention=sdpa_math"),
    "precision": ("memory=broken", "memory.fault=masters_truncated", *TWO, "precision=O2",
                  "sharding=ddp", "attention=sdpa_math"),
    "optimizer.clip_norm": ("memory=broken", "memory.fault=nothing_clipped", *ONE,
                            "optimizer.clip_norm=0.5", "attention=sdpa_math"),
}  # fmt: skip
"""What is named -> a fault in it, beside other choices that touch what differs. Those of the last three lie
in code of vitsweep's own, where a function of the test or `memory=broken` plants them for good."""
