"""The loop of an evaluation: one pass for all evaluators, few messages, nothing left behind."""

import logging
import math
import re

import pytest
import torch
from conftest import counted_waits
from plumbing import comm, inference
from plumbing.errors import StoppedBySignal
from plumbing.events import EventStorage, get_event_storage, has_event_storage
from plumbing.inference import (
    DatasetEvaluator,
    InferenceTimer,
    inference_context,
    inference_on_dataset,
    log_results,
)
from plumbing.loading import InferenceLoader
from plumbing.parallel import DistributedDataParallel
from ranks import run_on_ranks
from torch import nn

NUM_SAMPLES = 61


class Doubles(nn.Module):
    """Predicts twice the number in the batch."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.norm = nn.BatchNorm1d(1)  # buffers, for the ranks to average

    def forward(self, data):
        return self.factor * data["x"]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return {"x": torch.tensor(float(index))}


class Mean(DatasetEvaluator):
    """The mean prediction over all ranks."""

    def reset(self):
        self.total = torch.zeros(2, dtype=torch.float64)

    def process(self, inputs, outputs):
        assert len(inputs["x"]) == len(outputs)
        self.total += torch.tensor([0, len(outputs)])
        self.total[0] += outputs.double().sum()

    def evaluate(self):
        total, number = comm.gather_tensor(self.total).sum(dim=0).tolist()
        return {"mean": total / number}


class Gives(DatasetEvaluator):
    """Gives what it was made with, and counts what it saw."""

    def __init__(self, results):
        self.results = results

    def reset(self):
        self.seen = 0

    def process(self, inputs, outputs):
        self.seen += len(outputs)

    def evaluate(self):
        return self.results


class Fails(Gives):
    def process(self, inputs, outputs):
        raise KeyError("a bug")


def loader(batch_size=16):
    return InferenceLoader(Numbers(), batch_size)


def merged(*results):
    return inference_on_dataset(Doubles(), loader(), list(map(Gives, results)), "set")


# What is done on ranks: one launch for all.


def evaluate_in_batches():
    return [inference_on_dataset(Doubles(), loader(size), Mean()) for size in (1, 7, 61)]


def count_costs():
    """Reads of tensors at each batch, and collectives outside of the evaluator."""
    per_batch = []

    def watched(batches):
        for batch in batches:
            before = counts["reads"]
            yield batch
            per_batch.append(counts["reads"] - before)

    model = DistributedDataParallel(Doubles())
    with counted_waits() as counts:
        inference_on_dataset(model, watched(list(loader(4))), [Gives({"a": 1})])
    return {"reads": per_batch, "collectives": counts["collectives"]}


def log_of_an_evaluation():
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    inference.logger.addHandler(handler)
    inference.logger.setLevel(logging.INFO)
    inference_on_dataset(Doubles(), loader(), Mean(), "set")
    return messages


@pytest.fixture(scope="module")
def ranks():
    """What each of two ranks finds: [{name of a function above: what it returns}, ...]."""
    return run_on_ranks(evaluate_in_batches, count_costs, log_of_an_evaluation)


def test_no_number_depends_on_batches_or_ranks(ranks):
    expected = [{"mean": float(NUM_SAMPLES - 1)}] * 3
    assert evaluate_in_batches() == expected
    assert [rank["evaluate_in_batches"] for rank in ranks] == [expected] * 2


def test_a_batch_costs_no_read_and_a_test_set_one_message_for_the_buffers(ranks):
    for rank in ranks:
        reads, collectives = rank["count_costs"].values()
        assert len(reads) >= 5
        assert not any(reads)
        assert collectives == 1


# Several evaluators, one pass


def test_results_are_merged_and_nested_names_joined():
    results = merged({"a": 1, "box": {"AP": torch.tensor(2.0), "x": {"y": 3}}}, None, {"b": 0}, {})
    assert results == {"a": 1.0, "box/AP": 2.0, "box/x/y": 3.0, "b": 0.0}
    assert all(type(value) is float for value in results.values())


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (({"a": 1}, {"a": 1}), ("set", "two evaluators", "a:")),
        (({"box": {"AP": 1}, "box/AP": 1},), ("set", "two", "box/AP")),
        (({"a": "high"},), ("set", "a is not a number", "'high'")),
        (({"a": "1.0"},), ("set", "a is not a number")),
        (({"a": torch.ones(2)},), ("set", "a is not a number")),
        (([1],), ("set", "dict or None", "[1]")),
    ],
)
def test_what_cannot_be_merged_is_an_error_that_names_it(results, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        merged(*results)
    assert all(word in str(caught.value) for word in words)


def test_each_batch_passes_through_the_model_once_for_all_evaluators():
    model, passes = Doubles(), []
    model.register_forward_hook(lambda *args: passes.append(model.training))
    judges = [Gives({"a": 1}), Gives({"b": 1})]
    inference_on_dataset(model, loader(), judges)
    assert passes == [False] * 4
    assert [judge.seen for judge in judges] == [NUM_SAMPLES] * 2


def test_one_evaluator_needs_no_list_and_may_be_used_again():
    judge = Mean()
    first = inference_on_dataset(Doubles(), loader(), judge)
    assert inference_on_dataset(Doubles(), loader(), judge) == first


# The log


class Clock:
    """In place of the module ``time``."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


