"""What the judge checks from outside: whose files ran, whether both sides trained alike, what is possible."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsweep.errors import VitsweepError
from vitsweep.execution.code_hash import PACKAGE_FOLDER
from vitsweep.files import write_atomically
from vitsweep.judging.sides import RunResult, Side
from vitsweep.judging.trees import SOURCE_ROOTS

if TYPE_CHECKING:
    from torch import Tensor

LEAST_LOSS, LEAST_UPDATE, LEAST_NORM = 1e-5, 1e-3, 0.05
"""Relative differences of a loss, of a tensor's update and of its norm that are always allowed."""
CUSHION = 30.0
"""So many times the measured effect of rounding is allowed: another order of sums moves more values."""
LEAST_SHARE = 1e-2
"""A nearly vanishing update is measured by this share of a typical one."""
SHOWN = 3


class ForeignModuleError(VitsweepError):
    """A side imported a file of the project that is not its own."""


def own_modules(side: Side, other: Side, modules: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return path in the tree -> hash of each file of the project that a side imported.

    Raises:
        ForeignModuleError: a file of the project lies outside of the side's tree, as after
            `pip install -e .`, which shows one checkout to both sides.
    """
    root = side.tree.root.resolve()
    roots = [root / name for name in SOURCE_ROOTS] + [Path(path) for path in side.paths]
    source = side.tree.source.resolve()
    tops = {path.stem for folder in roots if folder.is_dir() for path in folder.iterdir()}
    found = {}
    for name, (path_text, digest) in modules.items():
        if not digest and name.partition(".")[0] not in tops:
            continue  # one of some thousand files of installed packages
        path = Path(path_text)
        if path.is_relative_to(root) and digest:
            found[str(path.relative_to(root))] = digest
            continue
        tail = Path(*name.split("."))
        is_project = any(
            (folder / tail).with_suffix(".py").exists() or (folder / tail / "__init__.py").exists()
            for folder in roots
        )
        is_judge = path.is_relative_to(PACKAGE_FOLDER) and not is_project
        of_source = bool(digest) and path.is_relative_to(source) and not is_judge
        if not (is_project or of_source):
            continue
        if _of_own_environment(path, side, other):
            found[f"{name} (installed)"] = digest
            continue
        raise ForeignModuleError(
            f"The {side.tree.side} ({side.tree.label}) imported `{name}` from `{path}`, which is outside of "
            f"its tree `{root}`: both sides would run the same file, as after `pip install -e .`. Name the "
            "folder that holds the package in the project (`--path src`), or give each side an environment: "
            "`--setup 'python -m venv .venv && .venv/bin/pip install .' --python-base .venv/bin/python "
            "--python-head .venv/bin/python`."
        )
    return found


def _of_own_environment(path: Path, side: Side, other: Side) -> bool:
    prefixes = [Path(each.python).parent.parent for each in (side, other)]
    return prefixes[0] != prefixes[1] and path.is_relative_to(prefixes[0].resolve())


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the judge has of one run: losses of rank 0..n by step, and the weights at both ends."""

    losses: list[list[float]]
    start: "Mapping[str, Tensor]"
    end: "Mapping[str, Tensor]"


def training_of(result: RunResult, path: Path) -> Training:
    """Read and remove the weights of a run.

    Raises:
        WrongEvidenceError: they are not those whose checksum ended the window.
    """
    import torch

    from vitsweep.judging.rank import checksum

    found = []
    for file in (path.with_name(f"{path.name}.start"), path):
        found.append(torch.load(file, weights_only=True))
        file.unlink()
    sums = {name: checksum(tensor) for name, tensor in found[1].items()}
    if sums != result.sums:
        raise WrongEvidenceError(
            "the weights changed after their checksum had ended the window: work was left running"
        )
    return Training(losses=result.losses, start=found[0], end=found[1])


class WrongEvidenceError(Exception):
    """The head does not train as the base does; the text says in what."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What rounding explains, measured on a base whose weights and inputs were changed by one unit.

    Attributes:
        losses: by step, relative.
        updates: by tensor, relative to its update.
        norms: by tensor, of the norm of its update.
        steps: of the window.
    """

    losses: list[float]
    updates: dict[str, float]
    norms: dict[str, float]
    steps: int

    @classmethod
    def between(cls, base: Training, perturbed: Training) -> "Bounds":
        """Measure them."""
        worst, losses = 0.0, []
        for found, wanted in zip(_by_step(perturbed), _by_step(base), strict=True):
            worst = max(worst, _relative(found, wanted))
            losses.append(max(LEAST_LOSS, CUSHION * worst))
        apart = differences(perturbed, base)
        return cls(
            losses=losses,
            updates={n: max(LEAST_UPDATE, CUSHION * d) for n, (d, _) in apart.items()},
            norms={n: max(LEAST_NORM, CUSHION * d) for n, (_, d) in apart.items()},
            steps=len(losses),
        )

    @property
    def sentence(self) -> str:
        """What was compared, in words."""
        loose = sum(bound > 1 for bound in self.updates.values())
        text = (
            f"losses of {self.steps} timed steps within {self.losses[0]:.0e} (first) to "
            f"{self.losses[-1]:.0e} (last), updates of {len(self.updates)} tensors"
        )
        if loose:
            text += f"; of {loose} of them rounding alone changes the direction, so their norms were compared"
        return text

    def require_equal(self, head: Training, base: Training) -> None:
        """Compare losses and updates.

        Raises:
            WrongEvidenceError: they differ by more than rounding explains.
        """
        for step, (found, wanted) in enumerate(zip(_by_step(head), _by_step(base), strict=True)):
            if not _relative(found, wanted) <= self.losses[step]:
                raise WrongEvidenceError(
                    f"the loss of timed step {step + 1} is {found[0]:.6g} instead of {wanted[0]:.6g} "
                    f"(rounding explains {self.losses[step]:.0e} of it)"
                )
        if {n: t.shape for n, t in head.end.items()} != {n: t.shape for n, t in base.end.items()}:
            raise WrongEvidenceError(
                "its weights have other names or shapes, so that they cannot be compared: "
                "`--quality loss` judges another model"
            )
        far = [
            f"`{name}` ({apart:.1e} of its update, rounding explains {self.updates[name]:.0e})"
            for name, (apart, of_norm) in differences(head, base).items()
            if not (apart <= self.updates[name] and of_norm <= self.norms[name])
        ]
        if far:
            more = f" and {len(far) - SHOWN} more" if len(far) > SHOWN else ""
            raise WrongEvidenceError(
                f"after {self.steps} steps weights differ: {', '.join(far[:SHOWN])}{more}"
            )


def _by_step(training: Training) -> list[list[float]]:
    """Return the losses of all ranks, step by step."""
    return [list(step) for step in zip(*training.losses, strict=True)]


def _relative(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative difference; inf where a value is not finite."""
    if not all(isfinite(value) for value in (*found, *wanted)):
        return inf
    return max(abs(f - w) / (abs(w) or 1.0) for f, w in zip(found, wanted, strict=True))


def differences(found: Training, wanted: Training) -> dict[str, tuple[float, float]]:
    """Return by tensor how far two updates from the base's first weights are apart, and their norms.

    Both are relative to the norm of the wanted update, or to a share of a typical one.
    """
    updates = {n: (t.double() - wanted.start[n].double()) for n, t in wanted.end.items()}
    norms = {n: float(t.norm()) for n, t in updates.items()}
    known = [norm for norm in norms.values() if isfinite(norm)]
    typical = (sum(norm**2 for norm in known) / max(len(known), 1)) ** 0.5
    result = {}
    for name, update in updates.items():
        size = max(norms[name], LEAST_SHARE * typical) or 1.0
        own = found.end[name].double() - wanted.start[name].double()
        apart, of_norm = float((own - update).norm()), abs(float(own.norm()) - norms[name])
        result[name] = tuple(d / size if isfinite(d) else inf for d in (apart, of_norm))
    return result  # type: ignore[return-value]


def restored(path: Path, entries: Sequence[Mapping[str, Any]]) -> bool:
    """Write JSON lines anew where a candidate changed them, which its user may; return whether it did."""
    own = [json.dumps(entry) for entry in entries]
    with suppress(OSError, ValueError):
        lines = path.read_text(encoding="utf-8").splitlines()
        if [json.dumps(json.loads(line)) for line in lines] == own:
            return False
    write_atomically(path, "".join(f"{line}\n" for line in own))
    return True


def require_finite(base: Training) -> None:
    """Refuse a base that diverges: nothing can be compared with it.

    Raises:
        VitsweepError: one of its losses is not finite.
    """
    if not all(isfinite(loss) for losses in base.losses for loss in losses):
        raise VitsweepError("The loss of the base is not finite: nothing can be compared with it.")
