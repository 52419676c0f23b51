"""Where boxes of whole tensors lie, numbers by hand; the sketch of gradients by its formula."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.training.alone import alone, trainer_of
from vitsweep.collectives.parallel_linear import Block
from vitsweep.collectives.primitives import aligned, local, pad, unpadded_length, view_like
from vitsweep.spec.generators import named_seed
from vitsweep.training.shards import (
    MOST,
    SKETCHES,
    Updated,
    _boxes_of_run,
    _joined,
    _norm_and_projections,
    _Part,
    _sketch,
    _some,
    plain_weights,
    untouched,
    whole,
)


def test_a_run_of_memory_is_cut_into_boxes_in_the_order_of_its_strides() -> None:
    images = torch.arange(24.0).reshape(2, 3, 2, 2)
    for like in (images, images.contiguous(memory_format=torch.channels_last)):
        memory = like.as_strided((24,), (1,))
        for start, stop in ((0, 24), (0, 12), (5, 19), (7, 8)):
            rebuilt = torch.full_like(images, -1)
            for offsets, box in _boxes_of_run(memory[start:stop], like, start):
                part = rebuilt
                for axis, offset in enumerate(offsets):
                    part = part.narrow(axis, offset, box.shape[axis])
                part.copy_(box)
            held = rebuilt[rebuilt >= 0]
            assert sorted(held.tolist()) == sorted(memory[start:stop].tolist())
            assert torch.equal(rebuilt[rebuilt >= 0], images[rebuilt >= 0])


def test_a_part_that_is_split_over_ranks_lies_in_blocks_of_the_whole() -> None:
    """Rows 0 and 1 of q, k and v lie at 2, 6 and 10 of the whole on the second of two ranks."""
    parameter = nn.Parameter(torch.arange(18.0).reshape(6, 3))
    blocks = tuple(Block(0, 2 * part, 4 * part + 2, 2) for part in range(3))
    part = _Part(parameter, (12, 3), blocks)

    def places(low: int, high: int) -> list[tuple[tuple[int, ...], list[float]]]:
        values = parameter.detach()[low:high]
        found = part.in_whole((low, 0), values)
        return [(offsets, box[:, 0].tolist()) for offsets, box in found]

    assert places(0, 6) == [((2, 0), [0, 3]), ((6, 0), [6, 9]), ((10, 0), [12, 15])]
    assert places(1, 3) == [((3, 0), [3]), ((6, 0), [6])]
    assert places(2, 4) == [((6, 0), [6, 9])]
    assert places(5, 6) == [((11, 0), [15])]
    columns = _Part(parameter, (6, 6), (Block(1, 0, 3, 3),))
    [(offsets, box)] = columns.in_whole((0, 1), parameter.detach()[:, 1:])
    assert (offsets, box.shape) == ((0, 4), (6, 2))
    [(offsets, box)] = _Part(parameter, (6, 3)).in_whole((4, 1), parameter.detach()[4:, 1:])
    assert (offsets, box.shape) == ((4, 1), (2, 2))


def test_state_of_another_shape_belongs_to_each_parameter_as_a_whole() -> None:
    tensor = nn.Parameter(torch.zeros(2, 3))
    place = Updated(tensor, ("a", "b"), lambda values: [whole("a", values), whole("b", values)])
    for values in (torch.ones(2, 3), torch.tensor(7.0)):
        found = list(place.shards("exp", values))
        assert [shard.name for shard in found] == ["exp.a", "exp.b"]
        assert all(shard.offsets == (0,) * values.ndim for shard in found)
        assert all(torch.equal(shard.values, values) for shard in found)
        assert all(shard.shape == tuple(values.shape) for shard in found)


def test_frozen_weights_and_buffers_are_what_no_optimizer_updates() -> None:
    trainer = trainer_of(alone())
    trainer.model.head.bias.requires_grad_(False)  # type: ignore[union-attr]
    trainer.model.register_buffer("seen", torch.tensor([1.0, 2.0]))
    found = {shard.name: shard.values.tolist() for shard in untouched(trainer)}
    assert found == {"model.head.bias": [0.0] * 10, "model.seen": [1.0, 2.0]}
    weights = plain_weights(trainer)
    assert weights["seen"].tolist() == [1.0, 2.0]
    assert weights.keys() == trainer.model.state_dict().keys()
    held = trainer.model.state_dict()
    assert all(w.data_ptr() != held[name].data_ptr() for name, w in weights.items()), "copies"
    assert plain_weights(trainer, on_first=True).keys() == weights.keys()
    other = SimpleNamespace(world=SimpleNamespace(rank=1, shape=trainer.world.shape))
    other.model, other.reshard, other.names = trainer.model, trainer.reshard, trainer.names
    assert plain_weights(other, on_first=True) == {}  # type: ignore[arg-type]


def test_split_matrices_are_joined_by_the_axis_of_their_kind(monkeypatch) -> None:
    from vitsweep.collectives.parallel_linear import ColumnParallelLinear, RowParallelLinear
    from vitsweep.training import shards

    pieces = [torch.arange(8.0).reshape(4, 2), 10 + torch.arange(8.0).reshape(4, 2)]
    monkeypatch.setattr(shards, "gathered_tensors", lambda *_: [{"part": p} for p in pieces])
    axis = SimpleNamespace(get_group=lambda: None)
    world = SimpleNamespace(axis=lambda name: axis)
    row, column = object.__new__(RowParallelLinear), object.__new__(ColumnParallelLinear)
    vars(column)["parts"] = 2
    joined = _joined(pieces[0], row, world)  # type: ignore[arg-type]
    assert joined[1].tolist() == [2, 3, 12, 13]
    joined = _joined(pieces[0], column, world)  # type: ignore[arg-type]
    assert joined[:, 0].tolist() == [0, 2, 10, 12, 4, 6, 14, 16]


def test_projections_have_the_sign_of_a_column_times_that_of_a_row() -> None:
    signs = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    for values in (torch.tensor([1.0, 2.0, 4.0]), torch.tensor([[3.0 + 4j]])):
        flat = torch.view_as_real(values).flatten() if values.is_complex() else values
        wanted = [0.0, 0.0]
        for place, number in enumerate(flat.tolist()):
            row, column = divmod(place, 2)
            for each in range(2):
                wanted[each] += number * float(signs[column, each] * signs.flip(0)[row, each])
        found = _norm_and_projections(values, signs)
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx([float(flat.norm()), *wanted])


def test_a_sketch_weighs_each_tensor_by_its_own_norm() -> None:
    tensors = {"a": [3.0, 1.0, -2.0, 0.5, 3.0], "b": [0.001, 0.0005, 0.0, 0.001, -0.001]}
    norm = (9 + 1e-6) ** 0.5
    least = 1e-3 * norm
    wanted, weight = [0.0] * SKETCHES, 0.0
    for name, (length, *projections) in tensors.items():
        smooth = (length**2 + least**2) ** 0.5
        weight += (length / smooth) ** 2
        for place, projection in enumerate(projections):
            sign = -1.0 if named_seed(0, name) >> place & 1 else 1.0
            logarithm = float(torch.tensor(smooth / least, dtype=torch.float64).log())
            wanted[place] += sign * (projection / smooth + logarithm)
    found = _sketch(tensors)
    assert found[0] == pytest.approx(norm)
    assert found[1:] == pytest.approx([number / weight**0.5 for number in wanted])
    assert _sketch({}) == _sketch({"a": [0.0] * 5}) == _sketch({"a": [float("inf")] * 5}) == []
    assert _sketch({"a": [float("nan")] * 5}) == []


def test_at_most_so_many_numbers_of_a_tensor_are_looked_at_by_an_odd_stride() -> None:
    for count, stride in ((1, 1), (MOST, 1), (MOST + 1, 3), (3 * MOST, 3), (3 * MOST + 1, 5)):
        assert torch.equal(_some(torch.arange(count)), torch.arange(0, count, stride))


def test_flat_buffers_are_aligned_and_keep_the_order_of_their_tensors() -> None:
    assert [aligned(n, 4) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert [aligned(n, 2) for n in (1, 128, 129)] == [128, 128, 256]
    buffer = torch.arange(64.0)
    assert view_like(buffer, torch.zeros(2, 3), 5).tolist() == [[5, 6, 7], [8, 9, 10]]
    plain = torch.zeros(2, 3, 2, 2)
    assert view_like(buffer, plain, 1)[0, 0].tolist() == [[1, 2], [3, 4]]
    last = plain.contiguous(memory_format=torch.channels_last)
    view = view_like(buffer, last, 1)
    assert view.stride() == last.stride()
    assert view[0, :, 0, 0].tolist() == [1, 2, 3]
    assert view.data_ptr() == buffer.data_ptr() + 4


def test_parts_of_an_axis_are_padded_at_its_end() -> None:
    assert [unpadded_length(7, 3, index) for index in range(4)] == [3, 3, 1, 0]
    x: Tensor = torch.arange(6.0).reshape(2, 3)
    assert pad(x, 1, 3) is x
    assert pad(x, 0, 2) is x
    assert pad(x, 1, 2).tolist() == [[0, 1, 2, 0], [3, 4, 5, 0]]
    assert pad(x, 0, 4).tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0], [0, 0, 0]]
    assert local(x) is x
