import pytest
import torch
from torch.utils import flop_counter

from tests.choices import choice
from tests.flops import recomputed_score_flops
from tests.model.test_flops import CPU_FLASH
from tests.shapes import replace
from vitsweep.model import flops
from vitsweep.objectives.diffusion_spec import SINUSOIDS
from vitsweep.objectives.dit import DiT
from vitsweep.spec.technique import SOFTMAX

AUTO = {"in_channels": 3, "num_classes": 5}
NANO = choice("model", "dit_nano", **AUTO, depth=2, width=48, num_heads=3, mlp_width=80)


def inputs(spec, images=3, side=8, dtype=torch.float64) -> dict[str, torch.Tensor]:
    return {
        "image": torch.randn(images, spec.in_channels, side, side, dtype=dtype),
        "time": torch.randn(images, SINUSOIDS, dtype=dtype),
        "label": torch.arange(images) % (spec.num_classes + 1),
    }


def test_flops_are_those_of_torch_and_parameters_those_of_the_network():
    for spec in [NANO, replace(NANO, patch_px=4, width=64, num_heads=4)]:
        model = DiT(spec, resolution_px=8).double()
        counter = flop_counter.FlopCounterMode(display=False, custom_mapping=CPU_FLASH)

        with counter:
            model(**inputs(spec)).sum().backward()

        scores = recomputed_score_flops(spec, 8, "mean")
        assert counter.get_total_flops() == 3 * (spec.train_flops(8, SOFTMAX) + scores)
        counted = sum(p.numel() for p in model.parameters())
        assert counted == flops.num_parameters(spec, 8, "mean")


def test_dit_xl_2_has_the_published_size():
    spec = choice("model", "dit_xl_2", in_channels=4, num_classes=1000)

    assert spec.train_flops(32, SOFTMAX) == pytest.approx(6 * 118.6e9, rel=5e-3)  # its table 4
    assert flops.num_parameters(spec, 32, "mean") == pytest.approx(675e6, rel=1e-3)


def test_flops_and_parameters_of_stdit():
    shape = {"frames": 3, "depth": 2, "width": 48, "num_heads": 3, "mlp_width": 80}
    for texts in [{"text_width": None, "text_vectors": 1}, {"text_width": 7, "text_vectors": 5}]:
        spec = choice("model", "stdit_nano", **AUTO, **shape, **texts)
        model = spec.own_network(8).double()
        batch = {
            "image": torch.randn(1, 3, 3, 8, 8, dtype=torch.float64),
            "time": torch.randn(1, SINUSOIDS, dtype=torch.float64),
        }
        if spec.text_width:
            batch["text"] = torch.randn(1, 5, 7, dtype=torch.float64)
            batch |= {"text_length": torch.tensor([3]), "dropped": torch.tensor([False])}
        else:
            batch["label"] = torch.tensor([1])
        counter = flop_counter.FlopCounterMode(display=False, custom_mapping=CPU_FLASH)

        with counter:
            model(**batch).sum().backward()

        # Fused attention computes the scores of either attention again.
        cross = 2 * spec.depth * spec.num_patches(8) * spec.text_vectors * spec.width
        again = recomputed_score_flops(spec, 8, "mean") + cross
        assert counter.get_total_flops() == spec.train_flops(8, SOFTMAX) + again
        assert sum(p.numel() for p in model.parameters()) == spec.own_parameters()


def test_an_untrained_network_predicts_nothing_and_a_twin_something():
    for spec, is_zero in [(NANO, True), (NANO.twin(depth=2, num_classes=5), False)]:
        predicted = DiT(spec, resolution_px=8).double()(**inputs(spec))

        assert predicted.shape == (3, 6, 8, 8)
        assert bool(predicted.any()) is not is_zero
