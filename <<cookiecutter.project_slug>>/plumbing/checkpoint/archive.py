"""Checkpoint files: written whole, verified when they are read, and read without their code.

A file is the zip archive that ``torch.save`` makes.  Each member of an archive, such as the data of
one tensor, has a checksum in the archive's directory.  ``save_file`` adds a checksum of all bytes
that are not data of a tensor, the directory among them, as the comment of the archive.
So every byte of the file is covered, and the comment stands for the whole content.
"""

import ctypes
import mmap
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.utils.serialization import config

from plumbing.errors import SettingsError
from plumbing.files import write_atomically

from .sharded import ShardFolder, bind_shards, has_shards, remove_folders, whole

# The length of the comment, a mark, and the checksum.
_COMMENT = struct.Struct("<H4sI")
_COMMENT_LENGTH = 8
_MARK = b"sum:"
# The first byte of a pickle that is not in an archive, as torch wrote before version 1.6.
_BARE_PICKLE = b"\x80"
_CHUNK = 2**20


class UnsafeFileError(SettingsError):
    """A checkpoint holds code or types that are not data: somebody should look into it."""


class Fingerprint(NamedTuple):
    """Files with the same fingerprint have the same content."""

    name: str
    size: int
    checksum: int


class CheckpointFile(NamedTuple):
    """A checkpoint that was read from a file.

    If it is mapped, the tensors in ``content`` are pages of the file: the system reads a page when
    it is used for the first time, and the page then counts as memory of this process.
    """

    path: str
    content: dict
    fingerprint: Fingerprint
    is_mapped: bool
    # Where the data of divided tensors are; None if all tensors are whole.
    shards: ShardFolder | None

    def release(self, values: Any) -> None:
        """Give back the memory of tensors of this file that have been copied elsewhere."""
        if self.is_mapped:
            for tensor in tensors_in(values):
                _release_pages(tensor)


def save_file(path: str, content: dict) -> None:
    """Write a checkpoint atomically, and remove the folders of earlier ones of this name.

    Args:
        content: of the types that ``to_plain_types`` returns.
    """

    def write(file: BinaryIO) -> None:
        # torch sums up each tensor while it writes.
        with config.patch("save.compute_crc32", True):
            torch.save(content, file)
        # An archive ends with the length of its comment, which is 0 so far.
        size = file.seek(-2, os.SEEK_END)
        comment = _COMMENT.pack(_COMMENT_LENGTH, _MARK, _checksum_without_tensors(file, size))
        file.seek(size)
        file.write(comment)

    write_atomically(path, write)
    remove_folders(path, content.get("sharded", {}).get("token", ""))


def load_file(path: str, check_tensors: bool = True) -> dict:
    """Read a checkpoint to the CPU.

    Args:
        check_tensors: False for a caller that needs only small things, such as the settings; then
            the tensors, which are nearly all of the file, are not read.

    Returns:
        A dict with the key "model"; files of other makers are brought into this form.  The tensors
        of the model are whole; others that were divided between ranks are ``SavedShards``.

    Raises:
        SettingsError: the file is missing or damaged, or holds code.
    """
    file = read_file(path, check_tensors)
    if check_tensors and has_shards(file.content["model"]):
        file.shards.check()
        file.content["model"] = whole(file.content["model"])
    return file.content


def read_file(path: str, check_tensors: bool = True) -> CheckpointFile:
    """Read a checkpoint to the CPU; what is in a folder beside it stays there.

    Args:
        check_tensors: False does not read the tensors, so a damaged tensor is not noticed.

    Raises:
        UnsafeFileError: the file holds code or unknown types, which are not loaded.
        SettingsError: the file is missing or damaged.
    """
    if not os.path.isfile(path):
        raise SettingsError(f"checkpoint {path} does not exist")
    try:
        fingerprint = _verify(path, check_tensors)
        content, is_mapped = _load(path)
        if "model" not in content:
            # From elsewhere: a state dict with that name, or nothing but a state dict.
            content = {"model": content.get("state_dict", content)}
        shards = None
        if "sharded" in content:
            shards = ShardFolder(path, content.pop("sharded"))
            content = {key: bind_shards(value, key, shards) for key, value in content.items()}
    except pickle.UnpicklingError as error:
        raise UnsafeFileError(
            f"checkpoint {path} holds code or unknown types, and so it is not loaded: save only"
            " tensors and plain values"
        ) from error
    except Exception as error:
        # Which kind of error torch or zipfile raises depends on where the damage is.
        reason = f"{type(error).__name__} {error}".splitlines()[0]
        raise SettingsError(
            f"checkpoint {path} is damaged, or not a checkpoint: {reason}"
        ) from error
    return CheckpointFile(path, content, fingerprint, is_mapped, shards)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Find all tensors in nested dicts, lists and tuples."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)


