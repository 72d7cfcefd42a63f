"""The learning rate, and the momentum where it moves: functions of the iteration."""

import bisect
import math

from torch.optim.lr_scheduler import LRScheduler

from plumbing.comm import SettingsError


def build_lr_scheduler(cfg, optimizer):
    """Sets the rate of each iteration: see build_schedule."""
    scheduler = build_schedule(cfg, optimizer)  # or any torch.optim.lr_scheduler
    return TorchScheduler(scheduler) if isinstance(scheduler, LRScheduler) else scheduler


def build_schedule(cfg, optimizer):
    """Rate and momentum as functions of the iteration alone; past MAX_ITER they stay.

    Raises:
        SettingsError: the rate would grow beyond all numbers.
    """
    solver = cfg.SOLVER
    hold = solver.ITERS_PER_EPOCH if solver.LR_BY_EPOCH else 1
    shape, height = build_shape(cfg)
    warmup = solver.WARMUP_ITERS, solver.WARMUP_FACTOR, solver.WARMUP_METHOD
    factor = until(with_warmup(held(shape, hold), *warmup), solver.MAX_ITER)
    try:
        last = solver.BASE_LR * factor(solver.MAX_ITER)
    except OverflowError:
        last = math.inf
    if not last < math.inf:
        error = "is too large: the rate grows beyond all numbers before SOLVER.MAX_ITER"
        raise SettingsError(f"SOLVER.GAMMA: {solver.GAMMA} {error}")
    if height is None:
        return LRMultiplier(optimizer, factor)
    height = until(held(height, hold), solver.MAX_ITER)
    return MomentumCycle(optimizer, factor, height, solver.CYCLE_MOMENTUM)


def build_shape(cfg):
    """Two functions of the iteration: what BASE_LR is times, and how high in its cycle it is.

    The second is None where there is no momentum that moves along.
    """
    solver, height = cfg.SOLVER, None
    max_iter, end = solver.MAX_ITER, solver.BASE_LR_END / solver.BASE_LR
    match solver.LR_SCHEDULER_NAME:
        case "constant":
            shape = multistep([], 1.0)
        case "multistep":
            shape = multistep(solver.STEPS, solver.GAMMA)
        case "step":
            shape = step(solver.STEP_SIZE, solver.GAMMA)
        case "exponential":
            shape = exponential(solver.STEP_SIZE, solver.GAMMA)
        case "inverse_sqrt":
            shape = inverse_sqrt(max(solver.WARMUP_ITERS, 1))
        case "linear":
            shape = polynomial(max_iter, 1.0, end)
        case "polynomial":
            shape = polynomial(max_iter, solver.POWER, end)
        case "cosine":
            shape = cosine(max_iter, end)
        case "flat_cosine":
            shape = flat_then(solver.FLAT_ITERS, cosine(max_iter - solver.FLAT_ITERS, end))
        case "cosine_restarts":
            cycle_at = cycles(max_iter, solver.CYCLE_ITERS, solver.CYCLE_GROWTH)
            shape = cosine_restarts(cycle_at, solver.CYCLE_DECAY, end)
        case "one_cycle":
            up_iters, start = solver.CYCLE_UP_ITERS, solver.CYCLE_START_FACTOR
            height = one_cycle(max_iter, up_iters, solver.CYCLE_SHAPE)
            shape = between(height, lambda iteration: start if iteration < up_iters else end)
        case "cyclic":
            cycle_at, start = cycles(max_iter, solver.CYCLE_ITERS, 1), solver.CYCLE_START_FACTOR
            height = cyclic(cycle_at, solver.CYCLE_UP_ITERS, solver.CYCLE_DECAY, solver.CYCLE_SHAPE)
            shape = between(height, lambda iteration: start)
    return shape, height


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
        if "iteration" not in state:
            raise SettingsError("--resume: another kind of scheduler was saved: go back to it")
        self.iteration = state["iteration"]
        factor = self.factor(self.iteration)
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs):
            group["lr"] = base_lr * factor


class MomentumCycle(LRMultiplier):
    """Moves the momentum as well: from its first value down to ``lowest`` where ``height`` is 1.

    It is SGD's momentum or Adam's first beta.  What is at most ``lowest`` from the start stays.
    """

    def __init__(self, optimizer, factor, height, lowest):
        self.height, self.lowest = height, lowest
        self.base_momenta = [momentum_of(group) for group in optimizer.param_groups]
        super().__init__(optimizer, factor)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        height = self.height(self.iteration)
        for group, base in zip(self.optimizer.param_groups, self.base_momenta):
            if base > self.lowest:
                momentum = base + (self.lowest - base) * height
                if "momentum" in group:
                    group["momentum"] = momentum
                else:
                    group["betas"] = (momentum, *group["betas"][1:])


def momentum_of(group):
    """The momentum, or first beta, of an optimizer's group; 0 if it has none."""
    return group["momentum"] if "momentum" in group else group.get("betas", (0.0,))[0]


class TorchScheduler:
    """A torch.optim.lr_scheduler whose resume is exact.

    torch's own state lacks the rates, and an optimizer that is loaded keeps those of the settings.
    What the scheduler took from the settings when it was made comes from the file, however.
    """

    KEPT = ("lr", "initial_lr", "momentum", "betas")

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def step(self, *metrics):
        self.scheduler.step(*metrics)

    def get_last_lr(self):
        return [group["lr"] for group in self.scheduler.optimizer.param_groups]

    def state_dict(self):
        groups = self.scheduler.optimizer.param_groups
        kept = [{name: group[name] for name in self.KEPT if name in group} for group in groups]
        return {"scheduler": self.scheduler.state_dict(), "groups": kept}

    def load_state_dict(self, state):
        groups = self.scheduler.optimizer.param_groups
        if len(state.get("groups", ())) != len(groups):
            raise SettingsError("--resume: another kind of scheduler was saved: go back to it")
        self.scheduler.load_state_dict(state["scheduler"])
        for group, kept in zip(groups, state["groups"]):
            group.update(kept)


