"""Traced steps: every instant in one class, by the stated precedence; and what names are classed as."""

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.utils.checkpoint import checkpoint

from vitsweep.extras.explain.kernel_kinds import (
    Event,
    TimeClass,
    kind_of_kernel,
    kind_of_operator,
)
from vitsweep.extras.explain.step_trace import (
    END,
    STEP,
    WAIT,
    TraceMarks,
    _event,
    critical_rank,
    record_steps,
    step_rows,
)

MS = 1_000_000


def event(name: str, start: float, end: float, **facts: Any) -> Event:
    return Event(name=name, start=int(start * MS), end=int(end * MS), **facts)


def step_mark(at: float) -> Event:
    return event(STEP, at, at, is_range=True)


def phase_end(phase: str, at: float) -> Event:
    return event(END + phase, at, at, is_range=True)


def by_class(events: list[Event], steps: int = 1, transfers: Any = None) -> dict[str, float]:
    """Milliseconds by class over the last steps."""
    found: defaultdict[str, float] = defaultdict(float)
    for rows in step_rows(events, steps, transfers):
        for row in rows:
            found[row["class"]] += row["ms"]
    return {kind: round(ms, 6) for kind, ms in found.items() if ms}


def test_each_instant_of_a_step_on_the_host_has_one_class() -> None:
    found = by_class(
        [
            step_mark(0),
            event(WAIT, 1, 4, is_range=True),
            event("aten::linear", 5, 10),  # its own time counts with the product in it
            event("aten::addmm", 6, 9, sequence=3),
            event("aten::copy_", 7, 8),  # inside of the product
            event("aten::view", 10, 11),  # computes nothing
            event("aten::scaled_dot_product_attention", 11, 14),
            event("aten::softmax", 12, 13),  # part of attention
            phase_end("backward", 15),
            event("aten::mul_", 16, 17),
            phase_end("optimizer", 19),
            step_mark(20),
        ]
    )
    assert found == {
        TimeClass.data: 3,
        TimeClass.products: 4,
        TimeClass.copies: 1,
        TimeClass.attention: 3,
        TimeClass.optimizer: 4,
        TimeClass.host: 5,
    }


def test_what_the_backward_pass_computes_again_is_recomputation_with_the_time_between() -> None:
    node = {"is_node": True, "sequence": 7}
    found = by_class(
        [
            step_mark(0),
            event("aten::mm", 0, 1, sequence=7),
            event("autograd::engine::evaluate_function: MmBackward0", 1, 9, **node),
            event("MmBackward0", 1, 9, **node),
            event("aten::mm", 2, 3, sequence=11),
            event("aten::gelu", 4, 5, sequence=12),
            event("aten::mm", 6, 8),  # the gradient itself: autograd numbers no operator of it
            step_mark(10),
        ]
    )
    assert found == {TimeClass.products: 3, TimeClass.recomputation: 4, TimeClass.host: 3}


def test_the_backward_pass_of_attention_is_attention_by_the_numbers_of_autograd() -> None:
    node = {"is_node": True}
    found = by_class(
        [
            step_mark(0),
            event("aten::scaled_dot_product_attention", 0, 3, sequence=5),
            event("aten::bmm", 0, 1, sequence=5),
            event("aten::softmax", 1, 2, sequence=6),
            event("aten::mm", 3, 4, sequence=7),
            event("autograd::engine::evaluate_function: MmBackward0", 4, 6, sequence=7, **node),
            event("aten::mm", 4, 6),
            event(
                "autograd::engine::evaluate_function: SoftmaxBackward0", 6, 8, sequence=6, **node
            ),
            event("aten::_softmax_backward_data", 6, 8),
            step_mark(8),
        ]
    )
    assert found == {TimeClass.attention: 5, TimeClass.products: 3}


def test_communication_is_what_no_computation_hides_and_begins_with_waiting_for_ranks() -> None:
    events = [
        step_mark(0),
        event("aten::mm", 0, 6),
        event("gloo:all_reduce", 2, 12, thread=9),
        step_mark(12),
    ]
    assert by_class(events, transfers=[4.0]) == {
        TimeClass.products: 6,
        TimeClass.ranks: 2,
        TimeClass.communication: 4,
    }
    assert by_class(events) == {TimeClass.products: 6, TimeClass.communication: 6}


def test_the_critical_rank_waits_least() -> None:
    rows = [
        [[0, TimeClass.ranks, "", "", 0, 7.0]],
        [[0, TimeClass.ranks, "", "", 0, 0.1]],
    ]
    assert critical_rank([{"rows": own} for own in rows]) == 1


