"""Bundles of sweeps that laboratories wrote."""

from pathlib import Path
from typing import Any

from vitsweep.extras.bundle.pack import write_bundle
from vitsweep.results.store import Store

HERE = "code of this test"


def bundled(store: Store, to: Path, **options: Any) -> Path:
    """Write the bundle of a sweep; return its path."""
    write_bundle(store, to, drawn_by=HERE, **options)
    return to
