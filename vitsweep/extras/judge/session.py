"""What `vitsweep judge` does: compose the cell, lay out both sides, hold the trial, keep its records."""

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path
from typing import Any

from vitsweep.cli import SCHEMA
from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import merge_overrides
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError, ImpossibleCellError
from vitsweep.execution.run_request import frozen_document
from vitsweep.extras.judge.sides import Side, interpreter
from vitsweep.extras.judge.trees import BASE, Tree, laid_out, prepare, require_function, states_of
from vitsweep.extras.judge.trial import Trial
from vitsweep.extras.judge.verdict import Verdict
from vitsweep.extras.take_home.asked_cell import described
from vitsweep.files import write_atomically
from vitsweep.interpreters import command_of
from vitsweep.planning.freeze import code_state
from vitsweep.rates.profile import device_name, profile_of
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec, flatten
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resolve import resolve
from vitsweep.spec.resources import Machine
from vitsweep.world import World

BATCHES, LEAST_BATCHES = 9, 2
"""Batches' worth of examples; one of them is held out."""
MOST_EXAMPLE_BYTES = 2**30
"""Fewer batches are made where more would take more memory, in this process and in every rank."""
START_MINUTES = 2.0
"""What importing torch and building a model may take besides the budget, before a side counts as stuck."""
FOLDER = "sweep.name=judge"
ONE_RANK = "resources.ranks_per_node=1"
RATES = "vitsweep.extras.judge.half_rates"