def test_a_device_at_work_counts_before_the_host_and_steps_end_with_their_last_kernel() -> None:
    """Two streams overlap; the host runs ahead of the device."""
    gpu = {"on_device": True}
    found = by_class(
        [
            step_mark(0),
            event("aten::mm", 0, 1, id=1),
            event("nvjet_sm90_tst", 2, 10, id=1, **gpu),  # ends the first step
            step_mark(3),
            event(WAIT, 3, 12, is_range=True),
            event("aten::addmm", 12, 13, id=2),
            event("ampere_bf16_s16816gemm", 14, 20, id=2, **gpu),
            event("ncclDevKernel_AllReduce_Sum_f32", 18, 24, **gpu),
            event("nccl:all_reduce", 18, 24, is_range=True, **gpu),  # a range, no kernel
            phase_end("backward", 14),
            event("aten::_foreach_mul_", 15, 16, id=3),
            event("multi_tensor_apply_kernel<BinaryOpScalarFunctor>", 24, 26, id=3, **gpu),
            event("Optimizer.step#AdamW.step", 24, 26, is_range=True, **gpu),
            phase_end("optimizer", 17),
            step_mark(18),
        ]
    )
    assert found == {
        TimeClass.data: 2,  # from 10, when the device became idle
        TimeClass.host: 2,  # from 12 to the first kernel
        TimeClass.products: 6,
        TimeClass.communication: 4,
        TimeClass.optimizer: 2,
    }


def recorded(
    name: str, start: float, end: float, number: int = 0, linked: int = 0, **facts: Any
) -> Any:
    """Return an event as Kineto hands it over; times in milliseconds."""
    known = {"correlation_id": number, "linked_correlation_id": linked, "start_ns": int(start * MS)}
    known |= {
        "name": name,
        "duration_ns": int((end - start) * MS),
        "start_thread_id": 1,
        "scope": 0,
    }
    known |= {"device_type": DeviceType.CPU, "is_user_annotation": False, "sequence_nr": -1}
    known |= {"shapes": [], "dtypes": []} | facts
    return SimpleNamespace(**{key: lambda value=value: value for key, value in known.items()})


def test_kernels_of_a_cuda_graph_are_classed_by_name_in_the_phase_of_its_launch() -> None:
    """As recorded: all kernels of a launch have its number, which may be that of an operator."""
    gpu, mark = {"device_type": DeviceType.CUDA}, {"is_user_annotation": True}
    found = [
        recorded(STEP, 0, 0, 1, **mark),
        recorded("aten::mm", 0, 1, 7),
        recorded("cudaLaunchKernel", 0.2, 0.4, 41, linked=7),
        recorded("volta_sgemm_128x32_nt", 1, 3, 41, linked=7, **gpu),
        recorded("aten::softmax", 1, 2, 8),
        recorded("cudaLaunchKernel", 1.2, 1.4, 42, linked=8),
        recorded("kernel_of_a_user", 3, 4, 42, linked=8, **gpu),  # classed by its operator
        recorded("cudaGraphLaunch", 2, 3, 8),  # the number of an operator
        recorded("volta_sgemm_32x128_tn", 4, 9, 8, **gpu),
        recorded("flash_bwd_dot_do_o_kernel", 9, 11, 8, **gpu),
        recorded("Memcpy DtoD (Device -> Device)", 11, 12, 8, **gpu),
        recorded(END + "backward", 4, 4, 9, **mark),
        recorded("cudaGraphLaunch", 5, 6, 43),
        recorded("vectorized_elementwise_kernel<4, MulFunctor>", 13, 16, 43, **gpu),
        recorded(END + "optimizer", 7, 7, 10, **mark),
        recorded(STEP, 8, 8, 11, **mark),  # the device is behind the host
    ]
    assert by_class([_event(each) for each in found]) == {
        TimeClass.products: 7,
        TimeClass.elementwise: 1,
        TimeClass.attention: 2,
        TimeClass.copies: 1,
        TimeClass.host: 1,
        TimeClass.optimizer: 3,
    }


def test_streams_that_overlap_share_an_instant_and_the_rows_add_up_to_the_step() -> None:
    generator = torch.Generator().manual_seed(3)
    names = ("aten::mm", "aten::gelu", "aten::copy_", "gloo:all_reduce", WAIT, "aten::view")
    events = [step_mark(at) for at in (0, 10, 20)]
    for place in range(60):
        start, long = (torch.rand(2, generator=generator) * torch.tensor([18.0, 3.0])).tolist()
        name = names[place % len(names)]
        events.append(event(name, start, start + long, thread=place, is_range=name == WAIT))
    for rows in step_rows(events, 2, None):
        assert sum(row["ms"] for row in rows) == pytest.approx(10, abs=1e-9)
        assert all(row["ms"] >= 0 for row in rows)


