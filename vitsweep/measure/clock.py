"""Time of day for records."""

from datetime import UTC, datetime


def now() -> str:
    """Return the time in UTC, to the millisecond, sortable as text."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
