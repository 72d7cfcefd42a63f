"""The state of a model: whether it may be saved, and what of a file fits it."""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from plumbing.errors import SettingsError

from .archive import copied
from .sharded import SavedShards, fit_to, is_sharded

# The end of the name under which torch keeps what a module has added by get_extra_state.
_EXTRA_STATE = "_extra_state"
_NUM_SHOWN = 3
_NUM_SHOWN_GROUPS = 8


class IncompatibleKeys(NamedTuple):
    """How a model differs from a file; the names are fvcore's."""

    missing_keys: list[str]
    unexpected_keys: list[str]
    # (name, shape in the file, shape in the model)
    incorrect_shapes: list[tuple[str, tuple, tuple]]


def not_finite(state: dict[str, Any]) -> list[str]:
    """Names of the tensors that hold NaN or an infinite value; no tensor is copied.

    Of a tensor that is divided between the ranks only the part of this rank counts.
    """
    names = []
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value):
            continue
        value = value.detach()
        if is_sharded(value):
            value = value.to_local()
        if value.layout != torch.strided:
            value = value.to_sparse().coalesce().values()
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        if not value.is_floating_point() or value.numel() == 0:
            continue
        if value.element_size() == 1:
            # aminmax does not know the types of 8 bits.
            value = value.float()
        low, high = torch.aminmax(value)
        if not (math.isfinite(low) and math.isfinite(high)):
            names.append(name)
    return names


def check_model_state(state: Any, path: str) -> None:
    """Check that a part of a file can be the state of a model.

    Raises:
        SettingsError: names the file and the entry.
    """
    if not isinstance(state, dict):
        raise SettingsError(f"checkpoint {path} is damaged: its model is not a dict")
    for name, value in state.items():
        is_tensor = isinstance(value, (torch.Tensor, np.ndarray, SavedShards))
        if not is_tensor and not str(name).endswith(_EXTRA_STATE):
            raise SettingsError(f"checkpoint {path} is damaged: {name} is not a tensor")


def load_model_state(model: nn.Module, state: dict, path: str, advice: str) -> IncompatibleKeys:
    """Copy everything that fits into a model.

    Args:
        state: by name; the names may have a common first part, such as "module.", too many.
        path: the file, for errors.
        advice: what the user can do if nothing fits.

    Raises:
        SettingsError: the file and the model have no name in common.
    """
    own_state = model.state_dict(keep_vars=True)
    state = _without_wrappers(_as_tensors(state), own_state)
    if own_state and not state.keys() & own_state.keys():
        raise SettingsError(
            f"{path} has nothing for this model: it holds {_some_of(state)}, and the model has"
            f" {_some_of(own_state)}: {advice}"
        )
    incorrect_shapes = []
    for name, own in own_state.items():
        if name not in state or nn.parameter.is_lazy(own):
            continue
        # What a module added by get_extra_state has no shape.
        saved_shape = getattr(state[name], "shape", ())
        own_shape = getattr(own, "shape", ())
        if saved_shape != own_shape:
            del state[name]
            incorrect_shapes.append((name, tuple(saved_shape), tuple(own_shape)))
            continue
        state[name] = fit_to(own, state[name])
    missing, unexpected = model.load_state_dict(state, strict=False)
    # A parameter that two modules share has two names; one of them in the file is enough.
    found = _names_with_values(own_state, state)
    found.update(name for name, _, _ in incorrect_shapes)
    missing = [name for name in missing if name not in found]
    return IncompatibleKeys(missing, unexpected, incorrect_shapes)


def describe(incompatible: IncompatibleKeys) -> str:
    """Say in one line how a model differs from a file; "" if it does not."""
    parts = _grouped("missing in the file", incompatible.missing_keys)
    parts += _grouped("only in the file", incompatible.unexpected_keys)
    for name, saved_shape, own_shape in incompatible.incorrect_shapes:
        parts.append(f"{name} is {saved_shape} in the file, {own_shape} here")
    if len(parts) > _NUM_SHOWN_GROUPS:
        num_more = len(parts) - _NUM_SHOWN_GROUPS
        parts = [*parts[:_NUM_SHOWN_GROUPS], f"and {num_more} more differences"]
    return "; ".join(parts)


def _grouped(what: str, names: list[str]) -> list[str]:
    """["missing: layer.{weight,bias}", ...], one for each module."""
    groups = defaultdict(list)
    for name in names:
        module, _, last = name.rpartition(".")
        groups[module].append(last)
    return [f"{what}: {module}.{{{','.join(last)}}}" for module, last in groups.items()]


def with_own_extra_states(state: dict) -> dict:
    """Copy what modules have added by get_extra_state: they may keep it, and it is of a file."""
    own = {}
    for name, value in state.items():
        if str(name).endswith(_EXTRA_STATE):
            value = copied(value)
        own[name] = value
    return own


def _as_tensors(state: dict) -> dict:
    tensors = {}
    for name, value in with_own_extra_states(state).items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        tensors[name] = value
    return tensors


def _without_wrappers(state: dict, own_state: dict) -> dict:
    """Remove first parts of the names, such as "module.", that all names share and no own has."""
    # Each pass removes one wrapper, such as DistributedDataParallel around a compiled module.
    while state and not state.keys() & own_state.keys():
        first_parts = {name.partition(".")[0] for name in state}
        if len(first_parts) > 1 or not all("." in name for name in state):
            break
        state = {name.partition(".")[2]: value for name, value in state.items()}
    return state


def _names_with_values(own_state: dict, state: dict) -> set[str]:
    """Names of the model whose tensor is in the file, under this name or a second one."""
    names_of_tensor = defaultdict(list)
    for name, own in own_state.items():
        names_of_tensor[id(own)].append(name)
    found = set()
    for names in names_of_tensor.values():
        if state.keys() & set(names):
            found.update(names)
    return found


def _some_of(names: Any) -> str:
    if not names:
        return "nothing"
    shown = list(names)[:_NUM_SHOWN]
    if len(names) > _NUM_SHOWN:
        shown.append("...")
    return ", ".join(map(str, shown))
