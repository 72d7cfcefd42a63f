"""Optimizer, learning rate, gradients.  Names and defaults follow detectron2/solver."""

import bisect
import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from plumbing import comm

logger = logging.getLogger(__name__)

_NORM_LAYERS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


def build_optimizer(cfg: Any, model: nn.Module) -> torch.optim.Optimizer:
    solver = cfg.SOLVER
    groups = get_optimizer_params(
        model,
        solver.BASE_LR,
        solver.WEIGHT_DECAY,
        weight_decay_norm=solver.WEIGHT_DECAY_NORM,
        weight_decay_bias=solver.WEIGHT_DECAY_BIAS,
        bias_lr_factor=solver.BIAS_LR_FACTOR,
    )
    if solver.OPTIMIZER == "SGD":
        arguments = {"momentum": solver.MOMENTUM, "nesterov": solver.NESTEROV}
        optimizer = torch.optim.SGD(groups, lr=solver.BASE_LR, fused=True, **arguments)
    elif solver.OPTIMIZER == "AdamW":
        optimizer = torch.optim.AdamW(groups, lr=solver.BASE_LR, betas=solver.BETAS, fused=True)
    else:
        raise comm.SettingsError(f"SOLVER.OPTIMIZER: {solver.OPTIMIZER!r} is not SGD or AdamW")
    optimizer.register_load_state_dict_pre_hook(_keep_settings)
    return optimizer


def get_optimizer_params(
    model: nn.Module,
    base_lr: float,
    weight_decay: float,
    weight_decay_norm: float,
    weight_decay_bias: float,
    bias_lr_factor: float,
) -> list[dict]:
    """Parameter groups of one learning rate and decay each; frozen parameters are in none.

    All parameters of norm layers, biases included, get ``weight_decay_norm``; other biases get
    ``weight_decay_bias``.  A shared parameter counts once.
    """
    groups, seen = {}, set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            lr = base_lr * bias_lr_factor if name == "bias" else base_lr
            decay = weight_decay_bias if name == "bias" else weight_decay
            decay = weight_decay_norm if isinstance(module, _NORM_LAYERS) else decay
            full_name = f"{module_name}.{name}".removeprefix(".").removeprefix("module.")
            group = groups.setdefault((lr, decay), {"lr": lr, "weight_decay": decay, "params": []})
            group["params"].append((full_name, parameter))
    return list(groups.values())


def _keep_settings(optimizer: torch.optim.Optimizer, saved: dict) -> dict:
    """The settings in force stay; from the file comes only the state, by the parameters' names."""
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    id_of = dict(zip(names, ids))
    groups = []
    for own in optimizer.state_dict()["param_groups"]:
        if lacking := [name for name in own["param_names"] if name not in id_of]:
            logger.warning("No optimizer state was saved for %s: it starts anew", lacking)
        kept = [id_of.get(name, f"new {name}") for name in own["param_names"]]
        groups.append({**own, "params": kept})
    return {"state": saved["state"], "param_groups": groups}


class LRMultiplier:
    """Sets each group's learning rate to its first one times ``factor(iteration)``.

    The rate is a function of the iteration alone: after a resume, edited settings hold at once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self._set(0)

    def _set(self, iteration: int) -> None:
        self.iteration = iteration
        factor = self.factor(iteration)
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs):
            group["lr"] = base_lr * factor

    def step(self) -> None:
        """Go to the next iteration."""
        self._set(self.iteration + 1)

    def get_last_lr(self) -> list[float]:
        """The rate of each group in the current iteration."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict) -> None:
        self._set(state["iteration"])


def build_lr_scheduler(cfg: Any, optimizer: torch.optim.Optimizer) -> LRMultiplier:
    solver = cfg.SOLVER
    if solver.LR_SCHEDULER_NAME == "constant":
        decay = lambda iteration: 1.0  # noqa: E731
    elif solver.LR_SCHEDULER_NAME == "multistep":
        decay = multistep(sorted(solver.STEPS), solver.GAMMA)
    elif solver.LR_SCHEDULER_NAME == "cosine":
        decay = cosine(solver.MAX_ITER, solver.BASE_LR_END / solver.BASE_LR)
    else:
        raise comm.SettingsError(
            f"SOLVER.LR_SCHEDULER_NAME: {solver.LR_SCHEDULER_NAME!r} is not constant, multistep or"
            " cosine"
        )
    warm = with_warmup(decay, solver.WARMUP_ITERS, solver.WARMUP_FACTOR, solver.WARMUP_METHOD)
    return LRMultiplier(optimizer, warm)


def multistep(steps: list[int], gamma: float) -> Callable[[int], float]:
    """``gamma`` to the power of the number of ``steps`` that have been reached."""
    return lambda iteration: gamma ** bisect.bisect_right(steps, iteration)


def cosine(max_iter: int, end: float) -> Callable[[int], float]:
    """Half a cosine from 1 at iteration 0 to ``end`` at ``max_iter``, where it stays (SGDR)."""

    def factor(iteration: int) -> float:
        progress = min(iteration / max_iter, 1.0)
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def with_warmup(
    decay: Callable[[int], float], iters: int, start: float, method: str
) -> Callable[[int], float]:
    """``decay`` after a warm-up from ``start * decay(0)`` to ``decay(iters)``, as detectron2."""

    def factor(iteration: int) -> float:
        if iteration >= iters:
            return decay(iteration)
        first, last = start * decay(0), decay(iters)
        return first + (last - first) * (iteration / iters if method == "linear" else 0.0)

    return factor


def build_grad_scaler(cfg: Any) -> torch.amp.GradScaler:
    """Scales the loss when AMP is on and float16; otherwise passes everything through."""
    float16 = cfg.SOLVER.AMP.ENABLED and cfg.SOLVER.AMP.DTYPE == "float16"
    return torch.amp.GradScaler(cfg.MODEL.DEVICE, enabled=float16)


def build_autocast(cfg: Any) -> contextlib.AbstractContextManager:
    """Context of the forward pass, to be entered again and again."""
    if not cfg.SOLVER.AMP.ENABLED:
        return contextlib.nullcontext()
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return torch.autocast(cfg.MODEL.DEVICE, dtypes[cfg.SOLVER.AMP.DTYPE])


def sum_losses(loss_dict: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the entries with "loss" in their name; the others are only logged."""
    losses = [loss for name, loss in loss_dict.items() if "loss" in name]
    if not losses or "total_loss" in loss_dict:
        raise ValueError(
            'the model must return a dict of scalar tensors with "loss" in the name of one or more,'
            f" none of them total_loss, which is their sum; got {list(loss_dict)}"
        )
    return sum(losses)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """The norm of all gradients together, before they are scaled down to ``max_norm`` (inf: never).

    Nothing is read to the host.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = get_total_norm([parameter.grad for parameter in parameters])
    if max_norm < math.inf:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
