"""The state of the random generators, as a function of (seed, iteration, rank).

The loop sets it at the beginning of every iteration.  So a resumed run draws the same numbers as
one that was not interrupted, and no checkpoint has to hold the state of a generator.
"""

import random

import numpy as np
import torch


def set_random_state(seed: int, iteration: int = 0, rank: int = 0) -> None:
    """Set the generators of torch, numpy and Python.

    Args:
        seed: of the run.
        iteration: from 0 on; the numbers of different iterations have nothing in common.
        rank: each rank draws different numbers, for dropout and the like.
    """
    # Generators that get neighbouring seeds begin alike, and a plain sum would give rank 1 of one
    # iteration the numbers of rank 0 of the next.  Large odd factors and a shift, as in the
    # generator splitmix64, spread the three numbers over 63 bits.
    mixed = (seed * 0x9E3779B97F4A7C15 + iteration) * 0xBF58476D1CE4E5B9 + rank
    mixed = ((mixed ^ (mixed >> 29)) * 0x94D049BB133111EB) % 2**63

    # torch.manual_seed would do both, but takes ten times as long: this is in every iteration.
    torch.default_generator.manual_seed(mixed)
    # A loader worker that was forked off a process with CUDA must not touch CUDA; there
    # is_initialized() is False.
    if torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        torch.cuda.default_generators[device].manual_seed(mixed)
    np.random.seed(mixed % 2**32)  # numpy takes 32 bits
    random.seed(mixed)