def copied(values: Any) -> Any:
    """Copy nested dicts, lists and tuples with their tensors, so that none is part of a file."""
    if isinstance(values, torch.Tensor):
        return values.clone()
    if isinstance(values, dict):
        return {key: copied(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(copied(value) for value in values)
    return values


def _verify(path: str, check_tensors: bool) -> Fingerprint:
    """Compare a file with its checksums.

    Raises:
        ValueError, zipfile.BadZipFile, OSError: the file is damaged.
    """
    name = os.path.basename(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(1) == _BARE_PICKLE:
            # It has no checksum of its own.
            return Fingerprint(name, size, _checksum_of_all(file))
        if size < _COMMENT.size:
            raise ValueError(f"it has only {size} bytes")
        file.seek(-_COMMENT.size, os.SEEK_END)
        comment_length, mark, expected = _COMMENT.unpack(file.read())
        with zipfile.ZipFile(file) as archive:
            if (comment_length, mark) == (_COMMENT_LENGTH, _MARK):
                checksum = _checksum_without_tensors(file, size - _COMMENT.size)
                if checksum != expected:
                    raise ValueError("its checksum is wrong")
            elif archive.comment:
                # torch writes no comment: this one may have been ours.
                raise ValueError("its checksum is unreadable")
            else:
                checksum = _checksum_without_tensors(file, size)
            if check_tensors:
                damaged = archive.testzip()
                if damaged is not None:
                    raise ValueError(f"the checksum of {damaged} is wrong")
    return Fingerprint(name, size, checksum)


def _load(path: str) -> tuple[dict, bool]:
    """Load a file that was verified.

    Returns:
        The content, and whether its tensors are pages of the file.
    """
    with open(path, "rb") as file:
        can_be_mapped = file.read(1) != _BARE_PICKLE
    if can_be_mapped:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True), True
        except RuntimeError as error:
            # Some network file systems cannot map files.
            if "unable to mmap" not in str(error):
                raise
    return torch.load(path, map_location="cpu", weights_only=True), False


def _checksum_of_all(file: BinaryIO) -> int:
    file.seek(0)
    checksum = 0
    while chunk := file.read(_CHUNK):
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def _checksum_without_tensors(file: BinaryIO, size: int) -> int:
    """Sum up the first ``size`` bytes of an archive without the data of its members."""
    with zipfile.ZipFile(file) as archive:
        members = [(member.header_offset, member.compress_size) for member in archive.infolist()]
    checksum = 0
    position = 0
    for header, num_bytes in sorted(members):
        # A header has 30 bytes; its last four are the lengths of the name and of the padding.
        file.seek(header + 26)
        name_length, padding_length = struct.unpack("<2H", file.read(4))
        data = header + 30 + name_length + padding_length
        file.seek(position)
        checksum = zlib.crc32(file.read(data - position), checksum)
        position = data + num_bytes
    file.seek(position)
    return zlib.crc32(file.read(size - position), checksum)


def _release_pages(tensor: torch.Tensor) -> None:
    """Drop the pages of a mapped file that lie wholly within a tensor.

    Without this, a resume would need memory for the file and for everything that is copied from
    it.  A page that is used again is read from the file again.  torch does not hand out its map
    of the file, so the system is asked by address; where that is not possible, nothing is done.
    """
    if tensor.layout != torch.strided or not hasattr(mmap, "MADV_DONTNEED"):
        return
    storage = tensor.untyped_storage()
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