# Shapes: functions of the iteration, times the first rate.


def multistep(steps, gamma):
    """``gamma`` to the power of how many of the ``steps``, iterations, have been reached."""
    steps = sorted(steps)
    return lambda iteration: gamma ** bisect.bisect_right(steps, iteration)


def step(size, gamma):
    """``gamma`` to the power of how often ``size`` iterations have passed."""
    return lambda iteration: gamma ** (iteration // size)


def exponential(size, gamma):
    """As ``step``, but evenly: a factor of ``gamma`` over any ``size`` iterations."""
    return lambda iteration: gamma ** (iteration / size)


def inverse_sqrt(flat_iters):
    """1 up to ``flat_iters``, then falls as one over the root of the iteration.

    With a linear warm-up of as many iterations: Vaswani et al., Attention is all you need, 2017.
    """
    return lambda iteration: math.sqrt(flat_iters / max(iteration, flat_iters))


def polynomial(max_iter, power, end):
    """From 1 at iteration 0 to ``end`` at ``max_iter``, where it stays.  Liu, ParseNet, 2015."""

    def factor(iteration):
        left = max(max_iter - iteration, 0) / max_iter
        return end + (1 - end) * left**power

    return factor


def cosine(max_iter, end):
    """Half a cosine from 1 at iteration 0 to ``end`` at ``max_iter``, where it stays.

    Loshchilov and Hutter, SGDR, 2017.
    """

    def factor(iteration):
        progress = min(iteration / max_iter, 1.0)
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def flat_then(iters, shape):
    """1 for so many iterations, and then ``shape``, which starts at 0 there."""
    return lambda iteration: shape(iteration - iters) if iteration > iters else 1.0


def cycles(max_iter, length, growth):
    """Of an iteration: number, position and length of its cycle, all whole numbers.

    Each cycle is ``growth`` times as long as the one before.  One that would start at ``max_iter``
    does not: there, the last one is at its end.
    """
    starts, lengths = [0], [length]
    while growth > 1 and starts[-1] + lengths[-1] < max_iter:
        starts.append(starts[-1] + lengths[-1])
        lengths.append(lengths[-1] * growth)

    def cycle_at(iteration):
        number = bisect.bisect_right(starts, iteration) - 1
        return number, iteration - starts[number], lengths[number]

    def equal_cycle_at(iteration):
        number = min(iteration, max_iter - 1) // length
        return number, iteration - number * length, length

    return cycle_at if growth > 1 else equal_cycle_at


def cosine_restarts(cycle_at, decay, end):
    """A cosine from 1 to ``end`` in each cycle, whose height is ``decay`` times that before.

    Loshchilov and Hutter, SGDR, 2017.
    """

    def factor(iteration):
        number, position, length = cycle_at(iteration)
        return end + (1 - end) * decay**number * ease(1 - position / length, "cosine")

    return factor


def one_cycle(max_iter, up_iters, method):
    """Height: up from 0 to 1 at ``up_iters``, down to 0 at ``max_iter``.

    Smith and Topin, Super-convergence, 2018.
    """

    def height(iteration):
        if iteration < up_iters:
            return ease(iteration / up_iters, method)
        return ease((max_iter - iteration) / max(max_iter - up_iters, 1), method)

    return height


def cyclic(cycle_at, up_iters, decay, method):
    """Height: up from 0 in the first ``up_iters`` of each cycle, then down to 0.

    It goes up to 1 in the first cycle, and to ``decay`` times the height before in the others.
    Smith, Cyclical learning rates, 2017.
    """

    def height(iteration):
        number, position, length = cycle_at(iteration)
        if position < up_iters:
            progress = position / up_iters
        else:
            progress = (length - position) / max(length - up_iters, 1)
        return decay**number * ease(progress, method)

    return height


def between(height, foot):
    """From ``foot(iteration)``, where ``height`` is 0, to 1, where it is 1."""

    def factor(iteration):
        low = foot(iteration)
        return low + (1 - low) * height(iteration)

    return factor


def ease(progress, method):
    """From 0 to 1 along a line ("linear") or half a cosine ("cosine")."""
    return progress if method == "linear" else 0.5 * (1 - math.cos(math.pi * progress))


# Shapes made of shapes.


def with_warmup(shape, iters, start, method):
    """``shape``, in iterations before ``iters`` times a factor that rises from ``start`` to 1.

    It rises along a line ("linear"), by equal ratios ("exponential"), or at the end only
    ("constant").
    """

    def factor(iteration):
        if iteration >= iters:
            return shape(iteration)
        if method == "exponential":
            return shape(iteration) * start ** (1 - iteration / iters)
        progress = iteration / iters if method == "linear" else 0.0
        return shape(iteration) * (start + (1 - start) * progress)

    return factor if iters > 0 else shape


def held(shape, iters):
    """``shape``, which changes only after every ``iters`` iterations; 1: after each."""
    if iters < 1:
        raise SettingsError("SOLVER.ITERS_PER_EPOCH: 0 was not replaced: call setup_length before")
    return shape if iters == 1 else lambda iteration: shape(iteration - iteration % iters)


def until(shape, max_iter):
    """``shape``, which stays from ``max_iter`` on."""
    return lambda iteration: shape(min(iteration, max_iter))
