"""Which operators are timed: each on tensors of the size that is written beside its time."""

import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitsweep.extras.predict import operators

SIZES = (1 << 8, 1 << 12)


class Seen(TorchDispatchMode):
    """The operators that are called, and the elements of the largest tensor that each reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        read = [a for a in args if isinstance(a, torch.Tensor)]
        read += [t for a in args if isinstance(a, list) for t in a if isinstance(t, torch.Tensor)]
        name = func.overloadpacket.__name__
        self.calls.append((name, max((t.numel() for t in read), default=0)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elementwise_operators_read_as_many_elements_as_is_declared(
    dtype: str,
) -> None:
    jobs = list(operators._elementwise(dtype, SIZES))
    assert {operator.shape for operator, *_ in jobs} == {(size,) for size in SIZES}
    item = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    for operator, work, _ in jobs:
        with Seen() as seen:
            work()
        [(name, elements)] = seen.calls
        assert (name, elements) == (operator.name, *operator.shape)
        passes = operator.bytes_moved / (elements * item)
        assert 1 <= passes <= 4, "read and written, over the bytes of one tensor"


def test_weights_and_states_are_read_from_more_memory_than_caches_hold() -> None:
    """As in a step, which comes back to each of them once: two calls in a row share none."""
    jobs = [job for job in operators._updates("float32", ()) if job[0].kind == "optimizer"]
    assert {"add_", "lerp_", "addcdiv_", "sqrt"} <= {operator.name for operator, *_ in jobs}
    for operator, work, _ in jobs:
        with Seen() as seen:
            work()
        assert [size for _, size in seen.calls] == [operator.shape[0]]
    places = [t.data_ptr() for t in operators._many((512, 512), "float32")]
    assert len({*places}) == len(places) == operators.COLD_BYTES >> 20
    turns: list[int] = []
    work = operators._in_turn(turns.append, range(3))
    for _ in range(4):
        work()
    assert turns == [0, 1, 2, 0]


def test_the_time_of_one_thread_holds_nothing_of_what_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that the system lets wait takes what it computes, not what it waits; an exchange takes both."""
    for threads, alone, waits in ((1, True, False), (2, True, True), (1, False, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        seconds = operators._chunk_seconds(lambda: time.sleep(0.5), 1, alone)
        assert (seconds >= 0.5) == waits


def test_the_time_of_a_call_is_that_of_the_fastest_chunk_over_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def seconds(work: object, calls: int, alone: bool = True) -> float:
        """The first and every third chunk is disturbed."""
        asked.append(calls)
        return calls * of_call * (5 if len(asked) % 3 == 1 else 1)

    monkeypatch.setattr(operators, "_chunk_seconds", seconds)
    monkeypatch.setattr(operators.dist, "barrier", lambda: None)
    of_call = 3e-6
    assert operators._equal_calls_us(lambda: None, 6) == pytest.approx(3.0)
    assert asked == [6] * operators.CHUNKS
    chunk = operators.CHUNK_SECONDS
    for of_call, calls in (
        (chunk / 10, 10),
        (chunk / 10_000, 2000),
        (chunk * 1.4, 1),
        (operators.LONG_CHUNKS * chunk, 1),
    ):
        asked.clear()
        assert operators._fastest_us(lambda: None) == pytest.approx(of_call * 1e6)
        assert asked == [1, 1] + [calls] * operators.CHUNKS
    asked.clear()
    of_call = operators.LONG_CHUNKS * chunk * 1.01
    assert operators._fastest_us(lambda: None) == pytest.approx(of_call * 1e6)
    assert asked == [1, 1], "once is enough"
