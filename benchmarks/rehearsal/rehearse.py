"""Training steps and a checkpoint of every technique, and whole runs, on CUDA tensors without a GPU.

    make rehearse-gpu [CASES="precision=O2,sharding=fsdp ..."]

A CUDA build of torch, two stub libraries that answer for the driver, fake tensors and a fake process
group let a step run as on a GPU, but for the numbers. Found are operations whose tensors lie on two
devices, wrong shapes and dtypes, and reads of a value by the host within the step, each of which makes
the host wait for a GPU; and tensors that a checkpoint of one trainer has and that of a new one lacks, or
has in another shape, dtype or place. Nothing is measured.

Of `gpu.py`, the parts that train run whole, what they compile or record as it is. Of its first part, the
product, runs on one rank and on eight go from the proof over the timed steps and the instruments to a record
that is read back. The servers that fork ranks and parts are asked whether they have touched CUDA.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the parts find one another
import gpu_parts
import gpu_steps

from benchmarks.gpu_list import NEEDS, PRODUCT_CELLS, choices
from vitsweep.collectives import primitives
from vitsweep.composition.composer import Composer
from vitsweep.execution import worker
from vitsweep.execution.outcome import NO_INSTRUMENTS, publish
from vitsweep.execution.run_request import RunRequest
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.proof import checks
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine
from vitsweep.training import shards
from vitsweep.training.checkpoint import (
    ShardSavePlanner,
    allocate_state,
    shards_of_training,
    state_dict_of,
)
from vitsweep.training.trainer import Trainer
from vitsweep.world import World, device_mesh

BASE = ("model=vit_large", "model.depth=2", "data=synthetic", "batch.scope=per_replica",
        "batch.images_per_step=16")  # fmt: skip
NOT_FAKED = {
    "attention=flex": "the compiler writes a kernel",
    "compilation=compile_blocks": "the compiler writes kernels",
    "compilation=compile_model": "the compiler writes kernels",
    "optimizer=sgd_fused": "PyTorch has no fake kernel of it",
    **dict.fromkeys(
        (f"pipeline_parallel={schedule}" for schedule in ("gpipe", "one_f_one_b")),
        "stages tell each other their shapes through tensors that must be real",
    ),
}
"""Choice -> what of it a fake tensor cannot stand for."""
READ = torch.ops.aten._local_scalar_dense.default
KNOWN_READS = {
    "LossScaler.step": "torch's GradScaler asks whether to skip the update of an optimizer that is not fused"
}
"""Method -> why the host may read a value there in every step."""
COMPARES = ("prove.py", "checks.py", "evidence.py", "differences.py")
"""Modules in which numbers are read to be compared: all are 1, so that they agree and can be divided by."""
PRODUCT: tuple[tuple[int, tuple[str, ...]], ...] = (
    *((1, case) for case in PRODUCT_CELLS),
    (8, ("precision=bf16",)),
    (8, ("precision=bf16_masters", "sharding=fsdp", "compilation=compile_blocks")),
)
"""Ranks and cell of whole runs."""
PART_SECONDS = {"peers": 3600, "attention": 3600, "one_at_a_time": 3600, "soak": 30}
"""Parts of `gpu.py` that are rehearsed, and the time in which they begin something: the soak fills it."""
FILLED = ("images_per_second", "forward_ms", "backward_ms", "optimizer_ms", "peak_allocated_gib",
          "parameter_gib", "gradient_gib", "optimizer_state_gib", "activation_gib",
          "gradient_bytes_per_step", "mfu")  # fmt: skip
"""Columns that a run on a GPU must have."""


aten = torch.ops.aten
NO_KERNELS = {aten.empty.memory_format, aten.empty_strided.default, aten.detach.default,
              aten.new_empty.default, aten.empty_like.default, aten._unsafe_view.default}  # fmt: skip
COPY = torch.ops.aten._to_copy.default


class HostReads(TorchDispatchMode):
    """Notes where the host reads a value from the device, and answers zero: no gradient overflowed.

    Counts kernels, and the bytes of what they read and write, as if nothing stayed in a cache.

    A number that the host knows is copied to the device without its value, which fake tensors would
    compute with there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.kernels, self.bytes = 0, 0

    def begin(self) -> None:
        """Start anew."""
        self.places.clear()
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ and args[0].device.type == "cuda":
            frames = [f for f in traceback.extract_stack() if "/vitsweep/" in f.filename]
            last = frames[-1] if frames else None
            file = Path(last.filename).name if last else ""
            is_scaler = last and (file, last.name) == ("update.py", "step")
            place = f"{file}:{last.lineno}" if last else "torch"
            self.places.append("LossScaler.step" if is_scaler else place)
            compared = last and file in COMPARES
            return float(bool(compared)) if args[0].is_floating_point() else 0
        to = torch.device((kwargs or {}).get("device") or "cpu")
        if func is COPY and to.type == "cuda" and args[0].device.type == "cpu":
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=to)
        try:
            result = func(*args, **(kwargs or {}))
        except fake.DataDependentOutputException:  # of a fake tensor on the host
            return 0
        self._count(func, (args, kwargs), result)
        return result

    def _count(self, func: Any, given: Any, result: Any) -> None:
        tensors = [
            [t for t in tree_leaves(each) if isinstance(t, Tensor) and t.is_cuda]
            for each in (given, result)
        ]
        asks = func.namespace == "prim"  # where a tensor lies, say
        if asks or func.is_view or func in NO_KERNELS or not any(tensors):
            return
        self.kernels += 1
        self.bytes += sum(t.nbytes for each in tensors for t in each)


