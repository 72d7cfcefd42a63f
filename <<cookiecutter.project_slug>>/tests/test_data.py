"""The digits and their loaders: what is read, on which rank, when, and what an error looks like."""

import collections
import contextlib
import itertools
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

import data
from data import (
    Digits,
    Loader,
    Prefetcher,
    SeededSamples,
    build_test_loader,
    build_train_loader,
    dataset_size,
    plain_sampler,
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


# The data set


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


def test_any_data_sets_one_after_the_other_are_augmented_by_their_common_index():
    class Noise(TensorDataset):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] + torch.rand(())

    zeros = Noise(torch.zeros(3))
    dataset = SeededSamples(ConcatDataset([zeros, zeros]), seed=0)
    first, second, again = dataset[0, 1], dataset[0, 4], dataset[0, 1]
    assert first == again != second


class Strips(Dataset):
    """Samples one by one: of random numbers, and what they are called."""

    def __len__(self):
        return 70

    def __getitem__(self, index):
        return {"images": torch.rand(3), "labels": np.int64(index), "name": f"{index}.jpg"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_of_single_samples_needs_one_function_only(cfg, monkeypatch, num_workers):
    def build_dataset(cfg, names, train):
        return SeededSamples(Strips(), cfg.SEED), [np.arange(70)]

    monkeypatch.setattr(data, "build_dataset", build_dataset)
    cfg.DATALOADER.NUM_WORKERS, cfg.SOLVER.BATCH_SIZE = num_workers, 4
    assert dataset_size(cfg) == 70
    ((batch,),) = itertools.islice(build_train_loader(cfg, 0), 1)
    assert batch["labels"].dtype == torch.int64
    samples = SeededSamples(Strips(), cfg.SEED)
    expected = torch.stack([samples[0, index]["images"] for index in batch["labels"]])
    assert torch.equal(batch["images"], expected)
    assert batch["name"] == [f"{index}.jpg" for index in batch["labels"]]
    tests = torch.cat([each["labels"] for each in build_test_loader(cfg, "digits_test")])
    assert tests.tolist() == list(range(70))


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


@pytest.mark.parametrize(
    "words", [{"SAMPLER_TRAIN": "class_balanced"}, {"RANDOM_SUBSET_RATIO": 0.5}], ids=str
)
def test_settings_of_the_order_are_never_ignored(cfg, words):
    cfg.DATALOADER.update(words)
    with pytest.raises(comm.SettingsError, match="sampler"):
        build_train_loader(cfg, 0)


# The loaders


@pytest.mark.parametrize("world_size", [1, 2, 3, 400])
def test_each_test_sample_is_loaded_once_and_len_tells_the_batches(cfg, monkeypatch, world_size):
    cfg.TEST.BATCH_SIZE = 100
    labels = []
    for rank in range(world_size):
        monkeypatch.setattr(comm, "get_world_size", lambda: world_size)
        monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
        loader = build_test_loader(cfg, "digits_test")
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all(0 < len(batch["labels"]) <= 100 for batch in batches)
        labels.extend(batch["labels"] for batch in batches)
    assert torch.cat(labels).tolist() == read_digits(PATH)["digits_test"][1].tolist()


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


class Handlers(Dataset):
    """Tells how its process takes signals."""

    def __len__(self):
        return 1

    def __getitems__(self, keys):
        numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
        return {
            "ignored": torch.tensor([signal.getsignal(each) is signal.SIG_IGN for each in numbers])
        }


def test_workers_of_any_start_method_outlive_the_signals_that_stop_a_training(cfg, monkeypatch):
    monkeypatch.setattr(data, "Digits", lambda *args: Handlers())
    cfg.DATALOADER.NUM_WORKERS = 1
    (batch,) = build_test_loader(cfg, "digits_test")
    assert batch["ignored"].all()


# Workers that fail


class Failing(Dataset):
    """Item 3 ends its process, or raises."""

    def __init__(self, fail):
        self.fail = fail

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 3:
            self.fail()
        return torch.tensor(index)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def left():
    os._exit(7)


def mistaken():
    raise FileNotFoundError("no image 3")


@pytest.fixture
def impatient(monkeypatch):
    """torch looks after its workers every 5 seconds while it waits; here more often."""
    look = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(look, "__defaults__", (0.1,))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("fail", "cause"), [(killed, "SIGKILL"), (left, "exit status 7")])
def test_a_worker_that_dies_is_one_line_where_its_batch_is_missing(fail, cause):
    loader = Loader(Failing(fail), batch_size=1, num_workers=2)
    seen = []
    with pytest.raises(comm.SettingsError, match=rf"^DATALOADER.*rank 0.*{cause}[^\n]*$"):
        seen.extend(map(int, loader))
    assert seen == [0, 1, 2][: len(seen)]


