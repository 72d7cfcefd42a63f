"""The digits and their loaders: what is read, on which rank, when, and what an error looks like."""

import os

import data
import numpy as np
import pytest
import torch
from data import (
    Digits,
    build_test_loader,
    build_train_loader,
    dataset_size,
    read_digits,
)
from defaults import get_cfg
from plumbing import comm

PATH = os.path.join(data.HERE, get_cfg().DATASETS.PATH)


@pytest.fixture
def cfg():
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    return cfg


def test_the_file_is_read_once_for_all_loaders(cfg, monkeypatch):
    reads, load = [], np.load

    def counted(*args, **kwargs):
        reads.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr(np, "load", counted)
    read_digits.cache_clear()
    dataset_size(cfg)
    next(build_train_loader(cfg, 0))
    list(build_test_loader(cfg, "digits_test"))
    assert len(reads) == 1


def test_data_sets_one_after_the_other_are_one():
    both = Digits(PATH, ("digits_test", "digits_train"))
    parts = [Digits(PATH, [name]) for name in ("digits_test", "digits_train")]
    assert len(both) == sum(map(len, parts)) == 1797
    fetched = both.__getitems__([(0, 0), (0, len(parts[0])), (0, len(parts[0]) + 7)])
    (test,) = parts[0].__getitems__([(0, 0)])["images"]
    train = parts[1].__getitems__([(0, 0), (0, 7)])["images"]
    assert torch.equal(fetched["images"], torch.stack([test, *train]))


def test_only_the_training_is_augmented(cfg):
    keys = [(0, index) for index in range(50)]
    images, labels = read_digits(PATH)["digits_train"]
    for train in (False, True):
        dataset, (all_labels,) = data.build_dataset(cfg, ["digits_train"], train)
        same = torch.equal(dataset.__getitems__(keys)["images"][:, 0], torch.tensor(images[:50]))
        assert same != train
        assert np.array_equal(all_labels, labels)


def test_the_size_of_all_data_sets_is_that_of_an_epoch(cfg):
    assert dataset_size(cfg) == len(Digits(PATH, cfg.DATASETS.TRAIN))
    cfg.DATASETS.TRAIN = ("digits_train", "digits_test")
    assert dataset_size(cfg) == 1797


def test_a_batch_larger_than_the_subset_is_an_error_before_anything_is_loaded(cfg):
    cfg.DATALOADER.RANDOM_SUBSET_RATIO = 0.01
    with pytest.raises(comm.SettingsError, match=r"^SOLVER.BATCH_SIZE: 64 .* 1\d samples"):
        build_train_loader(cfg, 0)
