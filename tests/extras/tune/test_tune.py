"""Settings take turns in one training, which is the training without; a bad one is out before it updates."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitsweep
from tests.refusals import require
from tests.user_modules import Stack
from vitsweep.errors import BadValueError, ImpossibleCellError, VitsweepError
from vitsweep.extras.guard import planted
from vitsweep.extras.tune import tune as tuning

ONE_THREAD = "resources.threads_per_rank=1"
EQUAL = ("runtime=plain", "runtime=gc_scheduled", "runtime=gc_automatic")
"""Settings with the same kernels."""


def build() -> Stack:
    return Stack(1, 10, 16, 2)


def batches(steps: int, rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator))
        for _ in range(steps)
    ]


def rate(step: int) -> float:
    return 0.01 / (1 + step)


def trained(training: Any, steps: list[Any], first: int = 0) -> dict[str, Tensor]:
    """Return the weights after some steps with a schedule."""
    for number, batch in enumerate(steps, first):
        for group in training.optimizer.param_groups:
            group["lr"] = rate(number)
        training.step(batch)
    found: dict[str, Tensor] = training.weights()
    return found


def alone(settings: str, steps: list[Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with vitsweep.apply(f"{settings} {ONE_THREAD}", build()) as training:
        return trained(training, steps)


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in a.items() if not torch.equal(tensor, b[name])]


def out_of_memory(training: Any) -> Any:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 80.00 GiB.")

    return training.model.register_forward_pre_hook(fail)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BLOCK_STEPS", 4)


@pytest.mark.smoke
@pytest.mark.usefixtures("short_blocks")
def test_a_training_in_turns_is_the_one_without_bit_for_bit_and_bad_settings_are_out(
    tmp_path: Path,
) -> None:
    steps, said = batches(50), list[str]()
    wrong, large = f"optimizer=adamw_foreach {ONE_THREAD}", f"optimizer=adamw_fused {ONE_THREAD}"
    settings = [*(f"{each} {ONE_THREAD}" for each in EQUAL), wrong, large]
    torch.manual_seed(0)
    record = tmp_path / "tune.jsonl"
    with ExitStack() as faults, vitsweep.tune(
        settings, build, tune_steps=44, record=record, on_news=said.append
    ) as tuner:  # fmt: skip
        faults.enter_context(planted.scaled_gradients(tuner._trainings[wrong]))
        out_of_memory(tuner._trainings[large])
        drawn = torch.rand(3)
        found = trained(tuner, steps)
        assert tuner.stays == tuner.setting
        assert tuner._trainings.keys() == {tuner.stays}
        assert set(tuner.left_out) >= {wrong, large}
        assert "FaultFoundError" in tuner.left_out[wrong]
        assert "OutOfMemoryError" in tuner.left_out[large]
    assert apart(found, alone(EQUAL[0], steps)) == []
    torch.manual_seed(0)
    build()
    assert torch.equal(drawn, torch.rand(3)), "models after the first drew other numbers"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    taken = [line["setting"] for line in lines if "seconds" in line]
    assert {*taken[:3]} == {*settings[:3]}
    assert lines[-1]["stays"] == tuner.stays
    assert sum("is out" in sentence for sentence in said) >= 2


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("stop", [1, 6, 8, 30])
def test_a_resumed_search_goes_on(stop: int) -> None:
    steps = batches(40)
    settings = [f"{each} {ONE_THREAD}" for each in EQUAL[:2]]
    torch.manual_seed(0)
    with vitsweep.tune(settings, build, tune_steps=24, on_news=str) as tuner:
        trained(tuner, steps[:stop])
        state = tuner.state_dict()
    with vitsweep.tune([*settings, f"{EQUAL[2]} {ONE_THREAD}"], build, tune_steps=36) as again:
        again.load_state_dict(state)
        assert (again.setting, again.stays) == (tuner.setting, tuner.stays)
        assert again._blocks == tuner._blocks
        found = trained(again, steps[stop:], stop)
        assert again.stays
        assert len(again._blocks) >= len(tuner._blocks)
    assert apart(found, alone(EQUAL[0], steps)) == []


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ("precision=fp32", "one setting"),
        (["precision=fp32", "precision=fp32"], "named twice"),
        (["precision=O1 seed=1", "seed=1 precision=O1"], "are the same setting"),
        ("optimizer=adamw_loop,sgd_loop", "optimizer.kind=SGD"),
        ("optimizer.learning_rate=0.1,0.2", "optimizer.learning_rate=0.2"),
        ("averaging=none,ema", "averaging="),
        ("batch.accumulation_steps=1,2", "batch.accumulation_steps=2"),
        ("precision=fp32,O3", "O3.* trains with `model.*=bfloat16"),
        (["precision=bf16_params", "precision=O3"], "in half precision"),
        (["", "runtime.variables={OMP_PLACES:cores}"], "runtime.variables="),
        (["", "precision=fp8"], "`precision=fp8`"),
    ],
)
def test_settings_that_compute_another_training_are_refused_by_name(
    settings: Any, names: str
) -> None:
    with pytest.raises((BadValueError, VitsweepError, ImpossibleCellError), match=names):
        vitsweep.tune(settings, build)


def test_arguments_of_another_kind_are_refused_when_they_are_given(tmp_path: Path) -> None:
    right = {"settings": "precision=fp32,bf16", "build_model": build}
    for key, values in {
        "settings": (None, 5, tmp_path),
        "build_model": (None, build()),
        "loss": (4,),
        "loss_count": (4,),
        "tune_steps": ("120", 0, 1.5),
        "record": (5, tmp_path / "missing" / "tune.jsonl"),
        "on_news": (3, None),
        "config_dir": (4,),
        "trust": ("yes", None),
    }.items():
        for value in values:
            with pytest.raises(BadValueError, match=f"^`{key}=") as said:
                vitsweep.tune(**right | {key: value})  # type: ignore[arg-type]
            require(str(said.value))
    for settings, name in (
        ([None, ""], "None"),
        ([["seed=1", 3], ""], "3"),
        ([{"cell_id": "x"}, ""], "sweep"),
        ([{"a": 1}, ""], "a=1"),
    ):
        with pytest.raises(BadValueError, match=f"`{name}`"):
            vitsweep.tune(settings, build)  # type: ignore[arg-type]


@pytest.mark.usefixtures("short_blocks")
def test_where_every_setting_is_bad_the_reasons_were_said() -> None:
    said = list[str]()
    torch.manual_seed(0)
    with vitsweep.tune([*EQUAL], build, on_news=said.append) as tuner:
        for training in tuner._trainings.values():
            out_of_memory(training)
        with pytest.raises(VitsweepError, match="No setting is left"):
            tuner.step(*batches(1))
    assert len(said) == 3


class Counting(Stack):
    """Keeps a mean of its images in a buffer that is not saved, and subtracts it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(1, 10, 16, 2)
        self.register_buffer("mean", torch.zeros(1, 8, 8), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(images.detach().mean(0), alpha=0.5)
        return super().forward(images - self.mean)


@pytest.mark.usefixtures("short_blocks")
def test_buffers_that_are_not_saved_move_and_a_step_that_raises_begins_its_block_anew() -> None:
    def loss(outputs: Any, batch: Any) -> Tensor:
        if len(batch[1]) == 3:
            raise ValueError("three")
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    steps, found = batches(20), []
    settings = [f"{each} {ONE_THREAD}" for each in EQUAL[:2]]
    training: Any
    for begin in (
        lambda: vitsweep.apply(settings[0], Counting(), loss),
        lambda: vitsweep.tune(settings, Counting, loss, on_news=str),
    ):
        torch.manual_seed(0)
        with begin() as training:
            trained(training, steps[:7])
            with pytest.raises(ValueError, match="three"):  # in the middle of the second block
                training.step(tuple(each[:3] for each in steps[0]))
            found.append(trained(training, steps[7:], 7))
    assert [block.turn for block in training._blocks] == [1, 1, 2, 2]
    assert apart(*found) == []


def test_a_search_whose_chosen_setting_was_removed_goes_on() -> None:
    settings = [f"{each} {ONE_THREAD}" for each in EQUAL]
    with vitsweep.tune(settings[:2], build) as tuner:
        tuner.step(*batches(1))
        state = tuner.state_dict()
    [other] = {*settings[:2]} - {state["setting"]}
    with vitsweep.tune([state["setting"], settings[2]], build) as again:
        again.load_state_dict({**state, "stays": other, "order": [other]})
        again.step(*batches(1))
        assert again.stays is None
        assert again._trainings.keys() == {state["setting"], settings[2]}
        assert not again.left_out
