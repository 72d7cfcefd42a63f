"""The learning rate, as a part of SOLVER.BASE_LR: a function of the iteration alone.

A scheduler of torch.optim.lr_scheduler works as well: return it from build_lr_scheduler.
"""

import bisect
import math

from plumbing.solver import LRMultiplier


def build_lr_scheduler(cfg, optimizer):
    solver = cfg.SOLVER
    if solver.LR_SCHEDULER_NAME == "constant":
        shape = multistep([], 1.0)
    elif solver.LR_SCHEDULER_NAME == "multistep":
        shape = multistep(solver.STEPS, solver.GAMMA)
    else:
        shape = cosine(solver.MAX_ITER, solver.BASE_LR_END / solver.BASE_LR)
    warm = with_warmup(shape, solver.WARMUP_ITERS, solver.WARMUP_FACTOR, solver.WARMUP_METHOD)
    return LRMultiplier(optimizer, warm)


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
