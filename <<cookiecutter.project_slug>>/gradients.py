"""What happens to the gradients between backward and step: scaling, clipping, leaving out."""

import math

import torch

from plumbing.events import get_event_storage

_FEW = 16  # norms that are put together only when they are read
_LEAST_SCALE = 2.0**-40  # of float16 losses
_LARGEST = 3e38  # in float32


def build_gradients(cfg, optimizer):
    return Gradients(optimizer, cfg.SOLVER.CLIP_GRAD_VALUE, cfg.SOLVER.CLIP_GRAD_NORM)


class Gradients:
    """The gradients of all parameters of an optimizer.

    Args:
        max_value: each element is clipped to at most this; inf: not at all.
        max_norm: then all together are, to at most this norm; inf: not at all.
    """

    def __init__(self, optimizer, max_value=math.inf, max_norm=math.inf):
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.max_value, self.max_norm = max_value, max_norm

    def clip(self):
        """Returns tensors whose norm is that of all gradients before that: nothing is read."""
        gradients = [grad for each in self.parameters if (grad := each.grad) is not None]
        norms = torch._foreach_norm(gradients)
        if len(norms) > _FEW:
            norms = [torch.linalg.vector_norm(torch.stack(norms))]
        if self.max_value < _LARGEST:
            torch._foreach_clamp_min_(gradients, -self.max_value)
            torch._foreach_clamp_max_(gradients, self.max_value)
        if self.max_norm < math.inf:
            clipped = norms if self.max_value == math.inf else torch._foreach_norm(gradients)
            total = torch.linalg.vector_norm(torch.stack(clipped))
            torch._foreach_mul_(gradients, torch.clamp(self.max_norm / (total + 1e-6), max=1.0))
        return norms

    def clear(self):
        """What optimizer.zero_grad() does, in a tenth of its time."""
        for parameter in self.parameters:
            parameter.grad = None


def build_grad_scaler(cfg, model):
    amp = cfg.SOLVER.AMP
    float16 = amp.ENABLED and amp.DTYPE == "float16"
    if cfg.SOLVER.NONFINITE == "skip":
        return SkippingScaler(cfg.MODEL.DEVICE, float16, model, cfg.SOLVER.MAX_SKIPS)
    return OverflowScaler(cfg.MODEL.DEVICE) if float16 else NoScaler()


class NoScaler:
    """Stands where a torch.amp.GradScaler would, and lets everything through."""

    must_be_finite = ("loss", "grad_norm")  # what EventStorage.reduce has to insist on

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

    must_be_finite = ("loss", "grad_scale")

    def load_state_dict(self, state):
        if "scale" in state:  # that of a run without float16 has none
            super().load_state_dict(state)

    def update(self):
        if self.is_enabled():  # without a scale left, no gradient was finite for long
            scale = torch.where(self._scale > _LEAST_SCALE, self._scale, math.nan)
            get_event_storage().put_scalar("grad_scale", scale, smoothing_hint=False)
        super().update()


class SkippingScaler(OverflowScaler):
    """Leaves out each step whose gradients are not finite; ``max_skips`` in a row are an error.

    The gradients are those of all ranks, so all leave it out.  Floating point buffers, such as
    batch-norm statistics, keep their values as well.  Nothing is read: the fused optimizers look at
    ``found_inf`` on the device.
    """

    must_be_finite = ("skips_in_a_row", "grad_scale")

    def __init__(self, device, enabled, model, max_skips):
        super().__init__(device, enabled=enabled)
        self.max_skips = max_skips
        self.model = model
        self.kept = None  # buffers by name, before the first forward pass of an iteration
        model.register_forward_pre_hook(self._keep_buffers)
        self.skips = self.in_a_row = torch.zeros((), device=device)

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norms = torch._foreach_norm([grad for p in parameters if (grad := p.grad) is not None])
        self.bad = ~torch.stack(norms).isfinite().all()  # now: clipping may hide what is infinite

    def step(self, optimizer):
        bad = self.bad
        optimizer.grad_scale, optimizer.found_inf = None, bad.float()
        super().step(optimizer)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                kept = (self.kept or {}).get(name)
                if kept is not None and kept.shape == buffer.shape:
                    buffer.copy_(torch.where(bad, kept, buffer))
        self.kept = None
        self.skips, self.in_a_row = self.skips + bad, (self.in_a_row + 1) * bad
        too_many = torch.where(self.in_a_row < self.max_skips, self.in_a_row, math.inf)
        counts = {"skips_in_a_row": too_many, "skips": self.skips}
        get_event_storage().put_scalars(counts, smoothing_hint=False)

    def _keep_buffers(self, model, _):
        if model.training and self.kept is None:
            buffers = self.model.named_buffers()
            self.kept = {name: b.clone() for name, b in buffers if b.is_floating_point()}

    def state_dict(self):
        mine = {"skips": self.skips, "in_a_row": self.in_a_row}
        return {**super().state_dict(), **mine}

    def load_state_dict(self, state):
        self.skips, self.in_a_row = (
            state.get(name, torch.zeros(())).to(self.skips.device) for name in ("skips", "in_a_row")
        )
        super().load_state_dict(state)
