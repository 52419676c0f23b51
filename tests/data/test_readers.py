"""What readers make of items, labels and damaged images, at the first and the last that they take."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitsweep.data.batches import Endless, ReplicaSampler, Request
from vitsweep.data.image_loader import DamagedImages, ImageReader
from vitsweep.data.module_batches import _Checked, _stack, as_item, as_pair, inspect_data
from vitsweep.errors import BadValueError, VitsweepError


def checked(label: str | None = None) -> Any:
    model = SimpleNamespace(input_shape=lambda px: (1, px, px), num_classes=3)
    data = SimpleNamespace(target="t", label=label)
    cell: Any = SimpleNamespace(model=model, data=data, batch=SimpleNamespace(resolution_px=2))
    return _Checked(cell, torch.device("cpu"))


def test_labels_are_whole_numbers_of_the_classes_along_one_axis() -> None:
    for labels, is_wrong in (
        (torch.tensor([0, 2]), False), (torch.tensor([0, 3]), True), (torch.tensor([-1, 2]), True),
        (torch.tensor([1.0]), True), (torch.tensor([[1]]), True), (torch.zeros(0).long(), False),
    ):  # fmt: skip
        images = torch.zeros(len(labels), 1, 2, 2, dtype=torch.float64)
        for read, reader in (((images, labels), checked()), ({"y": labels}, checked("y"))):
            if is_wrong:
                with pytest.raises(BadValueError):
                    reader(read)
            else:
                reader(read)
        checked()({"y": labels})
    found, _ = checked()((torch.zeros(1, 1, 2, 2, dtype=torch.float64), torch.tensor([1])))
    assert found.dtype == torch.float32
    with pytest.raises(BadValueError):
        checked()((torch.zeros(1, 1, 2, 3), torch.tensor([1])))


def test_an_item_is_a_pair_or_a_mapping_of_tensors() -> None:
    image = torch.zeros(1, 2, 2)
    for label, number in (
        (3, 3),
        (3.0, 3),
        (torch.tensor([3]), 3),
        (np.int64(3), 3),
        (np.array([[3]]), 3),
    ):
        assert as_item((image, label), 0, "t") == (image, number)
        assert as_pair([image, label], 0, "t")[1] == number
    for wrong in (
        (image, 1.5),
        (image, "3"),
        (image, torch.tensor([1, 2])),
        (image,),
        (1, 2),
        image,
        (image, None),
    ):
        with pytest.raises(BadValueError):
            as_item(wrong, 0, "t")
    found = as_item({"a": 1, "b": np.zeros(2), "c": torch.zeros(1, dtype=torch.float64)}, 0, "t")
    assert [tensor.dtype for tensor in found.values()] == [
        torch.int64,
        torch.float32,
        torch.float32,
    ]
    with pytest.raises(BadValueError, match="`word`"):
        as_item({"a": 1, "word": "x"}, 0, "t")
    assert _stack([torch.zeros(2), torch.ones(2)], "x").shape == (2, 2)
    with pytest.raises(BadValueError):
        _stack([torch.zeros(2), torch.zeros(3)], "x")


def test_a_check_of_data_counts_both_splits_and_checks_the_first_label() -> None:
    def factory(label: Any, mapping: bool = False) -> Any:
        image = torch.zeros(1, 2, 2)

        def made(*, training: bool) -> Any:
            item = {"image": image, "y": torch.tensor(label)} if mapping else (image, label)
            return [item] * 5 if training else None

        return made

    for label, is_wrong in ((0, False), (2, False), (3, True), (-1, True)):
        for mapping in (False, True):
            found = inspect_data(factory(label, mapping), "t", "y" if mapping else None, 3)
            assert bool(found.error) is is_wrong
            assert (found.num_train, found.num_test) == (5, 0)
            assert found.shape == (() if mapping else (1, 2, 2))
            assert [*found.entries] == (["image", "y"] if mapping else [])
    assert not inspect_data(factory([7, 7], True), "t", "y", 3).error, (
        "several numbers are no class"
    )
    assert not inspect_data(factory(7, True), "t", None, 3).error
    with pytest.raises(BadValueError):
        inspect_data(lambda *, training: iter(()), "t", None, 3)  # type: ignore[arg-type]


class Folder:
    """Five images, those given damaged, each of one brightness."""

    labels = np.array([0, 1, 2, 3, 4])

    def __init__(self, *damaged: int) -> None:
        self.damaged = damaged

    def __len__(self) -> int:
        return 5

    def path(self, row: int) -> str:
        return f"/{row}.png"

    def image(self, row: int) -> Any:
        return "short" if row in self.damaged else Image.new("RGB", (4, 4), (row, row, row))


def read(
    training: bool, rows: list[int], *damaged: int, most: int = 5
) -> tuple[list[int], list[str]]:
    folder: Any = Folder(*damaged)
    reader = ImageReader(
        folder, side=2, crop_share=0.5, training=training, seed=0, max_damaged=most, decoded=folder
    )
    images, labels, found = reader[Request(0, np.array(rows))]
    assert images[:, 0, 0, 0].tolist() == labels.tolist()
    return labels.tolist(), [path for path, _ in found]


def test_damaged_images_are_replaced_in_training_and_left_out_of_a_test() -> None:
    assert read(True, [0, 1, 4]) == ([0, 1, 4], [])
    assert read(True, [0, 1, 4], 1, 4) == ([0, 2, 0], ["/1.png", "/4.png"])
    assert read(True, [1], 1, 2, 3) == ([4], ["/1.png", "/2.png", "/3.png"])
    assert read(True, [1], 0, 1, 2, 3, 4) == ([], [f"/{row}.png" for row in (1, 2, 3, 4, 0)])
    assert read(False, [0, 1, 4], 1, 4) == ([0], ["/1.png", "/4.png"])
    assert read(True, [1], 1, 2, 3, most=1) == ([], ["/1.png", "/2.png"])
    assert read(True, [1], 1, 2, most=2) == ([3], ["/1.png", "/2.png"])


def test_a_share_of_damaged_images_is_allowed() -> None:
    for images, share, most in ((100, 0.05, 5), (99, 0.05, 4), (10, 0.0, 0)):
        damage = DamagedImages(images, share)
        assert damage.most == most
        for number in range(most):
            damage.add([(f"/{number}", "short")] * 2)
        with pytest.raises(VitsweepError):
            damage.add([("/last", "short")])


def test_requests_go_on_from_epoch_to_epoch() -> None:
    sampler = ReplicaSampler(replica=1, replicas=2, micro_batch=2, accumulation_steps=1, seed=0)
    requests = iter(Endless(sampler, 9, 3, first=1))
    found = [next(requests) for _ in range(3)]
    assert [request.epoch for request in found] == [3, 4, 4]
    assert found[0].rows.tolist() == sampler.train(9, 3)[1].tolist()
    assert found[2].rows.tolist() == sampler.train(9, 4)[1].tolist()
    assert list(Endless(sampler, 3, 0)) == []
    assert (sampler.images_per_step, sampler.micro_batches(9), sampler.micro_batches(3)) == (
        4,
        2,
        0,
    )


def test_held_out_images_are_dealt_out_once_in_as_many_batches_on_each_replica() -> None:
    for images, batches in (
        (8, [2, 2]),
        (9, [2, 3]),
        (10, [2, 2, 1]),
        (1, [1]),
        (3, [2]),
        (5, [3]),
    ):
        found = []
        for replica in range(2):
            sampler = ReplicaSampler(
                replica=replica, replicas=2, micro_batch=2, accumulation_steps=1, seed=0
            )
            found.append([rows.tolist() for rows in sampler.test(images)])
        assert [len(rows) for rows in found[0]] == batches, images
        assert len(found[0]) == len(found[1])
        assert sorted(row for of in found for rows in of for row in rows) == list(range(images))
