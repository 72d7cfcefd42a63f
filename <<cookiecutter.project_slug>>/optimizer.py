"""What is optimized how: parameters, optimizer, learning rate, precision, as in detectron2."""

import bisect
import contextlib
import math

import torch
from torch import nn

from plumbing.solver import keep_settings_on_load

NORM_LAYERS = nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm


def build_optimizer(cfg, model):
    solver = cfg.SOLVER
    groups = parameter_groups(cfg, model)
    if solver.OPTIMIZER == "SGD":
        momentum = {"momentum": solver.MOMENTUM, "nesterov": solver.NESTEROV}
        optimizer = torch.optim.SGD(groups, solver.BASE_LR, fused=True, **momentum)
    else:
        optimizer = torch.optim.AdamW(groups, solver.BASE_LR, solver.BETAS, fused=True)
    optimizer.register_load_state_dict_pre_hook(keep_settings_on_load)
    return optimizer


def parameter_groups(cfg, model):
    """One group of named parameters for each learning rate and weight decay.

    Norm layers have a decay of their own, for all their parameters; so have the biases elsewhere.
    Frozen parameters are left out, a shared one counts once.
    """
    solver = cfg.SOLVER
    groups, seen = {}, set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            lr, decay = solver.BASE_LR, solver.WEIGHT_DECAY
            if name == "bias":
                lr, decay = lr * solver.BIAS_LR_FACTOR, solver.WEIGHT_DECAY_BIAS
            if isinstance(module, NORM_LAYERS):
                decay = solver.WEIGHT_DECAY_NORM
            group = groups.setdefault((lr, decay), {"lr": lr, "weight_decay": decay, "params": []})
            full_name = f"{module_name}.{name}".removeprefix("module.").removeprefix(".")
            group["params"].append((full_name, parameter))
    return list(groups.values())


def build_lr_scheduler(cfg, optimizer):
    """The rate is a function of the iteration alone; a torch.optim.lr_scheduler works as well."""
    solver = cfg.SOLVER
    if solver.LR_SCHEDULER_NAME == "constant":
        shape = multistep([], 1.0)
    elif solver.LR_SCHEDULER_NAME == "multistep":
        shape = multistep(solver.STEPS, solver.GAMMA)
    else:
        shape = cosine(solver.MAX_ITER, solver.BASE_LR_END / solver.BASE_LR)
    warm = with_warmup(shape, solver.WARMUP_ITERS, solver.WARMUP_FACTOR, solver.WARMUP_METHOD)
    return LRMultiplier(optimizer, warm)


class LRMultiplier:
    """Sets the learning rate of each group to its first one times ``factor(iteration)``."""

    def __init__(self, optimizer, factor):
        self.optimizer, self.factor = optimizer, factor
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.load_state_dict({"iteration": 0})

    def step(self):
        """Go to the next iteration."""
        self.load_state_dict({"iteration": self.iteration + 1})

    def get_last_lr(self):
        """Of each group, in this iteration."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self):
        return {"iteration": self.iteration}

    def load_state_dict(self, state):
        self.iteration = state["iteration"]
        factor = self.factor(self.iteration)
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs):
            group["lr"] = base_lr * factor


def multistep(steps, gamma):
    """``gamma`` to the power of how many of the ``steps``, iterations, have been reached."""
    steps = sorted(steps)
    return lambda iteration: gamma ** bisect.bisect_right(steps, iteration)


def cosine(max_iter, end):
    """Half a cosine from 1 at iteration 0 to ``end`` at ``max_iter``, where it stays.

    Loshchilov and Hutter, SGDR, 2017.
    """

    def factor(iteration):
        progress = min(iteration / max_iter, 1.0)
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def with_warmup(shape, iters, start, method):
    """``shape`` from iteration ``iters`` on; before, a rise from ``start`` times its first value.

    The rise is a line that meets the shape ("linear"), or stays at its start ("constant").
    """

    def factor(iteration):
        if iteration >= iters:
            return shape(iteration)
        first, last = start * shape(0), shape(iters)
        return first + (last - first) * (iteration / iters if method == "linear" else 0.0)

    return factor


def build_grad_scaler(cfg):
    """Scales losses in float16 mixed precision; otherwise passes everything through."""
    float16 = cfg.SOLVER.AMP.ENABLED and cfg.SOLVER.AMP.DTYPE == "float16"
    return torch.amp.GradScaler(cfg.MODEL.DEVICE, enabled=float16)


def build_autocast(cfg):
    """Context of the forward pass, to be entered again and again; without AMP it does nothing."""
    dtype = torch.float16 if cfg.SOLVER.AMP.DTYPE == "float16" else torch.bfloat16
    autocast = torch.autocast(cfg.MODEL.DEVICE, dtype)
    return autocast if cfg.SOLVER.AMP.ENABLED else contextlib.nullcontext()
