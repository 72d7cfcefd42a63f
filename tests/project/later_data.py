"""The digits and their loaders: what is read, on which rank, when, and what an error looks like."""

import contextlib
import os

import data
import pytest
import torch
from data import (
    build_train_loader,
    plain_sampler,
)
from defaults import get_cfg
from plumbing import comm

PATH = os.path.join(data.HERE, get_cfg().DATASETS.PATH)


@pytest.fixture
def cfg():
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    return cfg


@pytest.mark.parametrize(
    "words", [{"SAMPLER_TRAIN": "class_balanced"}, {"RANDOM_SUBSET_RATIO": 0.5}], ids=str
)
def test_settings_of_the_order_are_never_ignored(cfg, words):
    cfg.DATALOADER.update(words)
    with pytest.raises(comm.SettingsError, match="sampler"):
        build_train_loader(cfg, 0)


def drawn_ahead(cfg, num_workers, prefetch_factor):
    """How many micro-batches the sampler has been asked for when the first one is there."""
    cfg.DATALOADER.NUM_WORKERS, cfg.DATALOADER.PREFETCH_FACTOR = num_workers, prefetch_factor
    drawn = []

    def counting_sampler(*args):
        for keys in plain_sampler(*args):
            drawn.append(keys)
            yield keys

    with contextlib.closing(build_train_loader(cfg, 0, counting_sampler)) as loader:
        (batch,) = next(loader)
    return len(drawn), batch


def test_prefetch_factor_is_how_many_batches_each_worker_has_ahead(cfg):
    alone, batch = drawn_ahead(cfg, 0, 7)
    few, first = drawn_ahead(cfg, 1, 1)
    many, second = drawn_ahead(cfg, 1, 7)
    assert (alone, few, many) == (1, 2, 8)
    for other in (first, second):
        assert all(torch.equal(batch[key], other[key]) for key in batch)
