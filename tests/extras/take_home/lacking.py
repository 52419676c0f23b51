"""Trainings whose steps lack gradients, on each rank others, beside plain PyTorch on all ranks' batches.

`python -m tests.extras.take_home.lacking FILE` writes the whole table.
"""

import itertools
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import vitsweep
from tests.cells import entry
from tests.refusals import require
from vitsweep.errors import VitsweepError
from vitsweep.execution.rank_processes import fork_server
from vitsweep.spec.cell_spec import CellSpec

WIDTH, IMAGES, STEPS = 12, 4, 5
LEARNING_RATE, DECAY, MOMENTUM, CLIP_NORM = 0.01, 0.1, 0.9, 0.05
OTHER_SIZE = 7
NEVER = "never"


class Block(nn.Module):
    """Residual branch of two linears around a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TwoHeads(nn.Module):
    """Blocks, of which some may be left out, and heads, of which some may be read.

    Attributes:
        heads: names of those that run.
        left_out: numbers of the blocks that do not run.
        read: number of the block whose output the heads get.
    """

    def __init__(self, size_of_b: int = 4) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(6, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.a, self.b = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, size_of_b)
        self.heads, self.left_out, self.read = "ab", (), 2

    def forward(self, x: Tensor, task: Tensor) -> dict[str, Tensor]:
        read = x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if number not in self.left_out:
                x = block(x)
            read = x if number <= self.read else read
        # What is read of the batch is seen in no pass without values.
        heads = "ab"[int(task[0])] if self.heads == "of the batch" else self.heads
        return {name: getattr(self, name)(read) for name in heads}


class Chosen:
    """The mean square error of the heads that are read."""

    heads = "ab"

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        read = [outputs[name] for name in self.heads if name in outputs]
        return sum(((found - batch["y"][:, : found.shape[1]]) ** 2).mean() for found in read)  # type: ignore[return-value]


@dataclass(frozen=True)
class Case:
    """What a training does in each step.

    Attributes:
        prepare: (model, loss, step, rank) sets what runs in this step.
        size_of_b: outputs of the second head.
        at_first: done with the new model.
    """

    prepare: Callable[[Any, Chosen, int, int], None]
    size_of_b: int = 4
    at_first: Callable[[Any], None] = lambda model: None


def heads(of: Callable[[int, int], str]) -> Callable[[Any, Chosen, int, int], None]:
    """Let the model run the heads that a function of step and rank names."""
    return lambda model, loss, step, rank: setattr(model, "heads", of(step, rank))


def blocks(of: Callable[[int, int], tuple[int, ...]]) -> Callable[[Any, Chosen, int, int], None]:
    """Let the model leave out the blocks that a function of step and rank names."""
    return lambda model, loss, step, rank: setattr(model, "left_out", of(step, rank))


def trained(at: int, parts: Callable[[Any], list[Any]], *, to: bool) -> Any:
    """Freeze or thaw modules before a step."""

    def prepare(model: Any, loss: Chosen, step: int, rank: int) -> None:
        if step == at:
            for part in parts(model):
                part.requires_grad_(to)

    return prepare


def _frozen_after_an_evaluation(model: Any, loss: Chosen, step: int, rank: int) -> None:
    if step == 2:
        batch = batch_of(step, rank)
        with torch.no_grad():
            model(batch["x"], batch["task"])
        model.b.requires_grad_(False)


def _later(step: int, rank: int) -> str:
    return "ab" if step < 2 else "ab"[(rank + step) % 2]


def _chosen_by_loss(model: Any, loss: Chosen, step: int, rank: int) -> None:
    loss.heads = "ab"[(rank + step) % 2]


def _frozen_by_one(model: Any, loss: Chosen, step: int, rank: int) -> None:
    model.b.requires_grad_(step < 2 or rank != 0)


CASES = {
    "same": Case(heads(lambda step, rank: "a")),
    "differ by rank": Case(heads(lambda step, rank: "ab"[rank % 2])),
    "differ by batch": Case(heads(lambda step, rank: "of the batch")),
    "later": Case(heads(_later)),
    "none later": Case(heads(lambda step, rank: "ab" if step < 2 else "a")),
    "fewer": Case(heads(lambda step, rank: "ab" if rank == step % 2 else "a")),
    "loss chooses": Case(_chosen_by_loss),
    "unequal sizes": Case(heads(lambda step, rank: "ab"[(rank + step) % 2]), OTHER_SIZE),
    "block left out": Case(blocks(lambda step, rank: (1,) if (rank + step) % 2 else ())),
    "block left out later": Case(blocks(lambda step, rank: (1,) if (step, rank) == (2, 0) else ())),
    "last block left out": Case(blocks(lambda step, rank: (2,) if (step, rank) == (2, 0) else ())),
    "always left out": Case(blocks(lambda step, rank: (1,))),
    "block not read": Case(
        lambda model, loss, step, rank: setattr(model, "read", 1 if (step, rank) == (2, 0) else 2)
    ),
    "first block alone read": Case(
        lambda model, loss, step, rank: setattr(model, "read", 0 if (step, rank) == (2, 0) else 2)
    ),
    "never read": Case(lambda model, loss, step, rank: setattr(model, "read", 1)),
    "left out by all": Case(blocks(lambda step, rank: (1,) if step == 2 else ())),
    "frozen later": Case(trained(2, lambda m: [m.b, m.blocks[1].up], to=False)),
    "stem frozen later": Case(trained(2, lambda m: [m.stem], to=False)),
    "frozen after an evaluation": Case(_frozen_after_an_evaluation),
    "frozen by one": Case(_frozen_by_one),
    "thawed later": Case(
        trained(2, lambda m: [m.blocks[0]], to=True),
        at_first=lambda m: m.blocks[0].requires_grad_(False),
    ),
}  # fmt: skip
OTHER_UNITS = (
    *(case for case in CASES if "left out" in case or "read" in case),
    "stem frozen later",  # without a gradient of its input, the first block is reduced later
)
"""Cases in which steps reach other units of FSDP."""
SHARDINGS = ("none", "ddp", "fsdp", "zero1", "zero2")
OPTIMIZERS = (
    "adamw_loop",
    "adamw_foreach",
    "adamw_fused",
    "adamw_contiguous",
    "sgd_foreach",
    "sgd_contiguous",
    "muon",
)
EQUAL = 1e-10
SLOW_TO_IMPORT = (
    "torch._dynamo",
    "vitsweep.extras.take_home.apply",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "vitsweep.techniques.sharding.fsdp_units",
    "vitsweep.techniques.sharding.zero1_buckets",
)
SECONDS = 100
"""After which a rank stops to wait for the others."""


@dataclass(frozen=True)
class Asked:
    """One row of the table."""

    case: str
    sharding: str
    optimizer: str
    accumulation: int
    ranks: int

    def __str__(self) -> str:
        name = f"{self.case}, {self.sharding}, {self.optimizer}, "
        return f"{name}{self.accumulation} parts, {self.ranks} ranks"

    @property
    def clip_norm(self) -> float | None:
        """The limit of clipping, in one half of the table."""
        return CLIP_NORM if self.accumulation > 1 else None

    @property
    def is_refused(self) -> bool:
        """Whether its techniques cannot do what the case does."""
        if self.case == "thawed later":
            return True
        if self.optimizer.endswith("contiguous"):
            return self.plain()[1]
        in_shards = self.sharding.partition(" ")[0] in ("fsdp", "zero2", "hsdp")
        return in_shards and self.case in OTHER_UNITS

    def plain(self) -> tuple[list[dict[str, Tensor]], bool]:
        """Return what plain PyTorch makes of it, see `plain`."""
        return plain(self.case, self.optimizer, self.clip_norm, self.ranks, self.accumulation)

    def fault(self, found: "list[Found]") -> str:
        """Return what is wrong with what became of it on the ranks, or ""."""
        reasons = [each.refused for each in found if each.refused]
        lost = [each.lost for each in found if each.lost]
        for reason in reasons:
            require(reason)
        if self.is_refused:
            ended = all(each.refused or each.lost for each in found)
            is_fault = not reasons or not ended or any("Timed out" in text for text in lost)
        else:
            is_fault = bool(reasons or lost) or max(each.distance for each in found) > EQUAL
        return f"{self}: {', '.join(map(str, found))}" if is_fault else ""

    @property
    def spec(self) -> CellSpec | None:
        """The cell, or None where its techniques do not go together."""
        sgd = self.optimizer.startswith("sgd")
        found = entry(
            f"resources.ranks_per_node={self.ranks}", "resources.threads_per_rank=1",
            f"batch.images_per_step={IMAGES * self.ranks}", "precision.dtype=float64",
            f"batch.accumulation_steps={self.accumulation}", *f"sharding={self.sharding}".split(),
            f"optimizer={self.optimizer}", f"optimizer.learning_rate={LEARNING_RATE}",
            f"optimizer.weight_decay={DECAY}", f"optimizer.clip_norm={self.clip_norm or 'null'}",
            *([f"optimizer.momentum={MOMENTUM}"] if sgd else []),
        )  # fmt: skip
        return None if found.reasons else found.spec


def table(ranks: int) -> Iterator[Asked]:
    """Yield all rows of so many ranks."""
    if ranks == 4:
        for number, case in enumerate(CASES):
            yield Asked(case, "hsdp", OPTIMIZERS[number % 3], 1 + number % 2, ranks)
        return
    for row in itertools.product(CASES, SHARDINGS, OPTIMIZERS, (1, 2)):
        asked = Asked(*row, ranks)
        if asked.spec is not None:
            yield asked


def batch_of(step: int, rank: int) -> dict[str, Tensor]:
    """Return the images of a rank in a step, whose halves ask for other heads."""
    drawn = torch.Generator().manual_seed(100 * step + rank)
    kind = {"dtype": torch.float64, "generator": drawn}
    x, y = torch.randn(IMAGES, 6, **kind), torch.randn(IMAGES, OTHER_SIZE, **kind)  # type: ignore[call-overload]
    halves = torch.arange(IMAGES) // (IMAGES // 2)
    return {"x": x, "y": y, "task": (step + rank + halves) % 2}


def new_model(case: str) -> TwoHeads:
    """Return the model of a case, the same each time."""
    torch.manual_seed(0)
    model = TwoHeads(CASES[case].size_of_b).double()
    CASES[case].at_first(model)
    return model


@cache
def plain(
    case: str, optimizer: str, clip_norm: float | None, ranks: int, parts: int
) -> tuple[list[dict[str, Tensor]], bool]:
    """Train one plain model on the batches of all ranks.

    Returns:
        Its weights after each step, and whether one of them had no gradient in a step.
    """
    model, loss, at = new_model(case), Chosen(), CASES[case]
    parameters = dict(model.named_parameters())
    optimizers = _optimizers(parameters, optimizer)
    found, lacks = [], False
    for step in range(STEPS):
        for p in parameters.values():
            p.grad = None
        for rank in range(ranks):
            at.prepare(model, loss, step, rank)
            for part in range(parts):
                batch = {n: t.chunk(parts)[part] for n, t in batch_of(step, rank).items()}
                outputs = model(batch["x"], batch["task"])
                (loss(outputs, batch) / ranks / parts).backward()
        lacks |= any(p.grad is None for p in parameters.values())
        if clip_norm:
            nn.utils.clip_grad_norm_(parameters.values(), clip_norm)
        for each in optimizers:
            each.step()
        found.append({name: p.detach().clone() for name, p in parameters.items()})
    return found, lacks


def _optimizers(parameters: dict[str, nn.Parameter], name: str) -> list[torch.optim.Optimizer]:
    matrices = {
        n: p
        for n, p in parameters.items()
        if name == "muon" and n.startswith("blocks") and p.ndim == 2
    }
    rest = {n: p for n, p in parameters.items() if n not in matrices}
    groups = [
        {
            "params": [p for n, p in rest.items() if (p.ndim > 1) is decays],
            "weight_decay": DECAY if decays else 0.0,
        }
        for decays in (True, False)
    ]
    if name.startswith("sgd"):
        return [torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=MOMENTUM, foreach=False)]
    found: list[Any] = [torch.optim.AdamW(groups, lr=LEARNING_RATE, foreach=False)]
    if matrices:
        found.append(WideMuon(matrices.values(), {"lr": LEARNING_RATE, "weight_decay": DECAY}))
    return found


class WideMuon(torch.optim.Optimizer):
    """torch.optim.Muon with its iterations in the dtype of the weights, as ours has them in float64."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        [group] = self.param_groups
        for weight in group["params"]:
            if weight.grad is None:
                continue
            held = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
            held.lerp_(weight.grad, 0.05)
            x = weight.grad.lerp(held, 0.95)
            x = x.T if (is_tall := x.shape[0] > x.shape[1]) else x
            x = x / x.norm().clamp(min=1e-7)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            rate = 0.2 * group["lr"] * max(weight.shape) ** 0.5
            weight.sub_(rate * (x.T if is_tall else x))