class Event(torch.cuda.Event):
    """A CUDA event with the time at which the host records it."""

    _time_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._time_s = time.perf_counter()

    def elapsed_time(self, end: Any) -> float:
        """Return milliseconds."""
        return 1e3 * float(end._time_s - self._time_s)


class Replica(nn.Module):
    """What DistributedDataParallel does to gradients; its reducer, in C++, wants real tensors."""

    def __init__(self, module: nn.Module, process_group: Any = None, **_: Any) -> None:
        super().__init__()
        self.module, self._sync = module, True

        def reduce(parameter: Tensor) -> None:
            if self._sync:
                dist.all_reduce(parameter.grad, group=process_group)

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)

    def forward(self, images: Tensor) -> Tensor:
        """Run the module."""
        output: Tensor = self.module(images)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Exchange no gradients inside."""
        self._sync = False
        yield
        self._sync = True


def pretend_cuda() -> None:
    """Let Python take the stubs for a GPU, and `Module.to` swap fake parameters."""
    warnings.filterwarnings("ignore")
    fake.init_gpu_context = lambda device: None  # type: ignore[assignment]
    torch.cuda._lazy_init = lambda: None  # type: ignore[assignment]
    torch.cuda.is_available = lambda: True  # type: ignore[assignment]
    torch.cuda.is_bf16_supported = lambda *_, **__: True  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)  # type: ignore[assignment]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    torch.nn.parallel.DistributedDataParallel = Replica  # type: ignore[assignment, misc]
    shards.is_plain = lambda tensor: type(tensor) in (Tensor, nn.Parameter, fake.FakeTensor)  # type: ignore[assignment]
    place = shards._place

    def with_real_tensors(tensor: Tensor) -> tuple[int, ...]:
        with fake.unset_fake_temporarily():  # torch computes where a shard begins with tensors
            return place(tensor)

    shards._place = with_real_tensors
    flatten = DeviceMesh._flatten

    def of_real_ranks(self: DeviceMesh, *args: Any, **kwargs: Any) -> DeviceMesh:
        with fake.unset_fake_temporarily():
            return flatten(self, *args, **kwargs)

    DeviceMesh._flatten = of_real_ranks  # type: ignore[method-assign]
    tensor = torch.tensor

    def without_values(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        made = tensor(data, **kwargs)
        on_gpu = torch.device(device or "cpu").type == "cuda"
        return torch.empty(made.shape, dtype=made.dtype, device=device) if on_gpu else made

    torch.tensor = without_values
    apply = nn.Module._apply

    def replace(
        self: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            return apply(self, change, recurse)
        return _replaced(self, change)

    nn.Module._apply = replace  # type: ignore[assignment, method-assign]


def pretend_ranks() -> None:
    """Let every rank tell what this one does, and compare tensors by their shapes and places.

    Memory is not counted by an allocator, and events lie on the host's clock.
    """
    for name in ("max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *_: 2**30)
    for name in ("reset_peak_memory_stats", "synchronize"):
        setattr(torch.cuda, name, lambda *_: None)
    torch.cuda.get_device_name = lambda *_: "NVIDIA H100 80GB HBM3"  # type: ignore[assignment]
    torch.cuda.Event = Event  # type: ignore[assignment, misc]

    def gathered(value: Any, group: Any = None, *, on_first: bool = False) -> list[Any]:
        return [json.loads(json.dumps(value))] * dist.get_world_size(group)

    def from_first(value: Any, group: Any = None, rank: int = 0) -> Any:
        return json.loads(json.dumps(value))

    for own in (gathered, from_first):
        known = getattr(primitives, own.__name__)
        for module in [*sys.modules.values()]:
            if getattr(module, own.__name__, None) is known:
                setattr(module, own.__name__, own)

    # Differences are taken as in a run: shapes or places that differ fail there. Norms have no values.
    checks.furthest = lambda *_: ""
    checks.longer = lambda *_: {}


def pretend_compilers() -> None:
    """Let what is compiled run as it is: compilers write kernels."""
    nn.Module.compile = lambda self, **_: None  # type: ignore[assignment, method-assign]
    torch.compile = lambda work, **_: work  # type: ignore[assignment]


def _replaced(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Give a model other parameters and buffers: fake ones cannot change in place."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                changed = change(parameter.detach())
                module._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = change(buffer)
    return model


@contextmanager
def world_of(cell: CellSpec) -> Iterator[World]:
    """Yield rank 0 of the cell's world under a process group that sends nothing."""
    size = cell.resources.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mesh = device_mesh("cuda", cell.mesh)
        device = torch.device("cuda", 0)
        yield World(rank=0, local_rank=0, size=size, device=device, shape=cell.mesh, mesh=mesh)
    finally:
        dist.destroy_process_group()


