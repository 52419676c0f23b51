"""Defaults follow the machine: sizes where nothing is typed, and the part of a named sweep."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.cells import composer
from tests.command import Command
from tests.refusals import named
from vitsweep.api.plan import machine_with
from vitsweep.api.session import open_session
from vitsweep.composition.grid import expand
from vitsweep.composition.hydra import key_of
from vitsweep.errors import BadValueError
from vitsweep.planning.machine_defaults import cells_for, with_sizes
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.rates.profile import profile_named
from vitsweep.spec.resources import Machine

COMPOSER = composer()
CPU = Machine(device="cpu", cores_per_node=2, devices_per_node=0)
H200 = machine_with(profile_named("h200"))
ONE_H200 = replace(H200, devices_per_node=1)
SIZES = ("model", "data", "batch.scope", "batch.images_per_step")


def sizes(*overrides, machine=ONE_H200):
    """Return what the first cell of a command says of the sizes."""
    cell = cells_for(overrides, COMPOSER, machine)[0][0]
    found = dict(text.split("=", 1) for text in cell.overrides)
    return {key: found[key] for key in SIZES if key in found}


def defaults(overrides, machine):
    """Return the cells of a command, their node `sweep`, and what is said of the machine."""
    cells, sweep, says = cells_for(overrides, COMPOSER, machine)
    return cells, sweep, says(plan_of(cells, machine, COMPOSER))


def techniques(cells):
    """Return the overrides of each cell beside those of the sweep and the sizes."""
    outside = (*SIZES, "sweep", "batch.resolution_px")
    return [
        [
            t
            for t in c.overrides
            if key_of(t).split(".")[0] not in outside and key_of(t) not in outside
        ]
        for c in cells
    ]


def test_a_gpu_gets_a_real_model_and_names_it():
    cells, sweep, said = defaults(["precision=O1,O2"], ONE_H200)
    assert said.startswith("1 x H200 SXM: ViT-B/16, 224 px, 256 images; ")
    assert "`machine=cpu`" in said
    assert sweep["name"] == cells[0].tree["sweep"]["name"] == "vit_base-synthetic-precision"
    typed = ["model=vit_base", "data=synthetic", "batch.images_per_step=256"]
    typed += ["batch.scope=per_replica", "precision=O1,O2", "sweep.baseline={precision:tf32}"]
    by_hand = plan_of(expand(typed, COMPOSER), ONE_H200, COMPOSER)
    assert [*plan_of(cells, ONE_H200, COMPOSER).entries] == [*by_hand.entries]
    assert "256" in named(defaults([], H200)[2])


def test_a_comparison_has_the_same_sizes():
    pair = [COMPOSER.compose(["precision=O1", *more]) for more in ([], ["seed=1"])]
    both, says = with_sizes(pair, ["precision=O1", "seed=1"], COMPOSER, ONE_H200)
    assert says(plan_of(both, ONE_H200, COMPOSER)).startswith(
        "1 x H200 SXM: ViT-B/16, 224 px, 256 images;"
    )
    assert [cell.choices["model"] for cell in both] == ["vit_base"] * 2
    same, says = with_sizes(pair, ["machine=cpu"], COMPOSER, ONE_H200)
    assert (same, says(plan_of(same, ONE_H200, COMPOSER))) == (pair, "")


def test_on_a_cpu_nothing_changes():
    for overrides in (["+sweep=first"], ["precision=O1,O2"], ["+sweep=meta_speedups"]):
        cells, sweep, said = defaults(overrides, CPU)
        before = expand(overrides, COMPOSER)
        assert [c.overrides for c in cells] == [c.overrides for c in before]
        assert not said
        assert sweep["name"] == before[0].tree["sweep"]["name"]


def test_what_is_typed_wins():
    assert sizes("model=vit_large") == {
        **{"model": "vit_large", "data": "synthetic"},
        **{"batch.scope": "per_replica", "batch.images_per_step": "256"},
    }
    assert sizes("batch.images_per_step=48") == {
        **{"model": "vit_base", "data": "synthetic", "batch.images_per_step": "48"},
    }
    assert sizes("data=image_folder")["model"] == "vit_base"
    assert "batch.images_per_step" not in sizes("batch=blog_560")
    for small in (
        ["model=vit_nano"],
        ["data=digits"],
        ["task=train"],
        ["+sweep=attention_lengths"],
    ):
        found = cells_for([*small, "machine.precision=null"], COMPOSER, ONE_H200)[0]
        assert found == expand(small, COMPOSER), small
    for cpu in ("machine=cpu", "resources.device=cpu"):
        assert sizes(cpu) == {}
    first = cells_for(["+sweep=first", "machine=cpu"], COMPOSER, ONE_H200)[0]
    assert [c.overrides for c in first] == [c.overrides for c in expand(["+sweep=first"])]
    assert cells_for(["+sweep=first", "sweep.name=mine"], COMPOSER, ONE_H200)[1]["name"] == "mine"


def test_the_largest_cell_fits_into_the_share_of_the_memory():
    found = [
        sizes("precision=fp32,O1", machine=replace(ONE_H200, least_gib=gib))
        for gib in (60, 30, 12, 3, None)
    ]
    asked = [(each["model"], int(each["batch.images_per_step"])) for each in found]
    assert asked == [
        ("vit_base", 256),
        ("vit_base", 128),
        ("vit_base", 64),
        ("vit_small", 32),
        ("vit_base", 32),
    ]
    assert sizes("machine.memory_share=0.1")["batch.images_per_step"] == "64"
    assert sizes("machine.images_per_rank=[48]")["batch.images_per_step"] == "48", (
        "without machine=cuda"
    )
    with pytest.raises(BadValueError, match=r"`machine=cpu`.*`machine=cuda`"):
        cells_for(["machine.images_per_rank=[48]"], COMPOSER, CPU)
    small = replace(ONE_H200, least_gib=28.7)
    said = defaults(["+sweep=meta_speedups"], small)[2]
    assert "images (ViT-B/16 needs 66 GiB of 23 usable" in said
    said = defaults(["+sweep=meta_epoch_time"], small)[2]
    assert {"33", "23"} <= named(said)
    said = defaults(["+sweep=first", "model=vit_10b"], replace(ONE_H200, least_gib=79))[2]
    assert said.startswith("1 x H200 SXM: vit_10b, 224 px, 32 images (")
    said = defaults(["machine=cuda"], CPU)[2]
    assert said.startswith("2 x CPU rank: ViT-B/16, ")
    assert "ViT-B/16 needs" not in defaults(["model=vit_large"], replace(small, least_gib=3))[2]


def test_named_sweeps_have_a_part_for_gpus():
    cells, sweep, said = defaults(["+sweep=first"], ONE_H200)
    assert sweep["name"] == "first-cuda"
    assert said.startswith("1 x H200")
    stack = ["precision=bf16_masters", "optimizer=adamw_fused", "compilation=compile_blocks"]
    alone = [["precision=O1"], ["precision=O1", "optimizer=adamw_fused"], stack]
    assert techniques(cells) == alone
    baseline = plan_of(cells, ONE_H200, COMPOSER).runnable[-1]
    assert baseline.is_added_baseline
    chosen = baseline.composed.choices
    assert [chosen[g] for g in ("precision", "sharding", "optimizer")] == [
        "tf32",
        "ddp",
        "adamw_loop",
    ]
    several = techniques(cells_for(["+sweep=first"], COMPOSER, H200)[0])
    assert several[:3] == alone
    assert "sharding=fsdp" in several[3]


def test_the_baseline_of_the_blog_is_tf32_where_the_gpu_has_it():
    names = [f"meta_{what}" for what in ("speedups", "gpu_scaling", "epoch_time")]
    for name, machine in [
        *((n, ONE_H200) for n in names),
        *((f"{n}_cluster", H200) for n in names),
    ]:
        cells, sweep, _ = cells_for([f"+sweep={name}"], COMPOSER, machine)
        plan = plan_of(cells, machine, COMPOSER)
        bases = {entry.baseline_id for entry in plan.runnable}
        assert {plan.entries[base].spec.precision.name for base in bases} == {"tf32"}
        assert "fp32" in {cell.choices["precision"] for cell in cells}
        if machine is ONE_H200:  # one rank: one sharding
            assert {entry.spec.sharding.name for entry in plan.runnable} == {"ddp"}
            assert re.search(r"assumed: .*A100s.*TF32", sweep["question"])
        old = replace(machine, has_tf32=False)
        plan = plan_of(cells_for([f"+sweep={name}"], COMPOSER, old)[0], old, COMPOSER)
        assert "tf32" not in {entry.spec.precision.name for entry in plan.runnable}


def test_a_gpu_without_tf32_gets_fp32_and_the_same_sentences():
    cell = "cells: ['precision=tf32 layout=batch_second']"
    part = f"{{question: 'Is tf32 fast?', baseline: {{precision: tf32}}, {cell}}}"
    typed = ["sweep.name=mine", f"+sweep.by_machine.cuda={part}"]
    old = replace(ONE_H200, has_tf32=False)
    for machine, is_refused in (
        (old, True),
        (ONE_H200, False),
        (replace(old, has_tf32=None), False),
    ):
        cells = cells_for(["precision=fp32,tf32"], COMPOSER, machine)[0]
        [refused] = [
            e.reasons
            for e in plan_of(cells, machine, COMPOSER).named
            if e.spec.precision.name == "tf32"
        ]
        assert ("`precision=fp32`" in " ".join(refused)) == is_refused
    cells, sweep, _ = cells_for(typed, COMPOSER, old)
    assert (sweep["question"], sweep["baseline"]) == ("Is tf32 fast?", {"precision": "fp32"})
    assert techniques(cells) == [["precision=fp32", "layout=batch_second"]]


def test_tf32_is_the_precision_where_nobody_chose_one():
    """On NVIDIA GPUs known to have it. Who names a precision of float32, or the baseline's, has chosen."""

    def found(*typed, machine=ONE_H200):
        cells = cells_for(typed, COMPOSER, machine)[0]
        entries = plan_of(cells, machine, COMPOSER).entries.values()
        return {entry.spec.precision.name for entry in entries}

    for typed, precisions in (
        (["precision=O1,O2"], {"O1", "O2", "tf32"}),
        (["sharding=ddp,fsdp"], {"tf32"}),
        (["model=vit_nano", "task=train"], {"tf32"}),
        (["precision=O1,bf16", "sweep.baseline={sharding: fsdp}"], {"O1", "bf16", "tf32"}),
        (["sharding=ddp,fsdp", "sweep.baseline=null"], {"tf32"}),
        (["+sweep=first", "precision=O1"], {"O1", "tf32"}),
        # somebody chose
        (["precision=fp32,O1"], {"fp32", "O1"}),
        (["precision=fp32", "sharding=ddp,fsdp"], {"fp32"}),
        (["precision=O0,O1"], {"O0", "O1", "fp32"}),
        (["precision.half_dtype=bfloat16", "precision=O1"], {"O1", "fp32"}),
        (["precision.dtype=float64"], {"fp32"}),
        (["sharding=ddp,fsdp", "sweep.baseline={precision: O1}"], {"fp32", "O1"}),
        (["sharding=ddp,fsdp", "machine.precision=null"], {"fp32"}),
        (["sharding=ddp,fsdp", "machine=cpu"], {"fp32"}),
    ):
        assert found(*typed) == precisions, typed
    for typed, is_told in (("sharding=ddp,fsdp", True), ("precision=fp32,O1", False)):
        assert ("`precision=fp32`" in defaults([typed], ONE_H200)[2]) == is_told
    for name in ("v100", "mi300x"):
        assert found("precision=O1,O2", machine=machine_with(profile_named(name))) == {
            *{"O1", "O2", "fp32"}
        }
    assert found("sharding=ddp,fsdp", machine=replace(ONE_H200, has_tf32=None)) == {"fp32"}
    match = "sweep.match=[model,data,task,resources,batch,precision]"
    assert found("precision=O1", match) == {"O1"}, "the cell's own precision"
    names = [cells_for(["sharding=ddp,fsdp"], COMPOSER, m)[1]["name"] for m in (ONE_H200, CPU)]
    assert names == ["vit_base-synthetic-sharding", "vit_nano-sharding"]
    pair = [COMPOSER.compose(typed) for typed in (["precision=O1"], [])]
    both, says = with_sizes(pair, ["precision=O1"], COMPOSER, ONE_H200)
    assert [cell.choices["precision"] for cell in both] == ["O1", "tf32"]
    assert "`precision=fp32`" in says(plan_of(both, ONE_H200, COMPOSER))


