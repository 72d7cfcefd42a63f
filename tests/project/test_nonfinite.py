"""A loss that is not finite ends the run, on all ranks, before it is saved."""

import itertools
import re

import pytest
import torch
from conftest import train_here
from models import Faulty, Tiny, train_with
from outcomes import rows_of
from plumbing.errors import NonFiniteError


def train_faulty(output, words, iteration, rank):
    train_with(lambda: Faulty(iteration, rank), output, words)


def files_that_are_not_finite(output):
    found = []
    for path in output.glob("*.pth"):
        if not all(value.isfinite().all() for value in torch.load(path)["model"].values()):
            found.append(path.name)
    return found


@pytest.mark.parametrize("periods", list(itertools.permutations((20, 3, 7))))
def test_nothing_that_is_not_finite_is_saved_whatever_the_periods(periods, tmp_path):
    words = "LOG_PERIOD {} SOLVER.CHECKPOINT_PERIOD {} TEST.EVAL_PERIOD {}".format(*periods)
    with pytest.raises(NonFiniteError, match="not finite at iteration 4 on rank 0: .*loss_cls nan"):
        train_faulty(tmp_path / "run", words, iteration=4, rank=0)
    assert files_that_are_not_finite(tmp_path / "run") == []
    assert [row for row in rows_of(tmp_path / "run") if row["iteration"] > 5] == []


def test_a_loss_that_is_not_finite_on_one_rank_ends_both(on_ranks, tmp_path):
    words = "LOG_PERIOD 20 SOLVER.CHECKPOINT_PERIOD 3 TEST.EVAL_PERIOD 7"
    ranks = on_ranks(2, train_faulty, tmp_path / "run", words, 4, 1)  # read after iteration 5
    assert [rank.code for rank in ranks] == [2, 2]
    message = "error: the loss is not finite at iteration 4 on rank 1: "
    assert [rank.printed.count(message) for rank in ranks] == [1, 0]
    assert "Traceback" not in ranks[0].printed + ranks[1].printed
    assert [path.name for path in (tmp_path / "run").glob("*.pth")] == ["model_0000002.pth"]


def test_the_last_good_checkpoint_and_all_iterations_that_ran_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("plumbing.errors._last_checkpoint", "none")  # as in a new process
    words = "LOG_PERIOD 6 SOLVER.CHECKPOINT_PERIOD 100 TEST.EVAL_PERIOD -1 SOLVER.MAX_ITER 30"
    with pytest.raises(NonFiniteError, match="last good checkpoint: none;"):
        train_faulty(tmp_path / "run", words, iteration=9, rank=0)
    log = (tmp_path / "run/log.txt").read_text()
    assert re.search("Overall training speed: 12 iterations", log)
    words = "LOG_PERIOD 6 SOLVER.CHECKPOINT_PERIOD 2"
    with pytest.raises(NonFiniteError, match=r"last good checkpoint: .*model_0000003\.pth;"):
        train_faulty(tmp_path / "other", words, iteration=5, rank=0)


class Diverging(Tiny):
    """Its loss stays finite when its weights are not: the gradient of a square root at 0."""

    def forward(self, data):
        result = super().forward(data)
        if self.training:
            weight = self.layers[0].weight
            slope = (weight - weight.detach()).abs().sqrt().sum()
            result["loss_slope"] = 0 * slope
        return result


def test_weights_that_are_not_finite_are_never_saved_though_the_loss_is(tmp_path):
    words = "SOLVER.MAX_ITER 1 SOLVER.CHECKPOINT_PERIOD 1"
    with pytest.raises(NonFiniteError, match="nothing is saved, because these weights .*layers.0"):
        train_with(Diverging, tmp_path / "run", words)
    assert list((tmp_path / "run").glob("*.pth")) == []


def test_a_float16_run_whose_gradients_always_overflow_ends_with_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("plumbing.gradients._LEAST_SCALE", 2.0**12)
    words = "SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE float16"
    with pytest.raises(NonFiniteError, match="float16: the gradients overflow at any scale"):
        train_with(Diverging, tmp_path / "run", words)
    assert files_that_are_not_finite(tmp_path / "run") == []


def test_a_run_with_finite_losses_ends_well_so_the_tests_would_notice(tmp_path):
    assert train_here(tmp_path / "run", "SOLVER.MAX_ITER 2")