def asked(composer: Composer, case: Iterable[str], ranks: int) -> Any:
    """Return a case over so many GPUs as a command plans it."""
    nodes = max(1, ranks // 8)
    place = [f"resources.nodes={nodes}", f"resources.ranks_per_node={ranks // nodes}"]
    chosen = {choice.partition("=")[0] for choice in case}
    base = [each for each in BASE if each.partition("=")[0] not in chosen]
    if ranks == 1 and "sharding" not in chosen:
        base.append("sharding=none")
    machine = Machine(device="cuda", cores_per_node=64, devices_per_node=8)
    return plan_cell(composer.compose([*base, *case, *place]), machine)


def rehearse(composer: Composer, case: list[str], ranks: int) -> str:
    """Run two steps and a checkpoint; return `ok`, the traffic and where the host reads, or why not."""
    planned = asked(composer, case, ranks)
    if planned.reasons:
        return f"refused: {planned.reasons[0][:120]}"
    cell, reads = planned.spec, HostReads()
    with world_of(cell) as world, FakeTensorMode(allow_non_fake_inputs=True):
        torch.manual_seed(0)
        trainer = _trainer(cell, world)
        shape = cell.model.input_shape(cell.batch.resolution_px)
        images = torch.randn(cell.micro_batch, *shape, device=world.device)
        labels = torch.randint(10, (cell.micro_batch,), device=world.device)
        micro_batches = [(images, labels)] * cell.batch.accumulation_steps
        with reads:
            for _ in range(2):  # the first one allocates the optimizer's state
                reads.begin()
                loss = trainer.step(iter(micro_batches))
        assert loss.device == world.device
        with HostReads():  # a checkpoint may read
            rehearse_checkpoint(trainer, _trainer(cell, world))
    unknown = [place for place in reads.places if place not in KNOWN_READS]
    if unknown:
        raise RuntimeError(f"the host reads a value of the device at {', '.join(unknown)}")
    known = dict.fromkeys(KNOWN_READS[place] for place in reads.places)
    counted = f"{reads.kernels} operators, {reads.bytes / 1e9:.2f} GB"
    return ", ".join(["ok", counted, *(f"the host waits: {reason}" for reason in known)])


def rehearse_product(composer: Composer, case: Sequence[str], ranks: int) -> str:
    """Run a cell as a rank does, from the proof to its record; return `ok` and what that holds.

    Raises:
        RuntimeError: the record lacks a column, or is not the one that was written.
    """
    steps = ("measurement=smoke", "measurement.prove=twin", "measurement.traced_steps=2")
    cell = asked(composer, [*case, *steps], ranks).spec
    with tempfile.TemporaryDirectory() as folder, world_of(cell) as world:
        request = RunRequest(
            sweep_folder=Path(folder) / "sweep",
            cell_id=cell.cell_id,
            run_id="run",
            block="block",
            position=0,
        )
        Store(request.sweep_folder).create()
        draft = request.folder / "draft.json"
        with FakeTensorMode(allow_non_fake_inputs=True), HostReads():
            record = worker._run(request, cell, world, None, draft)
        assert record is not None
        timed = RunRecord.from_json(draft.read_text())
        draft.write_text(record.to_json())
        again = publish(request, cell, None)
    unseen = {"activation_gib"} if cell.compilation.scope != "nothing" else {}
    empty = [
        column for column in FILLED if again.metrics.get(column) is None and column not in unseen
    ]
    if empty or (again.status, timed.status) != (Status.measured, Status.measured):
        raise RuntimeError(f"{again.status}, without {', '.join(empty)}")
    if NO_INSTRUMENTS not in timed.environment or not again.samples["trace"]["rows"]:
        raise RuntimeError("the timed steps were not kept first, or there is no trace")
    known = sum(value is not None for value in again.metrics.values())
    return f"ok, {again.validity['proved']}, {known} of {len(again.metrics)} metrics"


def rehearse_part(name: str) -> str:
    """Run a part of `gpu.py` on a ViT-L of two blocks; every row has figures, but that of `flex`.

    Raises:
        RuntimeError: one has none.
    """
    size = gpu_steps.Size("cuda", extra=("model.depth=2",), seconds=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        end = time.monotonic() + PART_SECONDS[name]
        earlier = {"rates": {"bfloat16": 1.0, "float8": 1.0}}  # no clock that is read tells them
        run = gpu_steps.Run(size, Path(folder) / f"{name}.json", end, earlier)
        with FakeTensorMode(allow_non_fake_inputs=True), HostReads():
            gpu_parts.PARTS[name](run)
        rows = json.loads(run.path.read_text())["rows"]
    without = {row.get("name", row.get("kernel")): row.get("reason") for row in rows}
    without = {name: why for name, why in without.items() if why and name != "flex"}
    if without or not rows:
        raise RuntimeError(f"without figures: {without}")
    return f"ok, {len(rows)} rows"


IN_RANK = (
    "import ctypes, os; os._exit(ctypes.c_int.in_dll(ctypes.CDLL(None), 'calls_of_stub').value)"
)
FORK = f"""
import sys
from vitsweep.execution.rank_processes import PRELOADED, fork_server

sys.path.insert(0, {str(Path(__file__).parents[1])!r})
server = fork_server()
server.set_forkserver_preload([PRELOADED, "gpu_parts"])
rank = server.Process(target=exec, args=({IN_RANK!r},))
rank.start()
rank.join()
sys.exit(rank.exitcode)
"""


def forked_without_cuda() -> str:
    """Return `ok` where ranks and parts of `gpu.py` are forked from what has called nothing of CUDA.

    Raises:
        RuntimeError: it has, so that CUDA would fail in what is forked.
    """
    calls = subprocess.run([sys.executable, "-c", FORK]).returncode
    if calls:
        raise RuntimeError(f"{calls} calls of CUDA's runtime before the fork")
    return "ok"


def _trainer(cell: CellSpec, world: World) -> Trainer:
    with torch.device("meta"):
        model = build_model(cell)
    return parallelize(model, cell, world)


def rehearse_checkpoint(trained: Trainer, new: Trainer) -> None:
    """Plan and stage a checkpoint as an asynchronous one is, and copy it into a newly built trainer.

    Raises:
        RuntimeError: names, boxes, shapes or dtypes of the two differ, or a tensor is not on the GPU.
    """
    saved = list(shards_of_training(trained))
    ShardSavePlanner(saved).create_local_plan()
    on_host = {name: values.cpu() for name, values in state_dict_of(saved).items()}
    allocate_state(new.optimizer)
    into = state_dict_of(shards_of_training(new))
    if into.keys() != on_host.keys():
        raise RuntimeError(f"checkpoints differ in {sorted(into.keys() ^ on_host.keys())[:4]}")
    for name, values in into.items():
        read = on_host[name]
        if (values.shape, values.dtype) != (read.shape, read.dtype):
            raise RuntimeError(
                f"{name}: saved {read.shape} {read.dtype}, has {values.shape} {values.dtype}"
            )
        if values.device.type != "cuda" and values.ndim > 0:
            raise RuntimeError(f"{name} is on {values.device}")
        with torch.no_grad():
            values.copy_(read)
    new.publish()


def main() -> None:
    """Rehearse every choice of every group alone, on each number of ranks; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cases", nargs="*", help="choices joined by commas, or `product`; all, if none"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8, 512])
    arguments = parser.parse_args()
    cases = [case.split(",") for case in arguments.cases if case != "product"]
    composer, failed = Composer(), []

    def report(name: str, ranks: int, work: Callable[[], str]) -> None:
        result = result_of(work)
        failed.extend([name] * result.startswith("FAILED"))
        print(f"{name:60} {ranks:4} ranks  {result}", flush=True)

    pretend_cuda()
    if not arguments.cases or "product" in arguments.cases:
        report("product: a rank is forked", 1, forked_without_cuda)
    for case in cases or [[*NEEDS.get(c, ()), c] for c in choices() if not arguments.cases]:
        for ranks in arguments.ranks:
            name, reason = " ".join(case), NOT_FAKED.get(case[-1])
            if reason:
                print(f"{name:60} {ranks:4} ranks  not rehearsed: {reason}", flush=True)
            else:
                report(name, ranks, partial(rehearse, composer, case, ranks))
    if not arguments.cases or "product" in arguments.cases:
        pretend_ranks()
        pretend_compilers()
        for part in PART_SECONDS:
            report(f"part: {part}", 1, partial(rehearse_part, part))
        for ranks, product in PRODUCT:
            name = f"product: {' '.join(product)}"
            report(name, ranks, partial(rehearse_product, composer, product, ranks))
    sys.exit(bool(failed))


def result_of(work: Callable[[], str]) -> str:
    """Return what a case says, or how it failed and where."""
    try:
        return work()
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "/torch/" not in f.filename][-4:]
        at = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(own))
        return f"FAILED: {type(error).__name__}: {str(error)[:160]!r} at {at}"


if __name__ == "__main__":
    main()
