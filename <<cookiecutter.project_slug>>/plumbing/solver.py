"""What an optimizer needs around it: learning rates, resuming, mixed precision."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from plumbing.comm import SettingsError


class LRMultiplier:
    """Sets each group's learning rate to its first one times ``factor(iteration)``.

    A function of the iteration alone: edited settings hold from the first resumed iteration on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        self.optimizer, self.factor = optimizer, factor
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.load_state_dict({"iteration": 0})

    def step(self) -> None:
        """Go to the next iteration."""
        self.load_state_dict({"iteration": self.iteration + 1})

    def get_last_lr(self) -> list[float]:
        """Of each group, in this iteration."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict) -> None:
        self.iteration = state["iteration"]
        factor = self.factor(self.iteration)
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs):
            group["lr"] = base_lr * factor


def keep_settings_on_load(optimizer: torch.optim.Optimizer, saved: dict) -> dict:
    """A load_state_dict_pre_hook: the state is loaded by parameter names, the settings stay."""
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    id_of = dict(zip(names, (i for group in saved["param_groups"] for i in group["params"])))
    groups = []
    for own in optimizer.state_dict()["param_groups"]:
        if own.keys() != saved["param_groups"][0].keys():
            kind = type(optimizer).__name__
            raise SettingsError(f"--resume: another optimizer than {kind} was saved: go back to it")
        if new := [name for name in own["param_names"] if name not in id_of]:
            logging.getLogger(__name__).warning("The optimizer starts anew for %s", ", ".join(new))
        groups.append({**own, "params": [id_of.get(name, name) for name in own["param_names"]]})
    return {"state": saved["state"], "param_groups": groups}


def build_grad_scaler(cfg: Any) -> torch.amp.GradScaler:
    """Scales losses in float16 mixed precision; otherwise passes everything through."""
    float16 = cfg.SOLVER.AMP.ENABLED and cfg.SOLVER.AMP.DTYPE == "float16"
    return torch.amp.GradScaler(cfg.MODEL.DEVICE, enabled=float16)


def build_autocast(cfg: Any) -> contextlib.AbstractContextManager:
    """Context of the forward pass, to be entered again and again; without AMP it does nothing."""
    dtype = torch.float16 if cfg.SOLVER.AMP.DTYPE == "float16" else torch.bfloat16
    autocast = torch.autocast(cfg.MODEL.DEVICE, dtype)
    return autocast if cfg.SOLVER.AMP.ENABLED else contextlib.nullcontext()
