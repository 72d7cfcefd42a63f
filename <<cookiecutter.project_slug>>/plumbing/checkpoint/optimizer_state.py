"""The state of an optimizer, by the names of its parameters.

torch saves the state of parameter 0, 1, 2, ...  If a layer is frozen or moved between two runs,
each momentum goes to another parameter.  Here every number has its name in the file, and each
parameter gets its own state back.  Learning rates and other settings stay those of the present
run, so an edited setting takes effect on a resume.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from plumbing.errors import SettingsError

from .archive import copied
from .sharded import SavedShards, copy_saved, whole

logger = logging.getLogger("plumbing.checkpoint")

# A setting that makes an optimizer of torch keep one more tensor, which begins at zero.
_STATE_OF_SETTING = {
    "momentum": "momentum_buffer",
    "amsgrad": "max_exp_avg_sq",
    "centered": "grad_avg",
}
# The state of torch's optimizers is a tensor with the shape of its parameter, apart from these.
_ONE_NUMBER = ("step", "mu", "mu_product", "eta")
_OTHER_SHAPES = ("Adafactor", "LBFGS")
# What the optimizers whose kernels read memory without a check need of each parameter.
_NEEDED = {
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Adagrad": ("step", "sum"),
}
_NUM_SHOWN = 8


def has_parameter_state(state: Any) -> bool:
    """Whether a state dict has the form that torch.optim.Optimizer gives it."""
    return isinstance(state, dict) and {"state", "param_groups"} <= state.keys()


def save_optimizer(optimizer: torch.optim.Optimizer, modules: dict[str, nn.Module]) -> dict:
    """Return the state dict of an optimizer, with the names of the parameters and its class.

    Args:
        modules: where the parameters may come from; "model" is the model itself.
    """
    state = dict(optimizer.state_dict())
    if not has_parameter_state(state):
        # A class of somebody's own has a state of its own form.
        return state
    names = parameter_names(optimizer, modules)
    groups = []
    for group, names_of_group in zip(state["param_groups"], names):
        groups.append({**group, "param_names": names_of_group})
    state["param_groups"] = groups
    # The state of Adam cannot be told from that of AdamW otherwise.
    state["kind"] = type(optimizer).__name__
    return state


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    saved: dict,
    modules: dict[str, nn.Module],
    path: str,
    release: Callable[[Any], None],
) -> None:
    """Give each parameter the state that was saved under its name; the settings stay.

    Args:
        saved: what ``save_optimizer`` returned, or the state dict of an optimizer without names.
        path: the file, for errors.
        release: is called with tensors of the file that are no longer needed.

    Raises:
        SettingsError: the state is that of a different optimizer, or does not fit.
    """
    if not has_parameter_state(saved):
        optimizer.load_state_dict(saved)
        return
    kind = type(optimizer).__name__
    saved_kind = saved.get("kind", kind)
    if saved_kind != kind:
        raise SettingsError(
            f"--resume: the optimizer is {kind}, and {path} holds the state of {saved_kind}: go"
            f" back to {saved_kind}, or start elsewhere with the file as MODEL.WEIGHTS"
        )
    names = parameter_names(optimizer, modules)
    state_of_name, shared = _state_by_name(saved, names, path)
    fitted = {}
    new_names = []
    for group, names_of_group in zip(optimizer.param_groups, names):
        for name, parameter in zip(names_of_group, group["params"]):
            state = state_of_name.pop(name, {})
            if state:
                check_parameter_state(optimizer, parameter, state, f"{path}: {name}")
            elif saved["state"]:
                # Not if the optimizer keeps no state at all, as SGD without momentum.
                new_names.append(name)
            fitted[parameter] = {
                **optimizer.state.get(parameter, {}),
                **fit_state(parameter, state, release),
            }
            _follow_settings(fitted[parameter], group, parameter)
    _warn_of_new_parameters(new_names)
    others = {key: value for key, value in saved.items() if key != "kind"}
    _load(optimizer, others, fitted, shared)


def parameter_names(
    optimizer: torch.optim.Optimizer, modules: dict[str, nn.Module]
) -> list[list[str]]:
    """Name the parameters of each group, so that every name stands for one parameter.

    A name is the one that the optimizer was given; else that of the parameter in the model or in
    another module; else its position.
    """
    known = _names_by_identity(modules)
    seen: dict[str, int] = {}
    position = 0
    names = []
    for group in optimizer.param_groups:
        given_names = group.get("param_names", [None] * len(group["params"]))
        names_of_group = []
        for given, parameter in zip(given_names, group["params"]):
            name = _choose_name(given, known.get(id(parameter)), position)
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                # Two modules whose parameters have the same names were given to one optimizer.
                name = f"{name} ({seen[name]})"
            names_of_group.append(name)
            position += 1
        names.append(names_of_group)
    return names


def fit_state(parameter: torch.Tensor, state: dict, release: Callable[[Any], None]) -> dict:
    """Copy the state of a parameter to its device and its layout in memory.

    The fused kernels walk through memory, so a tensor of the parameter's shape needs the strides
    of the parameter.  Its type stays.  It is divided between the ranks if the parameter is.

    Args:
        release: is called with each value that has been copied.
    """
    fitted = {}
    for key, value in state.items():
        is_tensor = isinstance(value, (torch.Tensor, SavedShards))
        if is_tensor and value.shape == parameter.shape:
            layout = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
            fitted[key] = copy_saved(value, layout)
        else:
            # The number of steps, sums over rows, lists of earlier steps and the like.
            fitted[key] = copied(whole(value))
        # One by one, so that a resume does not need memory for two optimizers.
        release(value)
    return fitted


def check_parameter_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: Any, what: str
) -> None:
    """Check the state of one parameter, as far as it is known how it must be.

    A fused kernel that gets a tensor of the wrong size ends the process without a word, or reads
    memory that is not its own.  Of an optimizer that is not torch's nothing is known.

    Args:
        what: the file and the name of the parameter, for errors.

    Raises:
        SettingsError: the state does not fit the parameter.
    """
    kind = type(optimizer).__name__
    if not isinstance(state, dict):
        raise SettingsError(f"{what}: its state in {kind} is not a dict: the file is damaged")
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    if not is_torchs or kind in _OTHER_SHAPES:
        return
    missing = [key for key in _NEEDED.get(kind, ()) if key not in state]
    if missing:
        raise SettingsError(f"{what}: {', '.join(missing)} of {kind} is missing in the file")
    for key, value in state.items():
        if key in _ONE_NUMBER:
            fits = isinstance(value, (int, float)) or _has_one_element(value)
        elif isinstance(value, (torch.Tensor, SavedShards)):
            is_number = value.dtype.is_floating_point or value.dtype.is_complex
            fits = value.shape == parameter.shape and is_number
        else:
            fits = value is None
        if not fits:
            found = type(value).__name__
            if isinstance(value, torch.Tensor):
                found = f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
            raise SettingsError(
                f"{what}: {key} of {kind} does not fit a parameter of shape"
                f" {tuple(parameter.shape)}: it is {found}"
            )


def _warn_of_new_parameters(names: list[str]) -> None:
    if not names:
        return
    shown = ", ".join(names[:_NUM_SHOWN])
    more = ""
    if len(names) > _NUM_SHOWN:
        more = f" and {len(names) - _NUM_SHOWN} more"
    logger.warning("The optimizer starts anew for %s%s", shown, more)


def _has_one_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _names_by_identity(modules: dict[str, nn.Module]) -> dict[int, str]:
    known = {}
    for key, module in modules.items():
        prefix = "" if key == "model" else f"{key}."
        for name, parameter in module.named_parameters():
            known.setdefault(id(parameter), f"{prefix}{name}")
    return known


def _choose_name(given: str | None, known: str | None, position: int) -> str:
    if given is None:
        return known or f"parameter {position}"
    # A model that was wrapped for several ranks puts "module." before its names.
    if known is not None and given.endswith(known):
        return known
    return given


def _state_by_name(saved: dict, own_names: list[list[str]], path: str) -> tuple[dict, dict]:
    """Sort the state in a file.

    Returns:
        {name: state of a parameter}, and the state that belongs to no parameter.
    """
    own_in_order = [name for names in own_names for name in names]
    shared = dict(saved["state"])
    state_of_name = {}
    position = 0
    for group in saved["param_groups"]:
        # A file without names has the order of the parameters only.
        names = group.get("param_names", own_in_order[position : position + len(group["params"])])
        if len(names) != len(group["params"]):
            raise SettingsError(
                f"{path}: the optimizer has {len(names)} names for {len(group['params'])}"
                " parameters: the file is damaged, or its parameters are not those of the model"
            )
        for name, index in zip(names, group["params"]):
            state_of_name[name] = shared.pop(index, {})
            position += 1
    return state_of_name, shared


def _follow_settings(state: dict, group: dict, parameter: torch.Tensor) -> None:
    """Drop or begin what a setting that was edited turns off or on."""
    for setting, key in _STATE_OF_SETTING.items():
        if setting not in group:
            continue
        if not group[setting]:
            state.pop(key, None)
        elif state and state.get(key) is None:
            state[key] = torch.zeros_like(parameter, requires_grad=False)


def _load(optimizer: torch.optim.Optimizer, others: dict, fitted: dict, shared: dict) -> None:
    """Hand the state to the optimizer's own load_state_dict, and keep types and settings.

    Args:
        others: what a class of somebody's own has in its state dict beside the usual keys.
        fitted: {parameter: its state}.
        shared: state that belongs to no parameter.
    """
    groups = optimizer.param_groups
    numbered_groups = optimizer.state_dict()["param_groups"]
    state = dict(shared)
    for numbered, group in zip(numbered_groups, groups):
        for index, parameter in zip(numbered["params"], group["params"]):
            if fitted[parameter]:
                state[index] = fitted[parameter]
    optimizer.load_state_dict({**others, "state": state, "param_groups": numbered_groups})
    # torch has copied the settings; others, such as a scheduler, may hold the groups themselves.
    optimizer.param_groups = groups
    # torch casts floating point state to the type of the parameter, also where it was not so.
    for parameter, saved_state in fitted.items():
        for key, value in saved_state.items():
            loaded = optimizer.state[parameter].get(key)
            if not isinstance(loaded, torch.Tensor) or not isinstance(value, torch.Tensor):
                continue
            if loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)
