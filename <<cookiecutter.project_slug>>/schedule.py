"""The learning rate: a function of the iteration."""

import bisect
import math


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
    """``shape``, in iterations before ``iters`` times a factor that rises from ``start`` to 1.

    It rises along a line ("linear"), or at the end only ("constant").
    """

    def factor(iteration):
        if iteration >= iters:
            return shape(iteration)
        progress = iteration / iters if method == "linear" else 0.0
        return shape(iteration) * (start + (1 - start) * progress)

    return factor
