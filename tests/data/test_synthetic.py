import pytest
import torch

from tests.choices import choice
from tests.data.cells_and_worlds import cell, world

SMALL = {"num_train": 100, "num_test": 10, "num_distinct": 6}


def opened(name: str, rank: int = 0, replicas: int = 1, seed: int = 0, **overrides):
    data = choice("data", name, **SMALL, **overrides)
    asked = cell(images_per_step=8, resolution_px=16, replicas=replicas, seed=seed)
    return data.open(asked, world(rank, replicate=replicas))


def test_synthetic_images_have_the_asked_shape_and_come_round_again():
    batches = opened("synthetic", num_channels=5)
    images, labels = next(batches.train(0))

    assert (images.shape, images.dtype) == ((8, 5, 16, 16), torch.float32)
    assert (labels.dtype, int(labels.max()) < 1000) == (torch.int64, True)
    assert len(list(batches.train(0))) == 12
    assert len(images.flatten(1).unique(dim=0)) <= 6
    assert sum(len(x) for x, _ in batches.test()) == batches.num_test == 10


@pytest.mark.parametrize("name", ["synthetic", "synthetic_field"])
def test_replicas_share_a_global_batch(name):
    whole = next(opened(name).train(1))
    halves = [next(opened(name, rank, 2).train(1)) for rank in range(2)]

    for tensor, parts in zip(whole, zip(*halves, strict=True), strict=True):
        assert torch.equal(tensor, torch.cat(parts))


@pytest.mark.parametrize("name", ["synthetic", "synthetic_field"])
def test_the_seed_decides_the_images(name):
    assert torch.equal(next(opened(name).train(0))[0], next(opened(name).train(0))[0])
    assert not torch.equal(next(opened(name).train(0))[0], next(opened(name, seed=1).train(0))[0])


def test_targets_are_the_first_channels_blown_on():
    fields, targets = next(
        opened("synthetic_field", num_channels=4, num_classes=2, wind_px=3).train(0)
    )

    assert (fields.shape, targets.shape) == ((8, 4, 16, 16), (8, 2, 16, 16))
    torch.testing.assert_close(targets[..., 3:], fields[:, :2, :, :-3])


def test_fields_are_normalised_and_smoother_than_noise():
    fields, _ = next(opened("synthetic_field").train(0))
    white, _ = next(opened("synthetic_field", smoothness=0.0).train(0))

    def roughness(x: torch.Tensor) -> float:
        return float((x - x.roll(1, -1)).square().mean())

    torch.testing.assert_close(fields.std((-2, -1)), torch.ones(8, 48))
    torch.testing.assert_close(white.mean((-2, -1)), torch.zeros(8, 48), atol=1e-5, rtol=0)
    assert roughness(fields) < roughness(white) / 4


def test_power_falls_with_the_wave_number_as_asked():
    from vitsweep.data.synthetic import noise, smooth

    fields = smooth(noise((256, 64, 64), torch.Generator().manual_seed(0)), 3.0)
    power = torch.fft.rfft2(fields).abs().square().mean(0)
    assert float(power[0, 2] / power[0, 16]) == pytest.approx(8**3, rel=0.4)


def test_heads_that_do_not_fit_are_refused():
    field, plain = choice("data", "synthetic_field"), choice("data", "synthetic")

    assert [*field.conflicts(cell(field, head="dense"))] == []
    (reason,) = field.conflicts(cell(field))
    assert reason.endswith("which has a target field per image: use `model.head=dense`.")
    (reason,) = plain.conflicts(cell(plain, head="dense"))
    assert reason.endswith("use `model.head=classify`.")


def test_more_targets_than_inputs_and_too_few_images_are_refused_together():
    field = choice("data", "synthetic_field", num_channels=2, num_train=4, num_test=1)
    reasons = list(field.conflicts(cell(field, head="dense", replicas=2, epochs=1)))

    assert "or a larger `data.num_train` and `data.num_test`." in reasons[0]
    assert reasons[1].startswith("`task=train` tests on 1 images of `data=synthetic_field`, fewer")
    assert "`data.num_classes=48` channels cannot be predicted" in reasons[2]
