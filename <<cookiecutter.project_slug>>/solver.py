"""The optimizer, its parameter groups, the learning rate schedule and mixed precision."""

import bisect
import contextlib
import math
from types import SimpleNamespace

import torch
from torch import nn

from plumbing.errors import SettingsError
from plumbing.gradients import GradScaler
from plumbing.schedule import LRMultiplier

NORM_LAYERS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm, SyncBatchNorm, InstanceNorm
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def check_solver(cfg):
    """Refuse settings that no optimizer or schedule takes, before anything is read or written.

    Raises:
        SettingsError: says what is wrong.
    """
    if len(cfg.SOLVER.BETAS) != 2:
        raise SettingsError(f"SOLVER.BETAS: {cfg.SOLVER.BETAS} must be two numbers")
    try:
        optimizer = build_optimizer(cfg, nn.Linear(1, 1))
        build_lr_scheduler(cfg, optimizer)
        # Past the warm-up, which does not look at the name of the schedule.
        lr_multiplier(cfg.SOLVER, cfg.SOLVER.MAX_ITER)
    except SettingsError as error:
        raise SettingsError(f"SOLVER.{error}") from None
    except ValueError as error:
        raise SettingsError(f"SOLVER: {error}") from None


def build_optimizer(cfg, model):
    """Any optimizer of torch.optim can stand here: checkpoints keep its state by parameter name."""
    solver = cfg.SOLVER
    groups = build_param_groups(cfg, model)
    match solver.OPTIMIZER:
        case "SGD":
            return torch.optim.SGD(groups, solver.BASE_LR, momentum=solver.MOMENTUM, fused=True)
        case "AdamW":
            return torch.optim.AdamW(groups, solver.BASE_LR, betas=solver.BETAS, fused=True)
    raise SettingsError(f"OPTIMIZER: {solver.OPTIMIZER!r} must be SGD or AdamW")


def build_param_groups(cfg, model):
    """Two groups: parameters of norm layers, with a weight decay of their own, and all others."""
    normal = []
    norm = []
    for module in model.modules():
        # Norm layers that are not torch's are known by their name, such as MyRMSNorm.
        is_norm = isinstance(module, NORM_LAYERS) or type(module).__name__.endswith("Norm")
        group = norm if is_norm else normal
        group.extend(module.parameters(recurse=False))
    # A shared parameter is listed once, and a frozen one not at all.
    normal = [parameter for parameter in dict.fromkeys(normal) if parameter.requires_grad]
    norm = [parameter for parameter in dict.fromkeys(norm) if parameter.requires_grad]
    groups = [
        {"params": normal, "weight_decay": cfg.SOLVER.WEIGHT_DECAY},
        {"params": norm, "weight_decay": cfg.SOLVER.WEIGHT_DECAY_NORM},
    ]
    return [group for group in groups if group["params"]]


def build_lr_scheduler(cfg, optimizer):
    """Any scheduler of torch.optim.lr_scheduler can stand here: a resume with it is exact."""
    solver = SimpleNamespace(**cfg.SOLVER)  # quicker to read in each iteration
    return LRMultiplier(optimizer, lambda iteration: lr_multiplier(solver, iteration))


def lr_multiplier(solver, iteration):
    """The learning rate of an iteration, as a multiple of SOLVER.BASE_LR."""
    iteration = min(iteration, solver.MAX_ITER)
    if iteration < solver.WARMUP_ITERS:
        # A line from WARMUP_FACTOR to 1.  The schedule begins after it, at its highest.
        progress = iteration / solver.WARMUP_ITERS
        return solver.WARMUP_FACTOR + (1 - solver.WARMUP_FACTOR) * progress

    match solver.LR_SCHEDULER_NAME:
        case "constant":
            return 1.0
        case "multistep":
            return solver.GAMMA ** bisect.bisect_right(sorted(solver.STEPS), iteration)
        case "cosine":
            # Half a cosine from 1 to BASE_LR_END / BASE_LR: Loshchilov and Hutter, SGDR, 2017.
            length = max(solver.MAX_ITER - solver.WARMUP_ITERS, 1)
            progress = (iteration - solver.WARMUP_ITERS) / length
            end = solver.BASE_LR_END / solver.BASE_LR
            return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress))
    name = solver.LR_SCHEDULER_NAME
    raise SettingsError(f"LR_SCHEDULER_NAME: {name!r} must be constant, multistep or cosine")


def build_autocast(cfg):
    """The context of a forward pass; it does nothing unless SOLVER.AMP.ENABLED is True."""
    if not cfg.SOLVER.AMP.ENABLED:
        return contextlib.nullcontext()
    return torch.autocast(cfg.MODEL.DEVICE, getattr(torch, cfg.SOLVER.AMP.DTYPE))


def build_grad_scaler(cfg):
    """torch's GradScaler, which float16 needs; it does nothing in bfloat16 and float32."""
    float16 = cfg.SOLVER.AMP.ENABLED and cfg.SOLVER.AMP.DTYPE == "float16"
    return GradScaler(cfg.MODEL.DEVICE, enabled=float16)
