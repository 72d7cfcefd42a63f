"""Checkpoints, with the names of fvcore/common/checkpoint.py.

A file is a dict that ``torch.load`` reads.  Its keys:

    model           the state dict of the model, without what DistributedDataParallel adds
    iteration       the last iteration that was trained
    config          the settings, as text
    optimizer, ...  the state of every other object that was given to the Checkpointer
    per_rank        for objects whose state differs between the ranks, the states of all ranks
    rank_buffers    the buffers of all ranks, such as batch-norm statistics
    checkpointables the names of the objects whose state the file holds
    sharded         what is known of the folder beside it, if tensors are divided between ranks

Such a tensor has no data in the file; ``load_file`` makes those of the model whole.
"""

from .archive import load_file
from .best import BestCheckpointer
from .checkpointer import Checkpointer
from .export import export_model
from .periodic import PeriodicCheckpointer

__all__ = [
    "BestCheckpointer",
    "Checkpointer",
    "PeriodicCheckpointer",
    "export_model",
    "load_file",
]
