"""Charts: `draw(table) -> Figure`, nothing is read, saved or shown. No torch."""

import logging

logging.getLogger("matplotlib").setLevel(logging.ERROR)
"""It warns where HOME cannot be written, and then uses a temporary folder."""
