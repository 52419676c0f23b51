"""RunRecord: one cell measured once, as JSON; every table is made from these records."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.files import fits
from vitsweep.foreign import parsed_json
from vitsweep.results.metrics import OF_TABLES, misfits
from vitsweep.results.provenance import masked_setting

SCHEMA_VERSION = 4
"""Raised when a reader could misread an earlier record: a column gets another meaning or name."""


class OtherSchemaError(VitsweepError):
    """A record was written by a version of vitsweep with another schema than this one."""


def check_schema(version: int) -> None:
    """Refuse records of another schema than this version's, by its number.

    Raises:
        OtherSchemaError: it is of another one.
    """
    if version != SCHEMA_VERSION:
        raise OtherSchemaError(
            f"schema {version} is not the one this vitsweep reads ({SCHEMA_VERSION}): use the version "
            "that wrote it, or measure anew."
        )


class Status(StrEnum):
    """How a run, and with it its cell, ended."""

    measured = "measured"
    out_of_memory = "out_of_memory"
    diverged = "diverged"  # the loss became non-finite: the speed does not count
    wrong = "wrong"  # the proof of equality failed
    timed_out = "timed_out"
    preempted = "preempted"
    killed = "killed"  # by a signal from outside
    failed = "failed"  # anything else, with its reason
    invalid = "invalid"  # refused by a rule, never started
    damaged = "damaged"  # of a cell: none of the files of its runs can be read


STOPPED_FROM_OUTSIDE = (Status.killed, Status.preempted)
"""Statuses of runs that say nothing about their cell, which is therefore run again."""
SCREENING, CHOOSING, FRESH = "look", "choosing", "fresh"
"""What a run was for, where it is not one of a grid's blocks: to tell whether its cell is worth blocks; to
choose the leader of a race; to measure what a race had chosen. Column `purpose`."""
RETRIABLE = tuple(str(s) for s in Status if s not in (Status.measured, Status.invalid))
"""Statuses after which a cell can be run again on request."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One cell measured once in fresh processes, as part of a block.

    Attributes:
        run_id: unique name of the run, also its file name.
        sweep: name of the sweep folder it was asked for in.
        block: name of the block; runs of one block ran back to back on the same machine.
        position: place of the run within its block, from 0, in the order in which they ran.
        attempt: 1 for the first try of this run; more after a preemption.
        reason: one sentence where `status` is not `measured`.
        failed_rank: rank that failed first, where known.
        spec: flattened spec (see `spec.cell_spec.flatten`).
        metrics: column -> number, the columns of `results.metrics.METRICS` except speedups.
        validity: the flags of `results.metrics.FLAGS`, and how the cell was proved.
        environment: device, versions, host, git state, times.
        samples: raw values of the timed steps: `step_time_ms[rank][step]`,
            `data_wait_ms[rank][step]`, `skipped[step]`, `warm_up_steps`; of many ranks, those of `ranks`
            alone (see `recorded_samples`).
    """

    run_id: str
    sweep: str
    cell_id: str
    block: str
    position: int
    attempt: int
    status: Status
    reason: str = ""
    failed_rank: int | None = None
    spec: dict[str, Any]
    metrics: dict[str, float | None] = field(default_factory=dict)
    validity: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def purpose(self) -> str:
        """What the run is for: `SCREENING`, `CHOOSING`, `FRESH`, or "" where it is of a grid's blocks."""
        return str(self.environment.get("purpose") or "")

    @property
    def is_screening(self) -> bool:
        """Whether it is as short as can be, see `Measurement.for_screening`; it enters no interval."""
        return self.purpose == SCREENING

    def to_json(self) -> str:
        """Return the record as JSON with a checksum at its end; non-finite numbers become null."""
        tree = asdict(self)
        tree["spec"] = {key: masked_setting(key, value) for key, value in self.spec.items()}
        text = json.dumps(_finite(tree), indent=1).removesuffix("\n}")
        return f'{text}{_CHECKSUM}{_checksum(text)}"\n}}'

    @classmethod
    def from_json(cls, text: str) -> "RunRecord":
        """Read a record; numbers that are not finite, which other writers leave in JSON, are missing.

        Raises:
            OtherSchemaError: the record is of another schema.
            ValueError: the text is not a whole record, or not as it was written. One without a
                checksum, or in which it is no longer the last line, was written by another program.
        """
        content, is_checked, end = text.rpartition(_CHECKSUM)
        if is_checked and end.rstrip() != f'{_checksum(content)}"\n}}':
            raise ValueError("not a whole run record: its checksum is another one")
        return cls.from_tree(parsed_json(text))

    @classmethod
    def from_tree(cls, tree: Any) -> "RunRecord":
        """Read the parsed JSON of a record.

        Raises:
            OtherSchemaError: it is of another schema.
            ValueError: it is not a whole record.
        """
        if not isinstance(tree, dict) or type(tree.get("schema_version")) is not int:
            raise ValueError("not a run record")
        check_schema(tree["schema_version"])
        known = {f.name for f in fields(cls)}
        try:
            parts: dict[str, Any] = {
                k: {_NAMES[name]: value for name, value in v.items()} if v.__class__ is dict else v
                for k, v in tree.items()
                if k in known
            }
            record = cls(**parts | {"status": Status(tree["status"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a whole run record: {error}") from error
        for part, kind in _KINDS.items():
            if type(getattr(record, part)) not in kind:
                raise ValueError(f"not a whole run record: `{part}` is of another type")
        for part in ("spec", "metrics", "validity", "environment", "samples"):
            if not isinstance(getattr(record, part), dict):
                raise ValueError(f"not a whole run record: `{part}` is no section")
        if computed := OF_TABLES & (record.row().keys()):
            raise ValueError(
                f"not a whole run record: tables compute `{min(computed)}`, and it has one"
            )
        if wrong := [*_wrong_parts(record)]:
            raise ValueError(f"not a whole run record: `{wrong[0]}` is of another type")
        return record

    def row(self) -> dict[str, Any]:
        """Return the record as one flat row of `runs.parquet` (samples left out)."""
        head = {
            "schema_version": self.schema_version,
            "run_id": self.run_id,
            "cell_id": self.cell_id,
            "sweep": self.sweep,
            "block": self.block,
            "position": self.position,
            "attempt": self.attempt,
            "status": str(self.status),
            "reason": self.reason,
            "failed_rank": self.failed_rank,
        }
        return head | self.spec | self.metrics | self.validity | self.environment | head


_NUMBER = {int, float, type(None)}
_CHECKSUM = ',\n "checksum": "'
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("run_id", "sweep", "cell_id", "block", "reason"), (str,)),
    **dict.fromkeys(("position", "attempt"), (int,)),
    "failed_rank": (int, type(None)),
}


class _Names(dict[str, str]):
    """Names of columns, each once in memory: a record has some 150, and a sweep 100,000 records."""

    def __missing__(self, name: str) -> str:
        return self.setdefault(name, name)


_NAMES = _Names()


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _wrong_parts(record: RunRecord) -> Iterator[str]:
    """Yield the parts of a record with which tables compute or group, and that cannot serve for it."""
    for part in (record.spec, record.metrics, record.validity, record.environment):
        yield from misfits(part)
    if not isinstance(record.environment.get("started_at"), str | None):
        yield "started_at"  # by which tables sort
    yield from (key for key, value in record.metrics.items() if type(value) not in _NUMBER)
    samples = record.samples
    if times := samples.get("step_time_ms"):
        lists = isinstance(times, list) and all(isinstance(of_rank, list) for of_rank in times)
        if not lists or not all(set(map(type, t)) <= _NUMBER for t in times):
            yield "samples.step_time_ms"
        elif type(samples.get("warm_up_steps", 0)) is not int:
            yield "samples.warm_up_steps"
        elif not isinstance(samples.get("ranks", []), list):
            yield "samples.ranks"
        elif len(samples.get("skipped", times[0])) < max(map(len, times)):
            yield "samples.skipped"


def utc_now() -> str:
    """Return the present time, see `utc_text`."""
    return utc_text(datetime.now(UTC))


def time_to_begin(earlier: Iterable[RunRecord]) -> str:
    """Return the time in UTC for a run that begins now, later than any at which one of its cell began.

    Runs of a cell are taken in this order: a clock that was set back must not make an old one the latest.

    Args:
        earlier: the runs of the cell.
    """
    now = utc_now()
    with suppress(ValueError, OverflowError, OtherSchemaError):
        began = [str(run.environment.get("started_at") or "") for run in earlier]
        if began and max(began) >= now:
            return utc_text(datetime.fromisoformat(max(began)) + timedelta(milliseconds=1))
    return now


def utc_text(time: datetime) -> str:
    """Return a time in UTC to the millisecond, in ISO 8601, so that text sorts by time."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


# Lines of `commands.jsonl`.


_NOTHING = type(None)
_COMMAND: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("command", "time"), (str,)),
    **dict.fromkeys(("question", "search", "replicate"), (str, _NOTHING)),
    **dict.fromkeys(("metrics", "limit", "baselines"), (dict, _NOTHING)),
    "prune_slowdown": (int, float, _NOTHING),
    **dict.fromkeys(("cells", "published", "reference", "hydra"), (list,)),
}


def is_command(entry: dict[str, Any]) -> bool:
    """Whether a line of `commands.jsonl` has the entries that a command writes."""
    if not fits(entry, _COMMAND, ()):
        return False
    ids = (*entry.get("cells", ()), *(entry.get("baselines") or {}).values())
    return all(isinstance(cell_id, str | None) for cell_id in ids)


# Times of a run's steps: of all ranks where they are few.


MOST_RANKS = 64
"""Of which a record holds every step."""
MOST_TIMES = 500_000
"""Of steps, of all ranks together: readers of records take no more than some times that."""
SAMPLED_TIMES = ("step_time_ms", "data_wait_ms")


def recorded_samples(samples: Mapping[str, Any]) -> dict[str, Any]:
    """Return the samples that go into the record.

    Of many ranks or steps it holds those of the slowest rank, which make its throughput; none where these
    are too many as well.

    Args:
        samples: see `RunRecord`.
    """
    times, begin = samples.get("step_time_ms", []), samples.get("warm_up_steps", 0)
    num_steps = len(times[0]) if times else 0
    if len(times) <= MOST_RANKS and len(times) * num_steps <= MOST_TIMES:
        return dict(samples)
    if num_steps > MOST_TIMES:
        return dict(samples) | {key: [] for key in (*SAMPLED_TIMES, "ranks", "skipped")}
    counted = [step for step in range(begin, num_steps) if not samples["skipped"][step]]
    slowest = max(range(len(times)), key=lambda rank: sum(times[rank][step] for step in counted))
    return dict(samples) | {n: [samples[n][slowest]] for n in SAMPLED_TIMES} | {"ranks": [slowest]}
