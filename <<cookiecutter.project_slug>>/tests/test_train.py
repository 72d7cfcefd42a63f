"""What stays true of a training, whatever model, data and settings it has."""

import json

import pytest
import torch
from conftest import assert_same_state, command_line, metrics_of, on_two_ranks, shell

import train
from plumbing import comm
from plumbing.arguments import parse_args
from plumbing.errors import NonFiniteError
from plumbing.launch import launch


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing disturbed, in a process of its own."""
    output = tmp_path_factory.mktemp("whole") / "output"
    done = shell("train.py", *command_line(output))
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def stop_before(monkeypatch, iteration):
    """Let the next training die when it begins an iteration, as if it had been killed there."""
    set_random_state = train.set_random_state

    def die_or_go_on(seed, current=0, rank=0):
        if current == iteration:
            raise KeyboardInterrupt
        set_random_state(seed, current, rank)

    monkeypatch.setattr(train, "set_random_state", die_or_go_on)


def test_a_run_leaves_a_log_metrics_checkpoints_settings_and_results(whole):
    names = {path.name for path in whole.iterdir()}
    assert {"log.txt", "metrics.json", "config.yaml", "results.json"} <= names
    assert {"model_final.pth", "model_0000001.pth", "last_checkpoint"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert metrics_of(whole)[-1]["iteration"] == 11


def test_every_loss_that_is_logged_is_finite_and_the_results_are_those_of_the_last_row(whole):
    results = json.loads((whole / "results.json").read_text())
    last = metrics_of(whole)[-1]
    assert results.pop("iteration") == 11
    assert results.items() <= last.items()
    for row in metrics_of(whole):
        assert row["total_loss"] is not None


@pytest.mark.parametrize("iteration", [5, 8])
def test_a_killed_run_resumes_to_the_same_bits(run, whole, monkeypatch, tmp_path, iteration):
    with monkeypatch.context() as patch:
        stop_before(patch, iteration)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    run(tmp_path, "--resume")
    assert_same_state(tmp_path, whole)
    assert metrics_of(tmp_path) == metrics_of(whole)


def test_a_run_with_loader_workers_has_the_same_bits(run, whole, tmp_path):
    run(tmp_path, "DATALOADER.NUM_WORKERS 2")
    assert_same_state(tmp_path, whole)


def test_another_seed_gives_other_weights_so_the_comparison_would_notice(run, whole, tmp_path):
    run(tmp_path, "SEED 1")
    with pytest.raises(AssertionError):
        assert_same_state(tmp_path, whole)


def test_evaluation_alone_gives_the_results_of_the_training(run, whole):
    results = run(whole, f"--eval-only MODEL.WEIGHTS {whole}/model_final.pth")
    expected = json.loads((whole / "results.json").read_text())
    expected.pop("iteration")
    assert results == pytest.approx(expected)


def train_on_two_ranks(words):
    launch(train.main, parse_args("", words))


def test_two_ranks_resume_to_the_same_bits(tmp_path):
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    assert on_two_ranks(train_on_two_ranks, command_line(whole)) == [0, 0]
    assert on_two_ranks(train_on_two_ranks, command_line(parts, "SOLVER.MAX_ITER 12")) == [0, 0]
    # All that came after iteration 7 is taken away, as if the run had been killed there.
    for path in parts.glob("model_*.pth"):
        if path.name not in ("model_0000005.pth", "model_0000007.pth"):
            path.unlink()
    (parts / "results.json").unlink()
    (parts / "last_checkpoint").write_text("model_0000007.pth")
    assert on_two_ranks(train_on_two_ranks, command_line(parts, "--resume")) == [0, 0]
    assert_same_state(parts, whole)
    assert metrics_of(parts) == metrics_of(whole)


class BadLoss(torch.nn.Module):
    """A model whose losses are NaN on the last rank."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, data):
        result = self.model(data)
        if self.training and comm.get_rank() == comm.get_world_size() - 1:
            return {name: loss * float("nan") for name, loss in result.items()}
        return result


def train_with_a_bad_loss(words):
    build_model = train.build_model
    train.build_model = lambda cfg: BadLoss(build_model(cfg))
    train_on_two_ranks(words)


def test_a_loss_that_is_not_finite_ends_the_run_before_a_save(run, monkeypatch, tmp_path):
    build_model = train.build_model
    monkeypatch.setattr(train, "build_model", lambda cfg: BadLoss(build_model(cfg)))
    with pytest.raises(NonFiniteError, match="iteration 0"):
        run(tmp_path)
    assert not list(tmp_path.glob("*.pth"))


def test_a_loss_that_is_not_finite_on_one_rank_ends_all_ranks(tmp_path):
    codes = on_two_ranks(train_with_a_bad_loss, command_line(tmp_path))
    assert all(code != 0 for code in codes)
    assert "not finite" in (tmp_path / "log.txt").read_text()
    assert not list(tmp_path.glob("*.pth"))
