"""The files in the folder of a checkpoint, written and read by torch.distributed.checkpoint.

Such a folder is what torch's own tools read, too.  This module is imported only when it is needed,
because its imports take seconds.
"""

import os
import pickle
import re
import shutil
import uuid
import warnings
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from plumbing import comm
from plumbing.errors import SettingsError
from plumbing.files import flush_folder

from .sharded import checksum_of, save_record

# What torch writes into ".metadata" of a folder, which is a pickle: the names and shapes of the
# tensors, and where in which file their parts are.  Anything else in it may be code.
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
# torch calls the files of rank 3 "__3_0.distcp", and so on.
_FILE_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")


class _Writer(dcp.FileSystemWriter):
    """torch's writer, which flushes each file to the disk."""

    def storage_meta(self) -> StorageMeta:
        # torch's own has a path in it, of a type that no other system can read.
        return StorageMeta()

    def write_data(self, plan: Any, planner: Any) -> Future:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # If the disk is full, torch.save raises an error of its own on top of the OSError.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _Unpickler(pickle.Unpickler):
    """Loads the metadata of a folder, and runs no code that somebody may have put there."""

    def find_class(self, module: str, name: str) -> Any:
        # To look up a name in these modules runs nothing; what is found may be called later.
        if module == "torch" or (module, name) in _ALLOWED:
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or (module, name) in _ALLOWED:
                return found
        raise pickle.UnpicklingError(f"{module}.{name}")


class ShardReader(dcp.FileSystemReader):
    """torch's reader, which reads the metadata only once, and without running code."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            path = os.path.join(self.path, ".metadata")
            try:
                with open(path, "rb") as file:
                    self._metadata = _Unpickler(file).load()
            except pickle.UnpicklingError as error:
                raise SettingsError(
                    f"{path} holds code or unknown types, and so it is not loaded: {error}"
                ) from error
        return self._metadata

    def read_tensor(self, key: str, tensor: torch.Tensor) -> None:
        """Fill a tensor, or the parts of a divided one that this rank has."""
        with warnings.catch_warnings():
            # torch warns that each rank reads for itself, which is what is wanted.
            warnings.simplefilter("ignore", UserWarning)
            dcp.load({key: tensor.detach()}, storage_reader=self, no_dist=True)


def save_shards(path: str, tensors: dict[str, torch.Tensor], is_writer: bool) -> dict | None:
    """Write divided tensors into a new folder for a checkpoint.  Collective.

    Args:
        path: of the checkpoint's file, which is not written here.
        tensors: DTensors by name, the same names on all ranks.
        is_writer: whether this rank will write that file.

    Returns:
        What the file must hold about the folder; None if no rank will write the file.

    Raises:
        OSError: a rank could not write; all ranks raise it.
    """
    own_token = uuid.uuid4().hex[:8] if is_writer else ""
    tokens = [token for token in comm.all_gather(own_token) if token]
    if not tokens:
        return None
    folder = f"{path.removesuffix('.pth')}.{tokens[0]}.shards"
    try:
        dcp.save(tensors, storage_writer=_Writer(folder))
    except dcp.CheckpointException as error:
        if is_writer:
            shutil.rmtree(folder, ignore_errors=True)
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise failure from None
        raise
    files = {}
    for own_files in comm.all_gather(_files_of_this_rank(folder)):
        files.update(own_files)
    if is_writer:
        flush_folder(folder)
        flush_folder(os.path.dirname(path))
    return save_record(tokens[0], files)


def _files_of_this_rank(folder: str) -> dict[str, tuple[int, int]]:
    """Return {name: (size, checksum)} of the files that this rank has written."""
    files = {}
    for name in os.listdir(folder):
        match = _FILE_OF_RANK.fullmatch(name)
        rank = int(match[1]) if match else 0
        if rank == comm.get_rank():
            path = os.path.join(folder, name)
            files[name] = (os.path.getsize(path), checksum_of(path))
    return files
