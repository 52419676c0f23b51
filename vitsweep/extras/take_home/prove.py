"""Is an exported file the cell? Both train alone from the same weights."""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import takewhile
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any

import torch

from vitsweep.console import captured
from vitsweep.errors import VitsweepError
from vitsweep.extras.take_home import rank as exported
from vitsweep.extras.take_home.rank import STEPS, Named
from vitsweep.extras.take_home.write import written
from vitsweep.interpreters import command_of
from vitsweep.model.build import build_model, first_model
from vitsweep.model.module_look import as_it_was
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.user_module import look_of
from vitsweep.proof.faults import minus, norms_of, typical_norm
from vitsweep.proof.twin import exact_twin, twin_of
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import count_gpus
from vitsweep.tables.formatting import count, missing, plain, ratio
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import screened
from vitsweep.tables.stats import Claim

EXACT, WIDE, IN_HALF = 1e-8, 1e-4, 5e-2
"""Relative differences that rounding may leave in float64, float32 and half precision."""
LEAST = 1e-2
"""A tensor's difference is measured by its norm, a nearly vanishing one by this share of a typical norm."""
OWN_SIZE = "own size"
KINDS = ("losses", "gradients", "weights", "masters")


@dataclass(frozen=True, kw_only=True)
class Leg:
    """The file and the cell in one size and precision.

    Attributes:
        name: what it shows.
        differences: kind of tensor -> largest relative difference (L2, tensor by tensor).
        allowed: the most that rounding explains.
    """

    name: str
    differences: Mapping[str, float]
    allowed: float

    @property
    def equal(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return all(difference <= self.allowed for difference in self.differences.values())

    def __str__(self) -> str:
        found = ", ".join(f"{kind} {value:.1e}" for kind, value in self.differences.items())
        return f"{self.name}: {found} (at most {self.allowed:g})"


def are_equal(legs: Sequence[Leg]) -> bool:
    """Return whether a file computes what the cell computes."""
    return all(leg.equal for leg in legs)


def not_provable(cell: CellSpec) -> str:
    """Return why the ranks of a cell cannot be started here; "" where they can."""
    resources = cell.resources
    if resources.nodes > 1:
        return say("not_proved", what=f"{resources.nodes} nodes")
    if resources.device == "cuda" and (gpus := count_gpus()) < resources.ranks_per_node:
        return say("not_proved", what=f"{resources.ranks_per_node} GPUs, here {gpus}")
    if isinstance(cell.model, ModuleSpec):
        if look_of(cell.model, cell.batch.resolution_px, cell.loss_function).draws:
            return say("not_proved", what=f"`{cell.model.typed}` (random numbers)")
    return ""


def prove(cell: CellSpec, say: Callable[[str], None] = lambda text: None) -> list[Leg]:
    """Start the file that is written for a cell, and the cell; compare losses, gradients and weights.

    First on the cell's twin (see `proof`) in float64 and in its own precision, then in its own size.

    Args:
        cell: expressible, with ranks on this machine alone.
        say: called with each result as it comes.

    Raises:
        VitsweepError: a side failed; its last words are in the text.
    """
    with TemporaryDirectory(prefix="vitsweep-export-") as folder:
        legs = compared({Path(folder, name): spec for name, spec in sizes(cell).items()}, say)
    for leg in legs:
        say(str(leg))
    return legs


def sizes(cell: CellSpec) -> dict[str, CellSpec]:
    """Return what is compared of a cell: its twin, exact and in its own precision, and itself."""
    twin = twin_of(cell)
    exact = exact_twin(twin)
    dtype = exact.precision.plan().param_dtype
    return {f"twin in {dtype}": exact, "twin": twin, OWN_SIZE: cell}


def compared(
    specs: Mapping[Path, CellSpec], say: Callable[[str], None] = lambda text: None
) -> list[Leg]:
    """Let both sides train in folders that are named after what they show, and compare them.

    Folders that hold results already are not trained in again.

    Args:
        specs: folder -> cell, all with as many ranks.
        say: called with the name of what begins.

    Raises:
        VitsweepError: a side failed; its last words are in the text.
    """
    for folder, spec in specs.items():
        if not folder.exists():
            say(f"drawing weights and batches: {folder.name}")
            _prepare(folder, spec)
    for side in ("file", "cell"):
        folders = [folder for folder in specs if not (folder / f"{side}.pt").exists()]
        if folders:
            say(f"the {side} trains: {', '.join(folder.name for folder in folders)}")
            start(side, specs[folders[0]], folders)
    return [_compared(folder.name, spec, folder) for folder, spec in specs.items()]


@as_it_was()
def _prepare(folder: Path, cell: CellSpec) -> None:
    """Write the file, its first weights and the batches of all ranks."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(written(cell, "train.py", []), encoding="utf-8")
    (folder / "cell.pickle").write_bytes(pickle.dumps(cell))
    torch.manual_seed(cell.seed)
    if cell.model.draws_its_weights:
        model = first_model(cell)
    else:
        with torch.device(cell.resources.device):  # whose generator the cell's weights are drawn by
            model = build_model(cell)
    torch.save(model.cpu().state_dict(), folder / "init.pt")
    generator = torch.Generator().manual_seed(cell.seed)
    shape = (cell.images_per_step, *cell.model.input_shape(cell.batch.resolution_px))
    batches = [
        (
            torch.randn(shape, generator=generator),
            torch.randint(cell.model.num_classes, shape[:1], generator=generator),
        )
        for _ in range(exported.STEPS)
    ]
    torch.save(batches, folder / "batches.pt")


def start(side: str, cell: CellSpec, folders: Sequence[Path]) -> None:
    """Let one side train in processes of its own."""
    module = exported.__name__ if side == "file" else "vitsweep.extras.take_home.cell_rank"
    command = command_of(module, *map(str, folders))
    if cell.sharding.name != "none":
        ranks = f"--nproc-per-node={cell.resources.world_size}"
        options = ("--standalone", ranks, "--no-python")
        command = command_of("torch.distributed.run", *options, *command)
    done = captured(
        command,
        env={**os.environ, **cell.runtime.rank_environment},
        timeout=60 * cell.measurement.timeout_min,
    )
    if done.returncode:
        own = takewhile(
            lambda line: "torch/distributed/elastic" not in line, done.stderr.splitlines()
        )
        last = "\n".join([*own][-15:])  # before torchrun's summary
        what = "The exported file" if side == "file" else "The cell"
        raise VitsweepError(f"{what} failed while it was proved:\n{last}")


def _compared(name: str, cell: CellSpec, folder: Path) -> Leg:
    found, wanted = (
        torch.load(folder / f"{side}.pt", weights_only=True) for side in ("file", "cell")
    )
    for each in (found, wanted):
        losses = torch.tensor(each["losses"], dtype=torch.float64)
        each["losses"] = {str(step): loss for step, loss in enumerate(losses)}
    plan = cell.precision.plan()
    coarsest = plan.autocast_dtype or plan.param_dtype
    allowed = {"float64": EXACT, "float32": WIDE}.get(coarsest, IN_HALF)
    apart = {kind: _apart(found[kind], wanted[kind]) for kind in KINDS if wanted[kind]}
    return Leg(name=name, differences=apart, allowed=allowed)


def _apart(found: Named, wanted: Named) -> float:
    """Return the largest relative difference of a tensor; inf where one is missing or has another shape."""
    shapes = [{name: tuple(t.shape) for name, t in each.items()} for each in (found, wanted)]
    if shapes[0] != shapes[1]:
        return inf
    norms, apart = norms_of(wanted), norms_of(minus(found, wanted))
    least = LEAST * typical_norm(norms)
    shares = [apart[name] / (max(norm, least) or 1.0) for name, norm in norms.items()]
    return float(torch.tensor(shares).max())  # NaN where one is, unlike Python's `max`


# What an exported file says of itself: cell, code, speedup and proof.

WIDTH = 84


def header(
    store: Store,
    row: Mapping[str, Any],
    cell: CellSpec,
    proof: Sequence[Leg] | str,
) -> list[str]:
    """Return the lines of the docstring, after what the file does and how it is started.

    Args:
        store: of the sweep.
        row: of the cell in its table.
        cell: what is exported.
        proof: what was found, or why nothing was.
    """
    lines = [*wrap(" ".join(_origin(store, row, cell)), WIDTH), ""]
    lines += [*wrap(" ".join(_measured(row)), WIDTH), ""]
    lines += [*(wrap(proof, WIDTH) if isinstance(proof, str) else _proved(proof)), ""]
    return [line.replace("\\", "/").replace('"""', "'''") for line in lines]


def _origin(store: Store, row: Mapping[str, Any], cell: CellSpec) -> Iterator[str]:
    code = store.frozen(str(row["cell_id"])).get("code") or {}
    yield f"Written by `vitsweep export` from sweep {store.name}, cell {row['cell_id']} ({row['cell']})."
    if commit := code.get("git_commit"):
        yield f"Code: commit {str(commit)[:12]}{' with changes' if code.get('git_dirty') else ''}."
    packages = {**(code.get("packages") or {}), **_of_model(cell)}
    packages["torch"] = plain(row.get("torch")) or packages.get("torch")
    if any(packages.values()):
        yield f"Versions: {', '.join(f'{n} {v}' for n, v in packages.items() if v)}."


def _of_model(cell: CellSpec) -> dict[str, str]:
    package = getattr(cell.model, "package", None)
    return {package: cell.model.version} if package else {}  # type: ignore[attr-defined]


def _measured(row: Mapping[str, Any]) -> Iterator[str]:
    if missing(row.get("images_per_second")):
        yield say("nothing_measured", why="not run")
        return
    device, claim = plain(row.get("device")), row.get("claim")
    where = f" on {device}" if device else ""
    if claim == Claim.baseline:
        where += ", the baseline"
    elif claim == Claim.screened:
        where += f", {screened(row['speedup'])} as its baseline"
    yield f"Measured: {row['images_per_second']:,.0f} images/s{where}."
    ends = row.get("speedup_low"), row.get("speedup_high")
    if claim in (Claim.baseline, Claim.screened):
        return
    if size := ratio(row.get("speedup"), *ends):
        pairs = row.get("num_pairs")
        told = {"blocks": count(0 if missing(pairs) else pairs, "block"), "claim": claim}
        yield say("compared", name="The cell", size=size, base="its baseline", **told)


def _proved(legs: Sequence[Leg]) -> Iterator[str]:
    head = f"This file, alone, on {date.today()} with torch {torch.__version__},"
    answer = f"{'equal' if are_equal(legs) else 'NOT EQUAL'} after {STEPS} updates"
    yield from wrap(say("judged", head=head, base="the cell", answer=answer), WIDTH)
    for leg in legs:
        yield from wrap(f"- {leg}", WIDTH, subsequent_indent="  ")
