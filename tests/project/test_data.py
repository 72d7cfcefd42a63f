"""The digits of data.py and their loaders: what is read, what is augmented, what an error says."""

import collections
import os

import data
import numpy as np
import pytest
import torch
from conftest import settings
from data import Digits, RandomShift, build_dataset, build_test_loader, build_train_loader
from defaults import get_cfg
from plumbing.errors import SettingsError

PATH = os.path.join(data.HERE, get_cfg().DATASETS.PATH)


def test_train_and_test_share_no_sample_and_have_the_forms_that_the_file_promises():
    train = Digits(PATH, "digits_train")
    test = Digits(PATH, "digits_test")
    assert (len(train), len(test)) == (1437, 360)
    images = [each.numpy().tobytes() for each in (*train.images, *test.images)]
    assert len(set(images)) == 1797
    sample = test[0]
    assert sample["images"].shape == (1, 8, 8)
    assert sample["images"].dtype == torch.float32
    assert sample["labels"].dtype == torch.int64
    assert (test.images.min(), test.images.max()) == (0, 1)
    assert test.labels.unique().tolist() == list(range(10))


def test_data_sets_one_after_the_other_are_one():
    cfg = get_cfg()
    both = build_dataset(cfg, ["digits_test", "digits_train"])
    parts = [Digits(PATH, name) for name in ("digits_test", "digits_train")]
    assert len(both) == 1797
    for index, other in ((0, parts[0][0]), (360, parts[1][0]), (367, parts[1][7])):
        assert torch.equal(both[index]["images"], other["images"])
        assert both[index]["labels"] == other["labels"]


def test_only_the_training_is_augmented():
    cfg = settings(BATCH_SIZE=1437)
    original = {image.numpy().tobytes() for image in Digits(PATH, "digits_train").images}
    (batch,) = next(iter(build_train_loader(cfg, 0)))
    kept = sum(image.numpy().tobytes() in original for image in batch["images"][:, 0])
    assert 50 < kept < 300  # a ninth of all is not shifted
    cfg.DATASETS.MAX_SHIFT = 0
    (batch,) = next(iter(build_train_loader(cfg, 0)))
    assert {image.numpy().tobytes() for image in batch["images"][:, 0]} == original
    test = torch.cat([each["images"][:, 0] for each in build_test_loader(cfg, "digits_test")])
    assert torch.equal(test, Digits(PATH, "digits_test").images)


def test_a_shift_moves_the_image_as_a_whole_and_takes_every_direction():
    image = torch.zeros(1, 8, 8)
    image[0, 3, 4] = 1
    places = set()
    for _ in range(300):
        shifted = RandomShift(1)(image)
        assert shifted.shape == image.shape
        assert shifted.sum() == 1
        places.add(tuple(shifted[0].nonzero()[0].tolist()))
    assert places == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}
    assert torch.equal(RandomShift(0)(image), image)


def test_an_item_holds_the_micro_batches_of_an_iteration_and_a_resume_begins_with_its_own():
    cfg = settings(BATCH_SIZE=48, ACCUM_STEPS=3)
    items = [item for _, item in zip(range(5), build_train_loader(cfg, 0))]
    assert [len(data["labels"]) for data in items[0]] == [16, 16, 16]
    resumed = next(iter(build_train_loader(cfg, 4)))
    for one, other in zip(items[4], resumed):
        assert torch.equal(one["images"], other["images"])


def test_a_name_that_does_not_exist_is_one_line():
    with pytest.raises(SettingsError, match="^DATASETS: 'mnist' must be digits_train or"):
        Digits(PATH, "mnist")


@pytest.mark.parametrize("damage", ["missing", "text", "short", "other arrays"])
def test_a_file_that_is_not_like_digits_npz_is_one_line(damage, tmp_path):
    path = tmp_path / "x.npz"
    if damage == "text":
        path.write_text("no archive")
    elif damage == "short":
        with open(PATH, "rb") as file:
            path.write_bytes(file.read(9000))
    elif damage == "other arrays":
        np.savez(path, images=np.zeros((1, 8, 8)))
    with pytest.raises(SettingsError, match=rf"^DATASETS.PATH: {path} is not like") as caught:
        Digits(path, "digits_train")
    assert "\n" not in str(caught.value)


def test_a_batch_larger_than_the_data_goes_on_in_the_next_epoch():
    cfg = settings(BATCH_SIZE=2 * 1437)
    cfg.DATASETS.MAX_SHIFT = 0
    (batch,) = next(iter(build_train_loader(cfg, 0)))
    counts = collections.Counter(image.numpy().tobytes() for image in batch["images"])
    assert set(counts.values()) == {2}
