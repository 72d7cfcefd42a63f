"""Samples that come more or less often: exactly how often, for any number of ranks, on a resume."""

import tracemalloc
from itertools import chain, islice

import numpy as np
import pytest
import train
from data import build_train_loader, dataset_size
from defaults import check_cfg, get_cfg
from plumbing import comm
from plumbing.samplers import TrainingBatchSampler, random_bits, sample_keys
from plumbing.settings import merge_settings
from sampling import (
    ChangedBatches,
    RandomSubset,
    WeightedChoice,
    build_train_sampler,
    class_weights,
    repeat_factors,
)

LABELS = [np.repeat([0, 1, 2], [60, 30, 10]), np.repeat([1, 3], [15, 5])]
WAYS = {
    "plain": "SEED 1",
    "class_balanced": "DATALOADER.SAMPLER_TRAIN class_balanced",
    "repeat_factor": "DATALOADER.SAMPLER_TRAIN repeat_factor DATALOADER.REPEAT_THRESHOLD 0.5",
    "weights": "DATASETS.TRAIN_WEIGHTS (1,3)",
    "subset": "DATALOADER.RANDOM_SUBSET_RATIO 0.5",
    "all": "DATALOADER.SAMPLER_TRAIN class_balanced DATASETS.TRAIN_WEIGHTS (1,3)"
    " DATALOADER.RANDOM_SUBSET_RATIO 0.5",
}


def settings(tmp_path, words=""):
    path = tmp_path / "cfg.yaml"
    path.write_text("MODEL.DEVICE: cpu\nDATASETS.TRAIN: [digits_train, digits_test]")
    cfg = get_cfg()
    merge_settings(cfg, str(path), words.split())
    check_cfg(cfg, num_ranks=1)
    return cfg


def drawn(cfg, num_iters, start_iter=0, labels=LABELS):
    """The keys of the first iterations, in their order, as tuples."""
    size = round(cfg.DATALOADER.RANDOM_SUBSET_RATIO * sum(map(len, labels)))
    sampler = build_train_sampler(cfg, labels, size, start_iter)
    batches = islice(sampler, num_iters * cfg.SOLVER.ACCUM_STEPS)
    return [tuple(key) for batch in batches for key in batch.tolist()]


def counts_of(weights, size, num_epochs, seed=0):
    """(num_epochs, samples): how often each came."""
    keys = np.stack(np.divmod(np.arange(num_epochs * size), size), axis=1)
    samples = WeightedChoice(weights, size, seed)(keys)[:, 1].reshape(num_epochs, size)
    return np.stack([np.bincount(row, minlength=len(weights)) for row in samples])


# How often


@pytest.mark.parametrize("size", [50, 64, 200])
def test_a_sample_comes_its_share_of_an_epoch_rounded_up_or_down(size):
    weights = np.random.default_rng(0).exponential(size=64)
    expected = weights / weights.sum() * size
    counts = counts_of(weights, size, num_epochs=200)
    assert (counts >= np.floor(expected)).all()
    assert (counts <= np.ceil(expected)).all()
    assert np.abs(counts.mean(axis=0) - expected).max() < 0.015
    assert len({tuple(row) for row in counts}) > 30


def test_the_share_is_exact_over_seeds_too():
    counts = np.concatenate([counts_of([1.0, 2.5, 0.25], 3, 1, seed) for seed in range(4000)])
    assert counts.mean(axis=0) == pytest.approx(np.array([1.0, 2.5, 0.25]) * 0.8, abs=0.03)


def test_equal_weights_give_each_sample_once_and_0_never():
    assert (counts_of(np.full(100, 0.1), 100, 50)[:, 1:-1] == 1).all()
    assert (counts_of(np.ones(100), 100, 50) == 1).all()
    counts = counts_of([0.0, 1.0, 0.0, 3.0, 0.0], 8, 50)
    assert (counts == [0, 2, 0, 6, 0]).all()


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0], [np.nan], [np.inf], [[1.0]]])
def test_weights_that_mean_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="sampling weights"):
        WeightedChoice(weights, 4, seed=0)


def test_occurrences_of_a_sample_have_keys_of_their_own():
    batches = TrainingBatchSampler(40, 8, 1, seed=0)
    weighted = ChangedBatches(batches, WeightedChoice([8.0] + [1.0] * 32, 40, seed=0))
    keys = np.concatenate(list(islice(weighted, 25)))
    assert len({tuple(key) for key in keys.tolist()}) == 200
    assert np.bincount(keys[:40, 1])[0] == 8
    bits = random_bits(0, *keys[keys[:, 1] == 0].T)
    assert len(set(bits.tolist())) == 40


