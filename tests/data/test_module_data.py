"""`data=module`: a dataset of the user's, in the same global batches on any world."""

from itertools import chain

import pytest

from tests.cells import TINY, entry
from tests.data.cells_and_worlds import world
from tests.refusals import require
from vitsweep.errors import VitsweepError
from vitsweep.execution.outcome import classify

MODULE = (
    *TINY, "data=module", "data.num_channels=1", "data.num_classes=10", "data.native_resolution_px=8",
    "data.num_workers=0",
)  # fmt: skip


def planned(target, *overrides):
    return entry(*MODULE, f"data.target=tests.user_data.{target}", *overrides)


def opened(target, *overrides, rank=0, ranks=1):
    cell = planned(target, f"resources.ranks_per_node={ranks}", *overrides).spec
    return cell.data.open(cell, world(rank, replicate=ranks))


def indices(batches):
    """Images tell their index in every pixel."""
    return [images[:, 0, 0, 0].int().tolist() for images, _ in batches]


def test_what_is_wrong_with_the_data_is_reported_before_anything_runs():
    for target, overrides, words in [
        ("nosuch", (), "`data.target=tests.user_data.nosuch` cannot be imported"),
        ("imports_what_is_missing", (), "raised ModuleNotFoundError with the arguments {}"),
        ("nothing", (), "returned a value of type int, which is no map-style dataset"),
        (
            "unpaired",
            (),
            "must be a pair of an image, a tensor (C, H, W), and a label, or a mapping; got",
        ),
        (
            "stream",
            (),
            "of type generator, which is no map-style dataset: return one, with `__len__`",
        ),
        ("MapStyle", ("++data.arguments.side=6",), "gives images of shape (1, 6, 6), and"),
        (
            "MapStyle",
            ("++data.arguments.num_images=8",),
            "than the 8 training images of `data=module`",
        ),
        ("MapStyle", ("task=train",), "tests on 0 images"),
        (
            "LabelsTooLarge",
            (),
            "the label 10, and with `data.num_classes=10` labels are from 0 to 9",
        ),
    ]:
        [reason] = planned(target, *overrides).reasons
        assert words in reason
        assert reason.endswith(".")


def test_a_function_of_a_notebook_belongs_into_a_file():
    [reason] = entry(*MODULE, "data.target=__main__.images").reasons
    require(reason, "`data.target=__main__.images`")


def test_data_need_a_target():
    assert "needs `data.target=" in " ".join(entry(*MODULE).reasons)


def test_replicas_share_the_same_global_batches_and_resume_amidst_an_epoch():
    whole = indices(opened("MapStyle").train(epoch=1))
    halves = [indices(opened("MapStyle", rank=r, ranks=2).train(epoch=1)) for r in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=True)] == whole
    assert sorted(chain.from_iterable(whole)) == list(range(64))
    assert indices(opened("MapStyle").train(epoch=1, first=2)) == whole[2:]


def test_held_out_images_are_those_of_the_test_arguments():
    batches = opened("MapStyle", "++data.test_arguments={first:1000}")
    assert sorted(chain.from_iterable(indices(batches.test()))) == list(range(1000, 1064))


def test_workers_read_the_same_batches():
    batches = opened("MapStyle", "data.num_workers=1")
    assert batches.prefetched == 2
    try:
        assert indices(batches.train(0)) == indices(opened("MapStyle").train(0))
    finally:
        batches.close()


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("half", "float 0.5"), ("text", "str 'cat'"), ("none", "NoneType None"), ("no_number", "float nan"),
        ("half_tensor", "float 0.5"), ("one_hot", "a tensor (10,) of torch.float32"),
        ("numpy_half", "float 0.5"),
    ],
)  # fmt: skip
def test_a_label_that_is_no_whole_number_is_refused_before_anything_runs(label, shown):
    [reason] = planned("Labelled", f"++data.arguments.label={label}").reasons
    require(reason, "`data.target=tests.user_data.Labelled` 0 `data.num_classes`")
    assert f"the label {shown}," in reason


@pytest.mark.parametrize("label", ["numpy", "tensor", "whole", "array"])
def test_whole_numbers_of_any_kind_are_labels(label):
    target = "Labelled", f"++data.arguments.label={label}"
    assert not planned(*target).reasons
    _, labels = next(opened(*target).train(0))
    assert labels.tolist() == [3] * len(labels)


def test_a_later_label_that_is_no_whole_number_is_named_with_its_index():
    batches = opened("Labelled", "++data.arguments={label:half,since:63}")
    with pytest.raises(VitsweepError, match=r"\b63\b.* float 0\.5"):
        list(batches.train(0))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("LabelsTooLarge", "labels from 0 to 9"),
        ("Ragged", "[(1, 8, 8), (1, 9, 9)]"),
    ],
)
def test_a_batch_that_the_model_cannot_take_is_shown(target, words):
    batches = opened(target)
    with pytest.raises(VitsweepError) as refused:
        next(batches.train(0))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("workers", "kind", "status", "words"),
    [
        (1, "", "failed", "UnidentifiedImageError: cannot identify image file '{file}'"),
        (0, "", "failed", "UnidentifiedImageError: cannot identify image file '{file}'"),
        (1, "memory", "out_of_memory", "MemoryError"),
        (1, "lines", "failed", "KeyError: 'no label\\n  of {file}'"),
    ],
)  # fmt: skip
def test_an_item_that_raises_is_named_with_the_last_line_of_its_own_traceback(
    tmp_path, workers, kind, status, words
):
    file = tmp_path / "cat.jpg"
    file.write_text("no picture")
    of_kind = ("++data.arguments.kind=" + kind,) if kind else ()
    asked = (f"++data.arguments.file={file}", *of_kind, f"data.num_workers={workers}")
    batches = opened("NoPicture", *asked)
    with pytest.raises((Exception, MemoryError)) as raised:
        list(batches.train(0))
    batches.close()
    found, reason = classify(raised.value)
    expected = words.format(file=file) + " (item 37 of `data.target=tests.user_data.NoPicture`)"
    assert (found, reason.removeprefix("PIL.")) == (status, expected)


def test_a_worker_that_dies_is_reported_with_its_signal():
    for how in ("SIGKILL", "SIGBUS"):
        batches = opened("Dying", f"++data.arguments.signal={how}", "data.num_workers=1")
        with pytest.raises(VitsweepError) as refused:
            list(batches.train(0))
        require(str(refused.value), "`/dev/shm` `data.num_workers`")
        assert f"ended by {how}." in str(refused.value)


def test_a_refusal_in_a_worker_is_the_sentence_alone():
    batches = opened("Labelled", "++data.arguments={label:half,since:63}", "data.num_workers=1")
    with pytest.raises(VitsweepError) as raised:
        list(batches.train(0))
    batches.close()
    assert classify(raised.value)[1].startswith(
        "`data.target=tests.user_data.Labelled` gave item 63"
    )