def test_a_real_step_puts_sleeps_recomputation_and_the_optimizer_where_they_belong() -> None:
    """Sleeps last at least as long as they are asked to; nothing else is said of times."""
    layer, seconds = nn.Linear(8, 8), 0.03
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    marks = TraceMarks()

    def batches() -> Iterator[torch.Tensor]:
        while True:
            time.sleep(seconds)
            yield torch.ones(4, 8)

    stream = marks.watched(batches())

    def slow(inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        return torch.tanh(layer(inputs))

    def step() -> None:
        images = next(stream)
        marks.end("data")
        loss = checkpoint(slow, images, use_reentrant=False).sum()
        marks.end("forward")
        loss.backward()
        marks.end("backward")
        optimizer.step()
        time.sleep(seconds)
        marks.end("optimizer")

    events = record_steps(step, 3, torch.device("cpu"))
    found = by_class(events, steps=2)
    kinds = (TimeClass.data, TimeClass.host, TimeClass.recomputation, TimeClass.optimizer)
    assert all(found[kind] >= 2e3 * seconds for kind in kinds)
    borders = sorted(e.start for e in events if e.name == STEP)
    assert sum(found.values()) == pytest.approx((borders[-1] - borders[1]) / MS)


KERNELS = {
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>": TimeClass.products,
    "nvjet_sm90_hsh_128x256": TimeClass.products,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": TimeClass.products,
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>": TimeClass.attention,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": TimeClass.attention,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": TimeClass.attention,
    "void at::native::vectorized_layer_norm_kernel<float, float>": TimeClass.elementwise,
    "void at::native::GammaBetaBackwardCUDAKernel_32x32<float>": TimeClass.elementwise,
    "void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>": TimeClass.elementwise,
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>": TimeClass.copies,
    "Memcpy DtoD (Device -> Device)": TimeClass.copies,
    "Memset (Device)": TimeClass.copies,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>": TimeClass.copies,
    "multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": TimeClass.optimizer,
    "triton_per_fused_native_layer_norm_3": TimeClass.fused,
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL": TimeClass.communication,
    # as found in recorded traces, where a part of the name is that of another class
    "void elementwise_kernel<128, 4, gpu_kernel_impl_nocast<MulFunctor<float>>>": TimeClass.elementwise,
    "cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16>": TimeClass.products,
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>": TimeClass.copies,
    "multimem_all_reduce_kernel<c10::BFloat16, 16>": TimeClass.communication,
    # flash attention 2 and 3, flex attention and products of TorchInductor, products of ROCm
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>": TimeClass.attention,
    "cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>": TimeClass.attention,
    "triton_tem_fused_flex_attention_0": TimeClass.attention,
    "triton_tem_fused_addmm_gelu_4": TimeClass.products,
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x256x32": TimeClass.products,
    "unrolled_elementwise_kernel<CUDAFunctor_add<double>, memory::LoadWithCast<2>>": TimeClass.elementwise,
    "void fbgemm_gpu::permute_2D_lengths_kernel<int>": TimeClass.other,
    "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1": TimeClass.products,
    "void wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>": TimeClass.products,
    "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 128, true, 1>": TimeClass.elementwise,
    "triton__0d1d2d3d": TimeClass.fused,
    "some_kernel_of_a_user": TimeClass.other,
}
OPERATORS = {
    "aten::addmm": TimeClass.products,
    "aten::bmm": TimeClass.products,
    "aten::mkldnn_convolution": TimeClass.products,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": TimeClass.attention,
    "aten::native_layer_norm_backward": TimeClass.elementwise,
    "aten::gelu": TimeClass.elementwise,
    "aten::add_": TimeClass.elementwise,
    "aten::_to_copy": TimeClass.copies,
    "aten::cat": TimeClass.copies,
    "c10d::allreduce_": TimeClass.communication,
    "mylib::thing": TimeClass.other,
    "aten::transpose": None,
    "aten::_unsafe_view": None,
    "autograd::engine::evaluate_function: AddmmBackward0": None,
    "DistributedDataParallel.forward": None,
}


def test_names_of_kernels_and_operators_are_classed_by_one_table() -> None:
    assert {name: kind_of_kernel(name) for name in KERNELS} == KERNELS
    assert {name: kind_of_operator(name) for name in OPERATORS} == OPERATORS


def test_at_least_98_percent_of_the_kernel_time_of_recorded_traces_is_in_its_class() -> None:
    kernels = pd.read_csv(Path(__file__).with_name("recorded_kernels.csv"), comment="#")
    found = kernels["kernel"].map(kind_of_kernel)
    right = found == kernels["kind"].map({kind.name: kind for kind in TimeClass})
    share = kernels["percent"].where(right, 0).groupby(kernels["trace"]).sum()
    share /= kernels.groupby("trace")["percent"].sum()
    assert (share >= 0.98).all(), share[share < 0.98]


def test_a_convolution_is_one_operator_whatever_its_backend_calls_inside() -> None:
    images, model = torch.ones(2, 4, 9, 9, requires_grad=True), nn.Conv2d(4, 8, 3)
    events = record_steps(lambda: model(images).sum().backward(), 1, torch.device("cpu"))
    [rows] = step_rows(events, 1, None)
    found = {row["operator"] for row in rows if row["class"] == TimeClass.products}
    assert found == {"aten::conv2d", "aten::convolution", "aten::convolution_backward"}
