"""The loaders for any data set: which samples, with which random numbers, in which batches."""

import collections
import contextlib
import multiprocessing
import random
from itertools import islice

import numpy as np
import pytest
import torch
from plumbing import prefetch, seeding, shared_memory
from plumbing.loading import InferenceLoader, TrainingLoader
from plumbing.random_state import set_random_state
from plumbing.samplers import TrainingBatchSampler, sample_keys
from plumbing.seeding import find_generators
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

SIZE = 70


class Photos(Dataset):
    """An ordinary data set whose transforms draw from all three global generators."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return {
            "images": torch.rand(3),
            "noise": np.random.rand(2),
            "flip": random.random(),
            "labels": index,
            "name": f"{index}.jpg",
        }


def training_loader(dataset=None, start_iter=0, micro_batches=1, **options):
    dataset = dataset or Photos()
    sampler = TrainingBatchSampler(len(dataset), 8, micro_batches, 1, start_iter)
    return TrainingLoader(dataset, sampler, seed=1, num_micro_batches=micro_batches, **options)


def take(number, loader):
    """The first items of an endless loader."""
    with contextlib.closing(loader):
        return list(islice(loader, number))


def same(first, second):
    """Whether two batches, or lists of them, are equal to the bit."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list) and first and isinstance(first[0], dict):
        return len(first) == len(second) and all(map(same, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@pytest.fixture
def forkserver():
    """The start method of Python 3.14: workers get everything pickled."""
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(method, force=True)


# Random transforms


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_ordinary_data_set_needs_no_wrapper_and_draws_the_same_in_any_process(num_workers):
    first, *_ = take(3, training_loader(num_workers=num_workers))
    (batch,) = first
    keys = sample_keys(np.arange(8), SIZE, seed=1)
    assert batch["labels"].tolist() == keys[:, 1].tolist()
    assert batch["name"] == [f"{index}.jpg" for index in keys[:, 1]]
    for position, (epoch, index) in enumerate(keys.tolist()):
        set_random_state(1, epoch, index)
        sample = Photos()[index]
        assert torch.equal(batch["images"][position], sample["images"])
        assert batch["noise"][position].tolist() == sample["noise"].tolist()
        assert batch["flip"][position].item() == sample["flip"]


@pytest.mark.parametrize("start_iter", [3, 30])
def test_a_resume_gives_the_batches_of_the_run_without_a_stop(start_iter):
    whole = take(start_iter + 3, training_loader())
    assert all(map(same, take(3, training_loader(start_iter=start_iter)), whole[start_iter:]))
    assert not same(whole[0], whole[1])


def test_a_sample_is_another_one_in_each_epoch_and_at_each_place_of_joined_data_sets():
    class Noise(TensorDataset):
        def __getitem__(self, index):
            return {"x": super().__getitem__(index)[0] + torch.rand(())}

    zeros = Noise(torch.zeros(4))
    drawn = [batch["x"] for (batch,) in take(5, training_loader(ConcatDataset([zeros, zeros])))]
    assert len(torch.cat(drawn).unique()) == 40


def test_loading_draws_nothing_from_the_generator_of_the_training_before_the_first_sample():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    iter(training_loader())
    take(1, training_loader(num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


class Whole(Photos):
    """Loads a batch at once."""

    def __init__(self, as_batch):
        self.as_batch = as_batch

    def __getitems__(self, indices):
        samples = [{"labels": index, "noise": random.random()} for index in indices]
        return default_collate(samples) if self.as_batch else samples


@pytest.mark.parametrize("as_batch", [False, True])
def test_a_data_set_may_load_whole_batches_which_are_seeded_once(as_batch):
    (batch,), *_ = take(1, training_loader(Whole(as_batch)))
    keys = sample_keys(np.arange(8), SIZE, seed=1)
    assert batch["labels"].tolist() == keys[:, 1].tolist()
    set_random_state(1, *keys[0].tolist())
    assert batch["noise"].tolist() == [random.random() for _ in range(8)]


def test_a_subset_of_an_ordinary_data_set_is_seeded_for_each_sample():
    dataset = Subset(Photos(), range(SIZE))
    whole = [batch for (batch,) in take(2, training_loader(dataset))]
    parts = take(2, training_loader(dataset, micro_batches=2))
    for batch, halves in zip(whole, parts):
        assert torch.equal(torch.cat([half["images"] for half in halves]), batch["images"])


class Compose:
    def __init__(self, *transforms):
        self.transforms = transforms


class Shift:
    def __init__(self, rng):
        self.rng = rng


class Folder(Photos):
    def __init__(self, *transforms):
        self.paths = ["a.jpg"] * 1000
        self.random = random  # the module, whose generator is the global one
        self.transform = Compose(*transforms)


@pytest.mark.parametrize(
    "rng", [np.random.default_rng(0), np.random.RandomState(0), random.Random(0), torch.Generator()]
)
def test_a_generator_of_ones_own_is_named_once_because_a_resume_cannot_set_it(rng, caplog):
    seeding._warned.clear()
    dataset = Folder(Shift(1), Shift(rng))
    for _ in range(2):
        training_loader(dataset)
        InferenceLoader(dataset, 8)
    (message,) = caplog.messages
    assert message.startswith("Folder.transform.transforms[1].rng is a random generator of its own")
    assert "global generators" in message


def test_data_sets_without_a_generator_of_their_own_are_left_in_peace(caplog):
    for dataset in (Photos(), Folder(Shift(1)), ConcatDataset([Photos(), Folder()])):
        assert find_generators(dataset, "data") == []
    joined = ConcatDataset([Photos(), Folder(Shift(random.Random(1)))])
    (place,) = find_generators(joined, "data")
    assert place == "data.datasets[1].transform.transforms[0].rng"


# The training loader


def test_an_item_is_the_list_of_the_micro_batches_of_an_iteration():
    items = take(3, training_loader(micro_batches=4))
    labels = [[batch["labels"].tolist() for batch in item] for item in items]
    assert [[len(part) for part in item] for item in labels] == [[2] * 4] * 3
    whole = [batch["labels"].tolist() for (batch,) in take(3, training_loader())]
    assert [sum(item, []) for item in labels] == whole


def test_a_batch_sampler_that_ends_ends_the_loader_without_an_error_of_its_own():
    keys = [np.array([[0, i]]) for i in range(5)]
    loader = TrainingLoader(Photos(), keys, seed=0, num_micro_batches=2)
    assert [len(item) for item in loader] == [2, 2]


@pytest.mark.parametrize("batches", [[[1, 2]], [[(0, 1, 2)]], [[3]]])
def test_a_batch_sampler_without_epochs_is_an_error_that_says_what_is_wanted(batches):
    with pytest.raises(TypeError, match=r"pairs of \(epoch, index\)"):
        list(TrainingLoader(Photos(), batches, seed=0))


def mixed(samples):
    return {"mixed": torch.tensor([sample["labels"] for sample in samples])}


def test_the_training_collates_in_its_own_way_and_the_test_set_in_its_own():
    dataset = Photos()
    ((batch,),) = take(1, training_loader(dataset, collate_fn=mixed))
    assert list(batch) == ["mixed"]
    assert list(next(iter(InferenceLoader(dataset, 8)))) == list(dataset[0])


def test_batches_go_to_the_device():
    ((batch,),) = take(1, training_loader(device="meta", collate_fn=mixed))
    assert batch["mixed"].is_meta
    assert next(iter(InferenceLoader(Photos(), 8, collate_fn=mixed, device="meta")))[
        "mixed"
    ].is_meta


# Errors in a sample


class Strange(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class Failing(Photos):
    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        if index == 3:
            raise self.error
        return {"labels": index}


class FailingAtOnce(Failing):
    def __getitems__(self, indices):
        raise self.error


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(2, "no such file", "cat.jpg"), FileNotFoundError),
        (KeyError("label"), KeyError),
        (StopIteration("the end"), RuntimeError),
        (Strange(5, "odd"), RuntimeError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_in_a_sample_names_the_sample_and_keeps_its_type(error, kind, num_workers):
    with pytest.raises(kind) as caught:
        list(InferenceLoader(Failing(error), 4, num_workers=num_workers))
    message = str(caught.value)
    assert "sample 3 of Failing" in message
    assert str(error.args[-1]) in message
    if num_workers:
        assert "__getitem__" in message  # the traceback of the worker
    else:
        assert caught.value.__cause__ is error


def test_an_error_in_a_whole_batch_names_its_samples():
    with pytest.raises(ValueError, match=r"samples \[0, 1\] of FailingAtOnce: bad"):
        list(InferenceLoader(FailingAtOnce(ValueError("bad")), 3))


# The test loader


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("batch_size", [1, 7, 32, 1000])
def test_all_ranks_have_equally_many_batches_and_each_sample_comes_once(
    as_rank, world_size, batch_size
):
    labels = []
    lengths = set()
    for rank in range(world_size):
        as_rank(rank, world_size)
        loader = InferenceLoader(Photos(), batch_size)
        sizes = []
        for batch in loader:
            labels.extend(batch["labels"].tolist())
            sizes.append(len(batch["labels"]))
        assert len(sizes) == len(loader)
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= batch_size
        assert loader.num_samples == SIZE
        lengths.add(len(loader))
    assert labels == list(range(SIZE))
    assert len(lengths) == 1


class Boxes(Dataset):
    """Its collate_fn keeps a list for each sample."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return {"image": torch.ones(3, 4), "boxes": torch.zeros(5, 4), "label": 7, "name": "a.jpg"}


def detection_collate(samples):
    return {
        "images": torch.stack([sample["image"] for sample in samples]),
        "targets": [{"boxes": sample["boxes"]} for sample in samples],
        "pair": (torch.zeros(len(samples)), [sample["name"] for sample in samples]),
        "scale": torch.tensor(2.0),
        "text": "all",
    }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_empty_batch_has_the_form_of_the_others_and_length_0(as_rank, num_workers):
    as_rank(1, 2)
    (batch,) = InferenceLoader(Boxes(), 4, num_workers=num_workers)
    assert {key: value for key, value in batch.items() if key != "name"}.keys() == {
        "image",
        "boxes",
        "label",
    }
    assert batch["image"].shape == (0, 3, 4)
    assert batch["label"].dtype == torch.int64
    assert batch["name"] == []
    (batch,) = InferenceLoader(Boxes(), 4, collate_fn=detection_collate, num_workers=num_workers)
    assert batch["images"].shape == (0, 3, 4)
    assert batch["targets"] == []
    assert batch["pair"][0].shape == (0,)
    assert batch["pair"][1] == []
    assert batch["scale"] == 2.0
    assert batch["text"] == "all"


def test_each_evaluation_sees_the_same_random_crops():
    loader = InferenceLoader(Photos(), 8)
    assert same(list(loader), list(loader))


def pids():
    return {process.pid for process in multiprocessing.active_children()}


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_the_workers_of_a_test_loader_serve_all_evaluations(start_method, request):
    if start_method == "forkserver":
        request.getfixturevalue("forkserver")
    others = pids()
    loader = InferenceLoader(Photos(), 8, num_workers=2)
    first = list(loader)
    workers = pids() - others
    assert len(workers) == 2
    assert same(list(loader), first)
    assert pids() - others == workers
    loader.close()
    assert pids() == others


def test_after_an_evaluation_that_was_left_the_next_one_starts_new_workers():
    others = pids()
    loader = InferenceLoader(Photos(), 8, num_workers=1)
    whole = list(loader)
    passing = iter(loader)
    next(passing)
    passing.close()
    assert pids() == others
    assert same(list(loader), whole)
    unfinished = iter(loader)
    next(unfinished)
    assert same(list(loader), whole)  # although the other pass is still open
    loader.close()


def test_workers_of_a_test_loader_that_is_gone_leave():
    others = pids()
    list(InferenceLoader(Photos(), 8, num_workers=1))
    assert pids() == others


@pytest.mark.usefixtures("forkserver")
def test_workers_that_are_not_forked_give_the_same_batches():
    batches = take(3, training_loader(num_workers=2, collate_fn=mixed))
    assert all(map(same, batches, take(3, training_loader(collate_fn=mixed))))


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
    loader = prefetch.on_device(items(gpu, 9), "cuda")
    assert gpu.events == []
    (data,) = next(loader)
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
        loader = prefetch.on_device(items(gpu, 9), "cuda")
        taken = [item for _, item in zip(range(num_iters), loader)]
        assert len(taken) == num_iters
        draws = [event for event in gpu.events if event[0] == "draw"]
        assert len(draws) == (num_iters + 1 if num_iters else 0)


def test_a_loader_that_ends_gives_all_its_items(gpu):
    passed = prefetch.on_device(items(gpu, 3), "cuda")
    assert [data["images"].number for (data,) in passed] == [0, 1, 2]
    assert list(prefetch.on_device(items(gpu, 0), "cuda")) == []


def test_an_error_ahead_waits_until_its_turn(gpu):
    loader, taken = prefetch.on_device(items(gpu, 2, KeyError("item 2")), "cuda"), []
    with pytest.raises(KeyError, match="item 2"):
        taken.extend(loader)
    assert len(taken) == 2


def test_nothing_is_done_for_a_cpu():
    endless = iter([])
    assert prefetch.on_device(endless, "cpu") is endless


def test_data_of_any_shape_goes_to_the_device():
    nested = {"images": torch.zeros(2), "targets": [{"boxes": torch.ones(1)}, (torch.ones(3),)]}
    moved = prefetch.to_device(nested, "meta")
    assert moved["images"].is_meta
    assert moved["targets"][0]["boxes"].is_meta
    assert moved["targets"][1][0].is_meta
    assert isinstance(moved["targets"][1], tuple)


def test_what_is_no_tensor_stays_as_it_is_on_the_way_to_a_device():
    Sample = collections.namedtuple("Sample", "image name")
    batch = {"samples": [Sample(torch.ones(2), "a.jpg")], "number": 3}
    moved = prefetch.to_device(batch, "cpu")
    assert moved["number"] == 3
    assert moved["samples"][0].name == "a.jpg"
    assert len(list(shared_memory.leaves_of(moved))) == 3
