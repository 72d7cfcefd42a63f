"""Checkpoints: whole or absent, found again after a crash, loaded without running any code in them.

The public surface and the names of files are fvcore's (fvcore/common/checkpoint.py); the best model
follows detectron2's hook.  A file is a dict of plain types: ``torch.load(path)``.
"""

from .checkpointer import Checkpointer
from .periodic import BestCheckpointer, PeriodicCheckpointer

__all__ = ["BestCheckpointer", "Checkpointer", "PeriodicCheckpointer"]