def test_a_machine_without_sizes_has_none_to_set():
    with pytest.raises(BadValueError, match="memory_share"):
        cells_for(["machine.memory_share=0.5"], COMPOSER, CPU)


def test_a_cluster_is_what_its_profile_says():
    found = {}
    for gpu in ("a100", "v100", "mystery"):
        site = ["hydra/launcher=slurm_example_site", f"hydra.launcher.gpu_type={gpu}"]
        session = open_session(["+sweep=first", *site], Console(quiet=True))
        texts = dict(text.split("=", 1) for text in session.cells[0].overrides)
        found[gpu] = session.settings.baseline, texts["model"], texts["batch.images_per_step"]
        assert session.settings.name == "first-cuda"
        assert "sharding=fsdp" in techniques(session.cells)[-1]
    assert found == {
        "a100": ({"precision": "tf32"}, "vit_base", "128"),
        "v100": ({"precision": "fp32"}, "vit_base", "64"),
        "mystery": ({"precision": "fp32"}, "vit_base", "32"),
    }


def test_a_baseline_of_tf32_that_is_typed_is_that_of_the_cells():
    """Where the type of a cluster's GPUs is unknown, docs/cluster/sites.md says to type it."""
    typed = ["+sweep=meta_speedups", "sweep.baseline={precision: tf32}"]
    cells = cells_for(typed, COMPOSER, replace(ONE_H200, has_tf32=None))[0]
    found = [cell.choices["precision"] for cell in cells]
    assert found.count("fp32") == 1 < found.count("tf32")


