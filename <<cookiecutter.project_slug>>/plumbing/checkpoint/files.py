import contextlib
import os
import pickle
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.serialization import config

from plumbing.comm import SettingsError


def write_atomically(path: str, write: Callable[[BinaryIO], Any]) -> None:
    """Let ``write`` fill a file that then appears whole and durable, or not at all."""
    folder, temporary = os.path.dirname(path), f"{path}.tmp"
    try:
        with open(temporary, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        cause.filename = path  # for an OSError, which does not know it, nor torch that it was one
        raise cause from None
    descriptor = os.open(folder or ".", os.O_RDONLY)
    os.fsync(descriptor)  # of the new name
    os.close(descriptor)


_COMMENT = struct.Struct("<H4sI")  # its length, a mark, the checksum of all but the tensors


def _checksum(file: BinaryIO, size: int) -> int:
    """Of the first ``size`` bytes of an archive without the tensors, whose own are in there."""
    members = sorted((m.header_offset, m.compress_size) for m in zipfile.ZipFile(file).infolist())
    checksum = position = 0
    for header, num_bytes in members:
        file.seek(header + 26)
        data = header + 30 + sum(struct.unpack("<2H", file.read(4)))  # after name and padding
        file.seek(position)
        checksum = zlib.crc32(file.read(data - position), checksum)
        position = data + num_bytes
    file.seek(position)
    return zlib.crc32(file.read(size - position), checksum)


def save_file(path: str, data: dict) -> None:
    """Write a checkpoint, with a checksum as the comment of the zip archive that torch makes."""

    def write(file: BinaryIO) -> None:
        with config.patch("save.compute_crc32", True):  # of each tensor, by torch as it writes
            torch.save(to_plain_types(data), file)
        size = file.seek(-2, os.SEEK_END)  # the length of the comment, so far 0
        comment = _COMMENT.pack(8, b"sum:", _checksum(file, size))
        file.seek(size)
        file.write(comment)

    write_atomically(path, write)


def _is_whole(path: str) -> bool:
    with open(path, "rb") as file:
        if file.read(1) == b"\x80":  # a bare pickle, as torch wrote before 1.6, or with code
            return True
        size = file.seek(-_COMMENT.size, os.SEEK_END)
        *start, expected = _COMMENT.unpack(file.read())
        ours = start == [8, b"sum:"]  # written by save_file
        with zipfile.ZipFile(file) as archive:
            sound = _checksum(file, size) == expected if ours else archive.comment == b""
            return sound and archive.testzip() is None


def load_file(path: str) -> dict:
    """Read a checkpoint to the CPU; one that is damaged or holds code is a SettingsError."""
    if not os.path.isfile(path):
        raise SettingsError(f"checkpoint {path} does not exist")
    damaged = "its checksum is wrong"
    try:
        if _is_whole(path):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            state = checkpoint.get("state_dict", checkpoint)  # of other makes, or only this
            return checkpoint if "model" in checkpoint else {"model": state}
    except pickle.UnpicklingError as error:
        raise SettingsError(f"checkpoint {path} holds code or foreign types: refused") from error
    except Exception as error:  # many kinds, by where the damage is
        damaged = f"{type(error).__name__} {error}".splitlines()[0]
    raise SettingsError(f"checkpoint {path} is damaged, or none: {damaged}")


_PLAIN = torch.Tensor, bool, int, float, str, bytes, torch.dtype, torch.device, type(None)


def to_plain_types(value: Any) -> Any:
    """What torch.load allows, in place of numpy's numbers, paths and so on; else a TypeError."""
    if isinstance(value, Mapping):
        return {key: to_plain_types(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, deque)):
        plain = [to_plain_types(item) for item in value]
        return tuple(plain) if isinstance(value, tuple) else plain
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, _PLAIN):
        raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}: {value!r}")
    return value
