"""Evaluation: right numbers on any number of ranks, and a run that answers for its results."""

import json
import math

import pytest
import torch
import train
from conftest import settings, train_here
from evaluation import AccuracyEvaluator, build_evaluators
from models import Tiny
from outcomes import differences, rows_of
from plumbing import comm
from plumbing.events import EventStorage, load_results, save_results
from plumbing.inference import DatasetEvaluator, inference_on_dataset
from ranks import run_on_ranks
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
        "labels": torch.randint(0, 10, (size,), generator=generator),
        "logits": 3 * torch.randn(size, 10, generator=generator),
    }


def batches(data, batch_size):
    """This rank's part in batches, the last of which may be smaller."""
    part = {}
    for name, tensor in data.items():
        part[name] = tensor.tensor_split(comm.get_world_size())[comm.get_rank()]
    found = []
    for start in range(0, len(part["labels"]), batch_size):
        found.append({name: tensor[start : start + batch_size] for name, tensor in part.items()})
    return found


def evaluators():
    return build_evaluators(settings(), "digits_test")


def evaluate(data, batch_size=16):
    return inference_on_dataset(Given(), batches(data, batch_size), evaluators())


def evaluate_in_batches():
    return [evaluate(samples(size), n) for size in (1, 2, 7, 61) for n in (1, 5, 61)]


def test_the_numbers_are_those_of_their_definitions():
    data = samples()
    results = evaluate(data)
    labels = data["labels"].tolist()
    predicted = data["logits"].argmax(dim=1).tolist()
    right = [one == other for one, other in zip(predicted, labels)]
    assert results["accuracy"] == pytest.approx(sum(right) / NUM_SAMPLES)
    for i in range(10):
        of_class = [one for one, label in zip(right, labels) if label == i]
        assert results[f"accuracy-{i}"] == pytest.approx(sum(of_class) / len(of_class))
    assert len(results) == 11


def test_no_number_depends_on_batches_or_ranks():
    alone = evaluate_in_batches()
    for start in range(0, len(alone), 3):
        assert alone[start] == alone[start + 1] == alone[start + 2]
    for rank in run_on_ranks(evaluate_in_batches):
        assert rank["evaluate_in_batches"] == alone


def test_what_is_not_defined_is_left_out():
    data = {name: tensor[samples()["labels"] == 3] for name, tensor in samples().items()}
    results = evaluate(data)
    assert sorted(results) == ["accuracy", "accuracy-3"]
    assert all(map(math.isfinite, results.values()))
    assert inference_on_dataset(Given(), [], evaluators()) == {}


def test_an_evaluator_may_be_used_again():
    judges = evaluators()
    data = batches(samples(), 16)
    first = inference_on_dataset(Given(), data, judges)
    assert inference_on_dataset(Given(), data, judges) == first


def test_the_confusion_matrix_shows_for_each_label_the_share_of_each_prediction():
    data = samples()
    with EventStorage() as storage:
        evaluate(data)
        ((name, image, iteration),) = storage._vis_data
    assert (name, iteration) == ("digits_test/confusion", 0)
    expected = torch.zeros(10, 10)
    for label, predicted in zip(data["labels"], data["logits"].argmax(dim=1)):
        expected[label, predicted] += 1
    expected /= expected.sum(dim=1, keepdim=True)
    image = torch.as_tensor(image).float().squeeze()
    assert image.shape == (10, 10)
    assert torch.allclose(image / image.max(), expected / expected.max(), atol=0.01)


class Gives(DatasetEvaluator):
    """Gives what it was made with."""

    def __init__(self, results):
        self.results = results

    def process(self, inputs, outputs):
        pass

    def evaluate(self):
        return self.results


# Results of a run.

BOTH = "SOLVER.MAX_ITER 2 DATASETS.TEST ('digits_test','digits_train')"


def test_names_are_the_same_for_one_test_set_and_for_many(tmp_path):
    one = train_here(tmp_path / "one", "SOLVER.MAX_ITER 2")
    both = train_here(tmp_path / "both", BOTH)
    assert one.items() <= both.items()
    assert one.keys() == {name for name in both if name.startswith("digits_test/")}
    assert len(both) == 2 * len(one)


