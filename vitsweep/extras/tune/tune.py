"""`vitsweep.tune`: settings that compute the same take turns in a training, until the fastest is found."""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from vitsweep.api.session import as_overrides
from vitsweep.collectives.primitives import from_first, gathered
from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import expand
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.extras.guard.arguments import open_record, require
from vitsweep.extras.guard.check import check, refuse_unchecked
from vitsweep.extras.take_home.apply import Applied, Loss, apply
from vitsweep.extras.take_home.asked_cell import Cell, place
from vitsweep.extras.take_home.moved import move
from vitsweep.extras.tune.choice import Block, between, next_turn
from vitsweep.extras.tune.vote import voted
from vitsweep.model.module_look import as_it_was, listed
from vitsweep.objectives.cross_entropy import OwnCount
from vitsweep.planning.blocks import BalancedOrder
from vitsweep.spec.menu import conf_dir
from vitsweep.training.checkpoint import shards_of_training
from vitsweep.training.checkpoint_files import course
from vitsweep.training.timed_steps import StepClock

BLOCK_STEPS, UNTIMED_STEPS = 20, 2
"""Steps that a setting takes in a row, and those of them, after a switch, that are not timed."""


def tune(
    settings: str | Sequence[Cell], build_model: Callable[[], nn.Module], loss: Loss | None = None, *,
    loss_count: OwnCount | None = None, tune_steps: int = 2000, record: str | Path | None = None,
    on_news: Callable[[str], object] = print, config_dir: str | Path | None = None, trust: bool = False,
) -> "Tuner":  # fmt: skip
    """Put the techniques of several settings around models of your own, and train on with the fastest.

    They take turns in one training, and each step trains. Under torchrun or srun every rank calls it.

    Args:
        settings: that compute the same training: cells as `vitsweep.apply` takes them, or a grid such as
            `"precision=O1,O2 sharding=ddp,fsdp"`. The first stays where none is shown to be the fastest.
        build_model: returns a new model; called once for each setting, with the same random numbers.
        loss: as of `vitsweep.apply`.
        loss_count: as of `vitsweep.apply`.
        tune_steps: optimizer steps of the training after which the search ends in any case.
        record: file of JSON lines to which rank 0 adds each block, each setting that is out, and the result.
        on_news: called on rank 0 with a sentence for each setting that is out, and the result.
        config_dir: as of `vitsweep.apply`.
        trust: as of `vitsweep.apply`.

    Raises:
        BadValueError: there is one setting only, one cannot be read, two are the same, an argument is of
            another kind, or `record` cannot be written.
        ImpossibleCellError: as of `vitsweep.apply`, of any setting.
        VitsweepError: settings compute another training than the first, or cannot be checked.
    """
    require(
        settings=settings, build_model=build_model, loss=loss, loss_count=loss_count, trust=trust
    )
    require(tune_steps=tune_steps, record=record, on_news=on_news, config_dir=config_dir)
    cells = _named(settings, config_dir)
    open_record(record, place()[0])  # fails now, and not after a block
    models = []
    for _ in [*cells][1:]:
        with as_it_was():
            models.append(build_model())
    models.append(build_model())  # the last, so that random numbers go on as after one
    applied = partial(apply, loss=loss, loss_count=loss_count, config_dir=config_dir, trust=trust)
    with ExitStack() as built:
        tuner = built.enter_context(Tuner([*cells], tune_steps, record, on_news))
        for name, cell in cells.items():
            error: Exception | None = None
            try:
                tuner._trainings[name] = applied(cell, models.pop())
            except torch.OutOfMemoryError as found:
                if not tuner._trainings:
                    raise
                error = found
            tuner._agree(name, error)
        _refuse_apart(tuner._trainings)
        built.pop_all()
    return tuner


def _named(settings: str | Sequence[Cell], config_dir: str | Path | None) -> dict[str, Cell]:
    """Return the cells by what was typed, or by their ids."""
    if isinstance(settings, str):
        composer = Composer(hydra.open_loader(conf_dir(), config_dir))
        settings = [cell.overrides for cell in expand(as_overrides(settings, {}), composer)]
    found: dict[str, Cell] = {}
    for cell in settings:
        given: Any = cell
        is_row, is_words = hasattr(given, "keys"), isinstance(given, list | tuple)
        row = given.get("cell_id", given) if is_row else given
        name = " ".join(map(str, given)) if is_words else str(row)
        if (name or "the default") in found:
            raise BadValueError(f"`{name}` is named twice in `settings`: name each setting once.")
        found[name or "the default"] = cell
    if len(found) < 2:
        raise BadValueError(
            f"`settings={settings!r:.80}` is one setting, and `vitsweep.tune` chooses among several: give a "
            'grid such as `"precision=O1,O2"`, or use `vitsweep.apply`.'
        )
    return found


