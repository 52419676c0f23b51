"""Configuration folders of installed packages: the entry points of the group `vitsweep.conf`."""

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.plugins.search_path_plugin import SearchPathPlugin

GROUP = "vitsweep.conf"


class VitsweepSearchPath(SearchPathPlugin):
    """Adds `conf/` of every package that an entry point of `vitsweep.conf` names.

    The folder lies inside the package or beside it. Other Hydra applications are left alone.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Put the folders behind vitsweep's own: a choice of the same name is vitsweep's."""
        if not any(_is_ours(entry.path) for entry in search_path.get_path()):
            return
        for entry in metadata.entry_points(group=GROUP):
            for folder in _folders(entry.value):
                anchor = SearchPathQuery(provider="schema")
                search_path.prepend(entry.name, f"file://{folder}", anchor=anchor)


def _is_ours(path: str) -> bool:
    folder = Path(path.removeprefix("file://"))
    return folder.name == "conf" and (folder / "model" / "vit_nano.yaml").is_file()


def _folders(package: str) -> list[Path]:
    found = find_spec(package)
    places = [Path(place) for place in (found.submodule_search_locations or [])] if found else []
    folders = [folder for place in places for folder in (place / "conf", place.parent / "conf")]
    return [folder for folder in folders if folder.is_dir()][:1]