@dataclass(frozen=True)
class Found:
    """What became of a row: how far a weight lies from plain, or why the training ended."""

    distance: float = 0.0
    refused: str = ""
    lost: str = ""

    def __str__(self) -> str:
        if self.lost:
            return f"lost: {self.lost}"
        return f"refused: {self.refused}" if self.refused else f"{self.distance:.1e}"


def trained_as(asked: Asked, world_rank: int, spec: CellSpec) -> Found:
    """Train as a row says, and compare each step."""
    case, rank = CASES[asked.case], world_rank
    model, loss = new_model(asked.case), Chosen()
    wanted, _ = asked.plain()
    distance = 0.0
    try:
        with vitsweep.apply(spec, model, loss) as applied:
            for step in range(STEPS):
                case.prepare(model, loss, step, rank)
                applied.step(batch_of(step, rank))
                found = applied.weights()
                distance = max(
                    distance, *(float((found[n] - w).abs().max()) for n, w in wanted[step].items())
                )
    except VitsweepError as error:
        return Found(refused=" ".join(str(error).split()))
    except RuntimeError as error:
        return Found(lost=" ".join(str(error).split())[:100])
    return Found(distance)


def _rank(rank: int, rows: list[tuple[Asked, CellSpec]], folder: Path) -> None:
    """Train each row; a process ends with the first that is refused, which the other ranks see."""
    for module in SLOW_TO_IMPORT:
        import_module(module)
    for number in range(len(rows)):
        if (folder / f"{number}-{rank}").exists():
            continue
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        try:
            _train(rank, rows, number, folder)
        except BaseException:
            lost = Found(lost=traceback.format_exc())
            (folder / f"{number}-{rank}").write_bytes(pickle.dumps(lost))
        finally:
            os._exit(0)


