"""Small models for the batches of data.py; without dropout and norms, so a batch may be divided."""

import math

from plumbing import comm
from plumbing.events import get_event_storage
from torch import nn


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
    """Its loss, or only its gradient, is not a number in one or more iterations on one rank."""

    def __init__(self, iteration, rank, only_gradient=False):
        super().__init__()
        self.iterations = {iteration} if isinstance(iteration, int) else set(iteration)
        self.rank, self.only_gradient = rank, only_gradient
        self.norm = nn.BatchNorm1d(16, affine=False)  # its statistics must stay finite as well

    def forward(self, data):
        result = super().forward(data)
        if self.training:
            bad = comm.get_rank() == self.rank and get_event_storage().iter in self.iterations
            images = data["images"].flatten(1)[:, :16]
            self.norm(images * math.nan if bad else images)
            if bad and self.only_gradient:
                weight = self.layers[0].weight
                zero = (weight - weight.detach()).abs().sqrt().sum()  # of infinite slope
                result["loss_cls"] = result["loss_cls"] + zero
            elif bad:
                result["loss_cls"] = result["loss_cls"] * math.nan
        return result
