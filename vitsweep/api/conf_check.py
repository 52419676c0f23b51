"""`vitsweep check`: the choices of a user's configuration folder, composed, proved and run."""

import re
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from rich.console import Console

from vitsweep.api.functions import collected, measured, rows_of
from vitsweep.api.session import CONFIG, open_session
from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer
from vitsweep.composition.overrides import value_override
from vitsweep.errors import BadValueError, ImpossibleCellError, VitsweepError
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.results.record import Status
from vitsweep.results.user_metrics import check_metrics
from vitsweep.spec.cell_spec import GROUPS, CellSpec
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resources import Machine
from vitsweep.spec.rules import said_by

SMALL = (
    "batch.images_per_step=16", "resources.device=cpu", "resources.threads_per_rank=1",
    "measurement=smoke", "measurement.prove=twin", "measurement.warmup_steps=0",
    "measurement.measured_steps=1", "measurement.phase_steps=1", "sweep.baseline=null",
)  # fmt: skip
"""Cells of a second; each is proved before its one step."""
RANKS = (1, 2)
ONE_RANK = "resources.ranks_per_node=1"
PARTNER = {"model": "data", "data": "model"}
"""Group of a choice that no rule may refuse by itself -> group of what it has to fit."""
FEWEST_WORDS = 6


@dataclass(frozen=True)
class Finding:
    """What was found about one choice.

    Attributes:
        choice: as typed, `group=choice`.
        test: what was tested.
        fault: what is wrong, or "".
        note: what else is worth saying, such as a proof's largest difference.
        is_run: False where the test could not be made here; `note` says why.
    """

    choice: str
    test: str
    fault: str = ""
    note: str = ""
    is_run: bool = True

    @property
    def result(self) -> str:
        """`fine`, `WRONG` or `not run`."""
        return "WRONG" if self.fault else "fine" if self.is_run else "not run"

    def __str__(self) -> str:
        more = f": {self.fault}" if self.fault else f" ({self.note})" if self.note else ""
        return f"{self.choice}: {self.test}: {self.result}{more}"


def check_conf(folder: str | Path, console: Console) -> Iterator[Finding]:
    """Test every choice of a folder; yield what was found as soon as it is.

    A choice has to compose with the defaults of all other groups. One of a technique, a model or data
    is proved equal to plain training and trained for a step, on 1 and on 2 ranks; what a technique
    refuses beside each choice of another group has to be a sentence. A model has to take the default
    data or one of the folder's, and data have to fit the default model or one of the folder's. The
    function of a metric has to be importable, and a named sweep has to have cells that can run.

    Args:
        folder: as for `--config-dir`.
        console: where progress is printed.

    Raises:
        BadValueError: there is no such folder, or it holds no choices.
    """
    composer = Composer(hydra.open_loader(conf_dir(), folder), CONFIG)
    choices = _choices(folder, composer)
    runnable: list[list[str]] = []
    for group, name in choices:
        chosen = [f"{group}={name}"]
        composed = list(_composed(group, name, folder, composer))
        if group in PARTNER and not composed[0].fault:
            chosen, reasons = _with_partner(group, name, choices, composer)
            composed[0] = replace(composed[0], fault=" ".join(reasons))
        yield from composed
        if not composed[0].fault and group in (*GROUPS, *PARTNER):
            runnable.append(chosen)
    for chosen in runnable:
        console.print(f"{' '.join(chosen)}: proved and trained for a step")
        yield from _run(chosen, folder)


def _choices(folder: str | Path, composer: Composer) -> list[tuple[str, str]]:
    """Return group and name of every choice of a folder."""
    choices = [
        (path.parent.name, path.stem)
        for path in sorted(Path(folder).glob("*/*.yaml"))
        if path.parent.name != "hydra"
    ]
    if not choices:
        raise BadValueError(
            f"`{folder}` holds no choices: put a YAML into a folder named like its group, such as "
            f"`{Path(folder) / 'precision' / 'mine.yaml'}`."
        )
    groups = {*composer.default_choices, "sweep"}
    if foreign := sorted({group for group, _ in choices} - groups):
        raise BadValueError(
            f"`{folder}`: {', '.join(f'`{name}`' for name in foreign)} in it are no groups; there are "
            f"{', '.join(f'`{name}`' for name in sorted(groups))}. Name the folder that holds them, such as "
            "`my_conf` with `my_conf/precision/mine.yaml`."
        )
    return choices


def _composed(group: str, name: str, folder: str | Path, composer: Composer) -> Iterator[Finding]:
    choice = f"{group}={name}"
    try:
        if group == "sweep":
            yield _named_sweep(name, folder)
            return
        tree = composer.compose([choice]).tree
        if group == "metric":
            check_metrics(tree["metric"]["columns"])
            yield Finding(choice, "its functions can be imported")
            return
        plan_cell(composer.compose([choice, ONE_RANK]), Machine.here())
        yield Finding(choice, "composes")
        if group in GROUPS:
            yield from _conflicts(group, choice, composer)
    except Exception as error:  # of the user's code too
        yield Finding(choice, "composes", fault=_fault(error))


def _fault(error: Exception) -> str:
    """Return an error as a sentence: its own, or what raised where in code of the user's."""
    if isinstance(error, (VitsweepError, yaml.YAMLError)):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"`{frame.name}` raised {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})."


