"""What a checkpoint can hold: tensors, and the plain types of Python."""

import os
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_AS_THEY_ARE = (torch.Tensor, torch.dtype, torch.device, type(None), bool)
_NUMBERS_AND_STRINGS = (int, float, complex, str, bytes)


def to_plain_types(value: Any, where: str = "") -> Any:
    """Replace types that ``torch.load`` refuses: those of numpy, paths, and subclasses.

    Args:
        where: the name of the value, for errors.

    Raises:
        TypeError: the value has a type that a checkpoint cannot hold.
    """
    # A bool cannot have subclasses; all other plain types can, see below.
    if isinstance(value, _AS_THEY_ARE):
        return value
    if isinstance(value, Mapping):
        return {key: to_plain_types(item, _join(where, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, deque)):
        plain = [to_plain_types(item, _join(where, i)) for i, item in enumerate(value)]
        if isinstance(value, tuple):
            return tuple(plain)
        return plain
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for kind in _NUMBERS_AND_STRINGS:
        if isinstance(value, kind):
            # An enum or another subclass would be refused when the file is loaded.
            return value if type(value) is kind else kind.__new__(kind, _content(value, kind))
    raise TypeError(f"a checkpoint cannot hold {where}, a {type(value).__name__}: {value!r}")


def _content(value: Any, kind: type) -> Any:
    if kind is str:
        # str() of an enum would be its name.
        return str.__str__(value)
    return value


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)
