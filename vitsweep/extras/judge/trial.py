"""A trial: probes, the proof, and blocks of both sides until the interval says enough."""

import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.extras.compare.comparison import Comparison, compared
from vitsweep.extras.judge.sides import (
    Bounds,
    RunFailedError,
    RunResult,
    Side,
    Training,
    WrongEvidenceError,
    free_port,
    own_modules,
    require_finite,
    restored,
    training_of,
)
from vitsweep.extras.judge.trees import BASE, HEAD
from vitsweep.extras.judge.verdict import Answer, Quality, Verdict, quality_of
from vitsweep.files import append_line
from vitsweep.planning.blocks import BalancedOrder
from vitsweep.results.record import utc_now
from vitsweep.tables.stats import SHOWN, Claim

PROBE_STEPS, WARM_SHARE, LEAST_WARM = 5, 0.25, 3
WINDOW_SHARE, BLOCKS_HOPED, RUNS_PER_WINDOW = 0.5, 12, 2
SHORTEST_WINDOW, LONGEST_WINDOW = 0.3, 5.0
FIRST_SHARE = 0.6
"""Of the budget, for the blocks before a sign of a difference is measured again."""
MOST_DRAWS, ENOUGH_EXPLAINED = 4, 0.1
"""Seeds that are tried for the proof, until rounding explains at most this share of a typical update."""
LEAST_BLOCKS = 5
MOST_CPUS = 1.25
"""A head whose CPU seconds per second exceed its threads and the base's by this factor computes with more."""
BESIDE_WINDOW_SECONDS = 0.1
"""CPU seconds that may belong to what follows the window: the kernel is asked later, and counts ticks."""
MARGIN = 2.0
"""A time is impossible where even a device that is faster by this could not do the counted work.

A rate that was measured on a busy machine was 1.7 times too low.
"""


