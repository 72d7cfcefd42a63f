"""Small models for the batches of data.py; without dropout and norms, so a batch may be divided."""

import math

from torch import nn

from plumbing import comm
from plumbing.events import get_event_storage


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

    def forward(self, data):
        logits = self.layers(data["images"].flatten(1))
        if not self.training:
            return logits
        return {"loss_cls": nn.functional.cross_entropy(logits, data["labels"])}


class Faulty(Tiny):
    """Its loss is not a number in one iteration on one rank."""

    def __init__(self, iteration, rank):
        super().__init__()
        self.fault = iteration, rank

    def forward(self, data):
        result = super().forward(data)
        if self.training and (get_event_storage().iter, comm.get_rank()) == self.fault:
            result["loss_cls"] = result["loss_cls"] * math.nan
        return result