def test_a_score_of_zero_is_a_best_one(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "build_evaluators", lambda cfg, name: [Gives({"score": 0.0})])
    train_here(tmp_path / "run", "SOLVER.MAX_ITER 1 TEST.BEST_METRIC digits_test/score")
    best = json.loads((tmp_path / "run/model_best.json").read_text())
    assert best == {"digits_test/score": 0.0, "iteration": 0}


def test_the_best_model_of_a_run_is_that_with_the_best_metric(tmp_path, monkeypatch):
    scores = iter([0.5, 0.25, 0.75])
    monkeypatch.setattr(
        train, "build_evaluators", lambda cfg, name: [Gives({"score": next(scores)})]
    )
    words = "TEST.BEST_METRIC digits_test/score TEST.BEST_MODE min"
    train_here(tmp_path / "run", words)
    best = torch.load(tmp_path / "run/model_best.pth")
    assert best["iteration"] == 7
    assert best["digits_test/score"] == 0.25
    other = torch.load(tmp_path / "run/model_0000007.pth")
    assert differences(best["model"], other["model"]) == []


def test_an_error_in_the_last_iteration_is_not_followed_by_an_evaluation(tmp_path, monkeypatch):
    class Breaks(Tiny):
        def forward(self, data):
            return super().forward(data) if next(passes, 0) else {}["a bug"]

    passes = iter([1] * 3)
    evaluated = []
    monkeypatch.setattr(train, "build_model", lambda cfg: Breaks())
    monkeypatch.setattr(train, "do_test", lambda cfg, model: evaluated.append(cfg) or {})
    with pytest.raises(KeyError, match="a bug"):
        train_here(tmp_path / "run", "SOLVER.MAX_ITER 4 TEST.EVAL_PERIOD 0")
    assert evaluated == []


def test_a_resumed_run_leaves_the_same_results(tmp_path):
    run = tmp_path / "run"
    words = "SOLVER.MAX_ITER 6 TEST.EVAL_PERIOD 2"
    train_here(run, words)
    kept = (run / "results.json").read_text()
    metrics = {row["iteration"]: row.get("digits_test/accuracy") for row in rows_of(run)}
    assert [iteration for iteration, value in metrics.items() if value is not None] == [1, 3, 5]
    for name in ("results.json", "model_final.pth", "model_0000005.pth"):
        (run / name).unlink()
    (run / "last_checkpoint").write_text("model_0000003.pth")
    train_here(run, f"{words} --resume")
    assert (run / "results.json").read_text() == kept
    again = {row["iteration"]: row.get("digits_test/accuracy") for row in rows_of(run)}
    assert again == metrics


def test_results_that_are_not_finite_are_kept_as_strict_json(tmp_path):
    save_results(str(tmp_path), 9, {"a": 0.5, "b": math.nan, "c": math.inf})
    text = (tmp_path / "results.json").read_text()
    assert json.loads(text, parse_constant=lambda constant: pytest.fail(constant))["b"] is None
    results = load_results(str(tmp_path), 9)
    assert results["a"] == 0.5
    assert math.isnan(results["b"])
    assert math.isnan(results["c"])
    assert load_results(str(tmp_path), 10) is None


def test_each_evaluation_draws_the_same_random_numbers(tmp_path, monkeypatch):
    """So a resumed run, which evaluates once more, gets the same results."""

    class Draws(DatasetEvaluator):
        def process(self, inputs, outputs):
            pass

        def evaluate(self):
            drawn.append(torch.rand(()).item())
            return {"accuracy": 0.5}

    drawn = []
    monkeypatch.setattr(train, "build_evaluators", lambda cfg, name: [Draws()])
    train_here(tmp_path / "run")
    assert len(drawn) == 3
    assert len(set(drawn)) == 1


def test_the_accuracy_is_read_once_at_the_end():
    judge = AccuracyEvaluator("digits_test", 10, "cpu")
    judge.reset()
    for data in batches(samples(), 7):
        judge.process(data, data["logits"])
    assert judge.counts.sum() == NUM_SAMPLES
    assert judge.evaluate() == evaluate(samples())