def _drawn() -> int:
    return secrets.randbits(31)


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Seeds of first weights, warm-up and window, which both sides of a block share."""

    first: int = field(default_factory=_drawn)
    warm_up: int = field(default_factory=_drawn)
    window: int = field(default_factory=_drawn)


@dataclass(kw_only=True)
class Trial:
    """Two sides, and what is measured of them.

    Attributes:
        base: side that the ratio divides by.
        head: side that is judged.
        request: what every run of both sides is given.
        ranks: of each side.
        width: half of the interval that is narrow enough, relative.
        deadline: by `time.monotonic`.
        folder: for records and weights.
        facts: of every record.
        flops_per_second: that the device can reach; 0 where nobody knows.
        say: called with each message.
        make_examples: (file, function) of the base that makes the examples; None where they are made.
    """

    base: Side
    head: Side
    request: dict[str, Any]
    ranks: int
    width: float
    deadline: float
    folder: Path
    facts: Mapping[str, Any]
    flops_per_second: float
    say: Callable[[str], None]
    make_examples: tuple[str, str] | None = None
    steps: int = PROBE_STEPS
    warm_steps: int = LEAST_WARM
    block_seconds: float = 0.0
    memory: dict[str, list[float]] = field(default_factory=lambda: {BASE: [], HEAD: []})
    step_seconds: dict[str, list[float]] = field(default_factory=lambda: {BASE: [], HEAD: []})
    cpus: dict[str, list[float]] = field(default_factory=lambda: {BASE: [], HEAD: []})
    quality: Quality | None = None
    qualities: list[float] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    base_files: Sequence[str] = ()
    records: list[dict[str, Any]] = field(default_factory=list)

    def verdict(self) -> Verdict:
        """Measure, and answer."""
        begin = time.monotonic()
        self._start_anew()
        try:
            return self._judged()
        except RunFailedError as error:
            return self._verdict(Answer.not_measured, reason=str(error).rstrip("."))
        except WrongEvidenceError as error:
            return self._verdict(Answer.wrong, reason=str(error))
        finally:
            self.say(f"{time.monotonic() - begin:.0f} s.")

    def _judged(self) -> Verdict:
        self.base_files = self.base.tree.names()
        if self.make_examples:
            self._run(self.base, "examples", Seeds(), make=list(self.make_examples))
        if self._probe():  # nothing to measure
            return self._verdict(Answer.same_code, reason=self.found["same"])
        if not self.proves:
            asked = "`--quality` was asked for"
            why = "a script hands over no losses" if self.request["script"] else asked
            self.found["equality"] = f"Not proved equal: {why}"
        return self._measured(self._proof() if self.proves else None)

    def _measured(self, bounds: Bounds | None) -> Verdict:
        """Measure blocks until they decide."""
        first = list(self._blocks(bounds, FIRST_SHARE, None))
        if compared(first).claim not in SHOWN:  # nothing to measure again yet
            first += list(self._blocks(bounds, 1.0, None, first))
        speed = compared(first)
        if speed.claim not in SHOWN:
            return self._concluded(speed, None)
        self._start_anew()
        left = int((self.deadline - time.monotonic()) / max(self.block_seconds, 1e-6))
        number = min(max(LEAST_BLOCKS, left), max(LEAST_BLOCKS, 2 * len(first)))
        self.say(f"{_percent(speed)}: measured again in fresh processes, {number} blocks.")
        repeated = compared(list(self._blocks(bounds, 1.0, number)), is_fixed=True)
        return self._concluded(speed, repeated)

    def _start_anew(self) -> None:
        """Start the processes of both sides, which import torch at the same time."""
        for side in (self.base, self.head):
            side.start()

    def _concluded(self, speed: Comparison, repeated: Comparison | None) -> Verdict:
        last = repeated or speed
        self._require_possible()
        if self.quality and self.quality.is_worse:
            return self._verdict(Answer.worse, speed, repeated)
        sign = speed.claim if repeated else None
        if last.claim is sign is Claim.slower:
            return self._verdict(Answer.slower, speed, repeated)
        if self.request["script"]:
            why = f"{last.claim}, and nothing shows that the head trains as the base does"
            return self._verdict(Answer.not_proved, speed, repeated, why)
        if last.claim is sign is Claim.faster:
            return self._verdict(Answer.faster, speed, repeated)
        if last.num_blocks >= LEAST_BLOCKS and last.half_width <= self.width:
            reason = f"a first sign of a {sign} head did not recur" if sign else ""
            return self._verdict(Answer.no_difference, speed, repeated, reason)
        why = f"a {sign} head was not shown again" if sign else "the interval is too wide"
        more = f"{why} within the budget: more `--minutes`, or a larger `--width`, decide it"
        return self._verdict(Answer.undecided, speed, repeated, more)

    @property
    def proves(self) -> bool:
        """Whether losses and weights are compared."""
        return not self.request["script"] and not self.request["quality"]

    def _probe(self) -> bool:
        """Look at both sides once: their files, work and time per step.

        Returns:
            Whether they are one code.

        Raises:
            VitsweepError: no file of the project ran.
        """
        looks = {}
        for side, other in ((self.base, self.head), (self.head, self.base)):
            self.say(f"{side.tree.side}: {side.tree.label}")
            looks[side.tree.side] = self._run(
                side, "probe", Seeds(), count=not self.request["script"]
            )
            modules = looks[side.tree.side].evidence["modules"]
            self.found.setdefault("files", {})[side.tree.side] = own_modules(side, other, modules)
        evidence = {name: look.evidence for name, look in looks.items()}
        self.found["versions"] = {name: each["versions"] for name, each in evidence.items()}
        if not self.request["script"]:
            self.found["flops_per_step"] = {n: each["flops"] for n, each in evidence.items()}
            self._set_window(max(look.seconds for look in looks.values()) / PROBE_STEPS)
        return self._is_same_code()

    def _is_same_code(self) -> bool:
        files, versions = self.found["files"], self.found["versions"]
        trees = [side.tree.files() for side in (self.base, self.head)]
        changed = sorted(n for n in {*trees[0], *trees[1]} if trees[0].get(n) != trees[1].get(n))
        self.found["changed_files"] = changed
        unread = [n for n in changed if not n.endswith((".py", ".md", ".rst"))]
        if versions[BASE] != versions[HEAD] or self.base.python != self.head.python:
            return False
        if not files[HEAD]:
            raise VitsweepError(
                "No file of the project ran, so that nothing of it would be judged: name the training step "
                "(`--step train.py:make_step`), or your model (`model.target=package.function`)."
            )
        if files[BASE] != files[HEAD] or unread:
            return False
        self.found["same"] = (
            f"all {len(files[HEAD])} files of the project that ran are identical"
            + (f"; {', '.join(changed[:3])} changed and was not imported" if changed else "")
        )
        return True

    def _set_window(self, seconds_per_step: float) -> None:
        """Choose how many steps all windows have; a script says so itself."""
        left = self.deadline - time.monotonic()
        hoped = WINDOW_SHARE * left / (2 * BLOCKS_HOPED * RUNS_PER_WINDOW)
        window = min(max(hoped, SHORTEST_WINDOW), LONGEST_WINDOW)
        self.steps = max(2, math.ceil(window / max(seconds_per_step, 1e-6)))
        self.warm_steps = max(LEAST_WARM, round(WARM_SHARE * self.steps))

    def _proof(self) -> Bounds:
        """Train both once before anything is timed, from seeds with which rounding hides little."""
        seeds, base, bounds = self._seeds_of_proof()
        head = self._training(self._run(self.head, "proof", seeds), self.head)
        bounds.require_equal(head, base)
        self.found["equality"] = f"Equal in {bounds.sentence}"
        return bounds

    def _seeds_of_proof(self) -> tuple[Seeds, Training, Bounds]:
        """Train the base twice, the second time with the least change; draw again where that explains much.

        With some seeds a training is chaotic: the least change grows within the window to a multiple of
        an update, and what is allowed besides would hide any fault of the head.
        """
        tightest: tuple[Seeds, Training, Bounds] | None = None
        for _ in range(MOST_DRAWS):
            seeds = Seeds()
            base = self._training(self._run(self.base, "proof", seeds), self.base)
            require_finite(base)
            other = self._training(
                self._run(self.base, "rounding", seeds, perturbed=True), self.base
            )
            bounds = Bounds.between(base, other)
            if tightest is None or bounds.of_updates < tightest[2].of_updates:
                tightest = seeds, base, bounds
            if bounds.of_updates <= ENOUGH_EXPLAINED:
                break
        assert tightest is not None
        return tightest

    def _blocks(
        self, bounds: Bounds | None, share: float, most: int | None, known: Sequence[float] = ()
    ) -> Iterator[float]:
        """Yield log(head / base) of throughput block by block, until the interval says enough.

        Args:
            bounds: of the proof; None where nothing is compared.
            share: of the time left.
            most: a number of blocks, which no result ends earlier; None for as many as decide.
            known: earlier blocks that the interval counts too.
        """
        order, logs = BalancedOrder(), [*known]
        begin = time.monotonic()
        end = begin + share * (self.deadline - begin)
        while most is None or len(logs) < most:
            if most is None and len(logs) >= LEAST_BLOCKS and self._is_decided(logs):
                return
            started = time.monotonic()
            if logs and started + self.block_seconds > end:
                return
            logs.append(self._block(order, bounds, "repeat" if most else "block"))
            self.block_seconds = time.monotonic() - started
            self.say(f"block {len(logs)}: {_percent(compared(logs))}")
            yield logs[-1]

    def _is_decided(self, logs: Sequence[float]) -> bool:
        """Whether the interval excludes 1, or is narrow enough."""
        now = compared(logs)
        return now.claim in SHOWN or now.half_width <= self.width

    def _block(self, order: BalancedOrder, bounds: Bounds | None, phase: str) -> float:
        name, seeds = f"{phase}-{secrets.token_hex(4)}", Seeds()
        results: dict[str, RunResult] = {}
        trainings: dict[str, Training] = {}
        for position, side_name in enumerate(order.next_block([BASE, HEAD])):
            side = self.base if side_name == BASE else self.head
            results[side_name] = result = self._run(side, name, seeds, position)
            self.step_seconds[side_name].append(result.seconds / self.steps)
            spent = max(0.0, result.cpu_seconds - BESIDE_WINDOW_SECONDS)
            self.cpus[side_name].append(spent / result.seconds)
            if bounds:
                trainings[side_name] = self._training(results[side_name], side)
        self._require_same_setup(results)
        if bounds:
            require_finite(trainings[BASE])
            bounds.require_equal(trainings[HEAD], trainings[BASE])
        if name := self.request["quality"]:
            head, base = (results[side].evidence["quality"] for side in (HEAD, BASE))
            self.qualities.append(head - base)
            self.quality = quality_of(name, self.qualities)
        return math.log(results[BASE].seconds / results[HEAD].seconds)

    def _require_same_setup(self, results: Mapping[str, RunResult]) -> None:
        """Refuse sides that are not what was proved: with files that changed, or a head with more threads.

        Raises:
            WrongEvidenceError: they are not.
        """
        for side, other in ((self.base, self.head), (self.head, self.base)):
            name = side.tree.side
            known = self.found["files"][name]
            for path, digest in own_modules(side, other, results[name].evidence["modules"]).items():
                if known.get(path, digest) != digest:
                    raise WrongEvidenceError(
                        f"`{path}` of the {name} was changed while it was judged"
                    )
        base, head = (results[name].evidence["threads"] for name in (BASE, HEAD))
        if head > base:
            raise WrongEvidenceError(
                f"it computes with {head} threads and the base with {base}: give both the same, "
                f"`resources.threads_per_rank={head}`"
            )

    def _training(self, result: RunResult, side: Side) -> Training:
        try:
            return training_of(result, self._weights)
        except WrongEvidenceError as error:
            if side is self.head:
                raise
            raise VitsweepError(f"The base cannot be judged against: {error}.") from error

    @property
    def _weights(self) -> Path:
        return self.folder.absolute() / "weights.pt"

    def _run(
        self, side: Side, block: str, seeds: Seeds, position: int = 0, **more: Any
    ) -> RunResult:
        """Do one run and keep its record."""
        is_probe = block in ("probe", "examples")
        request = self.request | {
            "steps": self.steps,
            "warm_steps": LEAST_WARM if is_probe else self.warm_steps,
            "seed": seeds.first,
            "warm_seed": seeds.warm_up,
            "port": free_port(),
            "weights": str(self._weights) if self.proves and not is_probe else "",
            "perturbed": False,
            "count": False,
            "make": None,
            **more,
        }
        record = {
            "started_at": utc_now(),
            **self.facts,
            "side": side.tree.side,
            "code": side.tree.label,
            "block": block,
            "position": position,
        }
        files = self.base.tree.stamps(self.base_files) if side is self.head else {}
        try:
            result = side.run(request, seeds.window, self.ranks)
            self._require_same_files(files)
        except RunFailedError as error:
            self._keep(record | {"status": "failed", "reason": str(error)})
            raise
        name = side.tree.side
        shown = {k: v for k, v in result.evidence.items() if k not in ("modules", "versions")}
        self._keep(
            record
            | {"status": "measured", "seconds": result.seconds, "steps": self.steps}
            | {"losses": result.losses, **shown}
        )
        self.memory[name].append(result.evidence["memory_gib"])
        if result.left_running:
            self.notes.append(
                f"The {name} left {result.left_running} processes running after its window; killed."
            )
        return result

    def _keep(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        append_line(self.folder / "runs.jsonl", record)

    def _require_same_files(self, before: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a run of the head that changed a file of the base.

        Raises:
            WrongEvidenceError: it did.
        """
        now = self.base.tree.stamps(before)
        if changed := [name for name in before if now.get(name) != before[name]]:
            raise WrongEvidenceError(f"a run of the head changed `{changed[0]}` of the base")

    def _require_possible(self) -> None:
        """Refuse a head that takes more CPUs than its threads, or less time than its counted work takes.

        Raises:
            WrongEvidenceError: it does.
        """
        if not self.step_seconds[HEAD]:
            return
        if self.cpus[HEAD]:
            head, base = (statistics.median(self.cpus[side]) for side in (HEAD, BASE))
            if head > MOST_CPUS * max(base, self.request["threads"] * self.ranks):
                raise WrongEvidenceError(
                    f"it computes with {head:.1f} CPUs, and the base with {base:.1f}: give both the same "
                    "threads, `resources.threads_per_rank`"
                )
        counted = self.found.get("flops_per_step", {})
        needed = counted.get(HEAD, 0) / min(self.step_seconds[HEAD])
        of_base = counted.get(BASE, 0) / min(self.step_seconds[BASE], default=math.inf)
        reached = max(self.flops_per_second, of_base)
        if self.flops_per_second and needed > MARGIN * reached:
            raise WrongEvidenceError(
                f"{counted[HEAD]:.3g} counted FLOPs in {1e3 * min(self.step_seconds[HEAD]):.3g} ms are more "
                f"than this device can do ({reached / 1e12:.3g} TFLOP/s per rank)"
            )

    def _verdict(
        self,
        answer: Answer,
        speed: Comparison | None = None,
        repeated: Comparison | None = None,
        reason: str = "",
    ) -> Verdict:
        if self.records and restored(self.folder / "runs.jsonl", self.records):
            self.notes.append("A candidate changed `runs.jsonl`; it was written anew.")
        medians = {
            name: {side: statistics.median(each) for side, each in values.items() if each}
            for name, values in (("memory_gib", self.memory), ("step_s", self.step_seconds))
        }
        facts = {name: each for name, each in medians.items() if len(each) == 2}
        shown = {k: v for k, v in self.found.items() if k not in ("same", "equality")}
        return Verdict(
            answer=answer,
            reason=reason,
            base=self.base.tree.label,
            head=self.head.tree.label,
            speed=speed,
            repeated=repeated,
            quality=self.quality,
            equality=self.found.get("equality", ""),
            facts={**self.facts, **facts, **shown},
            notes=(*self.base.tree.notes, *self.head.tree.notes, *dict.fromkeys(self.notes)),
        )


def _percent(found: Comparison) -> str:
    return f"head {100 * (found.ratio - 1):+.1f} %" + (
        f" [{100 * (found.low - 1):+.1f}, {100 * (found.high - 1):+.1f}]"
        if found.low == found.low
        else ""
    )
