"""Evaluation: right numbers, one pass, few messages, and a run that answers for its results."""

import json
import logging
import math
import re

import pytest
import torch
from conftest import arguments, counted_waits, own_log, parse, train_here
from models import Tiny
from ranks import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evaluation
import train
from defaults import check_cfg, expected_results, get_cfg
from evaluation import (
    CalibrationEvaluator,
    DigitsEvaluator,
    Evaluator,
    InferenceTimer,
    build_evaluators,
    inference_context,
    inference_on_dataset,
)
from hardware import build_parallel
from plumbing import comm
from plumbing.comm import SettingsError
from plumbing.events import EventStorage
from plumbing.setup import launch
from records import load_results, save_results, verify_results

NUM_SAMPLES = 61


class Given(nn.Module):
    """Predicts what stands in the batch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)  # buffers, for the ranks to average

    def forward(self, data):
        return data["logits"]


def samples(size=NUM_SAMPLES):
    generator = torch.Generator().manual_seed(1)
    return {
        "images": torch.rand(size, 1, 8, 8, generator=generator),
        "labels": torch.randint(0, 10, (size,), generator=generator),
        "logits": 3 * torch.randn(size, 10, generator=generator),
    }


def batches(data, batch_size):
    """This rank's part in batches, the last of which may be smaller."""
    parts = zip(*(tensor.tensor_split(comm.get_world_size()) for tensor in data.values()))
    part = list(parts)[comm.get_rank()]
    split = zip(*(tensor.split(batch_size) for tensor in part))
    return [dict(zip(data, tensors)) for tensors in split if len(tensors[0])]


def cpu_settings():
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    return cfg


def evaluators():
    return build_evaluators(cpu_settings(), "digits_test")


def evaluate(data, batch_size=16, model=None):
    return inference_on_dataset(model or Given(), batches(data, batch_size), evaluators())


def error_of(function, *args, kind=SettingsError):
    """The one line of an error that a call raises."""
    with pytest.raises(kind) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is done on ranks: one launch for all.


def evaluate_in_batches():
    sizes = (1, 2, 7, 61)
    return [evaluate(samples(size), n) for size in sizes for n in (1, 5, 61)]


def count_costs():
    """Reads of tensors at each batch; collectives of the whole evaluation of one test set."""
    per_batch = []

    def watched(data):
        for batch in data:
            before = counts["reads"]
            yield batch
            per_batch.append(counts["reads"] - before)

    model = build_parallel(cpu_settings(), nn.Sequential(Given(), nn.Linear(10, 10)))
    assert isinstance(model, DistributedDataParallel)
    with counted_waits() as counts:
        inference_on_dataset(model, watched(batches(samples(), 4)), evaluators())
    return {"reads": per_batch, "collectives": counts["collectives"]}


def log_of_an_evaluation():
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    evaluation.logger.addHandler(handler)
    evaluation.logger.setLevel(logging.INFO)
    evaluate(samples())
    return messages


@pytest.fixture(scope="module")
def ranks():
    """What each of two ranks finds: [{name of a function above: what it returns}, ...]."""
    return run_on_ranks(evaluate_in_batches, count_costs, log_of_an_evaluation)


# Numbers.


def test_the_numbers_are_those_of_their_definitions():
    data, results = samples(), evaluate(samples())
    probabilities = data["logits"].double().softmax(dim=1)
    confidence, predicted = (part.tolist() for part in probabilities.max(dim=1))
    labels, error = data["labels"].tolist(), 0.0
    for number in range(15):
        inside = [i for i, c in enumerate(confidence) if number / 15 < c <= (number + 1) / 15]
        error += abs(sum((predicted[i] == labels[i]) - confidence[i] for i in inside))
    right = [one == other for one, other in zip(predicted, labels)]
    losses = -probabilities[range(NUM_SAMPLES), labels].log()
    assert results["accuracy"] == sum(right) / NUM_SAMPLES
    assert results["expected_calibration_error"] == pytest.approx(error / NUM_SAMPLES, abs=1e-6)
    assert results["negative_log_likelihood"] == pytest.approx(losses.mean().item(), abs=1e-6)
    for i in range(10):
        of_class = [one for one, label in zip(right, labels) if label == i]
        assert results[f"accuracy-{i}"] == sum(of_class) / len(of_class)


