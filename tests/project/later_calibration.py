"""Evaluation: right numbers, one pass, few messages, and a run that answers for its results."""

import math

import pytest
import torch
from defaults import get_cfg
from evaluation import (
    CalibrationEvaluator,
    build_evaluators,
    inference_on_dataset,
)
from plumbing import comm
from plumbing.comm import SettingsError
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
    return run_on_ranks(evaluate_in_batches)


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


def test_the_bins_are_those_of_the_paper():
    judge = CalibrationEvaluator("cpu", num_bins=2)
    logits = torch.tensor([[0.0, 0.0], [1.0, 0.0]])  # confidence 0.5, in the lower bin; 0.73
    judge.process({"labels": torch.tensor([0, 0])}, logits)
    assert judge.tensors()[0][0].tolist() == [1, 1]