def _refuse_apart(trainings: Mapping[str, Applied]) -> None:
    """Refuse settings that compute another training than the first, keep other tensors, or are equal."""
    alike = dict[str, str]()
    for name, each in trainings.items():
        other = alike.setdefault(each.cell.cell_id, name)
        if other != name:
            raise BadValueError(
                f"`{name}` and `{other}` in `settings` are the same setting: name each setting once."
            )
    (first, wanted), *_ = facts = [(name, _facts(each)) for name, each in trainings.items()]
    for name, found in facts:
        refuse_unchecked(trainings[name])
        if keys := [k for k in {**wanted, **found} if wanted.get(k) != found.get(k)]:
            own, other = (" ".join(f"`{k}={x.get(k)}`" for k in keys[:4]) for x in (found, wanted))
            raise VitsweepError(
                f"`{name}` trains with {own}, and `{first}` with {other}: settings of `vitsweep.tune` must "
                "compute the same training, so leave one of them out."
            )
        if half := [k for k, v in found.items() if str(v).startswith(("float16 ", "bfloat16 "))]:
            raise VitsweepError(
                f"`{name}` keeps `{half[0]}` in half precision, and settings of `vitsweep.tune` take over "
                "each other's state without rounding: use a precision with float32 weights or masters, such "
                "as `precision=O2`."
            )


def _facts(training: Applied) -> dict[str, Any]:
    """Return what must be equal: what decides the course of the training, and types of its tensors."""
    cell, shards = training.cell, shards_of_training(training.trainer)
    own = {s.name: f"{s.values.dtype} {list(s.shape)}".removeprefix("torch.") for s in shards}
    found = course(cell) | {name: kind for rank in gathered(own) for name, kind in rank.items()}
    found["batch.accumulation_steps"] = cell.batch.accumulation_steps
    found["runtime.variables"] = cell.runtime.variables
    found["data-parallel ranks"] = cell.mesh.data_parallel_size
    return found