def test_occurrences_of_a_sample_are_augmented_differently(tmp_path):
    cfg = settings(tmp_path, "SOLVER.BATCH_SIZE 60 DATALOADER.RANDOM_SUBSET_RATIO 0.04")
    one_of = lambda cfg, labels, size, start_iter: ChangedBatches(  # noqa: E731
        TrainingBatchSampler(60, 60, 1, 0), WeightedChoice([1.0] + [0.0] * 59, 60, seed=0)
    )
    ((batch,),) = islice(build_train_loader(cfg, 0, one_of), 1)
    assert len(set(batch["labels"].tolist())) == 1
    assert len({tuple(image.flatten().tolist()) for image in batch["images"]}) == 9


# The weights


def test_class_weights_make_classes_equally_frequent():
    labels = np.array([7, 3, 7, 7, -2, 3])
    weights = class_weights(labels)
    assert [weights[labels == label].sum() for label in (-2, 3, 7)] == pytest.approx([1.0] * 3)


def test_repeat_factors_of_a_label_each():
    labels = np.repeat([0, 5], [96, 4])
    factors = repeat_factors(labels, threshold=0.16)
    assert factors == pytest.approx(np.where(labels == 5, 2.0, 1.0))
    assert (repeat_factors(labels, threshold=0.01) == 1).all()


def test_repeat_factors_of_samples_with_several_categories_or_none():
    samples, categories = np.array([0, 0, 0, 1, 2, 2]), np.array([0, 0, 1, 0, 0, 2])
    factors = repeat_factors(categories, 1.0, samples, num_samples=4)
    assert factors == pytest.approx([2.0, np.sqrt(4 / 3), 2.0, 1.0])


# The settings


def shares(numbers):
    return np.bincount(numbers) / len(numbers)


def labels_of(keys, labels=LABELS):
    return np.concatenate(labels)[[index for _, index in keys]]


def test_the_default_is_the_plain_order(tmp_path):
    cfg = settings(tmp_path, "SOLVER.BATCH_SIZE 30 SEED 3")
    expected = sample_keys(np.arange(300), 120, seed=3)
    assert drawn(cfg, 10) == [tuple(key) for key in expected.tolist()]
    assert type(build_train_sampler(cfg, LABELS, 120, 0)) is TrainingBatchSampler


def test_class_balanced_draws_each_class_equally_often(tmp_path):
    cfg = settings(tmp_path, WAYS["class_balanced"] + " SOLVER.BATCH_SIZE 120")
    assert shares(labels_of(drawn(cfg, 20))) == pytest.approx([0.25] * 4, abs=0.01)


def test_repeat_factor_draws_rare_classes_more_often(tmp_path):
    cfg = settings(tmp_path, WAYS["repeat_factor"] + " SOLVER.BATCH_SIZE 120")
    weights = np.array([60, 45, 10, 5]) * np.sqrt([1, 60 / 45, 60 / 10, 60 / 5])
    expected = weights / weights.sum()
    assert shares(labels_of(drawn(cfg, 20))) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("sampler", ["uniform", "class_balanced"])
def test_train_weights_are_the_shares_of_the_data_sets(tmp_path, sampler):
    words = f"DATASETS.TRAIN_WEIGHTS (1,3) DATALOADER.SAMPLER_TRAIN {sampler}"
    cfg = settings(tmp_path, words + " SOLVER.BATCH_SIZE 120")
    keys = drawn(cfg, 20)
    sets = np.array([index >= len(LABELS[0]) for _, index in keys])
    assert shares(sets.astype(int)) == pytest.approx([0.25, 0.75], abs=0.01)
    second = labels_of(keys)[sets]
    expected = {"uniform": 0.75, "class_balanced": (15 / 45) / (15 / 45 + 1)}
    assert np.mean(second == 1) == pytest.approx(expected[sampler], abs=0.01)


