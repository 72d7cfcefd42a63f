"""Evaluation: right numbers, one pass, few messages, and a run that answers for its results."""

import json
import logging
import math

import pytest
import torch
import train
from conftest import arguments, own_log, parse, train_here
from defaults import check_cfg, expected_results, get_cfg
from evaluation import (
    build_evaluators,
    inference_on_dataset,
)
from plumbing import comm
from plumbing.comm import SettingsError
from plumbing.setup import launch
from records import verify_results
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