@dataclass(frozen=True, kw_only=True)
class JudgeRequest:
    """What is judged.

    Attributes:
        base: commit or folder that the head is compared with.
        head: commit or folder; None for the working tree.
        overrides: of the cell.
        step: (file from the project's root, function) of `make_step`; None for a cell of vitsweep, whose
            model is in the project.
        script: file with `with vitsweep.measured():` in it, which hands over nothing else; "" for none.
        examples: (file, function) of the base that makes the examples; None for the cell's data.
        quality: name of what judges changes that alter training; "" for equality.
        minutes: budget.
        width: half of the interval that is narrow enough, relative.
        setup: shell command that builds a side.
        links: paths that git does not track and both sides are shown.
        paths: folders of the project that its packages lie in.
        pythons: interpreter of each side; None for this one.
        config_dir: folder with more choices.
    """

    base: str
    head: str | None
    overrides: tuple[str, ...]
    step: tuple[str, str] | None
    script: str
    examples: tuple[str, str] | None
    quality: str
    minutes: float
    width: float
    setup: str
    links: tuple[str, ...]
    paths: tuple[str, ...]
    pythons: tuple[str | None, str | None]
    config_dir: str | None

    @property
    def file(self) -> str:
        """The file that is run on both sides; "" for a cell."""
        return self.script or (self.step[0] if self.step else "")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A verdict, and the folder of its records."""

    verdict: Verdict
    folder: Path


def judge(request: JudgeRequest, say: Callable[[str], None]) -> Judged:
    """Judge a change of code.

    Raises:
        VitsweepError: what was asked for cannot be judged; nothing was timed.
    """
    deadline = time.monotonic() + 60 * request.minutes
    states_of(request.base, request.head)  # before anything is written
    cell, store, cell_file = _frozen_cell(request)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    folder = (store.root / "judged" / stamp).absolute()
    timeout = 60 * min(cell.measurement.timeout_min, request.minutes + START_MINUTES)
    with _sides(request, folder, timeout) as (base, head):
        run = {
            "cell": _given(cell, cell_file),
            "threads": cell.resources.threads_per_rank,
            "examples": str(folder / "examples.pt"),
            "quality": request.quality,
            "script": str(Path(request.script)) if request.script else "",
            "step": list(request.step) if request.step else None,
        }
        if not request.examples:
            _write_examples(cell, folder / "examples.pt")
        device = device_name(cell.resources.device) or cell.resources.device
        facts = {"cell_id": cell.cell_id, "device": device, "question": request.quality or "equal"}
        trial = Trial(
            base=base,
            head=head,
            request=run,
            ranks=cell.resources.ranks_per_node,
            width=request.width,
            deadline=deadline,
            folder=folder,
            facts=facts,
            flops_per_second=_most_flops(cell, device),
            make_examples=request.examples,
            say=say,
        )
        try:
            verdict = trial.verdict()
        finally:
            (folder / "examples.pt").unlink(missing_ok=True)
    write_atomically(
        folder / "verdict.json", json.dumps({"schema": SCHEMA} | verdict.json(), indent=1)
    )
    write_atomically(folder / "verdict.md", verdict.markdown())
    return Judged(verdict=verdict, folder=folder)


def _frozen_cell(request: JudgeRequest) -> tuple[CellSpec, Store, Path]:
    """Compose the cell and write its `cell.yaml`; nothing of the candidates is imported.

    Raises:
        ImpossibleCellError: techniques that a loop of one's own cannot be given.
    """
    composer = Composer(hydra.open_loader(conf_dir(), request.config_dir))
    first = (FOLDER, ONE_RANK) if request.file else (FOLDER,)
    composed = composer.compose(merge_overrides([first, request.overrides], composer))
    tree = resolve(composed.tree, Machine.here())
    cell = cell_from_tree(tree)
    if cell.resources.nodes > 1:
        raise BadValueError(
            f"`resources.nodes={cell.resources.nodes}`: `judge` measures on one machine; leave it out."
        )
    if request.step:
        own = described(cell, f"{request.step[0]}:{request.step[1]}")
        if reasons := [*own.refused(cell).values()]:
            raise ImpossibleCellError(reasons)
    settings = sweep_settings(composed.tree)
    store = Store(settings.path).create()
    write_atomically(store.root / ".gitignore", "*\n")  # the repository is the user's
    document = frozen_document(cell, tree, tuple(composed.overrides), code_state())
    store.freeze(cell.cell_id, document)
    store.digest(cell.cell_id)  # checks what is kept
    return cell, store, store.cell(cell.cell_id).absolute() / "cell.yaml"


def _given(cell: CellSpec, cell_file: Path) -> dict[str, Any]:
    """Return what `make_step` is given."""
    return {
        "path": str(cell_file),
        "images_per_step": cell.images_per_step,
        "images_per_rank": cell.images_per_step // cell.resources.world_size,
        "accumulation_steps": cell.batch.accumulation_steps,
        "resolution_px": cell.batch.resolution_px,
        "in_channels": cell.model.in_channels,
        "num_classes": cell.model.num_classes,
        "seed": cell.seed,
        "device": cell.resources.device,
        "settings": {k: v for k, v in flatten(cell).items() if isinstance(v, str | int | float)},
    }


@contextmanager
def _sides(request: JudgeRequest, folder: Path, timeout: float) -> Iterator[tuple[Side, Side]]:
    """Lay out and prepare both sides; end their processes and remove their trees at the end."""
    place = folder / "code"
    place.mkdir(parents=True)
    with laid_out(request.base, request.head, place) as trees:
        sides = []
        for tree, typed in zip(trees, request.pythons, strict=True):
            option = "--python-base" if tree.side == BASE else "--python-head"
            files = [request.file, *(request.examples or ())[:1]]
            tree = prepare(tree, request.setup, request.links, [name for name in files if name])
            if request.step:
                require_function("--step", *request.step, tree)
            if request.examples and tree.side == BASE:
                require_function("--examples", *request.examples, tree)
            python = interpreter(option, typed, tree)
            paths = _paths(tree, request)
            sides.append(
                Side(tree=tree, python=python, paths=paths, folder=folder, timeout=timeout)
            )
        base, head = sides
        try:
            yield base, head
        finally:
            for side in sides:
                side.close()


def _paths(tree: Tree, request: JudgeRequest) -> list[str]:
    """Return where a side's modules are imported from: as for `python FILE`, then `--path`, then the root.

    Raises:
        BadValueError: a folder of `--path` does not exist.
    """
    for path in request.paths:
        if not (tree.root / path).is_dir():
            raise BadValueError(f"`--path {path}`: `{tree.label}` has no such folder.")
    beside = [(tree.root / request.file).parent] if request.file else []
    folders = [*beside, *(tree.root / path for path in request.paths), tree.root]
    return list(dict.fromkeys(str(folder.resolve()) for folder in folders))


def _write_examples(cell: CellSpec, path: Path) -> None:
    """Write the examples that batches are drawn from: (images, labels) of the cell's data.

    Raises:
        BadValueError: code of the user's makes them, which this process does not import.
    """
    import torch

    if cell.data.code_modules:
        raise BadValueError(
            f"`data={cell.data.name}` is made by code of yours, which the judge does not import: name a "
            "function of the base that returns the examples, `--examples file.py:make_examples`."
        )

    world = World(
        rank=0, local_rank=0, size=1, device=torch.device("cpu"), shape=_alone(cell).mesh, mesh=None
    )
    alone = _alone(cell)
    parts = list[Any]()
    batches = cell.data.open(alone, world)
    try:
        first = next(iter(batches.train(0)))
        bytes_per_example = sum(each.nbytes for each in first) / len(first[0])
        most = int(MOST_EXAMPLE_BYTES / bytes_per_example) // cell.images_per_step
        wanted = min(BATCHES, max(LEAST_BATCHES, most)) * cell.images_per_step
        for epoch in count():
            left = wanted - sum(len(labels) for _, labels in parts)
            if left <= 0:
                break
            parts += islice(batches.train(epoch), math.ceil(left / alone.micro_batch))
    finally:
        batches.close()
    images, labels = (torch.cat(each)[:wanted] for each in zip(*parts, strict=True))
    torch.save((images, labels), path)


def _alone(cell: CellSpec) -> CellSpec:
    """Return a cell of one rank with the same data."""
    mesh = replace(cell.mesh, **dict.fromkeys(vars(cell.mesh), 1))
    resources = replace(cell.resources, nodes=1, ranks_per_node=1)
    return replace(cell, mesh=mesh, resources=resources)


def _most_flops(cell: CellSpec, device: str) -> float:
    """Return the FLOP/s that a rank can reach in its fastest format; 0 where nobody knows."""
    if cell.resources.device == "cuda":
        profile = profile_of(device)
        return 1e12 * max(profile.peak_tflops.values(), default=0.0) if profile else 0.0
    command = command_of(RATES)  # torch is not loaded here
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=120)
        rates: dict[str, float] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0
    return 1e9 * max(rates.values()) * cell.resources.threads_per_rank


def file_and_function(option: str, typed: str) -> tuple[str, str]:
    """Read `file.py:function`.

    Raises:
        BadValueError: it is something else.
    """
    file, colon, name = typed.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise BadValueError(
            f"`{option} {typed}`: give `file.py:function`, such as `train.py:make_step`."
        )
    return file, name


def overrides_of(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Part what names states of the code from overrides."""
    states = [word for word in words if "=" not in word]
    return states, tuple(word for word in words if "=" in word)