def test_progress_is_logged_every_five_seconds_with_what_is_left(monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr(inference, "time", clock)
    caplog.set_level(logging.INFO, logger="plumbing.inference")

    def batches():
        for _ in range(20):
            clock.now += 0.5
            yield {"x": torch.zeros(3)}

    timer = InferenceTimer("set", 20)
    for _ in timer.timed(batches()):
        clock.now += 1.0 if timer.num_done else 40.0  # the first batch is slow, and does not count
    timer.log_total(60)
    progress = [message for message in caplog.messages if "Evaluating" in message]
    numbers = [int(re.search(r"batch (\d+) of 20", line)[1]) for line in progress]
    assert numbers == [1, 5, 9, 13, 17]
    assert "data: 0.5000 s/batch  compute: 1.0000 s/batch  total: 1.5000 s/batch" in progress[2]
    left = [line.partition("eta: ")[2] for line in progress[2:]]
    assert left == ["0:00:16", "0:00:10", "0:00:04"]
    assert caplog.messages[-1] == "Evaluated 60 samples of set in 69.00 s, 0.9 samples/s"


def test_the_samples_of_all_ranks_are_counted(ranks):
    for rank in ranks:
        (message,) = rank["log_of_an_evaluation"]
        assert re.match(r"Evaluated 61 samples of set in \d+\.\d\d s, \d+\.\d samples/s", message)


def test_of_any_other_loader_the_batches_are_counted(caplog):
    caplog.set_level(logging.INFO, logger="plumbing.inference")
    inference_on_dataset(Doubles(), iter(loader()), Mean(), "set")
    (message,) = caplog.messages
    assert re.match(r"Evaluated 4 batches of set in \d+\.\d\d s", message)


def test_results_are_logged_as_a_table_and_as_lines_to_copy(caplog):
    caplog.set_level(logging.INFO, logger="plumbing.inference")
    log_results("set", {"accuracy": 0.5, "accuracy-1": 1.0, "nll": 1e-5, "box/AP": 1234567.0})
    table, *lines = caplog.messages
    assert table.splitlines() == [
        "Results on set:",
        "| accuracy   | 0.5000 | nll | 1.000e-05 | box/AP | 1.235e+06 |",
        "| accuracy-1 | 1.0000 |     |           |        |           |",
    ]
    assert lines == [
        "copypaste: Task: set",
        "copypaste: accuracy,nll,box/AP",
        "copypaste: 0.5000,0.0000,1234567.0000",
    ]


@pytest.mark.parametrize(
    "results", [{}, {"a": math.nan}, {f"name-{number}": float(number) for number in range(7)}]
)
def test_a_table_of_any_size_has_aligned_lines(results, caplog):
    caplog.set_level(logging.INFO, logger="plumbing.inference")
    log_results("set", results)
    rows = caplog.messages[0].splitlines()[1:]
    assert len({len(row) for row in rows}) == 1
    assert all(name in caplog.messages[0] for name in results)


# The model and the storage meanwhile


def test_an_error_leaves_each_module_in_its_mode():
    model = nn.Sequential(Doubles(), nn.Dropout())
    model[0].norm.eval()  # frozen
    with pytest.raises(KeyError, match="a bug"):
        inference_on_dataset(model, loader(), Fails({}))
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert torch.is_grad_enabled()


def test_a_module_that_cannot_be_set_to_evaluation_leaves_the_others_as_they_were():
    class Stubborn(nn.Identity):
        def train(self, mode=True):
            if not mode:
                raise RuntimeError("stubborn")
            return super().train(mode)

    model = nn.Sequential(nn.Dropout(), Stubborn(), nn.Dropout())
    with pytest.raises(RuntimeError, match="stubborn"), inference_context(model):
        pass
    assert all(module.training for module in model.modules())


def test_an_evaluator_reaches_the_storage_of_the_training_and_the_model_does_not():
    class Chatty(Doubles):
        def forward(self, data):
            assert not torch.is_grad_enabled()
            get_event_storage().put_scalar("chatter", 1.0)
            return super().forward(data)

    class Puts(Gives):
        def evaluate(self):
            get_event_storage().put_scalar("put", 1.0)
            return {}

    with EventStorage() as storage:
        inference_on_dataset(Chatty(), loader(), Puts({}))
        storage.reduce()
        assert list(storage.histories()) == ["put"]
    assert not has_event_storage()


# Signals


class Request:
    """Answers as a StopRequest does: yes from one call on."""

    def __init__(self, last_call):
        self.last_call = last_call
        self.calls = 0

    def agreed(self):
        self.calls += 1
        return self.calls >= self.last_call


def test_a_signal_ends_an_evaluation_after_the_batch_on_which_all_ranks_agree(monkeypatch):
    request, judge = Request(2), Gives({})
    monkeypatch.setattr(inference, "current_request", lambda: request)
    with pytest.raises(StoppedBySignal, match="evaluation of set.*--resume"):
        inference_on_dataset(Doubles(), loader(), judge, "set")
    assert request.calls == 2
    assert 0 < judge.seen < NUM_SAMPLES


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_all_ranks_ask_about_signals_equally_often(world_size, as_rank, monkeypatch):
    calls = []
    for rank in range(world_size):
        as_rank(rank, world_size)
        batches = list(loader(8))
        as_rank(0, 1)
        request = Request(math.inf)
        monkeypatch.setattr(inference, "current_request", lambda request=request: request)
        inference_on_dataset(Doubles(), batches, Gives({}))
        calls.append(request.calls)
    assert len(set(calls)) == 1
