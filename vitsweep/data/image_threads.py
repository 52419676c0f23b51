"""Reading batches of images in threads of the rank."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import torch
from PIL import Image
from torch import Tensor

from vitsweep.data.image_reader import ImageReader, Read
from vitsweep.data.loader_batches import Request

PARTS_PER_THREAD = 4
"""Parts of a micro-batch per thread: a thread with larger images leaves the last ones to others."""

Part = Future[tuple[int, dict[str, str]]]


@dataclass
class _Reading:
    """A request that threads are reading: its parts fill slices of the same tensors."""

    images: Tensor
    labels: Tensor
    parts: list[tuple[slice, Part]]

    def wait(self) -> Read:
        """Return the batch when all parts are read; images that were left out close up."""
        damaged: dict[str, str] = {}
        kept: list[Tensor] = []
        for rows, part in self.parts:
            count, found = part.result()
            damaged |= found
            kept.append(torch.arange(rows.start, rows.start + count))
        read = torch.cat(kept)
        if len(read) < len(self.labels):
            return Read(self.images[read], self.labels[read], list(damaged.items()))
        return Read(self.images, self.labels, list(damaged.items()))


class ThreadedReads(Iterator[Read]):
    """Batches in the order of the requests; reading begins at once.

    Args:
        reader: reads a request; its methods are called from several threads.
        requests: without end, or to the end of a test.
        num_threads: that read.
        prefetch_batches: batches that are read ahead.
        pinned: deliver page-locked memory, from which copies to a GPU run beside the host.
    """

    def __init__(
        self,
        reader: ImageReader,
        requests: Iterable[Request],
        num_threads: int,
        prefetch_batches: int,
        *,
        pinned: bool,
    ) -> None:
        Image.preinit()  # threads would register Pillow's formats at the same time
        self._reader, self._requests, self._pinned = reader, iter(requests), pinned
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="image-loader")
        self._ahead = deque(map(self._start, islice(self._requests, prefetch_batches)))

    def __next__(self) -> Read:
        """Return the next batch; wait for it where it is late."""
        if not self._ahead:
            self.close()
            raise StopIteration
        reading = self._ahead.popleft()
        self._ahead.extend(map(self._start, islice(self._requests, 1)))
        return reading.wait()

    def close(self) -> None:
        """Let the threads end; nothing more is read."""
        self._ahead.clear()
        self._requests = iter(())
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, request: Request) -> _Reading:
        images, labels = self._reader.empty(len(request.rows), pinned=self._pinned)
        pixels, classes = images.numpy(), labels.numpy()
        size = -(-len(request.rows) // (PARTS_PER_THREAD * self._num_threads))
        parts = []
        for first in range(0, len(request.rows), size):
            rows = slice(first, first + size)
            part = Request(request.epoch, request.rows[rows])
            parts.append(
                (rows, self._pool.submit(self._reader.fill, part, pixels[rows], classes[rows]))
            )
        return _Reading(images, labels, parts)