class Tuner:
    """A training in which settings take turns.

    All that is not here is of the training under the setting of now, as `vitsweep.apply` returns it:
    `predict`, `averaged`, `weights`, `cell`, `world`; `model` and `optimizer` are others after a switch.

    Attributes:
        setting: under which the model is now.
        stays: the setting that was chosen; None while the search goes on.
        left_out: setting -> why it takes no turns any more.
    """

    def __init__(
        self, settings: Sequence[str], tune_steps: int, record: Any, on_news: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.setting, self.left_out = settings[0], dict[str, str]()
        self.stays: str | None = None
        self._settings, self._tune_steps = settings, tune_steps
        self._record, self._on_news = record, on_news
        self._trainings: dict[str, Applied] = {}
        self._checked: set[str] = set()
        self._blocks: list[Block] = []
        self._order: list[str] = []
        self._turn = self._steps = 0

    @property
    def training(self) -> Applied:
        """The training under the setting of now, as `vitsweep.apply` returns it."""
        return self._trainings[self.setting]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.training, name)

    def step(self, batch: Any) -> Tensor:
        """Train on a batch, as the step of `vitsweep.apply` does; every 20 steps another setting may do it.

        Raises:
            VitsweepError: as of `vitsweep.apply`; or a setting failed on some ranks and not on all alike, and
                `state_dict` returns the state before this step; or none is left.
        """
        training = self.training
        if self.stays == self.setting or training.trainer.is_averaged:
            return training.step(batch)
        taken, self._steps = self._steps, 0  # a step that raises begins the block anew
        if not taken:
            loss = self._first_step(batch)
            self._clock, self._skipped = StepClock(self.training.world.device), list[Any]()
        elif taken < UNTIMED_STEPS:
            loss = training.step(batch)
        else:
            self._clock.mark()
            loss = training.step(batch)
            self._clock.mark()
            self._skipped += training.trainer.skipped[-1:] or [False]
        self._steps = taken + 1
        if self._steps == BLOCK_STEPS:
            self._end_block()
        return loss

    def _first_step(self, batch: Any) -> Tensor:
        """Take the first step of a block under the next setting that can."""
        while True:
            if not self._order:
                self._begin_turn()
            name = self._order[0]
            is_new, error = name not in self._checked, None
            try:
                self._take_over(name, batch)
            except Exception as found:
                error = found
            if not (is_new or error) or self._agree(name, error):
                self.setting = name
                self._free()
                return self.training.step(batch)

    def _take_over(self, name: str, batch: Any) -> None:
        training = self._trainings[name]
        if name != self.setting:
            move(self.training.trainer, training.trainer)
        if name not in self._checked:
            training.micro_batches(batch)  # which looks at the model
            if check(training, batch, raise_on_fault=True).verdict == "sound":
                self._checked.add(name)

    def _agree(self, name: str, error: Exception | None) -> bool:
        """Return whether an attempt at a setting failed on no rank; it is out where it did."""
        why, is_alike = voted(error, self.training.world)
        if why:
            self._leave_out({name: why})
        if why and not is_alike:
            raise VitsweepError(
                f"`{name}` failed on some ranks and not on all alike: {why}. The state before this step is "
                "kept: save `state_dict()` of each rank, and a resumed training leaves the setting out."
            ) from error
        return not why

    def _leave_out(self, reasons: Mapping[str, str]) -> None:
        self.left_out |= reasons
        self._order = [name for name in self._order if name not in reasons]
        for name, why in reasons.items():
            self._tell(f"`{name}` is out: {why}", left_out=name)
        if self.left_out.keys() >= {*self._settings}:
            raise VitsweepError(
                f"No setting is left of {listed([*self._settings])}: the sentences before this one say why."
            )
        self._free()

    def _free(self) -> None:
        """Free the models and optimizers of settings that take no turns any more."""
        kept = {self.stays} if self.stays else {*self._settings} - {*self.left_out}
        for name in {*self._trainings} - kept - {self.setting}:
            self._trainings.pop(name).close()
            gc.collect()
            torch.cuda.empty_cache()

    def _end_block(self) -> None:
        """Note the time of a block on the slowest rank, and end the turn after its last one."""
        times = zip(self._clock.times_ms()[::2], self._skipped, strict=True)
        own = [time for time, is_skipped in times if not is_skipped]
        ranks = gathered(sum(own) / len(own) / 1e3 if own else None)
        if own:
            self._blocks.append(Block(self._turn, self.setting, max(ranks)))
        self._order, self._steps = self._order[1:], 0
        self._tell("", setting=self.setting, turn=self._turn, seconds=ranks)
        if not self._order or self.training.trainer.steps_taken >= self._tune_steps:
            self._begin_turn()

    def _begin_turn(self) -> None:
        """Let rank 0 choose whose turn comes next, or which setting stays."""
        is_first = self.training.world.rank == 0
        order, out, self.stays, said = from_first(self._chosen() if is_first else None)
        self._leave_out(out)
        self._order, self._turn = order, self._turn + 1
        if self.stays:
            self._tell(said, stays=self.stays)
            self._free()

    def _chosen(self) -> tuple[list[str], dict[str, str], str | None, str]:
        """Return the order of the next turn, what is out, and which setting stays and why."""
        left, out = next_turn(self._blocks, self._settings, self.left_out)
        if len(left) > 1 and self.training.trainer.steps_taken < self._tune_steps:
            past: dict[int, list[str]] = {}
            for block in self._blocks:
                past.setdefault(block.turn, []).append(block.setting)
            return BalancedOrder(past.values()).next_block(left), out, None, ""
        fastest, stays = left[0], min(left, key=self._settings.index)
        said = f"`{stays}` stays."
        if len(left) > 1:
            said = f"nothing is shown to be the fastest in {self._tune_steps:,} steps, and {said}"
        pairs = [(n, between(self._blocks, fastest, n)) for n in self._settings if n != fastest]
        sentences = [found.sentence(fastest, name) for name, found in pairs if found.num_blocks]
        return [stays], out, stays, " ".join([said, *sentences[:1]])

    def _tell(self, said: str, **facts: Any) -> None:
        """Add a line to the record, and say what the user should hear."""
        if self.training.world.rank:
            return
        step = self.training.trainer.steps_taken
        if said:
            self._on_news(f"Step {step}: {said}")
        if self._record is not None:
            with Path(self._record).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **facts, "said": said}) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training, as `vitsweep.apply` does, with that of the search.

        Returns:
            `training`: under `setting`, of this rank; `blocks`: turn, setting and seconds of each; `order`:
            settings whose blocks are left in this `turn`; `left_out`, `stays`. A block that is not over is
            begun anew.
        """
        search = {
            "blocks": [list(b) for b in self._blocks],
            "order": self._order,
            "turn": self._turn,
        }
        search |= {"left_out": dict(self.left_out), "stays": self.stays, "setting": self.setting}
        return search | {"training": self.training.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank; settings may have been added since.

        Raises:
            VitsweepError: the state is of another model, or of a setting that is not there.
        """
        name, step = state.get("setting"), state.get("training", {}).get("step")
        ranks = gathered([name, step, state.get("left_out")])
        if name not in self._trainings or any(rank[:2] != [name, step] for rank in ranks):
            raise VitsweepError(
                f"The state is of `{name}` after step {step}, this tuner has {listed([*self._trainings])}, "
                f"and ranks have states of {[rank[:2] for rank in ranks]}: load what `state_dict` of a tuner "
                "returned after one step on all ranks, into a new tuner that has this setting."
            )
        self._trainings[name].load_state_dict(state["training"])
        self.setting = name
        self.left_out |= {
            n: why for rank in ranks for n, why in rank[2].items() if n in self._settings
        }
        first = from_first({k: state[k] for k in ("blocks", "order", "turn", "stays")})
        self._turn, self._steps = first["turn"], 0
        self.stays = first["stays"] if first["stays"] in self._trainings else None
        self._blocks = [Block(*block) for block in first["blocks"] if block[1] in self._settings]
        self._order = [n for n in first["order"] if n in {*self._trainings} - {*self.left_out}]
        self._free()

    def close(self) -> None:
        """Leave all settings, as `close` of `vitsweep.apply` does. Every rank calls it."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        for training in self._trainings.values():
            training.__exit__(*raised)
