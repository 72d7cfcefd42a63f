"""What is optimized how: groups of parameters, optimizer, clipping, steps that are left out."""

import logging
import math

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from plumbing.comm import SettingsError
from plumbing.events import get_event_storage

NORM_LAYERS = nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm


def build_optimizer(cfg, model):
    solver = cfg.SOLVER
    groups = parameter_groups(cfg, model)
    if solver.OPTIMIZER == "SGD":
        momentum = {"momentum": solver.MOMENTUM, "nesterov": solver.NESTEROV}
        optimizer = torch.optim.SGD(groups, solver.BASE_LR, fused=True, **momentum)
        # The fused SGD leaves them uninitialized if the very first step is left out.
        for parameter in (p for g in optimizer.param_groups for p in g["params"] if g["momentum"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
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
                lr *= solver.BIAS_LR_FACTOR
                decay = decay if solver.WEIGHT_DECAY_BIAS < 0 else solver.WEIGHT_DECAY_BIAS
            if isinstance(module, NORM_LAYERS):
                decay = solver.WEIGHT_DECAY_NORM
            group = groups.setdefault((lr, decay), {"lr": lr, "weight_decay": decay, "params": []})
            full_name = f"{module_name}.{name}".removeprefix("module.").removeprefix(".")
            group["params"].append((full_name, parameter))
    return list(groups.values())


def keep_settings_on_load(optimizer, saved):
    """On a resume the state comes from the file, by parameter names; the settings stay."""
    named = [zip(group["param_names"], group["params"]) for group in saved["param_groups"]]
    state_of = {name: saved["state"].get(i) for group in named for name, i in group}
    groups = optimizer.state_dict()["param_groups"]
    if groups[0].keys() != saved["param_groups"][0].keys():
        kind = type(optimizer).__name__
        raise SettingsError(f"--resume: another optimizer than {kind} was saved: go back to it")
    state, new = {}, []
    for group, own in zip(groups, optimizer.param_groups):
        for i, name, parameter in zip(group["params"], own["param_names"], own["params"]):
            state[i] = state_of.get(name)
            if state[i] is None and saved["state"]:
                new.append(name)
                # The fused SGD wants a momentum for all parameters or for none.
                sgd = isinstance(optimizer, torch.optim.SGD)
                state[i] = {"momentum_buffer": torch.zeros_like(parameter)} if sgd else None
    if new:
        logging.getLogger(__name__).warning("The optimizer starts anew for %s", ", ".join(new))
    return {"state": {i: s for i, s in state.items() if s is not None}, "param_groups": groups}


def build_grad_scaler(cfg, model):
    amp = cfg.SOLVER.AMP
    float16 = amp.ENABLED and amp.DTYPE == "float16"
    if cfg.SOLVER.NONFINITE == "skip":
        return SkippingScaler(cfg.MODEL.DEVICE, float16, model, cfg.SOLVER.MAX_SKIPS)
    return OverflowScaler(cfg.MODEL.DEVICE) if float16 else NoScaler()


class NoScaler:
    """Stands where a torch.amp.GradScaler would, and lets everything through."""

    finite = ("loss", "grad_norm")  # what EventStorage.reduce has to insist on

    def scale(self, losses):
        return losses

    def unscale_(self, optimizer):
        pass

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class OverflowScaler(torch.amp.GradScaler):
    """torch's, for float16: it leaves out a step whose gradients overflow, and scales less then."""

    finite = ("loss",)


class SkippingScaler(torch.amp.GradScaler):
    """Leaves out each step whose gradients are not finite; ``max_skips`` in a row are an error.

    The gradients are those of all ranks, so all leave it out.  Floating point buffers, such as
    batch-norm statistics, keep their values as well.  Nothing is read: the fused optimizers look at
    ``found_inf`` on the device.
    """

    finite = ("skips_in_a_row",)

    def __init__(self, device, enabled, model, max_skips):
        super().__init__(device, enabled=enabled)
        self.max_skips = max_skips
        self.buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self.kept = None  # the buffers before the first forward pass of an iteration
        model.register_forward_pre_hook(self._keep_buffers)
        self.skips = self.in_a_row = torch.zeros((), device=device)

    def step(self, optimizer):
        bad = ~grad_norm_of(optimizer).isfinite()
        optimizer.grad_scale, optimizer.found_inf = None, bad.float().reshape(1)
        super().step(optimizer)
        with torch.no_grad():
            for buffer, kept in zip(self.buffers, self.kept or ()):
                buffer.copy_(torch.where(bad, kept, buffer))
        self.kept = None
        self.skips, self.in_a_row = self.skips + bad, (self.in_a_row + 1) * bad
        too_many = torch.where(self.in_a_row < self.max_skips, self.in_a_row, math.inf)
        counts = {"skips_in_a_row": too_many, "skips": self.skips}
        get_event_storage().put_scalars(counts, smoothing_hint=False)

    def _keep_buffers(self, model, _):
        if model.training and self.kept is None:
            self.kept = [buffer.clone() for buffer in self.buffers]

    def state_dict(self):
        mine = {"skips": self.skips, "in_a_row": self.in_a_row}
        return {**super().state_dict(), **mine}

    def load_state_dict(self, state):
        self.skips, self.in_a_row = (
            state.get(name, torch.zeros(())).to(self.skips.device) for name in ("skips", "in_a_row")
        )
        super().load_state_dict(state)


def clip_grad_norm_(optimizer, max_norm):
    """Scale all gradients together down to a norm of ``max_norm`` (inf: never).

    Returns their norm before, a tensor: nothing is read.  torch.nn.utils.clip_grad_norm_ gives the
    same, but multiplies also by 1.
    """
    norm = grad_norm_of(optimizer)
    if max_norm < math.inf:
        for group in optimizer.param_groups:
            clip_grads_with_norm_(group["params"], max_norm, norm)
    return norm


def grad_norm_of(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
