"""StepTrace survives JSON."""

import json

from vitsweep.extras.predict.step_time import CollectiveTotal, MemoryParts, OperatorTotal, StepTrace

TRACE = StepTrace(
    operators=(
        OperatorTotal(
            kind="matmul",
            name="addmm",
            phase="forward",
            dtype="bfloat16",
            shape=(1, 788, 2304, 768),
            count=12,
            flops=12 * 2 * 788 * 2304 * 768,
            bytes_moved=12 * 2 * (788 * 768 + 2304 * 768 + 788 * 2304),
        ),
    ),
    collectives=(
        CollectiveTotal(
            name="all_gather",
            purpose="parameter",
            phase="forward",
            group_ranks=8,
            group_nodes=2,
            count=12,
            bytes_whole=1024,
            bytes_sent=12 * 7 / 8 * 1024,
        ),
    ),
    memory=MemoryParts(
        parameters=1, gradients=2, optimizer=3, activations=4, gathered=5, buffers=6, peak=7
    ),
    dispatches={"forward": 10, "backward": 20, "optimizer": 3},
    parameters=100,
    flops_per_step=10**9,
    device="cuda",
    notes=("A sentence.",),
)


def test_a_trace_survives_json() -> None:
    assert StepTrace.from_json(json.loads(json.dumps(TRACE.to_json()))) == TRACE
