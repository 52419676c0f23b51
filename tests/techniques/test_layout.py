"""Settings of the layout that a cell has no use for are refused by name."""

from tests.cells import GPU_NODE, entry


def test_a_choice_of_cudnns_algorithms_is_refused_without_cudnn() -> None:
    [reason] = entry("layout.cudnn_benchmark=true").reasons
    assert "`resources.device=cpu`" in reason
    on_gpu = ("layout.cudnn_benchmark=true", "resources.ranks_per_node=1")
    assert not entry(*on_gpu, machine=GPU_NODE).reasons


def test_patches_as_one_product_are_those_of_a_vit() -> None:
    [reason] = entry("model=axial_vit_nano", "layout.patch_embedding=linear").reasons
    assert "`layout.patch_embedding=convolution`" in reason
    assert not entry("layout=batch_second", "layout.patch_embedding=linear").reasons