def test_a_setting_of_a_launcher_of_another_form_is_refused_in_words():
    for text in ("+hydra.launcher.site=64", "hydra.launcher.partition.x=5"):
        with pytest.raises(BadValueError, match=re.escape(text.lstrip("+").partition("=")[0])):
            open_session(["hydra/launcher=slurm", text], Console(quiet=True))


def test_a_machine_is_one_for_all_cells():
    with pytest.raises(BadValueError, match="`machine=cpu,cuda`"):
        cells_for(["machine=cpu,cuda"], COMPOSER, CPU)
    with pytest.raises(BadValueError, match=r"`machine`.*`gpu`"):
        cells_for(["machine=gpu"], COMPOSER, CPU)
    with pytest.raises(BadValueError, match=r"`machine`.*`gpu`"):
        cells_for(["+sweep.by_machine.gpu={cells: []}"], COMPOSER, CPU)
    text = "+sweep.by_machine.cuda={cells: ['precision=O1 sharding=fsdp', 'sharding=fsdp']}"
    [cell] = cells_for(["sweep.name=mine", text], COMPOSER, ONE_H200)[0]
    assert techniques([cell]) == [["precision=O1"]]


def test_plan_prints_what_another_machine_would_run(tmp_path):
    words = ("plan", "-m", "+sweep=first", "--hardware", "h200", "--no-predict")
    several = Command(tmp_path)(*words[:-2], "h200,v100", words[-1], quick=False)
    assert "NVIDIA V100" in " ".join(several.stdout.split())
    done = Command(tmp_path)(*words, quick=False)
    assert done.stderr.startswith("8 x H200 SXM: ViT-B/16, 224 px, 256 images")
    assert "first-cuda on NVIDIA H200" in done.stdout
    assert "baseline: tf32 · ddp · adamw_loop" in done.stdout