def _train(rank: int, rows: list[tuple[Asked, CellSpec]], first: int, folder: Path) -> None:
    for number, (asked, spec) in enumerate(rows[first:], first):
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting-{number}", rank=rank, world_size=asked.ranks,
            timeout=timedelta(seconds=SECONDS),
        )  # fmt: skip
        found = trained_as(asked, rank, spec)
        (folder / f"{number}-{rank}").write_bytes(pickle.dumps(found))
        if asked.ranks > 1 and (found.refused or found.lost):
            return
        dist.destroy_process_group()


def results(rows: list[Asked], folder: Path) -> dict[Asked, list[Found]]:
    """Return what became of rows of as many ranks each, by rank."""
    given = [(asked, spec) for asked in rows if (spec := asked.spec)]
    processes = [
        fork_server().Process(target=_rank, args=(rank, given, folder))
        for rank in range(rows[0].ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return {
        asked: [_read(folder / f"{number}-{rank}") for rank in range(asked.ranks)]
        for number, asked in enumerate(rows)
    }


def _read(path: Path) -> Found:
    if not path.exists():
        return Found(lost="the process died")
    found: Found = pickle.loads(path.read_bytes())
    return found


def main(path: Path) -> None:
    """Write the whole table to a file."""
    with path.open("w", encoding="utf-8") as file:
        for ranks in (2, 4, 1):
            with tempfile.TemporaryDirectory() as folder:
                for asked, found in results([*table(ranks)], Path(folder)).items():
                    print(
                        f"{asked}: {' | '.join(map(str, dict.fromkeys(found)))}",
                        file=file,
                        flush=True,
                    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