def test_sure_and_right_is_well_calibrated_and_sure_and_wrong_is_not():
    labels = torch.arange(10)
    for logits, error in ((labels, 0.0), (labels.roll(1), 1.0)):
        logits = 100.0 * nn.functional.one_hot(logits)
        data = {"labels": labels, "logits": logits, "images": torch.zeros(10, 1, 8, 8)}
        results = evaluate(data)
        assert results["expected_calibration_error"] == pytest.approx(error)
        assert results["negative_log_likelihood"] == pytest.approx(100 * error)


def test_no_number_depends_on_batches_or_ranks(ranks):
    alone = evaluate_in_batches()
    for start in range(0, len(alone), 3):
        assert alone[start] == alone[start + 1] == alone[start + 2]
    for rank in ranks:
        assert rank["evaluate_in_batches"] == alone


@pytest.mark.parametrize("logit", [math.nan, math.inf, -3e38])
def test_one_sample_without_a_finite_likelihood_makes_the_mean_infinite(logit):
    data = samples()
    data["logits"][5, data["labels"][5]] = logit
    results = evaluate(data)
    assert results["negative_log_likelihood"] == math.inf
    assert 0 <= results["expected_calibration_error"] <= 1


def test_what_is_not_defined_is_left_out():
    data = {name: tensor[samples()["labels"] == 3] for name, tensor in samples().items()}
    results = evaluate(data)
    assert sorted(name for name in results if "-" in name) == ["accuracy-3"]
    assert all(map(math.isfinite, results.values()))
    assert inference_on_dataset(Given(), [], evaluators()) == {}


# Several evaluators, one pass.


class Gives(Evaluator):
    """Gives what it was made with, and counts what it saw."""

    def __init__(self, results):
        self.results, self.seen = results, 0

    def process(self, data, predictions):
        self.seen += len(predictions)

    def evaluate(self):
        return self.results


def merged(*results):
    return inference_on_dataset(Given(), batches(samples(), 16), list(map(Gives, results)), "set")


def test_results_are_merged_and_nested_names_joined():
    results = merged({"a": 1, "box": {"AP": torch.tensor(2.0), "x": {"y": 3}}}, None, {"b": 0}, {})
    assert results == {"a": 1.0, "box/AP": 2.0, "box/x/y": 3.0, "b": 0.0}
    assert all(type(value) is float for value in results.values())


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (({"a": 1}, {"a": 1}), ("set", "two evaluators", "a:")),
        (({"box": {"AP": 1}, "box/AP": 1},), ("set", "two", "box/AP")),
        (({"a": "high"},), ("set", "a is no number", "'high'")),
        (({"a": torch.ones(2)},), ("set", "a is no number")),
        (([1],), ("set", "dict or None", "[1]")),
    ],
)
def test_what_cannot_be_merged_is_an_error_that_names_it(results, words):
    message = error_of(merged, *results, kind=ValueError)
    assert all(word in message for word in words)


def test_each_batch_passes_through_the_model_once_for_all_evaluators():
    model, passes = Given(), []
    model.register_forward_hook(lambda *args: passes.append(model.training))
    judges = [Gives({"a": 1}), Gives({"b": 1})]
    inference_on_dataset(model, batches(samples(), 16), judges)
    assert passes == [False] * 4
    assert [judge.seen for judge in judges] == [NUM_SAMPLES] * 2


def test_an_evaluator_may_be_used_again():
    judges, data = evaluators(), batches(samples(), 16)
    first = inference_on_dataset(Given(), data, judges)
    assert inference_on_dataset(Given(), data, judges) == first