def _with_partner(
    group: str, name: str, choices: Sequence[tuple[str, str]], composer: Composer
) -> tuple[list[str], Sequence[str]]:
    """Find data for a model, or a model for data: the default, or one of the same folder.

    Returns:
        The choice with its partner, and why one rank cannot run it with the default partner; empty
        where it can be run.
    """
    choice, other = f"{group}={name}", PARTNER[group]
    first: Sequence[str] = ()
    for partner in ([], *([f"{other}={own}"] for its, own in choices if its == other)):
        try:
            cell = plan_cell(composer.compose([*SMALL, choice, *partner, ONE_RANK]), Machine.here())
        except (VitsweepError, yaml.YAMLError) as error:
            reasons: Sequence[str] = (str(error),)
        else:
            reasons = cell.reasons
        if not reasons:
            return [choice, *partner], ()
        first = first or reasons
    return [choice], first


def _named_sweep(name: str, folder: str | Path) -> Finding:
    session = open_session([f"+sweep={name}"], Console(quiet=True), folder)
    cells = [plan_cell(cell, session.launcher.machine()) for cell in session.cells]
    refused = [cell for cell in cells if cell.reasons]
    fault = " ".join(refused[0].reasons) if len(refused) == len(cells) else ""
    note = f"{len(cells)} cells, {len(refused)} of them refused here"
    return Finding(f"+sweep={name}", "composes", fault, note)


def _conflicts(group: str, choice: str, composer: Composer) -> Iterator[Finding]:
    """Try the technique alone and beside each choice of the other groups; read what refuses it.

    These are all reasons that it gives itself, and those of other rules that name it.
    """
    test, reasons, tried, refused = "its conflicts are sentences", dict[str, None](), 0, 0
    alone = [f"resources.ranks_per_node={ranks}" for ranks in RANKS]
    others = [f"{g}={option}" for g in GROUPS if g != group for option in composer.options(g)]
    for beside in (*alone, *others):
        try:
            cell = plan_cell(composer.compose([choice, beside]), Machine.here())
            own = _own_reasons(cell.spec, group)
        except Exception as error:  # of the user's code too
            if _can_be_planned(beside, composer):
                yield Finding(choice, test, fault=f"beside `{beside}`: {_fault(error)}")
                return
            continue  # the other choice is wrong, which is said where it is tested itself
        found = [*own, *(reason for reason in cell.reasons if choice in reason)]
        reasons |= dict.fromkeys(found)
        tried, refused = tried + 1, refused + bool(found)
    wrong = [reason for reason in reasons if not is_sentence(reason)]
    fault = f"no full sentence that names a way out: {wrong[0]!r}" if wrong else ""
    yield Finding(choice, test, fault, f"{len(reasons)} found")
    if refused == tried:
        note = (
            f"it was refused in all {tried} cells that it was tried in, so that it could not be compared "
            f"with plain training: {next(iter(reasons))}"
        )
        yield Finding(choice, "some cell can run with it", note=note, is_run=False)


def _can_be_planned(override: str, composer: Composer) -> bool:
    try:
        plan_cell(composer.compose([override]), Machine.here())
    except Exception:  # of the user's code too
        return False
    return True


def _own_reasons(cell: CellSpec, group: str) -> list[str]:
    """Return the reasons that a choice gives itself, unless the model refuses its whole group."""
    if group in cell.model.refused(cell):
        return []
    return [*said_by(cell, group, "conflicts"), *said_by(cell, group, "lacking_here")]


def is_sentence(reason: str) -> bool:
    """Return whether a reason for refusing a cell is a sentence with a setting as typed in it."""
    return (
        reason.endswith(".")
        and len(reason.split()) >= FEWEST_WORDS
        and re.search(r"`[\w.]+=?[^`]*`", reason) is not None
    )


def _run(chosen: Sequence[str], folder: str | Path) -> Iterator[Finding]:
    """Prove and train a cell with the first choice, beside others, on each number of ranks."""
    choice = chosen[0]
    with tempfile.TemporaryDirectory(prefix="vitsweep-check-") as results:
        for ranks in RANKS:
            test = f"equals plain training on {ranks} rank{'s' if ranks > 1 else ''}"
            where = [
                value_override("sweep.folder", results),
                f"sweep.name=ranks_{ranks}",
                f"resources.ranks_per_node={ranks}",
            ]
            try:
                row = _only_row([*SMALL, *chosen, *where], folder)
            except ImpossibleCellError as error:
                yield Finding(choice, test, note=" ".join(error.reasons), is_run=False)
                continue
            except Exception as error:  # of the user's code too
                yield Finding(choice, test, fault=_fault(error))
                continue
            fine = row["status"] == Status.measured
            fault = "" if fine else f"{row['status']}: {row['reason']}"
            yield Finding(choice, test, fault, str(row.get("proved") or "") if fine else "")


def _only_row(overrides: Sequence[str], folder: str | Path) -> dict[str, object]:
    session = open_session(overrides, Console(quiet=True), folder)
    with measured(session) as result:
        [row] = rows_of(collected(result)[1], result.plan)
    return dict(row)
