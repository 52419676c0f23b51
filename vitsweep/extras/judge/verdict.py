"""The verdict: one answer with its interval, as text, Markdown and JSON."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from math import inf, isfinite, nan
from statistics import fmean, stdev
from typing import Any

from vitsweep.errors import ExitCode
from vitsweep.extras.compare.comparison import Comparison
from vitsweep.tables.formatting import count
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import MIN_BLOCKS, any_look_half_width


class Answer(StrEnum):
    """The verdict on the head."""

    faster = "faster"
    slower = "slower"
    no_difference = "no difference shown"
    same_code = "same code"
    wrong = "wrong"
    worse = "worse"
    not_proved = "not proved"
    undecided = "undecided"
    not_measured = "not measured"


EXIT_CODES = {
    Answer.slower: ExitCode.gate_failed,
    Answer.worse: ExitCode.gate_failed,
    Answer.wrong: ExitCode.gate_failed,
    Answer.undecided: ExitCode.gate_undecided,
    Answer.not_proved: ExitCode.gate_undecided,
    Answer.not_measured: ExitCode.not_all_measured,
}


LOWER_IS_BETTER = ("loss", "error", "perplexity")


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How much larger a quality is in the head, over paired seeds, with an interval valid at any look.

    Attributes:
        name: of the quality.
        difference: mean of head - base over blocks.
        low: end of the 95 % interval.
        high: the other end; both infinite with few blocks.
        blocks: how many.
    """

    name: str
    difference: float
    low: float
    high: float
    blocks: int

    @property
    def lower_is_better(self) -> bool:
        """Whether it is a loss or an error, by its name."""
        return any(word in self.name for word in LOWER_IS_BETTER)

    @property
    def is_worse(self) -> bool:
        """Whether the head is shown to be worse."""
        return self.low > 0 if self.lower_is_better else self.high < 0

    def __str__(self) -> str:
        known = isfinite(self.low) and isfinite(self.high)
        interval = f" [{self.low:+.3g}, {self.high:+.3g}]" if known else ""
        better = "lower" if self.lower_is_better else "higher"
        return (
            f"{self.name} {self.difference:+.3g}{interval} over {count(self.blocks, 'paired seed')} "
            f"({better} is better)"
        )


def quality_of(name: str, differences: Sequence[float]) -> Quality:
    """Return the mean of head - base over blocks, with its interval."""
    number, middle = len(differences), fmean(differences)
    spread = stdev(differences) if number > 1 else nan
    half = float(any_look_half_width(spread, number)) if number >= MIN_BLOCKS else inf
    return Quality(
        name=name, difference=middle, low=middle - half, high=middle + half, blocks=number
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One verdict.

    Attributes:
        answer: in a word.
        reason: why, where it does not follow from the interval alone.
        base: what the head is compared with, in words.
        head: what is judged.
        speed: throughput of the head over the base's.
        repeated: the same in fresh blocks and processes, after a first sign of a difference.
        quality: besides the speed, where the change alters the training.
        equality: what was compared, or why nothing was.
        facts: further columns: memory, work, environment, files.
        notes: sentences.
    """

    answer: Answer
    reason: str = ""
    base: str
    head: str
    speed: Comparison | None = None
    repeated: Comparison | None = None
    quality: Quality | None = None
    equality: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """0 not worse, 1 worse or wrong, 3 not measured, 4 undecided."""
        return EXIT_CODES.get(self.answer, ExitCode.ok)

    @property
    def sentences(self) -> list[str]:
        """The verdict in words."""
        lines = [say("judged", head=self.head, base=self.base, answer=self.answer)]
        if self.reason:
            lines.append(f"{self.reason[:1].upper()}{self.reason[1:]}.")
        for name, found in (("", self.speed), ("Again, in fresh processes: ", self.repeated)):
            if found is not None and found.num_blocks:
                text = found.sentence("the head", "the base")
                if self.answer is Answer.undecided:  # "no difference shown" is another answer
                    text = text.replace(f": {found.claim}.", ".")
                lines.append(f"{name}{text}" if name else f"{text[:1].upper()}{text[1:]}")
        if self.quality:
            lines.append(f"Quality: {self.quality}.")
        if self.equality:
            lines.append(f"{self.equality}.")
        if memory := self.facts.get("memory_gib"):
            lines.append(
                f"Peak memory: {memory['head']:.3g} GiB, of the base {memory['base']:.3g} GiB."
            )
        if flops := self.facts.get("flops_per_step"):
            lines.append(
                f"Counted FLOPs per step: {flops['head']:.4g}, of the base {flops['base']:.4g}."
            )
        return [*lines, *self.notes]

    def markdown(self) -> str:
        """Return the verdict for a comment on a pull request."""
        first, _, log = self.reason.partition("\n")
        said = [f"base: {self.base}", f"head: {self.head}", first]
        said += replace(self, reason="").sentences[1:]
        lines = [f"**{self.answer}**", "", *(f"- {_inline(text)}" for text in said if text)]
        if log:  # of the candidate; nothing in an indented block is Markdown
            lines += ["", *(f"    {line}" for line in log.splitlines())]
        return "\n".join(lines) + "\n"

    def json(self) -> dict[str, Any]:
        """Return the verdict as JSON takes it; docs/judge.md names the keys."""
        return {
            "answer": str(self.answer),
            "exit_code": int(self.exit_code),
            "reason": self.reason,
            "base": self.base,
            "head": self.head,
            "speed": _plain(self.speed),
            "repeated": _plain(self.repeated),
            "quality": self.quality and _finite(asdict(self.quality)),
            "equality": self.equality,
            **self.facts,
            "notes": list(self.notes),
        }


def _inline(text: str) -> str:
    """Return text of a candidate as one line of Markdown that holds no HTML."""
    return html.escape(" ".join(text.split()), quote=False)


def _finite(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in tree.items()}


def _plain(found: Comparison | None) -> dict[str, Any] | None:
    if found is None or not found.num_blocks:
        return None
    known = isfinite(found.low) and isfinite(found.high)
    return {
        "ratio": found.ratio,
        "low": found.low if known else None,
        "high": found.high if known else None,
        "blocks": found.num_blocks,
        "claim": str(found.claim),
    }
