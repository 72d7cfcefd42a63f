"""Checkpoints as fvcore has them (fvcore/common/checkpoint.py): whole or absent, never run as code.

A file is a dict of plain types: ``torch.load(path)``.
"""

from .checkpointer import Checkpointer
from .periodic import BestCheckpointer, PeriodicCheckpointer
