"""The kinds of technique: what each may say before a cell runs, and what it does to the model.

Modules that hold a technique import torch inside their methods only, so that a thousand cells can
be composed, checked and planned on a login node without loading it.
"""

import json
import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt
from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from vitsweep.errors import VitsweepError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


# Which products attention takes: what its FLOPs follow from (no torch).


@dataclass(frozen=True, kw_only=True)
class AttentionPattern:
    """How the tokens of a sequence attend to one another.

    Attributes:
        causal: a token attends to itself and those before it.
        linear: through a state of (K, K) per head instead of scores.
    """

    causal: bool = False
    linear: bool = False

    def pairs(self, tokens: int) -> int:
        """Return how many pairs of query and key a sequence of `tokens` has."""
        return tokens * (tokens + 1) // 2 if self.causal else tokens * tokens


SOFTMAX = AttentionPattern()
"""Every token to every token."""


DType = Literal["float64", "float32", "float16", "bfloat16"]


Check = Callable[[Any, Any, Any], str]
"""(found, expected, bounds) -> what differs between a twin and its reference, or "" (see `proof.checks`)."""


PHASES = ("data", "forward", "backward", "optimizer")
"""Phases of a step that are timed separately."""


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    """One choice in a config group; its fields are the knobs, its methods the effect.

    `name` is the choice as typed (`precision=O2` -> "O2"): the value in tables, the label in charts.
    """

    name: str

    changes_model: ClassVar[bool] = False
    """True where the choice changes what is computed (pooled classifier, linear attention)."""

    rounds_apart: ClassVar[bool] = False
    """True where its kernels round to half precision in other places than the reference operations do."""

    part_of_training: ClassVar[bool] = False
    """True where every choice of the group decides what a training learns: a checkpoint is of one choice."""

    touches: ClassVar[tuple[str, ...]] = PHASES
    """Phases that the choices of the group change."""

    colour: ClassVar[int]
    """Place in the palette of charts (0 to 7) of a group's default choice; the others of its menu follow."""

    axes: ClassVar[tuple[str, ...]] = ()
    """Mesh axes whose degree this technique takes when it is left at `auto`."""

    @property
    def needs_transformer(self) -> bool:
        """Whether it works on tokens, heads or blocks of a transformer, and on no other model."""
        return False

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Yield one full sentence for each reason why `cell` cannot run with this technique.

        A sentence names the knob as typed, the value, the rule, and the way out.
        """
        return iter(())

    def lacking_here(self, cell: "CellSpec") -> Iterator[str]:
        """Yield one full sentence for each thing that `cell` needs and this machine lacks.

        Unlike `conflicts` it depends on the machine: a command asks where it runs the cells itself, and
        each rank asks on its node.
        """
        return iter(())

    @classmethod
    def note(cls, row: Mapping[Any, Any]) -> str:
        """Return a sentence for the footnotes of a table of cells, of which `row` has the choice; or ""."""
        return ""

    def trace_substitute(self) -> "tuple[Technique, str]":
        """Return the choice by which a step is traced without a device, and a sentence if it differs.

        Another choice stands for one that only a GPU or a compiler has, with tensors of the same sizes.
        """
        return self, ""

    def plain_twin(self, model: "nn.Module") -> "nn.Module":
        """Let a reference model in one process compute what this technique does, if it changes that.

        The result is what the technique is proved equal to, so it shares no code with `apply`. Most have
        nothing to do.
        """
        return model

    def checks(self) -> Iterable[Check]:
        """Return what the proof compares of this choice in each step, when loss, gradients and weights agree.

        They are made for one twin, so they may keep what their equations need of earlier steps.
        """
        return ()


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """What a precision means, without torch: `sharding` and the optimizer read it.

    Attributes:
        autocast_dtype: dtype of `torch.autocast`, or None for no autocast.
        param_dtype: dtype in which forward and backward see the parameters.
        norm_dtype: the same for LayerNorm's parameters and arithmetic.
        master_weights: the optimizer keeps and updates a float32 copy of the parameters.
        loss_scale: None (no scaler), a constant, or "dynamic" (apex: 2**16, doubled every 2000 steps).
        tf32: allow TensorFloat-32 in matmul and cuDNN.
    """

    autocast_dtype: DType | None = None
    param_dtype: DType = "float32"
    norm_dtype: DType = "float32"
    master_weights: bool = False
    loss_scale: float | Literal["dynamic"] | None = None
    tf32: bool = False


class Precision(Technique):
    """Number formats of compute, parameters, gradients and optimizer state."""

    colour = 0

    float8: ClassVar[bool] = False
    """True where the linears of the blocks are replaced by others, which multiply in FP8."""

    @property
    def multiple(self) -> int:
        """What rows and sides of these products are multiples of."""
        return 1

    @abstractmethod
    def plan(self) -> PrecisionPlan:
        """Return what this precision means, for whoever wraps the model."""

    @abstractmethod
    def relative_tolerance(self) -> float:
        """How far the loss of a short training may lie from the float32 one (see `proof`)."""

    def of_twin(self) -> "Precision":
        """Return the precision of a nano copy of the model, which has all that this one has."""
        return self

    def convert(self, model: "nn.Module") -> "nn.Module":
        """Swap modules that the plan alone cannot express (FP8 linears)."""
        return model


class Sharding(Technique):
    """Who holds parameters, gradients and optimizer state among data-parallel ranks."""

    colour = 1

    shards_parameters: ClassVar[bool] = False
    """True where ranks keep shards; with `master_weights` these are the masters."""

    shards_optimizer: ClassVar[bool] = False
    """True where ranks hold whole parameters, and update and keep the optimizer state of slices only."""

    @classmethod
    def note(cls, row: Mapping[Any, Any]) -> str:
        """Return the note on a choice that shards and has one rank, else ""."""
        shards = cls.shards_parameters or cls.shards_optimizer
        if not shards or str(row.get("world_size")) not in ("1", "1.0"):
            return ""
        name = row["sharding"]
        return f"`sharding={name}` on one rank shares nothing: it adds overhead only."

    def relative_tolerance(self) -> float:
        """How far the loss of a short training may lie from that with exact gradients."""
        return 0.0

    def of_twin(self) -> Self:
        """Return the choice for a nano twin, whose gradients fill several buckets as the cell's do."""
        return self

    @abstractmethod
    def apply(self, model: "nn.Module", plan: PrecisionPlan, world: "World") -> "nn.Module":
        """Wrap `model` so that its gradients are averaged over `world.gradient_group()`."""

    def optimizer_groups(
        self, groups: list[dict[str, Any]], model: "nn.Module"
    ) -> list[dict[str, Any]]:
        """Return what this rank's optimizer updates of parameter groups over the wrapped `model`."""
        return groups

    def complete_gradients(self, model: "nn.Module") -> None:
        """Finish the exchange of gradients that backward passes began, before the update."""

    def drop_gradients(self, model: "nn.Module") -> None:
        """Drop what a step that was broken off has left besides the gradients that the optimizer drops."""

    def complete_update(self, model: "nn.Module") -> None:
        """Exchange what the optimizer updated."""

    def gradient_of(
        self,
        model: "nn.Module",
        parameter: "nn.Parameter",
        held: "Callable[[nn.Parameter], Tensor | None]",
    ) -> "Tensor | None":
        """Return the gradient (whole, or a DTensor) of a parameter; every rank calls it.

        Args:
            model: as `apply` returned it.
            parameter: of the model.
            held: the gradient of what `optimizer_groups` returned.
        """
        return held(parameter)

    def skips(self, model: "nn.Module", parameter: "nn.Parameter") -> bool:
        """Whether a parameter had no gradient on any rank in this step, so that it is not updated."""
        return False

    def gradient_sync(
        self, model: "nn.Module", is_last_micro_batch: bool
    ) -> AbstractContextManager[None]:
        """Context of one micro-batch: gradients are exchanged on the last of a step only."""
        return nullcontext()