def test_tensors_of_any_type_and_shape_arrive_as_they_were():
    class Sends(Evaluator):
        def tensors(self):
            return sent

        def evaluate(self, *ranks):
            received.extend(ranks)

    large = 2**53 + 1  # no float64
    sent = [torch.tensor(True), torch.tensor([large]), torch.rand(2, 3).T, torch.zeros(0, 2)]
    received = []
    assert inference_on_dataset(Given(), [], [Sends()]) == {}
    assert [tensor.dtype for tensor in received] == [tensor.dtype for tensor in sent]
    assert all(torch.equal(one[0], other) for one, other in zip(received, sent))


# What it costs.


def test_a_batch_costs_no_read_and_a_test_set_two_messages(ranks):
    for rank in ranks:
        reads, collectives = rank["count_costs"].values()
        assert len(reads) >= 5
        assert not any(reads)
        assert collectives == 2


class Clock:
    """In place of the module ``time``."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


def test_progress_is_logged_every_five_seconds_with_what_is_left(monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr(evaluation, "time", clock)
    caplog.set_level(logging.INFO, logger="evaluation")

    def loader():
        for _ in range(20):
            clock.now += 0.5
            yield {"x": torch.zeros(3)}

    timer = InferenceTimer("set", 20)
    for _ in timer.timed(loader()):
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
        assert re.match(r"Evaluated 61 samples of  in \d+\.\d\d s, \d+\.\d samples/s", message)


# The model and the storage meanwhile.


class Fails(Evaluator):
    def process(self, data, predictions):
        raise KeyError("a bug")


def test_an_error_leaves_each_module_in_its_mode():
    model = nn.Sequential(Given(), nn.Dropout())
    model[0].norm.eval()  # frozen
    with pytest.raises(KeyError, match="a bug"):
        inference_on_dataset(model, batches(samples(), 16), [Fails()])
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


@pytest.mark.parametrize("num_shown", [0, 1, 5, 16])
def test_any_number_of_images_is_shown(num_shown):
    judge = DigitsEvaluator("digits_test", 10, "cpu", num_shown)
    with EventStorage() as storage:
        inference_on_dataset(Given(), batches(samples(), 16), [judge])
        shown = {name: tuple(image.shape) for name, image, _ in storage._vis_data}
    side = 10 * math.ceil(math.sqrt(num_shown)) * 8
    sheet = {"digits_test/misclassified": (1, side, side)} if num_shown else {}
    assert shown == {"digits_test/confusion": (1, 160, 160), **sheet}


def test_the_most_confident_mistakes_are_shown_whatever_their_batch():
    data = samples()
    confidence, predicted = data["logits"].softmax(dim=1).max(dim=1)
    order = (confidence * (predicted != data["labels"])).argsort(descending=True)[:16]
    for size in (3, 61):
        judge = DigitsEvaluator("digits_test", 10, "cpu")
        inference_on_dataset(Given(), batches(data, size), [judge])
        assert torch.equal(judge.images, data["images"][order, 0])


@pytest.mark.parametrize(("words", "dtype"), [("", "float32"), ("TEST.AMP True", "bfloat16")])
def test_evaluation_is_in_mixed_precision_only_if_told_so(words, dtype, tmp_path, monkeypatch):
    class Model(Tiny):
        def forward(self, data):
            result = super().forward(data)
            if not self.training:
                types.add(str(result.dtype))
            return result

    types = set()
    monkeypatch.setattr(train, "build_model", lambda cfg: Model())
    results = train_here(tmp_path / "run", f" SOLVER.AMP.ENABLED True SOLVER.MAX_ITER 1 {words}")
    assert types == {f"torch.{dtype}"}
    assert 0 < results["digits_test/negative_log_likelihood"] < 10


# Results of a run.

BOTH = " SOLVER.MAX_ITER 2 DATASETS.TEST ('digits_test','digits_train')"


def test_names_are_the_same_for_one_test_set_and_for_many(tmp_path):
    one = train_here(tmp_path / "one", " SOLVER.MAX_ITER 2")
    both = train_here(tmp_path / "both", BOTH)
    assert one.items() <= both.items()
    assert one.keys() == {name for name in both if name.startswith("digits_test/")}
    assert len(both) == 2 * len(one)


def test_a_score_of_zero_is_a_best_one(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "build_evaluators", lambda cfg, name: [Gives({"score": 0.0})])
    train_here(tmp_path / "run", " SOLVER.MAX_ITER 1 TEST.BEST_METRIC digits_test/score")
    best = json.loads((tmp_path / "run/model_best.json").read_text())
    assert best == {"digits_test/score": 0.0, "iteration": 0}


def test_an_error_in_the_last_iteration_is_not_followed_by_an_evaluation(tmp_path, monkeypatch):
    class Breaks(Tiny):
        def forward(self, data):
            return super().forward(data) if next(passes, 0) else {}["a bug"]

    passes, evaluated = iter([1] * 3), []
    monkeypatch.setattr(train, "build_model", lambda cfg: Breaks())
    monkeypatch.setattr(train, "do_test", lambda cfg, model: evaluated.append(cfg) or {})
    with pytest.raises(KeyError, match="a bug"):
        train_here(tmp_path / "run", " SOLVER.MAX_ITER 4 TEST.EVAL_PERIOD 0")
    assert evaluated == []


def test_a_resumed_run_leaves_the_same_results(tmp_path):
    run, words = tmp_path / "run", " SOLVER.MAX_ITER 6 TEST.EVAL_PERIOD 2"
    train_here(run, words)
    kept = {name: (run / name).read_text() for name in ("results.csv", "results.json")}
    iterations = [line.partition(",")[0] for line in kept["results.csv"].split()]
    assert iterations == ["iteration", "1", "3", "5"]
    for name in ("results.json", "model_final.pth", "model_0000005.pth"):
        (run / name).unlink()
    (run / "last_checkpoint").write_text("model_0000003.pth")
    train_here(run, words + " --resume")
    assert {name: (run / name).read_text() for name in kept} == kept


# Expected results.


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("digits_test/accuracy=0.99+-0.01", ("digits_test/accuracy", 0.99, 0.01)),
        (" digits_test/accuracy-3 = -1e-3 +- 0 ", ("digits_test/accuracy-3", -1e-3, 0.0)),
        ("digits_test/box/AP=40+-.5", ("digits_test/box/AP", 40.0, 0.5)),
    ],
)
def test_what_is_expected_is_read(entry, expected):
    assert expected_results((entry,)) == [expected]


def refusal_of(**settings):
    cfg = get_cfg()
    for name, value in settings.items():
        cfg.TEST[name] = value
    return error_of(check_cfg, cfg, 1)


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ("digits_test/accuracy=0.99", "VALUE +- TOLERANCE"),
        ("digits_test/accuracy 0.99 0.01", "VALUE +- TOLERANCE"),
        ("digits_test/accuracy=0.99+-", "VALUE +- TOLERANCE"),
        ("digits_test/accuracy=high+-1", "two finite numbers"),
        ("digits_test/accuracy=nan+-1", "two finite numbers"),
        ("digits_test/accuracy=1+-inf", "two finite numbers"),
        ("digits_test/accuracy=1+--1", "two finite numbers"),
        ("accuracy=0.99+-0.01", "DATASET/METRIC"),
        ("mnist/accuracy=0.99+-0.01", "DATASETS.TEST"),
        ("", "VALUE +- TOLERANCE"),
        (0.99, "VALUE +- TOLERANCE"),
    ],
)
def test_a_malformed_expectation_is_refused_at_the_start(entry, word):
    message = refusal_of(EXPECTED_RESULTS=("digits_test/accuracy=1+-1", entry))
    assert message.startswith("TEST.EXPECTED_RESULTS: ")
    assert word in message


def test_an_expectation_needs_an_evaluation_and_amp_needs_amp():
    entry = ("digits_test/accuracy=1+-1",)
    assert "TEST.EVAL_PERIOD" in refusal_of(EXPECTED_RESULTS=entry, EVAL_PERIOD=-1)
    assert refusal_of(AMP=True).startswith("TEST.AMP: ")
    cfg = get_cfg()
    cfg.DATASETS.TEST = ("digits_test", "digits_test")
    assert error_of(check_cfg, cfg, 1).startswith("DATASETS.TEST: ")


@pytest.mark.parametrize(
    ("actual", "met"),
    [
        (0.7, True),
        (0.8, True),  # though 0.8 - 0.7 is above 0.1
        (0.6, True),
        (0.81, False),
        (0.59, False),
        (math.nan, False),
        (math.inf, False),
        (None, False),
    ],
)
def test_a_result_must_be_within_its_tolerance(actual, met, caplog):
    results = {"a/b": actual, "a/other": 1.0} if actual is not None else {"a/other": 1.0}
    expected = [("a/other", 1.0, 0.0), ("a/b", 0.7, 0.1)]
    if met:
        assert verify_results(results, expected) is results
        return
    with pytest.raises(SystemExit) as stop:
        verify_results(results, expected)
    assert stop.value.code == 1
    (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    found = "there is none" if actual is None else f"got {actual:g}"
    assert message == f"a/b: expected 0.7 +- 0.1, {found}"


IMPOSSIBLE = "('digits_test/accuracy=2+-0.1','digits_test/nothing=0+-1')"


def run_to_the_end(output, words):
    with own_log():
        launch(train.main, parse(arguments(output, words)))


def test_all_ranks_of_a_run_that_misses_exit_with_1_after_it_was_saved(on_ranks, tmp_path):
    run = tmp_path / "run"
    words = f" SOLVER.MAX_ITER 2 TEST.EXPECTED_RESULTS {IMPOSSIBLE}"
    for flags, start in (("", "finished"), ("--resume", "again")):
        ranks = on_ranks(2, run_to_the_end, run, f"{flags} {words}")
        assert [rank.code for rank in ranks] == [1, 1], (start, ranks)
        assert [rank.printed.count("expected 2 +- 0.1, got") for rank in ranks] == [1, 0]
        assert [rank.printed.count("expected 0 +- 1, there is none") for rank in ranks] == [1, 0]
        assert "Traceback" not in ranks[0].printed + ranks[1].printed
        assert json.loads((run / "results.json").read_text())["iteration"] == 1
        assert (run / "model_final.pth").exists()
    assert len((run / "results.csv").read_text().splitlines()) == 2  # it was not trained again


def test_eval_only_verifies_too(tmp_path):
    train_here(tmp_path / "run", " SOLVER.MAX_ITER 2")
    words = "--resume --eval-only TEST.EXPECTED_RESULTS"
    results = train_here(tmp_path / "run", f"{words} ('digits_test/accuracy=0.5+-0.5',)")
    assert results["digits_test/accuracy"] <= 1
    with pytest.raises(SystemExit) as stop:
        train_here(tmp_path / "run", f"{words} {IMPOSSIBLE}")
    assert stop.value.code == 1


def test_results_that_are_not_finite_are_kept_as_strict_json(tmp_path):
    save_results(str(tmp_path), 9, {"a": 0.5, "b": math.nan, "c": math.inf})
    text = (tmp_path / "results.json").read_text()
    assert json.loads(text, parse_constant=lambda constant: pytest.fail(constant))["b"] is None
    results = load_results(str(tmp_path), 9)
    assert results["a"] == 0.5
    assert math.isnan(results["b"])
    assert math.isnan(results["c"])
    assert load_results(str(tmp_path), 10) is None


def test_the_bins_are_those_of_the_paper():
    judge = CalibrationEvaluator("cpu", num_bins=2)
    logits = torch.tensor([[0.0, 0.0], [1.0, 0.0]])  # confidence 0.5, in the lower bin; 0.73
    judge.process({"labels": torch.tensor([0, 0])}, logits)
    assert judge.tensors()[0][0].tolist() == [1, 1]