def baselines(*overrides, machine=ONE_H200):
    """Return precision, images and pixels of the baselines of a command, and its plan."""
    cells, sweep, _ = cells_for(overrides, COMPOSER, machine)
    assert cells[0].tree["sweep"]["baseline"] == sweep["baseline"]
    plan = plan_of(cells, machine, COMPOSER)
    specs = [plan.entries[base].spec for base in {entry.baseline_id for entry in plan.runnable}]
    found = [(s.precision.name, s.batch.images_per_step, s.batch.resolution_px) for s in specs]
    return sorted(found), plan


def test_a_typed_baseline_replaces_that_of_a_named_sweep():
    for name, machine in (("meta_speedups", ONE_H200), ("meta_speedups_cluster", H200)):
        for typed in (
            "sweep.baseline={precision:fp32}",
            "+sweep.baseline={precision: fp32}",
            "sweep.baseline='precision=fp32'",
            "sweep.baseline=['precision=fp32']",
            "sweep.baseline=default",
            "sweep.baseline.precision=fp32",
            "++sweep.baseline.precision=fp32",
        ):
            found = baselines(f"+sweep={name}", typed, machine=machine)[0]
            assert found == [("fp32", 256, 224)], (name, typed)
    typed = "sweep.baseline={precision:O1,batch.images_per_step:128}"
    assert baselines("+sweep=meta_speedups", typed)[0] == [("O1", 128, 224)]
    assert baselines("+sweep=first", "sweep.baseline.precision=fp32")[0] == [("fp32", 256, 224)]
    sweep = cells_for(["+sweep=meta_speedups", "sweep.baseline=null"], COMPOSER, ONE_H200)[1]
    assert sweep["baseline"] is None
    typed = ["+sweep=optimizer_step", "sweep.baseline.precision=O1"]
    assert cells_for(typed, COMPOSER, CPU)[1]["baseline"] == {"sharding": "none", "precision": "O1"}
    with pytest.raises(BadValueError, match=r"`sweep\.baseline`"):
        cells_for(["+sweep=first", "sweep.baseline={precision:fp32},null"], COMPOSER, CPU)


