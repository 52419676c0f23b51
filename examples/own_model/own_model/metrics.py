"""Columns of our own: functions of a run's record and its raw samples."""

from typing import Any

USD_PER_DEVICE_HOUR = 2.5


def usd_per_million_images(record: Any, samples: dict[str, Any]) -> float:
    """Return the price of all ranks while they train on a million images."""
    hours = 1e6 / record.metrics["images_per_second"] / 3600
    return hours * USD_PER_DEVICE_HOUR * record.spec["world_size"]
