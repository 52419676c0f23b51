"""`judge --series FOLDER`: many proposals, one after another, with one bound on the error of them all.

The level of proposal n is that of e-LOND (Xu and Ramdas, "Online multiple testing with e-values",
AISTATS 2024, arXiv:2311.06412). See docs/judge.md for what is guaranteed.
"""

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.extras.judge.sides import Bounds, restored
from vitsweep.extras.judge.trees import commit_of, git, repository_here
from vitsweep.extras.judge.trial import LEAST_BLOCKS, Trial
from vitsweep.extras.judge.verdict import Answer, Verdict
from vitsweep.files import open_safely
from vitsweep.results.record import utc_now
from vitsweep.tables.comparison import compared
from vitsweep.tables.stats import LEVEL, Claim, any_look_half_width, log_evidence

EXPONENT, OF_ALL = 1.1, 10.584448464950803
"""The share of the error that proposal n may spend falls as n to the power of minus this, and zeta of it."""
REFS = "refs/vitsweep"


def level(number: Any, accepted: Any) -> Any:
    """Return the level of a proposal: 0.05 n^-1.1 / zeta(1.1) (R + 1).

    Args:
        number: n, from 1; one or many.
        accepted: R, proposals accepted before it.
    """
    share = np.asarray(number, float) ** -EXPONENT / OF_ALL
    return LEVEL * share * (np.asarray(accepted) + 1)


def any_look_e_value(middle: Any, spread: Any, number: Any) -> Any:
    """Return the evidence against a mean of 0 or less: at level a it reaches 1 / a, ever, with chance a.

    It is the least B of `stats.any_look_p_value` over all means up to 0: B itself where the mean of the
    values is above 0, and B of values with a mean of 0 elsewhere. So it is at most the B of the true mean.
    """
    above = np.maximum(np.asarray(middle, float), 0.0)
    return np.exp(log_evidence(above, spread, number))


def evidence(logs: NDArray[np.float64]) -> tuple[Any, Any]:
    """Return the e-value against "not faster", and the upper end of the interval valid at any look.

    Args:
        logs: log(head / base) of throughput; (..., blocks).
    """
    number = logs.shape[-1]
    middle, spread = logs.mean(axis=-1), logs.std(axis=-1, ddof=1)
    high = middle + any_look_half_width(spread, number)
    return any_look_e_value(middle, spread, number), high


@dataclass(kw_only=True)
class Proposal(Trial):
    """A trial that ends where the head is shown faster at its level, or cannot be faster by the width.

    Attributes:
        number: of the proposal in its series, from 1.
        level: reciprocal of the e-value that accepts it.
    """

    number: int
    level: float
    e_value: float = 0.0
    is_repeated: bool = field(default=False, init=False)
    reserved_blocks: int = LEAST_BLOCKS

    def _is_decided(self, logs: Sequence[float]) -> bool:
        return not self.is_repeated and (self._is_shown(logs) or self._is_hopeless(logs))

    def _is_shown(self, logs: Sequence[float]) -> bool:
        self.e_value = float(evidence(np.array(logs))[0])
        return self.e_value >= 1 / self.level

    def _is_hopeless(self, logs: Sequence[float]) -> bool:
        return bool(evidence(np.array(logs))[1] < math.log1p(self.width))

    def _measured(self, bounds: Bounds | None) -> Verdict:
        logs = list(self._blocks(bounds, 1.0, None))
        repeated = None
        if len(logs) >= LEAST_BLOCKS and self._is_shown(logs):
            self.say("Faster; measured again in fresh processes before it counts.")
            self._start_anew()
            # A process's layout may make a side faster for as long as it lives
            self.is_repeated, self.reserved_blocks, known = True, 0, len(logs)
            logs += self._blocks(bounds, 1.0, known + LEAST_BLOCKS, logs)
            if len(logs) > known:
                repeated = compared(logs[known:])
        self._require_possible()
        speed = compared(logs)
        if len(logs) >= LEAST_BLOCKS:
            is_shown = self._is_shown(logs)
            if repeated and repeated.num_blocks == LEAST_BLOCKS and repeated.ratio > 1 and is_shown:
                return self._verdict(Answer.faster, speed, repeated)
            if self._is_hopeless(logs):
                is_slower = speed.claim is Claim.slower
                why = f"it cannot be faster by {100 * self.width:.3g} %"
                answer = Answer.slower if is_slower else Answer.not_faster
                return self._verdict(answer, speed, repeated, why)
        why = "its e-value is too small"
        if repeated:
            number = repeated.num_blocks
            why = "a faster head was not shown again"
            if number < LEAST_BLOCKS and repeated.ratio > 1:
                why = f"only {number} of {LEAST_BLOCKS} blocks in fresh processes ended"
        more = f"{why} within the budget: more `--minutes` decide it"
        return self._verdict(Answer.undecided, speed, repeated, more)

    def _verdict(self, answer: Answer, *rest: Any, **more: Any) -> Verdict:
        found = super()._verdict(answer, *rest, **more)
        is_accepted = answer is Answer.faster
        shown = {
            "proposal": self.number,
            "level": self.level,
            "e_value": self.e_value,
            "accepted": is_accepted,
        }
        note = (
            f"Proposal {self.number} is {'' if is_accepted else 'not '}accepted: its e-value is "
            f"{self.e_value:.3g}, and {1 / self.level:.3g} is needed."
        )
        facts = {**found.facts, "series": shown}
        return replace(found, accepted=is_accepted, facts=facts, notes=(note, *found.notes))


