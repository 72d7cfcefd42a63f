"""What train.py promises: it runs, it trains as a plain loop does, a resume is the same run."""

import contextlib
import itertools
import math
import os
import re
import shutil

import numpy as np
import pytest
import torch
import train
from conftest import LAUNCHERS, ROOT, arguments, counted_waits, parse, train_here
from defaults import get_cfg
from model import build_model
from models import Tiny, train_with
from outcomes import (
    assert_same_outcome,
    checkpoint_of,
    column,
    contents,
    differences,
    history_of,
    model_of,
    outcome_of,
    rewound,
    rows_of,
    starts_of,
)
from plumbing.inference import inference_context
from plumbing.launch import launch
from plumbing.random_state import set_random_state
from plumbing.settings import merge_settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

# A run, from the command line.


@pytest.fixture(params=LAUNCHERS, ids=["1 process", "2 ranks"])
def output(request, runs):
    return runs[request.param]


@pytest.fixture
def straight(runs):
    """Output of a run of one process."""
    return runs[1]


def test_a_run_writes_every_logged_iteration_once_as_strict_json(output):
    rows = rows_of(output)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 5, 7, 8, 9, 11]
    names = {"total_loss", "loss_cls", "lr", "time", "data_time", "grad_norm", "samples_per_second"}
    assert all(names <= row.keys() for row in rows)
    assert sorted(column(output, "digits_test/accuracy")) == [3, 7, 11]


def test_a_run_logs_its_environment_when_it_will_end_and_where_the_results_are(output, runs):
    log = (output / "log.txt").read_text()
    assert re.search(r"^  command: .*train\.py --config", log, re.M)
    assert f"torch {torch.__version__}" in log
    assert f"{1 if output == runs[1] else 2} ranks" in log
    assert re.search(r"eta: \d+:\d\d:\d\d .*iter: 11 ", log)
    last = log.splitlines()[-1]
    assert f"Finished.  Results: {output}; newest checkpoint: {output}/model_final.pth" in last