@pytest.mark.usefixtures("impatient")
def test_a_worker_killed_while_the_process_computes_interrupts_nothing():
    before = signal.getsignal(signal.SIGCHLD)
    loader = iter(Loader(Failing(lambda: None), batch_size=1, num_workers=1))
    next(loader)
    (worker,) = multiprocessing.active_children()
    worker.kill()
    worker.join()
    assert signal.getsignal(signal.SIGCHLD) is before
    with pytest.raises(comm.SettingsError, match="SIGKILL"):
        list(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_set_comes_as_itself(num_workers):
    loader = Loader(Failing(mistaken), batch_size=1, num_workers=num_workers)
    with pytest.raises(FileNotFoundError, match="no image 3"):
        list(loader)


# Copies to a GPU


class Gpu:
    """Stands for torch.cuda: notes in which order streams copy, wait and are handed tensors."""

    def __init__(self, monkeypatch):
        self.events, self.current = [], "compute"
        monkeypatch.setattr(torch.cuda, "Stream", lambda: "copy")
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)

    @contextlib.contextmanager
    def stream(self, stream):
        self.current = stream
        yield
        self.current = "compute"

    def wait_stream(self, stream):
        self.events.append(("wait", self.current, stream))


class Pinned:
    def __init__(self, gpu, number):
        self.gpu, self.number = gpu, number

    def to(self, device, non_blocking):
        assert device == "cuda"
        assert non_blocking
        self.gpu.events.append(("copy", self.gpu.current, self.number))
        return self

    def record_stream(self, stream):
        assert stream is self.gpu
        self.gpu.events.append(("record", self.gpu.current, self.number))


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def items(gpu, num, error=None):
    for number in range(num):
        gpu.events.append(("draw", gpu.current, number))
        yield [{"images": Pinned(gpu, number)}]
    if error is not None:
        raise error


def test_the_next_item_is_copied_on_another_stream_before_this_one_is_used(gpu):
    loader = iter(Prefetcher(items(gpu, 9), "cuda"))
    assert gpu.events == []
    ((data,),) = [next(loader)]
    assert data["images"].number == 0
    assert gpu.events == [
        ("draw", "compute", 0),
        ("copy", "copy", 0),
        ("wait", "compute", "copy"),  # for item 0 only: the copy of item 1 has not begun
        ("record", "compute", 0),
        ("draw", "compute", 1),
        ("copy", "copy", 1),
    ]
    gpu.events.clear()
    next(loader)
    assert gpu.events[:2] == [("wait", "compute", "copy"), ("record", "compute", 1)]


def test_one_item_at_most_is_drawn_ahead_and_none_before_the_first(gpu):
    for num_iters in range(4):
        gpu.events.clear()
        loader = iter(Prefetcher(items(gpu, 9), "cuda"))
        taken = [item for _, item in zip(range(num_iters), loader)]
        assert len(taken) == num_iters
        draws = [event for event in gpu.events if event[0] == "draw"]
        assert len(draws) == (num_iters + 1 if num_iters else 0)


def test_a_loader_that_ends_gives_all_its_items(gpu):
    prefetcher = Prefetcher(items(gpu, 3), "cuda")
    assert [data["images"].number for (data,) in prefetcher] == [0, 1, 2]
    assert list(Prefetcher(items(gpu, 0), "cuda")) == []
    assert len(Prefetcher([1, 2], "cuda")) == 2


def test_an_error_ahead_waits_until_its_turn(gpu):
    loader, taken = Prefetcher(items(gpu, 2, KeyError("item 2")), "cuda"), []
    with pytest.raises(KeyError, match="item 2"):
        taken.extend(loader)
    assert len(taken) == 2


def test_nothing_is_done_for_a_cpu():
    endless = iter([])
    assert iter(Prefetcher(endless, "cpu")) is endless


def test_data_of_any_shape_goes_to_the_device():
    nested = {"images": torch.zeros(2), "targets": [{"boxes": torch.ones(1)}, (torch.ones(3),)]}
    moved = data.to_device(nested, "meta")
    assert moved["images"].is_meta
    assert moved["targets"][0]["boxes"].is_meta
    assert moved["targets"][1][0].is_meta
    assert isinstance(moved["targets"][1], tuple)


def test_what_is_no_tensor_stays_as_it_is_on_the_way_to_a_device():
    Sample = collections.namedtuple("Sample", "image name")
    batch = {"samples": [Sample(torch.ones(2), "a.jpg")], "number": 3}
    moved = data.to_device(batch, "cpu")
    assert moved["number"] == 3
    assert moved["samples"][0].name == "a.jpg"
    assert [tuple(tensor.shape) for tensor in data._tensors(moved)] == [(2,)]


def test_a_loader_that_ends_ends_without_an_error_of_its_own():
    batches = [{"x": torch.ones(1)}] * 5
    assert len(list(data._micro_batches(batches, 2))) == 2
