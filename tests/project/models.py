"""Small models for the batches of data.py; without dropout and norms, so a batch may be divided."""

import math

import pytest
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
    """Its loss is not a number in one iteration on one rank."""

    def __init__(self, iteration, rank):
        super().__init__()
        self.iteration = iteration
        self.rank = rank

    def forward(self, data):
        result = super().forward(data)
        is_here = comm.get_rank() == self.rank
        if self.training and is_here and get_event_storage().iter == self.iteration:
            result["loss_cls"] = result["loss_cls"] * math.nan
        return result


def train_with(make_model, output, words=""):
    """Call train.main with a model that ``make_model()`` makes; returns the results."""
    import train
    from conftest import train_here

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build_model", lambda cfg: make_model())
        return train_here(output, words)
