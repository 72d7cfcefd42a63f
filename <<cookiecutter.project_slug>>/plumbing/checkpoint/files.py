import contextlib
import os
import pickle
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import torch

from plumbing.comm import SettingsError


def write_atomically(path: str, write: Callable[[BinaryIO], Any]) -> None:
    """Let ``write`` fill a file that then appears whole and durable, or not at all."""
    folder, temporary = os.path.dirname(path), f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    descriptor = os.open(folder or ".", os.O_RDONLY)
    os.fsync(descriptor)  # of the new name
    os.close(descriptor)


def load_file(path: str) -> dict:
    """Read a checkpoint to the CPU; one that is damaged or holds code is a SettingsError."""
    if not os.path.isfile(path):
        raise SettingsError(f"checkpoint {path} does not exist")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        damaged = error
    if damaged:
        raise SettingsError(f"checkpoint {path} is damaged, or none: {damaged}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise SettingsError(f"checkpoint {path} holds code or foreign types: refused") from error
    return checkpoint if "model" in checkpoint else {"model": checkpoint}


def to_plain_types(value: Any) -> Any:
    """Replace numpy's numbers and arrays, paths, and other mappings, by what torch.load allows."""
    if isinstance(value, dict):
        return {key: to_plain_types(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain_types(item) for item in value)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value
