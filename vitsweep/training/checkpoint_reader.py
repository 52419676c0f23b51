"""Reads a checkpoint's list of tensors without executing what a changed file would name.

`torch.distributed.checkpoint` unpickles `.metadata`, and a pickle calls whatever it names. Here it may
name the classes that torch writes there and nothing else. The tensors themselves are read by torch
with `weights_only=True`.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from vitsweep.files import read_bytes, refuse_links

WRITTEN_BY_TORCH = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}
"""Module -> what a checkpoint's `.metadata` names of it, beside the dtypes (torch 2.11 to 2.13)."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if name not in WRITTEN_BY_TORCH.get(module, ()):
            raise pickle.UnpicklingError(f"it names `{module}.{name}`, which no checkpoint does")
        return super().find_class(module, name)


class CheckpointReader(FileSystemReader):
    """A FileSystemReader that executes nothing of the files and follows no link among them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return which tensors the checkpoint holds, and where.

        Raises:
            pickle.UnpicklingError: the file names what torch does not write.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        refuse_links(path.parent)
        metadata = _MetadataUnpickler(io.BytesIO(read_bytes(path))).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