def test_a_subset_is_the_same_for_all_seeds_and_each_sample_once_an_epoch(tmp_path):
    def used(words):
        cfg = settings(tmp_path, f"DATALOADER.RANDOM_SUBSET_RATIO 0.3 SOLVER.BATCH_SIZE 36 {words}")
        epochs = np.array(drawn(cfg, 3))[:, 1].reshape(3, 36)
        assert all(len(set(epoch)) == 36 for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3
        (indices,) = {frozenset(epoch) for epoch in epochs}
        return indices

    assert used("SEED 0") == used("SEED 1") == used("SOLVER.ACCUM_STEPS 2")
    assert used("DATALOADER.RANDOM_SUBSET_SEED 1") not in (used(""), frozenset(range(36)))


def test_a_weighted_data_set_of_which_the_subset_has_nothing_is_an_error(tmp_path):
    words = "DATASETS.TRAIN_WEIGHTS (1,1) DATALOADER.RANDOM_SUBSET_RATIO 0.01"
    labels = [np.zeros(1000, int), np.zeros(1, int)]
    with pytest.raises(comm.SettingsError, match=r"^DATASETS.TRAIN_WEIGHTS: .*digits_test"):
        drawn(settings(tmp_path, words), 1, labels=labels)


@pytest.mark.parametrize("words", WAYS.values(), ids=WAYS)
def test_every_number_of_ranks_sees_the_same_global_batches(tmp_path, as_rank, words):
    batches = {}
    for world_size in (1, 2, 4):
        as_rank(0, 1)
        cfg = settings(tmp_path, f"{words} SOLVER.BATCH_SIZE 16 SOLVER.ACCUM_STEPS 2")
        ranks = []
        for rank in range(world_size):
            as_rank(rank, world_size)
            ranks.append(np.array(drawn(cfg, 12)).reshape(24, -1, 2))
        batches[world_size] = np.concatenate(ranks, axis=1).tolist()
    assert batches[1] == batches[2] == batches[4]


@pytest.mark.parametrize("words", WAYS.values(), ids=WAYS)
def test_a_resume_goes_on_with_the_samples_of_the_run(tmp_path, words):
    cfg = settings(tmp_path, f"{words} SOLVER.BATCH_SIZE 16")
    assert drawn(cfg, 20, start_iter=37) == drawn(cfg, 57)[37 * 16 :]


def test_a_subset_of_any_size_takes_no_memory():
    tracemalloc.start()
    subset = RandomSubset(10**12, seed=0)
    keys = subset(np.stack([np.zeros(1000, int), 10**11 + np.arange(1000)], axis=1))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert len(set(keys[:, 1].tolist())) == 1000


IMPOSSIBLE = [
    ("DATALOADER.SAMPLER_TRAIN", "balanced"),
    ("DATALOADER.SAMPLER_TRAIN", "repeat_factor"),  # without a threshold
    ("DATALOADER.REPEAT_THRESHOLD", "-0.1"),
    ("DATALOADER.REPEAT_THRESHOLD", "1.5"),
    ("DATALOADER.RANDOM_SUBSET_RATIO", "0"),
    ("DATALOADER.RANDOM_SUBSET_RATIO", "1.1"),
    ("DATALOADER.RANDOM_SUBSET_SEED", "-1"),
    ("DATALOADER.RANDOM_SUBSET_SEED", str(2**32)),
    ("DATALOADER.PREFETCH_FACTOR", "0"),
    ("DATASETS.TRAIN", "()"),
    ("DATASETS.TRAIN", "('digits_train','mnist')"),
    ("DATASETS.TRAIN_WEIGHTS", "(1,)"),
    ("DATASETS.TRAIN_WEIGHTS", "(1,0)"),
    ("DATASETS.TRAIN_WEIGHTS", "(1,-1)"),
    ("DATASETS.TRAIN_WEIGHTS", "(1.0,inf)"),
    ("DATASETS.TRAIN_WEIGHTS", "('a','b')"),
]


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE)
def test_impossible_settings_are_refused_in_one_line(tmp_path, key, value):
    shown = "DATALOADER.REPEAT_THRESHOLD" if value == "repeat_factor" else key
    with pytest.raises(comm.SettingsError, match=rf"\b{shown}: [^\n]*$"):
        settings(tmp_path, f"{key} {value}")


# On the digits, in a training


def test_an_epoch_is_as_long_as_what_is_used(tmp_path):
    assert dataset_size(settings(tmp_path)) == 1797
    assert dataset_size(settings(tmp_path, "DATALOADER.RANDOM_SUBSET_RATIO 0.1")) == 180
    assert dataset_size(settings(tmp_path, "DATALOADER.RANDOM_SUBSET_RATIO 1e-9")) == 1
    assert dataset_size(settings(tmp_path, WAYS["class_balanced"])) == 1797


def test_the_loop_trains_on_the_samples_that_the_settings_say(tmp_path, monkeypatch):
    words = WAYS["class_balanced"] + " DATASETS.TRAIN ('digits_train',) SOLVER.BATCH_SIZE 20"
    cfg = settings(tmp_path, words + " DATALOADER.RANDOM_SUBSET_RATIO 0.1 SOLVER.MAX_ITER 14")
    cfg.OUTPUT_DIR, cfg.TEST.EVAL_PERIOD, cfg.SOLVER.CHECKPOINT_PERIOD = str(tmp_path), -1, -1
    model, labels = train.build_model(cfg), []
    model.register_forward_pre_hook(lambda _, args: labels.append(args[0]["labels"]))
    train.do_train(cfg, model)
    assert len(labels) == 14
    counts = np.bincount(list(chain(*(each.tolist() for each in labels))), minlength=10)
    assert counts.sum() == 280
    assert counts.min() >= 24  # in the plain order they are 15 to 35
    assert counts.max() <= 32