@dataclass(frozen=True, kw_only=True)
class OptimizerChoice(Technique):
    """An optimizer and its implementation.

    All but matrices (norms, biases, tokens, positions) form a group of their own without weight decay.
    """

    touches: ClassVar[tuple[str, ...]] = ("optimizer",)

    colour = 2

    learning_rate: Annotated[float, Gt(0)]
    weight_decay: Annotated[float, Ge(0)]
    clip_norm: Annotated[float, Gt(0)] | None

    keeps_gradient_views: ClassVar[bool] = False
    """True where gradients must stay in a buffer of the optimizer's own."""

    instead: ClassVar[str] = ""
    """Where `keeps_gradient_views`: the choice that updates parameters one by one."""

    elementwise: ClassVar[bool] = False
    """True where the update treats every number alone, so that a shard is updated as a tensor of its own."""

    @property
    def updates_shards(self) -> bool:
        """Whether it updates the plain tensor in which a rank has its part of a sharded one."""
        return self.elementwise

    def relative_tolerance(self) -> float:
        """How far the loss of a short training may lie from that of `plain`, if state is rounded."""
        return 0.0

    @abstractmethod
    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Return an optimizer over parameter groups that carry their own `weight_decay` and `names`."""

    def plain(self) -> "OptimizerChoice":
        """Return the plainest implementation of the same algorithm, which this one is compared with."""
        return self


@dataclass(frozen=True, kw_only=True)
class Layout(Technique):
    """Order of the axes in which the blocks work, and how the convolutions before them are computed.

    Attributes:
        batch_first: whether images come before tokens.
        channels_last: images and patch filters lie in memory as (B, H, W, C).
        patch_embedding: `convolution` with a stride of its kernel's size, or the same sums as a `linear`
            layer over the pixels of each patch, which are copied side by side first.
        cudnn_benchmark: cuDNN times its algorithms for every new shape of a convolution and keeps the
            fastest (`torch.backends.cudnn.benchmark`); False takes the one that its heuristics name.
    """

    colour = 3

    batch_first: bool
    channels_last: bool
    patch_embedding: Literal["convolution", "linear"]
    cudnn_benchmark: bool


@dataclass(frozen=True, kw_only=True)
class Classifier(Technique):
    """What the head reads: the class token or the mean over tokens."""

    touches: ClassVar[tuple[str, ...]] = ("forward", "backward", "optimizer")

    colour = 4
    part_of_training = True

    pooling: Literal["token", "mean"]

    @property
    def needs_transformer(self) -> bool:
        """A model without a class token reads the mean anyway."""
        return self.pooling == "mean"


class AttentionKernel(Technique):
    """Which implementation computes softmax(q k^T) v."""

    touches: ClassVar[tuple[str, ...]] = ("forward", "backward")

    colour = 5

    @property
    def needs_transformer(self) -> bool:
        """Every kernel but torch's own choice, which asks for nothing."""
        return True

    @property
    def ring_computes_the_same(self) -> bool:
        """Whether ring attention, which brings its own kernel, may stand in for this one.

        It may where nobody asked for another kernel than flash attention, which gives the
        logsumexp of the scores that a ring merges blocks by.
        """
        return False

    @property
    def replaces_attend_alone(self) -> bool:
        """Whether it works on any module that calls `self.attend(q, k, v)`, whatever its shape."""
        return False

    @property
    @abstractmethod
    def recomputes_scores(self) -> bool:
        """Whether the backward pass computes q k^T again, as fused kernels do."""

    @property
    def attention_pattern(self) -> AttentionPattern:
        """Which tokens attend to which; all to all by default."""
        return SOFTMAX

    @abstractmethod
    def apply(self, model: "nn.Module") -> "nn.Module":
        """Replace the `attend` seam (or the attention module) of every block."""

    def plain_twin(self, model: "nn.Module") -> "nn.Module":
        """Compute another function by reference code; without such code the record says so."""
        return self.apply(model) if self.changes_model else model


