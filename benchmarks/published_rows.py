"""One published step time beside its prediction, and how the tables of a clone are read."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitsweep.extras.predict.step_time import StepTimePrediction
from vitsweep.rates.profile import Figure, Profile
from vitsweep.spec.resources import MeshShape


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published measurement beside its prediction.

    Attributes:
        regime: rows that are judged together.
        group: rows among which a user would choose (the same model, GPUs and batch).
        label: its conditions.
        measured_ms: published step time.
        prediction: ours.
    """

    regime: str
    group: str
    label: str
    measured_ms: float
    prediction: StepTimePrediction

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.prediction.step_time_ms / self.measured_ms - 1

    @property
    def held(self) -> bool:
        """Whether the 80 % interval holds the measurement."""
        return self.prediction.low_ms <= self.measured_ms <= self.prediction.high_ms


def gpt(
    depth: int, width: int, heads: int, tokens: int, vocabulary: int, fused: bool
) -> dict[str, Any]:
    """Sizes of a decoder with learned positions whose output layer is tied to its embedding."""
    return {
        "depth": depth,
        "width": width,
        "heads": heads,
        "mlp_width": 4 * width,
        "tokens": tokens,
        "edge_parameters": (vocabulary + tokens + 2) * width,
        "edge_products": ((1, width, 1), (tokens, vocabulary, width)),
        "causal": fused,
        "fused_attention": fused,
    }


def mesh_of(**degrees: int) -> MeshShape:
    """Return a mesh; degrees that are not named are 1."""
    axes = ("pipeline", "replicate", "shard", "sequence", "ring", "ulysses", "tensor")
    return MeshShape(**{axis: degrees.get(axis, 1) for axis in axes})


def with_figure(profile: Profile, name: str, value: float, source: str) -> Profile:
    """Return a profile with another published scalar."""
    figure: Figure[float] = Figure(value=value, source=source, confidence="published")
    return profile.model_copy(update={"figures": profile.figures.model_copy(update={name: figure})})


def text_of(clone: Path, path: str) -> str:
    """Read a file of a clone, with or without a work tree."""
    if (clone / path).is_file():
        return (clone / path).read_text(encoding="utf-8")
    command = ["git", "-C", str(clone), "show", f"HEAD:{path}"]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout


def names_of(clone: Path, folder: str) -> list[str]:
    """Return the paths of the files in a folder of a clone, likewise."""
    if (clone / folder).is_dir():
        return sorted(str(path.relative_to(clone)) for path in (clone / folder).iterdir())
    command = ["git", "-C", str(clone), "ls-tree", "--name-only", "HEAD", f"{folder}/"]
    listed = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    return sorted(listed.split())
