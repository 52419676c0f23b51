"""Texts of launchers and sweeps arrive as they are spelled, or are refused."""

from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from omegaconf import OmegaConf

from tests.cells import composer
from tests.refusals import require
from vitsweep.composition import hydra
from vitsweep.composition.grid import expand
from vitsweep.composition.spelling import TEXTS
from vitsweep.errors import BadValueError
from vitsweep.launchers.slurm.submit.sbatch import parameters
from vitsweep.launchers.slurm.submit.settings import Request, SlurmSettings, settings_of
from vitsweep.spec.cell_spec import GROUPS, CellSpec
from vitsweep.spec.from_yaml import hints_of
from vitsweep.spec.menu import choices, class_of, conf_dir

OPTIONS = "additional_parameters: {{{}}}"
REQUEST = Request(nodes=1, ranks_per_node=1, cpus=1, gpus=0, memory_gib=None, minutes=60)


def settings(profile: Path, text: str, *typed: str) -> SlurmSettings:
    """Compose the launcher of a profile with this text, and of what is typed."""
    file = profile / "hydra" / "launcher" / "mine.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"defaults:\n  - slurm\n{text}\n")
    loader = hydra.open_loader(conf_dir(), profile)
    words = ["hydra/launcher=mine", *typed]
    texts = [str(override.input_line) for override in hydra.parse_overrides(words, loader)]
    config = hydra.compose_sweep(loader, "config", texts)
    fields: Any = OmegaConf.to_container(config.hydra.launcher)
    del fields["_target_"]
    return settings_of(fields)


def sbatch(found: SlurmSettings) -> dict[str, Any]:
    options = parameters("s", REQUEST, found, Path("/code"))
    return options | options["additional_parameters"]


def test_a_profile_says_what_sbatch_gets(tmp_path: Path) -> None:
    for text in (
        "begin: 16:00", "begin: 1:30:00", "comment: 0755", "comment: 1_000", "comment: 0x1F", "comment: 0b11",
        "comment: 1e3", "comment: 1.10", "comment: .5", "comment: +5", "nodelist: [1, 010]",
    ):  # fmt: skip
        with pytest.raises(BadValueError) as error:
            settings(tmp_path, OPTIONS.format(text))
        name, value = text.split(": ")
        spelled = value.strip("[]").split(", ")[-1]
        require(str(error.value), f"`hydra/launcher/mine` `{name}: '{spelled}'`")
    for word in ("no", "yes", "Off"):
        with pytest.raises(BadValueError) as error:
            settings(tmp_path, OPTIONS.format(f"licenses: {word}"))
        require(str(error.value), f"`licenses: '{word}'`")
    for text in ("timeout_min: 1:30:00", "account: 0755", "mem_gb: 1:30", "signal_delay_s: 060"):
        with pytest.raises(BadValueError) as error:
            settings(tmp_path, text)
        require(str(error.value), f"`{text}`")
    for time in ("12:00:00", "'12:00:00'", "60"):
        with pytest.raises(BadValueError, match="timeout_min"):
            settings(tmp_path, OPTIONS.format(f"time: {time}"))
    for text, arrives in (
        ("comment: '0755'", "0755"), ("comment: 100", 100), ("comment: 2024-11-27", "2024-11-27"),
        ("comment: true", True),
    ):  # fmt: skip
        assert sbatch(settings(tmp_path, OPTIONS.format(text)))["comment"] == arrives
    assert "requeue" not in sbatch(settings(tmp_path, OPTIONS.format("requeue: false")))
    plain = settings(tmp_path, "account: 1234\nmem_gb: 1.50\ntimeout_min: 90\nexclusive: no")
    assert (plain.account, plain.mem_gb, plain.timeout_min) == ("1234", 1.5, 90)
    assert plain.exclusive is False


def test_a_typed_word_of_a_text_is_that_word(tmp_path: Path) -> None:
    for word in ("2024_11_27", "1_000", "1e3", "0755", "no", "16:00", "1.10"):
        typed = f"+hydra.launcher.additional_parameters.comment={word}"
        assert sbatch(settings(tmp_path, "", typed))["comment"] == word
    for word in ("2024_11_27", "1234", "1e3"):
        assert settings(tmp_path, "", f"hydra.launcher.account={word}").account == word
    with pytest.raises(BadValueError, match=r"`\+*hydra.launcher.additional_parameters=.*1000"):
        settings(tmp_path, "", "++hydra.launcher.additional_parameters={comment:1_000}")
    for word in ("2024_11_27", "true", "1e3"):
        [cell] = expand([f"sweep.name={word}", f"sweep.question={word}"], composer())
        assert (cell.tree["sweep"]["name"], cell.tree["sweep"]["question"]) == (word, word)


def kinds(hint: Any) -> set[Any]:
    """The types that a field may have."""
    if get_origin(hint) is Annotated:
        return kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return {kind for part in get_args(hint) for kind in kinds(part)}
    return {hint}


def test_all_texts_of_cells_are_known() -> None:
    """Those of `sweep` and `tracker` stand beside them; names are those of choices, but a model's."""
    texts = {"model.name"}
    for group, base in hints_of(CellSpec).items():
        found = choices(group) if group in (*GROUPS, "model", "data") else ()
        classes: list[type] = [base, *(class_of(group, choice) for choice in found)]
        for cls in filter(is_dataclass, classes):
            named = {name: kinds(hint) for name, hint in hints_of(cls).items() if name != "name"}
            texts |= {
                f"{group}.{n}"
                for n, types in named.items()
                if types - {NoneType, tuple[str, ...]} == {str}
            }
    assert texts == {key for key in TEXTS if not key.startswith(("sweep.", "tracker."))}


def test_a_typed_word_of_a_cells_text_is_that_word_swept_or_not() -> None:
    folder = ("data=image_folder", "data.folder={}")
    for typed, words in (
        ("2024_11_27", ["2024_11_27"]),
        ("2024,1.10,null,x/y", ["2024", "1.10", None, "x/y"]),
        ("choice(1_0, true)", ["1_0", "true"]),
    ):
        cells = expand([text.format(typed) for text in folder], composer())
        assert [cell.tree["data"]["folder"] for cell in cells] == words
        for cell in cells:  # what is typed for it alone makes it too
            [again] = expand(cell.overrides, composer())
            assert again.key == cell.key
    cells = expand(["seed=1_0,2"], composer())
    assert [cell.tree["seed"] for cell in cells] == [10, 2]


def test_a_grid_says_how_many_cells_it_has_before_it_composes_them() -> None:
    class Said(Exception):
        """Stops what would take hours."""

    def say(text: str) -> None:
        raise Said(text)

    with pytest.raises(Said, match="1,000,000"):
        expand(["seed=range(0,1000000)"], composer(), say=say)
    with pytest.raises(BadValueError, match="1,000,000"):
        expand(["seed=range(0,1000000000000)"], composer())
