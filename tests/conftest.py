"""Fixtures and markers shared by all tests."""

from pathlib import Path

import pytest
import torch

from tests.command import Command


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        wanted = (marker.kwargs.get("count", 1) if marker else 0) or 0
        if wanted > present:
            item.add_marker(
                pytest.mark.skip(reason=f"needs {wanted} CUDA devices, found {present}")
            )


@pytest.fixture
def vitsweep(tmp_path: Path) -> Command:
    """The command line, in an empty folder."""
    return Command(tmp_path)
