"""Images that cannot be read: named once each, and counted."""

import logging
from dataclasses import dataclass, field

from vitsweep.errors import VitsweepError

LOG = logging.getLogger(__name__)


@dataclass
class Damage:
    """Damaged images of one split that this rank has met.

    Attributes:
        num_images: of the split.
        max_share: of them that may be damaged.
        found: path -> reason.
    """

    num_images: int
    max_share: float
    found: dict[str, str] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """How many damaged images are put up with."""
        return int(self.max_share * self.num_images)

    def add(self, damaged: list[tuple[str, str]]) -> None:
        """Name images that are new here.

        Raises:
            VitsweepError: there are more than `max_share` of the split.
        """
        for path, reason in damaged:
            if path not in self.found:
                self.found[path] = reason
                LOG.warning("%s cannot be read (%s): skipped.", path, reason)
        if len(self.found) > self.most:
            names = ", ".join(list(self.found)[:3])
            raise VitsweepError(
                f"{len(self.found)} of {self.num_images} images cannot be read, more than "
                f"`data.max_damaged_share={self.max_share}` allows: {names}"
                f"{', ...' if len(self.found) > 3 else ''}. Mend or remove them, or raise the share."
            )