@dataclass(kw_only=True)
class Series:
    """The ledger of a series, held by one command at a time.

    Attributes:
        folder: that holds `ledger.jsonl`.
        repository: root of the project.
        entries: lines of the ledger, oldest first.
    """

    folder: Path
    repository: Path
    entries: list[dict[str, Any]]
    _descriptor: int

    @property
    def path(self) -> Path:
        """The ledger."""
        return self.folder / "ledger.jsonl"

    @property
    def number(self) -> int:
        """Number of the next proposal: one that was begun counts, whatever became of it."""
        return 1 + sum(entry["event"] == "begin" for entry in self.entries)

    @property
    def accepted(self) -> list[str]:
        """Commits that were accepted, oldest first."""
        return [entry["head"] for entry in self.entries if entry.get("accepted")]

    @property
    def level(self) -> float:
        """Level of the next proposal."""
        return float(level(self.number, len(self.accepted)))

    @property
    def base(self) -> str:
        """Commit that the next proposal is compared with; "" before the first one."""
        begun = [str(entry["base"]) for entry in self.entries[:1]]
        return (self.accepted or begun or [""])[-1]

    @property
    def ref(self) -> str:
        """Git ref that keeps the base."""
        return f"{REFS}/{self.folder.resolve().name}"

    def states(self, base: str, head: str | None) -> tuple[str, str]:
        """Return the commits of the next proposal: the series' base, and the head.

        Raises:
            BadValueError: one is no commit, or the base is not that of the series.
        """
        if head is None:
            raise BadValueError(
                "`--series` needs HEAD, a commit: a working tree cannot become the next base. Commit it "
                "first, and type `judge BASE HEAD --series FOLDER`."
            )
        typed, proposed = (commit_of(self.repository, text) for text in (base, head))
        known = {self.entries[0]["base"], self.base} if self.entries else {typed}
        if typed not in known:
            raise BadValueError(
                f"`{base}` is {typed[:10]}, and the series of `{self.folder}` compares with "
                f"{self.base[:10]}: type `{self.ref}`, or begin another series in a new folder."
            )
        return self.base or typed, proposed

    def begin(self, base: str, head: str, question: Mapping[str, Any]) -> None:
        """Write that the next proposal is measured from now on, and keep the base.

        Raises:
            BadValueError: the series asked something else so far, or its ref belongs to another one.
        """
        for entry in self.entries[:1]:
            differs = [n for n in question if entry["question"].get(n) != question[n]]
            for name in differs:
                raise BadValueError(
                    f"The series of `{self.folder}` was begun with {name} `{entry['question'].get(name)}`, "
                    f"and this command has `{question[name]}`: its base moves, its question does not. "
                    "Type the same, or begin another series in a new folder."
                )
        kept = git(
            self.repository, "rev-parse", "--verify", "--quiet", self.ref, check=False
        ).strip()
        own = {base, *(str(entry["head"]) for entry in self.entries)}
        own |= {str(entry["base"]) for entry in self.entries[:1]}
        if kept and kept not in own:
            raise BadValueError(
                f"`{self.ref}` of this repository is {kept[:10]}, which is of another series: choose another "
                f"name for `{self.folder}`, or remove it with `git update-ref -d {self.ref}`."
            )
        self._keep(base)
        self._append(
            event="begin",
            proposal=self.number,
            base=base,
            head=head,
            level=self.level,
            question=question,
        )

    def end(self, verdict: Verdict, records: Path) -> Verdict:
        """Write what became of the proposal that was begun last; an accepted one becomes the base.

        Returns:
            The verdict; `wrong` where the ledger was changed meanwhile, which is written anew.
        """
        if restored(self.path, self.entries):
            os.close(self._descriptor)
            self._descriptor = _locked(self.path)
            why = f"`{self.path}` was changed while this proposal was measured"
            facts = {**verdict.facts, "series": {**verdict.facts["series"], "accepted": False}}
            verdict = replace(verdict, answer=Answer.wrong, reason=why, accepted=False, facts=facts)
        begun, facts = self.entries[-1], verdict.facts["series"]
        if verdict.accepted:
            self._keep(begun["head"])  # first, so that no accepted commit is ever without a ref
        self._append(
            event="end",
            head=begun["head"],
            answer=str(verdict.answer),
            blocks=verdict.speed.num_blocks if verdict.speed else 0,
            records=str(records),
            **facts,
        )
        return verdict

    def _keep(self, commit: str) -> None:
        git(self.repository, "update-ref", self.ref, commit)

    def _append(self, **entry: Any) -> None:
        entry = {"at": utc_now(), **json.loads(json.dumps(entry))}
        line = json.dumps(entry).encode() + b"\n"
        if os.write(self._descriptor, line) != len(line):
            raise VitsweepError(f"`{self.path}` could not be written whole: the disk is full.")
        os.fsync(self._descriptor)
        self.entries.append(entry)


