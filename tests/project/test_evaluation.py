"""Evaluation: right numbers, one pass, few messages, and a run that answers for its results."""

import json
import math

import pytest
import torch
import train
from conftest import train_here
from defaults import get_cfg
from evaluation import (
    DigitsEvaluator,
    Evaluator,
    build_evaluators,
    inference_on_dataset,
)
from models import Tiny
from plumbing import comm
from plumbing.comm import SettingsError
from plumbing.events import EventStorage
from ranks import run_on_ranks
from records import load_results, save_results
from torch import nn

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


def evaluate_in_batches():
    sizes = (1, 2, 7, 61)
    return [evaluate(samples(size), n) for size in sizes for n in (1, 5, 61)]


@pytest.fixture(scope="module")
def ranks():
    """What each of two ranks finds: [{name of a function above: what it returns}, ...]."""
    return run_on_ranks(evaluate_in_batches, count_costs, log_of_an_evaluation)


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


def test_no_number_depends_on_batches_or_ranks(ranks):
    alone = evaluate_in_batches()
    for start in range(0, len(alone), 3):
        assert alone[start] == alone[start + 1] == alone[start + 2]
    for rank in ranks:
        assert rank["evaluate_in_batches"] == alone


def test_what_is_not_defined_is_left_out():
    data = {name: tensor[samples()["labels"] == 3] for name, tensor in samples().items()}
    results = evaluate(data)
    assert sorted(name for name in results if "-" in name) == ["accuracy-3"]
    assert all(map(math.isfinite, results.values()))
    assert inference_on_dataset(Given(), [], evaluators()) == {}


class Gives(Evaluator):
    """Gives what it was made with, and counts what it saw."""

    def __init__(self, results):
        self.results, self.seen = results, 0

    def process(self, data, predictions):
        self.seen += len(predictions)

    def evaluate(self):
        return self.results


def test_an_evaluator_may_be_used_again():
    judges, data = evaluators(), batches(samples(), 16)
    first = inference_on_dataset(Given(), data, judges)
    assert inference_on_dataset(Given(), data, judges) == first


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


def test_results_that_are_not_finite_are_kept_as_strict_json(tmp_path):
    save_results(str(tmp_path), 9, {"a": 0.5, "b": math.nan, "c": math.inf})
    text = (tmp_path / "results.json").read_text()
    assert json.loads(text, parse_constant=lambda constant: pytest.fail(constant))["b"] is None
    results = load_results(str(tmp_path), 9)
    assert results["a"] == 0.5
    assert math.isnan(results["b"])
    assert math.isnan(results["c"])
    assert load_results(str(tmp_path), 10) is None