def test_tensorboard_shows_what_metrics_json_holds(output):
    events = EventAccumulator(str(output)).Reload()
    names = set().union(*rows_of(output)) - {"iteration"}
    assert set(events.Tags()["scalars"]) == names
    for name in ("total_loss", "digits_test/accuracy"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx(column(output, name))
    assert events.Tags()["images"] == ["digits_test/confusion"]


def test_the_kept_settings_are_those_of_the_run(output):
    given = get_cfg()
    _, config, *opts = arguments(output)
    merge_settings(given, config, opts)
    kept = get_cfg()
    merge_settings(kept, str(output / "config.yaml"), [])
    assert kept == given
    assert torch.load(output / "model_final.pth")["config"] == (output / "config.yaml").read_text()


def test_a_checkpoint_is_of_plain_types_and_the_bare_model(output):
    names = build_model(get_cfg()).state_dict().keys()
    files = {path.name: torch.load(path) for path in output.glob("*.pth")}
    numbered = {f"model_{number:07d}.pth" for number in (1, 3, 5, 7, 9, 11)}
    assert files.keys() == numbered | {"model_final.pth", "model_best.pth"}
    assert all(file["model"].keys() == names for file in files.values())
    assert (output / "last_checkpoint").read_text() == "model_final.pth"


# A run that was killed and resumed is the run that was not.

# Before which call of which function of train.py it is killed, and again after the resume.
KILLS = {
    "before the first save": [("clip_grad_norm_", 2)],
    "in an iteration": [("clip_grad_norm_", 7)],
    "between save and evaluation": [("do_test", 2)],
    "during an evaluation": [("log_results", 2)],
    "after the last save": [("do_test", 3)],
    "twice": [("clip_grad_norm_", 7), ("do_test", 2)],
}


def killed(output, words, name, call):
    """Train until the call-th call of a function of train.py, before which the process ends."""
    function = getattr(train, name)
    calls = itertools.count(1)

    def last(*args, **kwargs):
        if next(calls) == call:
            os._exit(9)
        return function(*args, **kwargs)

    setattr(train, name, last)
    train_here(output, words)


@pytest.mark.parametrize("kills", KILLS.values(), ids=KILLS)
def test_a_killed_and_resumed_run_is_the_same_to_the_bit(kills, straight, on_ranks, tmp_path):
    for number, kill in enumerate(kills):
        words = "--resume" if number > 0 else ""
        (rank,) = on_ranks(1, killed, tmp_path / "run", words, *kill)
        assert rank.code == 9, rank.printed
    train_here(tmp_path / "run", "--resume DATALOADER.NUM_WORKERS 2")
    assert_same_outcome(straight, tmp_path / "run")


def test_two_ranks_killed_and_resumed_are_the_same_to_the_bit(runs, on_ranks, tmp_path):
    ended = on_ranks(2, killed, tmp_path / "run", "", "clip_grad_norm_", 7)
    assert all(rank.code for rank in ended)
    resumed = on_ranks(2, train_here, tmp_path / "run", "--resume DATALOADER.NUM_WORKERS 2")
    assert [rank.code for rank in resumed] == [0, 0], resumed
    assert_same_outcome(runs[2], tmp_path / "run")


def test_a_resumed_run_drops_what_was_logged_after_the_checkpoint(straight, tmp_path):
    run = rewound(straight, tmp_path / "run")
    train_here(run, "--resume")
    assert_same_outcome(straight, run)
    steps = [event.step for event in EventAccumulator(str(run)).Reload().Scalars("total_loss")]
    assert steps == [0, 1, 2, 3, 5, 7, 8, 9, 11]


def nothing(*_, **__):
    return {}


def begin_at_0(patch):
    build = train.build_train_loader
    patch.setattr(train, "build_train_loader", lambda cfg, _: build(cfg, 0))


def skip_the_first_evaluation(patch):
    evaluate = train.evaluate
    functions = iter([nothing])
    patch.setattr(train, "evaluate", lambda *args: next(functions, evaluate)(*args))


# What a resume may forget: how, and where it shows.
BREAKS = {
    "random state": (lambda patch: patch.setattr(train, "set_random_state", nothing), "/file/"),
    "data position": (begin_at_0, "/file/model/"),
    "optimizer": (
        lambda patch: patch.setattr("plumbing.checkpoint.object_state.load_optimizer", nothing),
        "/file/model/",
    ),
    "scheduler": (
        lambda patch: patch.setattr("plumbing.schedule.LRMultiplier.load_state_dict", nothing),
        "/file/model/",
    ),
    "storage": (
        lambda patch: patch.setattr("plumbing.events.EventStorage.load_state_dict", nothing),
        "/rows/",
    ),
    "evaluation": (skip_the_first_evaluation, "/rows/"),
}


@pytest.mark.parametrize(("break_it", "where"), BREAKS.values(), ids=BREAKS)
def test_the_comparison_notices_what_a_resume_forgets(
    break_it, where, straight, tmp_path, monkeypatch
):
    run = rewound(straight, tmp_path / "run")
    break_it(monkeypatch)
    train_here(run, "--resume")
    found = differences(outcome_of(straight), outcome_of(run))
    assert any(place.startswith(where) for place in found)


# What changes no weight.


@pytest.mark.parametrize(
    "words",
    [
        "LOG_PERIOD 1",
        "LOG_PERIOD 20",
        "SOLVER.CHECKPOINT_PERIOD 0",
        "SOLVER.CHECKPOINT_PERIOD 1",
        "TEST.EVAL_PERIOD 1",
        "TEST.EVAL_PERIOD -1",
        "DATALOADER.NUM_WORKERS 2",
    ],
)
def test_periods_and_workers_change_no_weight(words, straight, tmp_path):
    train_here(tmp_path / "run", words)
    one = checkpoint_of(straight)
    other = checkpoint_of(tmp_path / "run")
    for part in ("model", "optimizer"):
        assert differences(one[part], other[part]) == []


def test_periods_change_no_weight_of_two_ranks(runs, on_ranks, tmp_path):
    words = "LOG_PERIOD 5 SOLVER.CHECKPOINT_PERIOD 0 TEST.EVAL_PERIOD 5"
    ranks = on_ranks(2, train_here, tmp_path / "run", words)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    one = checkpoint_of(runs[2])
    other = checkpoint_of(tmp_path / "run")
    for part in ("model", "rank_buffers", "optimizer"):
        assert differences(one[part], other[part]) == []


def test_a_compiled_model_has_the_same_names_and_learns_the_same(straight, tmp_path):
    train_here(tmp_path / "run", "MODEL.COMPILE eager")
    assert differences(model_of(straight), model_of(tmp_path / "run")) == []


TINY = "SOLVER.BATCH_SIZE 8 LOG_PERIOD 1"


def train_tiny(output, words):
    train_with(Tiny, output, words)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Output of the tiny model on whole batches of 8 in one process."""
    output = tmp_path_factory.mktemp("tiny") / "run"
    train_tiny(output, TINY)
    return output


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 2), (1, 8), (2, 1), (2, 2)])
def test_a_batch_may_be_divided(num_ranks, num_micro_batches, tiny, on_ranks, tmp_path):
    words = f"{TINY} SOLVER.ACCUM_STEPS {num_micro_batches}"
    for rank in on_ranks(num_ranks, train_tiny, tmp_path / "run", words):
        assert rank.code == 0, rank.printed
    one = checkpoint_of(tiny)["model"]
    other = checkpoint_of(tmp_path / "run")["model"]
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for name in ("grad_norm", "total_loss", "loss_cls"):
        assert column(tmp_path / "run", name) == pytest.approx(column(tiny, name), rel=1e-4)


def test_training_is_plain_gradient_descent(tmp_path):
    train_with(Tiny, tmp_path / "run", f"{TINY} SOLVER.WEIGHT_DECAY 0.")
    cfg = get_cfg()
    merge_settings(cfg, str(tmp_path / "run/config.yaml"), [])
    set_random_state(cfg.SEED)
    plain = Tiny().train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9)
    batches = iter(train.build_train_loader(cfg, 0))
    losses = {}
    for iteration, lr in history_of(tmp_path / "run", "lr").items():
        optimizer.param_groups[0]["lr"] = lr
        loss = plain(next(batches)[0])["loss_cls"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[iteration] = loss.item()
    assert len(losses) == 12
    assert history_of(tmp_path / "run", "total_loss") == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(model_of(tmp_path / "run"), dict(plain.state_dict()))


class TwoLosses(Tiny):
    """The loss of Tiny in two parts, whose names say nothing."""

    def forward(self, data):
        result = super().forward(data)
        if not self.training:
            return result
        return {"recon": 0.25 * result["loss_cls"], "kl": 0.75 * result["loss_cls"]}


def test_all_losses_of_the_model_are_summed_and_trained_whatever_their_names(tiny, tmp_path):
    train_with(TwoLosses, tmp_path / "run", TINY)
    torch.testing.assert_close(model_of(tiny), model_of(tmp_path / "run"))
    parts = column(tmp_path / "run", "recon")
    assert parts == pytest.approx({i: v / 4 for i, v in column(tiny, "loss_cls").items()}, rel=1e-4)


# Evaluation.


def first_digits(path, size):
    """A file of digits whose test set has only so many samples."""
    with np.load(ROOT / "assets/digits.npz") as arrays:
        np.savez(path, **{**arrays, "test_indices": np.arange(100, 100 + size)})


def evaluate_sizes(folder, sizes, weights):
    """{size: results}"""
    words = "--eval-only TEST.BATCH_SIZE 2 MODEL.WEIGHTS {} DATASETS.PATH {}"
    results = {}
    for size in sizes:
        path = f"{folder}/{size}.npz"
        results[str(size)] = train_here(f"{folder}/{size}", words.format(weights, path))
    return results


def test_a_test_set_of_any_size_is_evaluated_exactly_on_two_ranks(straight, on_ranks, tmp_path):
    sizes = (1, 7, 60)
    for size in sizes:
        first_digits(tmp_path / f"{size}.npz", size)
    weights = straight / "model_final.pth"
    ranks = on_ranks(2, evaluate_sizes, tmp_path, sizes, weights)
    alone = evaluate_sizes(tmp_path, sizes, weights)
    assert [rank.result for rank in ranks] == [alone, alone], ranks[0].printed
    assert 0 < alone["60"]["digits_test/accuracy"] < 1
    assert len(alone["1"]) == 2  # that of all, and that of one class


@pytest.mark.parametrize("raises", [contextlib.nullcontext(), pytest.raises(KeyError)])
def test_evaluation_leaves_each_module_in_its_mode(raises):
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Sequential(nn.Dropout(), nn.BatchNorm2d(1)))
    model[1][1].eval()  # frozen
    inside = []
    with raises, inference_context(model):
        inside += [module.training for module in model.modules()] + [torch.is_grad_enabled()]
        {"a key": 1} if isinstance(raises, contextlib.nullcontext) else {}["a bug"]
    assert not any(inside)
    assert [module.training for module in model.modules()] == [True] * 4 + [False]
    assert torch.is_grad_enabled()


def test_an_error_in_the_evaluator_leaves_checkpoint_and_metrics_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("evaluation.AccuracyEvaluator.process", lambda *args: {}["a bug"])
    words = "SOLVER.CHECKPOINT_PERIOD 100"  # the evaluation alone makes the save due
    with pytest.raises(KeyError, match="a bug"):
        train_here(tmp_path / "run", words)
    assert torch.load(tmp_path / "run/model_0000003.pth")["iteration"] == 3
    assert rows_of(tmp_path / "run")[-1]["iteration"] == 3


@pytest.mark.parametrize("words", ["--resume", "MODEL.WEIGHTS {output}/model_final.pth"])
def test_eval_only_gives_the_numbers_of_the_training_and_changes_only_the_log(words, output):
    logs = ("log.txt", "launcher.txt")
    before = contents(output, *logs)
    results = train_here(output, f"--eval-only {words}")
    assert results == {
        name: value for name, value in rows_of(output)[-1].items() if name in results
    }
    assert 0 < results["digits_test/accuracy"] < 1
    assert contents(output, *logs) == before


# What the settings of the solver do.


@pytest.mark.parametrize(
    "words",
    [
        "SOLVER.OPTIMIZER SGD",
        "SOLVER.OPTIMIZER AdamW SOLVER.BASE_LR 0.02",
        "SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE bfloat16",
        "SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE float16",
    ],
)
def test_the_loss_falls_and_a_resume_is_exact(words, tmp_path):
    words += " LOG_PERIOD 1 SOLVER.BATCH_SIZE 60"
    train_here(tmp_path / "run", words)
    losses = list(history_of(tmp_path / "run", "total_loss").values())
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    scaler = checkpoint_of(tmp_path / "run")["scaler"]
    assert ("scale" in scaler) == ("float16" in words.split())
    train_here(rewound(tmp_path / "run", tmp_path / "copy"), f"--resume {words}")
    assert_same_outcome(tmp_path / "run", tmp_path / "copy")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_amp_computes_in_its_type_and_logs_the_true_norm(dtype, tiny, tmp_path):
    types = set()

    class Model(Tiny):
        def forward(self, data):
            if self.training:
                types.add(self.layers(data["images"].flatten(1)).dtype)
            return super().forward(data)

    words = f"{TINY} SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE {dtype}"
    train_with(Model, tmp_path / "run", words)
    assert types == {getattr(torch, dtype)}
    norms = history_of(tmp_path / "run", "grad_norm")
    true = history_of(tiny, "grad_norm")
    assert norms[0] == pytest.approx(true[0], rel=0.02)
    assert norms[11] == pytest.approx(true[11], rel=0.1)


def test_gradients_are_clipped_and_their_norm_before_that_is_logged(tmp_path):
    words = """SOLVER.MAX_ITER 1 SOLVER.BASE_LR 1. SOLVER.WARMUP_ITERS 0 SOLVER.WEIGHT_DECAY 0.
        SOLVER.CLIP_GRAD_NORM 0.01"""
    train_with(Tiny, tmp_path / "run", words)
    train_with(Tiny, tmp_path / "still", f"{words} SOLVER.BASE_LR 1e-30")
    weights = nn.utils.parameters_to_vector(model_of(tmp_path / "run").values())
    start = nn.utils.parameters_to_vector(model_of(tmp_path / "still").values())
    assert (weights - start).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert column(tmp_path / "run", "grad_norm")[0] > 0.1


def test_the_learning_rate_follows_the_settings(tmp_path):
    words = "LOG_PERIOD 1 SOLVER.BASE_LR 0.2 SOLVER.WARMUP_ITERS 0 SOLVER.BASE_LR_END 0.1"
    train_here(tmp_path / "cosine", words)
    rates = [0.1 + 0.1 * (1 + math.cos(math.pi * i / 12)) / 2 for i in range(12)]
    assert list(column(tmp_path / "cosine", "lr").values()) == pytest.approx(rates)
    words += " SOLVER.LR_SCHEDULER_NAME multistep SOLVER.STEPS (3,8) SOLVER.GAMMA 0.5"
    train_here(tmp_path / "multistep", words)
    rates = [0.2] * 3 + [0.1] * 5 + [0.05] * 4
    assert list(column(tmp_path / "multistep", "lr").values()) == pytest.approx(rates)


# Where a run starts and ends.


def launch_here(output, words):
    launch(train.main, parse(arguments(output, words)))


def test_a_finished_run_says_so_and_gives_its_results(straight, on_ranks, tmp_path):
    """It evaluates once more, and trains nothing."""
    run = shutil.copytree(straight, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in run.glob("*.pth")}
    (rank,) = on_ranks(1, launch_here, run, "--resume")
    assert rank.code == 0, rank.printed
    assert f"Finished.  Results: {run}" in (run / "log.txt").read_text().splitlines()[-1]
    assert {path.name: path.read_bytes() for path in run.glob("*.pth")} == before
    assert_same_outcome(straight, run)
    results = train_here(run, "--resume")
    last = rows_of(run)[-1]
    assert results == {name: last[name] for name in results}
    assert "digits_test/accuracy" in results


@pytest.mark.parametrize("final", ["missing", "damaged"])
def test_a_run_killed_between_its_last_two_files_gets_the_final_one(final, straight, tmp_path):
    run = shutil.copytree(straight, tmp_path / "run")
    (run / "results.json").unlink()
    (run / "model_final.pth").unlink()
    if final == "damaged":
        (run / "model_final.pth").write_bytes(b"PK")
    (run / "last_checkpoint").write_text("model_0000011.pth")
    train_here(run, "--resume")
    assert_same_outcome(straight, run)


def test_a_run_that_is_shortened_to_where_it_is_gets_its_final_file(straight, tmp_path):
    run = rewound(straight, tmp_path / "run")
    results = train_here(run, "--resume SOLVER.MAX_ITER 8")
    assert torch.load(run / "model_final.pth")["iteration"] == 7
    assert results["digits_test/accuracy"] == column(straight, "digits_test/accuracy")[7]


def test_a_finished_run_goes_on_when_max_iter_is_raised(straight, tmp_path):
    run = shutil.copytree(straight, tmp_path / "run")
    train_here(run, "--resume SOLVER.MAX_ITER 14")
    iterations = [row["iteration"] for row in rows_of(run)]
    assert iterations == [0, 1, 2, 3, 5, 7, 8, 9, 11, 13]
    assert torch.load(run / "model_final.pth")["iteration"] == 13


def test_a_resume_of_nothing_warns_and_starts_from_scratch(straight, tmp_path):
    train_here(tmp_path / "run", "--resume")
    log = (tmp_path / "run/log.txt").read_text()
    assert re.search(r"Nothing to resume in .* starting from scratch", log)
    assert_same_outcome(straight, tmp_path / "run")


def test_weights_of_another_run_start_at_iteration_0(straight, tmp_path):
    words = f"MODEL.WEIGHTS {straight}/model_final.pth SOLVER.MAX_ITER 1 SOLVER.BASE_LR 1e-30"
    train_here(tmp_path / "run", words)
    assert [row["iteration"] for row in rows_of(tmp_path / "run")] == [0]
    assert starts_of(tmp_path / "run") == []
    given = model_of(straight)
    kept = model_of(tmp_path / "run")
    learned = [name for name, _ in build_model(get_cfg()).named_parameters()]
    assert all(torch.equal(given[name], kept[name]) for name in learned)


# What an iteration in which nothing is due leaves out.


def count_waits(output, words):
    """For each batch, [reads of tensors, collectives] between it and the next one."""
    per_batch = []
    build = train.build_train_loader

    def watched_loader(*args):
        for micro_batches in build(*args):
            counts.clear()
            yield micro_batches
            per_batch.append([counts["reads"], counts["collectives"]])

    with pytest.MonkeyPatch.context() as patch, counted_waits() as counts:
        patch.setattr(train, "build_train_loader", watched_loader)
        train_here(output, words)
    return per_batch


@pytest.mark.parametrize("num_ranks", LAUNCHERS)
def test_between_two_logs_nothing_is_read_and_only_gradients_are_sent(
    num_ranks, on_ranks, tmp_path
):
    words = "LOG_PERIOD 4 SOLVER.CHECKPOINT_PERIOD 4 SOLVER.MAX_ITER 9"
    for rank in on_ranks(num_ranks, count_waits, tmp_path / "run", words):
        assert rank.code == 0, rank.printed
        # In the first iterations the ranks settle how gradients are sent.
        waits = rank.result[4:]
        assert waits[:3] == [[0, num_ranks - 1]] * 3
        assert waits[3][0] > 0
        assert num_ranks == 1 or waits[3][1] > 1


def count_batches(monkeypatch):
    """A list that grows by the iteration of each batch that is drawn."""
    drawn = []
    build = train.build_train_loader

    def watched_loader(cfg, start_iter):
        for number, micro_batches in enumerate(build(cfg, start_iter), start_iter):
            drawn.append(number)
            yield micro_batches

    monkeypatch.setattr(train, "build_train_loader", watched_loader)
    return drawn


def test_a_run_draws_as_many_batches_as_it_has_iterations(tmp_path, monkeypatch):
    drawn = count_batches(monkeypatch)
    train_here(tmp_path / "run")
    assert drawn == list(range(12))


def test_a_run_that_only_lacks_its_last_evaluation_draws_no_batch(straight, tmp_path, monkeypatch):
    run = shutil.copytree(straight, tmp_path / "run")
    (run / "results.json").unlink()
    drawn = count_batches(monkeypatch)
    train_here(run, "--resume")
    assert drawn == []
    assert_same_outcome(straight, run)


@pytest.mark.parametrize("max_iter", [1, 5])
def test_a_run_of_any_length_leaves_a_row_for_its_last_iteration(max_iter, tmp_path):
    words = f"SOLVER.MAX_ITER {max_iter} LOG_PERIOD 1000"
    train_here(tmp_path / "run", f"{words} TEST.EVAL_PERIOD 0 SOLVER.CHECKPOINT_PERIOD -1")
    row = rows_of(tmp_path / "run")[-1]
    assert row["iteration"] == max_iter - 1
    assert {"total_loss", "lr", "digits_test/accuracy"} <= row.keys()