@contextmanager
def opened(folder: Path, say: Callable[[str], None]) -> Iterator[Series]:
    """Hold a series until the block ends or the process dies.

    Args:
        folder: of the series; made where there is none.
        say: told of a line that a crash cut in half, which is dropped.

    Raises:
        VitsweepError: another command holds it, or its ledger is damaged.
    """
    repository = repository_here()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    descriptor = _locked(folder / "ledger.jsonl")
    series = Series(folder=folder, repository=repository, entries=[], _descriptor=descriptor)
    try:
        if not git(repository, "check-ref-format", "--print", series.ref, check=False):
            raise BadValueError(
                f"`--series {folder}`: its name becomes the git ref `{series.ref}`, which git refuses: "
                "choose a name of letters and digits."
            )
        series.entries += _read(descriptor, series.path, say)
        yield series
    finally:
        os.close(series._descriptor)


def _locked(path: Path) -> int:
    """Return the descriptor of a ledger that no other command holds."""
    descriptor = open_safely(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise VitsweepError(
            f"The series of `{path.parent}` cannot be locked ({error.strerror}): another command measures "
            "a proposal of it, or its file system has no locks. Wait for it, or choose another folder."
        ) from error
    return descriptor


def _read(descriptor: int, path: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    whole, _, torn = text.rpartition(b"\n")
    if torn:
        say(f"The last line of `{path}` was cut in half by a crash; it is dropped.")
        os.ftruncate(descriptor, len(text) - len(torn))
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(whole.splitlines(), 1):
        begun = sum(entry["event"] == "begin" for entry in entries)
        try:
            entry = json.loads(line)
            is_next = entry["proposal"] == begun + (entry["event"] == "begin")
            if not is_next or not isinstance(entry["head"], str):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise VitsweepError(
                f"Line {number} of `{path}` is damaged, so that nobody knows what the series has spent: "
                "restore the file, or begin another series in a new folder."
            ) from None
        entries.append(entry)
    return entries
