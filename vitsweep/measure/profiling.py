"""torch's profiler, without the messages that it prints."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity, profile

ABOVE_ALL = "6"
"""A level of Kineto's log above its highest, USDT (5): it prints every start and stop at that one."""


def quiet_profile(activities: "Sequence[ProfilerActivity]") -> "profile":
    """Return a profiler for a `with` block; Kineto reads its log level when the first one starts."""
    from torch.profiler import profile

    os.environ.setdefault("KINETO_LOG_LEVEL", ABOVE_ALL)
    return profile(activities=activities)