class Memory(Technique):
    """What is kept of the forward pass for the backward pass; itself the default choice, everything."""

    colour = 1

    wraps_blocks: ClassVar[bool] = False
    """True where the transformer blocks are wrapped, to recompute them."""

    forwards_per_step: ClassVar[int] = 1
    """How often a block's forward pass runs in a training step, with what attention sends: 2 where
    the backward pass repeats it."""

    @property
    def needs_transformer(self) -> bool:
        """Whatever wraps blocks needs blocks."""
        return self.wraps_blocks

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Wrap what is to be recomputed."""
        return model


class Compilation(Technique):
    """How much of the step is compiled; itself the default choice, nothing.

    Attributes:
        scope: what is compiled: nothing, each block by itself, or the whole model.
    """

    colour = 2

    scope: ClassVar[Literal["nothing", "block", "model"]] = "nothing"

    def trace_substitute(self) -> tuple[Technique, str]:
        """Nothing compiled."""
        if self.scope == "nothing":
            return self, ""
        return Compilation(name="eager"), (
            f"`compilation={self.name}` is counted as the eager step: a compiler keeps "
            "fewer intermediate results."
        )

    @property
    def replays_graphs(self) -> bool:
        """Whether the compiler's kernels are to be replayed as CUDA graphs."""
        return False

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Compile what should be compiled."""
        return model

    def begin_step(self) -> None:
        """Prepare a training step."""


# Environment variables of the ranks of a cell, and which names nobody may set there.


_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
NOT_SET_HERE = {
    r"VITSWEEP_\w*|KINETO_LOG_LEVEL": "vitsweep sets it",
    r"\w*(OMP|MKL|OPENBLAS)_NUM_THREADS": "`resources.threads_per_rank` sets it",
    r"\w+_VISIBLE_DEVICES": "`resources` and the launcher say which devices a rank has",
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w*"
    r"|TORCHRUN_\w*|(SLURM|SLURMD|SBATCH|SRUN|PMI|PMIX|OMPI|FLUX|PBS|LSB)_\w*": "the launcher sets it",
    r"LD_\w*|GLIBC_TUNABLES|BASH_ENV|ENV|IFS": "it loads code into every process: put it before the command",
    r"PYTHON\w*|PATH|HOME|TMPDIR|XDG_\w*|USER|SHELL": "it says which code and files a rank finds",
}
"""Pattern of names -> why a cell cannot set them."""
SECRET_NAME = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CRED|BEARER|WEBHOOK|TOKEN(?!I[SZ])"  # anywhere: PGPASSWORD, MYCREDS
    r"|(^|_)(API_?)?(KEY|PASS|PAT|AUTH|DSN|PW)S?(_|$)|[A-Z]PASS$|_PWD$",
    re.I,
)
"""Names of variables that hold secrets: WANDB_API_KEY, SSHPASS, GITHUB_PAT; not TOKENIZERS_PARALLELISM."""


def _texts(value: Any) -> Any:
    """Write whole numbers as the text that a shell would pass."""
    if not isinstance(value, dict):
        return value
    return {k: str(v) if type(v) is int else v for k, v in value.items()}


def _allowed(variables: dict[str, str]) -> dict[str, str]:
    problems = [problem for pair in variables.items() if (problem := _problem(*pair))]
    if problems or not variables:
        text = "; ".join(problems) or "names no variable: use null"
        raise PydanticCustomError("variables", "{text}", {"text": text})  # a brace in it is text
    return variables


def _problem(name: str, value: Any) -> str:
    if not _VARIABLE.fullmatch(name):
        return f"{json.dumps(name)} is no name of a variable"
    for pattern, why in NOT_SET_HERE.items():
        if re.fullmatch(pattern, name, re.ASCII | re.IGNORECASE):
            return f"`{name}` cannot be set for a cell: {why}"
    if SECRET_NAME.search(name):
        return f"`{name}` cannot be set for a cell: a secret would stand in every record"
    if not isinstance(value, str):
        return f"the value of `{name}` must be a text: put it into quotes, as in `{name}:'1.0'`"
    if not value.isprintable():
        return f"the value of `{name}` must be one line of printable characters"
    return ""


Variables = Annotated[dict[str, Any], BeforeValidator(_texts), AfterValidator(_allowed)]
"""Name -> value, both as a shell passes them."""


@dataclass(frozen=True, kw_only=True)
class Runtime(Technique):
    """Settings of a rank's process and of its host, under which the same model trains.

    Itself the default choice: cores, memory and garbage collection are as the system gives them, but that
    Python collects no garbage within the timed steps.

    Attributes:
        variables: environment variables of the ranks; None for none.
    """

    variables: Variables | None = field(
        default=None, hash=False, metadata={"identity": "where set"}
    )

    colour = 1

    collects_garbage: ClassVar[Literal["paused", "automatic", "scheduled"]] = "paused"
    """When Python looks for objects in cycles: `paused` does so outside of the timed steps."""

    @property
    def collect_every_steps(self) -> int:
        """Steps between two collections where they are scheduled."""
        return 0

    @property
    def rank_environment(self) -> Mapping[str, str]:
        """Variables that a rank must find when it starts; the ranks are new processes then."""
        return self.variables or {}

    def set_up(self, cell: "CellSpec", local_rank: int) -> None:
        """Prepare the process of a rank, before it joins the others.

        Raises:
            VitsweepError: the node lacks what is needed, or the process was started without its variables.
        """
        for reason in self.lacking_here(cell):
            raise VitsweepError(reason)
        lacking = {k: v for k, v in self.rank_environment.items() if os.environ.get(k) != v}
        if lacking:
            typed = " ".join(f"{key}={shlex.quote(value)}" for key, value in lacking.items())
            raise VitsweepError(
                "`runtime.variables` must be set before a rank starts, and this one was started without: put "
                f"`{typed}` before the command that starts the ranks."
            )
