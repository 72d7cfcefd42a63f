"""Optimizer and mixed precision.  The settings and their meaning are detectron2's."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_NORM_LAYERS = nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm


def build_optimizer(cfg: Any, model: nn.Module) -> torch.optim.Optimizer:
    solver = cfg.SOLVER
    groups = get_optimizer_params(
        model, solver.BASE_LR, solver.WEIGHT_DECAY, solver.WEIGHT_DECAY_NORM,
        solver.WEIGHT_DECAY_BIAS, solver.BIAS_LR_FACTOR,
    )  # fmt: skip
    if solver.OPTIMIZER == "SGD":
        momentum = {"momentum": solver.MOMENTUM, "nesterov": solver.NESTEROV}
        optimizer = torch.optim.SGD(groups, solver.BASE_LR, fused=True, **momentum)
    else:  # AdamW
        optimizer = torch.optim.AdamW(groups, solver.BASE_LR, solver.BETAS, fused=True)
    optimizer.register_load_state_dict_pre_hook(_keep_settings)
    return optimizer


def get_optimizer_params(
    model: nn.Module, base_lr: float, weight_decay: float, weight_decay_norm: float,
    weight_decay_bias: float, bias_lr_factor: float,
) -> list[dict]:  # fmt: skip
    """Named parameter groups, one for each pair of learning rate and decay, without frozen ones.

    ``weight_decay_norm`` goes to all parameters of norm layers, ``weight_decay_bias`` to the other
    biases.  A shared parameter counts once.
    """
    groups, seen = {}, set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                lr = base_lr * bias_lr_factor if name == "bias" else base_lr
                decay = weight_decay_bias if name == "bias" else weight_decay
                decay = weight_decay_norm if isinstance(module, _NORM_LAYERS) else decay
                group = {"lr": lr, "weight_decay": decay, "params": []}
                full_name = f"{module_name}.{name}".removeprefix("module.").removeprefix(".")
                groups.setdefault((lr, decay), group)["params"].append((full_name, parameter))
    return list(groups.values())


def _keep_settings(optimizer: torch.optim.Optimizer, saved: dict) -> dict:
    """Take from the file the state alone, by parameter names; the settings are those in force."""
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    id_of = dict(zip(names, (i for group in saved["param_groups"] for i in group["params"])))
    groups = []
    for own in optimizer.state_dict()["param_groups"]:
        groups.append({**own, "params": [id_of.get(name, name) for name in own["param_names"]]})
        if new := [name for name in own["param_names"] if name not in id_of]:
            logging.getLogger(__name__).warning("The optimizer starts anew for %s", ", ".join(new))
    return {"state": saved["state"], "param_groups": groups}


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


def build_grad_scaler(cfg: Any) -> torch.amp.GradScaler:
    """Scales losses in float16 mixed precision; otherwise passes everything through."""
    float16 = cfg.SOLVER.AMP.ENABLED and cfg.SOLVER.AMP.DTYPE == "float16"
    return torch.amp.GradScaler(cfg.MODEL.DEVICE, enabled=float16)


def build_autocast(cfg: Any) -> contextlib.AbstractContextManager:
    """Context of the forward pass, to be entered again and again; without AMP it does nothing."""
    dtype = torch.float16 if cfg.SOLVER.AMP.DTYPE == "float16" else torch.bfloat16
    autocast = torch.autocast(cfg.MODEL.DEVICE, dtype)
    return autocast if cfg.SOLVER.AMP.ENABLED else contextlib.nullcontext()