def test_typed_sizes_are_the_baselines_too():
    for machine, precision, px in ((ONE_H200, "tf32", 224), (CPU, "fp32", 14)):
        found, plan = baselines("+sweep=meta_speedups", "batch.images_per_step=64", machine=machine)
        assert found == [(precision, 64, px)]
        assert {entry.spec.batch.images_per_step for entry in plan.runnable} == {64}
    two = ("+sweep=meta_speedups", "batch.images_per_step=64,96", "batch.resolution_px=112")
    found, plan = baselines(*two)
    assert found == [("tf32", 64, 112), ("tf32", 96, 112)]
    for entry in plan.runnable:
        images = plan.entries[entry.baseline_id].spec.batch.images_per_step
        assert images == entry.spec.batch.images_per_step
    _, plan = baselines("+sweep=meta_speedups", "batch.scope=per_replica", machine=H200)
    assert {entry.spec.batch.scope for entry in plan.runnable} == {"per_replica"}
    # precision is what cells and baseline differ in
    assert baselines("+sweep=meta_speedups", "precision=O1")[0] == [("tf32", 256, 224)]
    own = "sweep.match=[model,data,task,resources,batch]"
    each = baselines("+sweep=meta_speedups", own)[0]
    assert each == [("tf32", 256, 224), ("tf32", 384, 256), ("tf32", 560, 224)]


def test_a_named_sweep_with_the_sizes_of_cpus_says_so_on_a_gpu():
    for name in ("menu_2026", "meta_chips"):
        said = defaults([f"+sweep={name}"], ONE_H200)[2]
        of_sizes = said.partition("; `precision=tf32`")[0]
        assert named(of_sizes) == {f"`+sweep={name}`", f"`+sweep={name}_cluster`"}
    assert defaults(["+sweep=menu_2026"], CPU)[2] == ""
    assert "sizes of CPUs" not in defaults(["+sweep=menu_2026_cluster"], ONE_H200)[2]
