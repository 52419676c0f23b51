"""The folder of a command that names none."""

from tests.cells import composer
from vitsweep.composition.grid import expand


def name_of(*overrides: str) -> str:
    [name] = {cell.tree["sweep"]["name"] for cell in expand(list(overrides), composer())}
    return str(name)


def test_the_folder_is_named_by_model_data_and_the_keys_that_vary() -> None:
    for overrides, name in [
        ([], "vit_nano"),
        (["precision=O1,O2", "sharding=ddp,fsdp"], "vit_nano-precision-sharding"),
        (["sharding=fsdp", "precision=O1"], "vit_nano-precision-sharding"),
        (["precision=O1", "precision.loss_scale=128,256"], "vit_nano-precision-loss_scale"),
        (["model=vit_small", "data=synthetic", "seed=1,2"], "vit_small-synthetic-seed"),
        (["model=vit_nano,vit_tiny", "batch.images_per_step=32"], "model"),
        (["batch.images_per_step=32,64", "measurement=smoke"], "vit_nano-images_per_step"),
        (["resources.ranks_per_node=1,2", "mesh.shard=2"], "vit_nano-ranks_per_node-shard"),
        (["model.depth=2,4", "tracker=none", "sweep.cells_per_block=4"], "vit_nano-depth"),
        (["sweep.cells=['precision=O1','memory=recompute_blocks']"], "vit_nano-precision-memory"),
        (["+sweep.axes.seed=[1,2]"], "vit_nano-seed"),
        (["sweep.limit.key=model.depth", "sharding=ddp"], "vit_nano-sharding-limit_of_depth"),
        (["sweep.name=mine", "precision=O1,O2"], "mine"),
        (["+sweep=one_at_a_time", "seed=3"], "one_at_a_time"),
    ]:
        assert name_of(*overrides) == name


def test_a_wider_grid_continues_in_the_same_folder() -> None:
    narrow = name_of("precision=O1", "sharding=fsdp")
    assert name_of("precision=O1,O2,O3", "sharding=ddp,fsdp") == narrow
    assert name_of("precision=fp32", "sharding=ddp") == narrow


def test_many_keys_are_counted() -> None:
    keys = ("depth", "width", "num_heads", "mlp_width", "patch_px")
    name = name_of(*(f"model.{key}=8,16" for key in keys), "seed=1,2", "batch.images_per_step=1,2")
    assert name == "vit_nano-depth-mlp_width-num_heads-patch_px-width-images_per_step-1_more"
