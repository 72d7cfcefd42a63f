"""Checkpoints, with the names of fvcore/common/checkpoint.py.

A file is a dict that ``torch.load`` reads.  Its keys:

    model           the state dict of the model, without what DistributedDataParallel adds
    iteration       the last iteration that was trained
    config          the settings, as text
    optimizer, ...  the state of every other object that was given to the Checkpointer
    per_rank        for objects whose state differs between the ranks, the states of all ranks
    rank_buffers    the buffers of all ranks, such as batch-norm statistics
    checkpointables the names of the objects whose state the file holds
"""

from .archive import load_file
from .best import BestCheckpointer
from .checkpointer import Checkpointer
from .periodic import PeriodicCheckpointer

__all__ = ["BestCheckpointer", "Checkpointer", "PeriodicCheckpointer", "load_file"]
