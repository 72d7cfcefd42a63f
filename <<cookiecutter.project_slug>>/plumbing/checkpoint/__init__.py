"""Checkpoints as in fvcore/common/checkpoint.py; a file is a dict that ``torch.load`` reads."""

from .checkpointer import Checkpointer
from .periodic import PeriodicCheckpointer
