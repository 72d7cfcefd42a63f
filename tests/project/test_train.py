"""What train.py promises: it runs, a resumed run is the same run, it stops in time, it refuses."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import train
from conftest import (
    LAUNCHERS,
    ROOT,
    arguments,
    counted_waits,
    own_log,
    parse,
    shell,
    train_here,
)
from defaults import get_cfg
from evaluation import inference_context
from model import build_model
from models import Faulty, Tiny
from plumbing import comm
from plumbing.settings import merge_settings
from plumbing.setup import launch, set_random_state
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

CLOCKS = {"time", "data_time", "samples_per_second", "eta_seconds"}  # differ from run to run


def strict(text):
    """JSON without NaN and Infinity, which Python would take."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def rows_of(output, left_out=()):
    lines = (output / "metrics.json").read_text().splitlines()
    return [{k: v for k, v in strict(line).items() if k not in left_out} for line in lines]


def column(output, name):
    """{iteration: value} of what metrics.json holds under a name."""
    return {row["iteration"]: row[name] for row in rows_of(output) if name in row}


def checkpoint_of(output, name="model_final"):
    """What a file holds, without clocks."""
    checkpoint = torch.load(output / f"{name}.pth")
    for part in ("histories", "smoothing_hints"):
        for clock in CLOCKS:
            checkpoint["storage"][part].pop(clock, None)
    return checkpoint


def outcome_of(output):
    """All that a run leaves, without clocks."""
    results = strict((output / "results.json").read_text())
    rows = rows_of(output, CLOCKS)
    return {"file": checkpoint_of(output), "rows": rows, "results": results}


def differences(one, other, path=""):
    """Where two trees differ, to the bit."""
    if type(one) is not type(other):
        return [path]
    if isinstance(one, dict):
        found = [f"{path}/{key}" for key in one.keys() ^ other.keys()]
        pairs = [(key, one[key], other[key]) for key in one.keys() & other.keys()]
    elif isinstance(one, (list, tuple)):
        found = [] if len(one) == len(other) else [f"{path}/length"]
        pairs = [(number, *pair) for number, pair in enumerate(zip(one, other))]
    else:
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        return [] if same else [path]
    return found + [spot for key, *pair in pairs for spot in differences(*pair, f"{path}/{key}")]


def contents(folder, *left_out):
    """{name: (content, when written)} of the files below a folder."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    kept = [path for path in files if path.name not in left_out]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in kept}


def rewound(output, copy):
    """Copy a run of 12 iterations and put it back to right after the save of iteration 7."""
    shutil.copytree(output, copy)
    for name in ("model_final.pth", "model_0000011.pth", "model_0000009.pth", "results.json"):
        (copy / name).unlink()
    (copy / "last_checkpoint").write_text("model_0000007.pth")
    return copy


def train_with(model, output, words=""):
    """Call train.main with another model, which starts from initial weights."""
    set_random_state(0)
    for layer in model.layers[::2]:
        layer.reset_parameters()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build_model", lambda cfg: model)
        return train_here(output, words)


def train_tiny(output, words):
    train_with(Tiny(), output, words)


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
    names = {"total_loss", "loss_cls", "lr", "time", "data_time", "grad_norm"}
    assert all(names <= row.keys() for row in rows)
    assert sorted(column(output, "digits_test/accuracy")) == [3, 7, 11]


def test_a_run_logs_its_environment_and_when_it_will_end(output, runs):
    log = (output / "log.txt").read_text()
    assert re.search(r"^Command line: .*train\.py --config", log, re.M)
    assert f"torch {torch.__version__}" in log
    assert f"{1 if output == runs[1] else 2} ranks" in log
    assert re.search(r"eta: \d+:\d\d:\d\d .*iter: 11 ", log)


def test_tensorboard_shows_what_metrics_json_holds(output):
    events = EventAccumulator(str(output)).Reload()
    names = set().union(*rows_of(output)) - {"iteration"}
    assert set(events.Tags()["scalars"]) == names
    for name in ("total_loss", "digits_test/accuracy"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx(column(output, name))
    assert set(events.Tags()["images"]) == {"digits_test/confusion", "digits_test/misclassified"}


def test_the_kept_settings_are_those_of_the_run(output):
    given, kept = get_cfg(), get_cfg()
    _, config, *opts = arguments(output)
    merge_settings(given, config, opts)
    merge_settings(kept, str(output / "config.yaml"), [])
    assert kept == given


def test_a_checkpoint_is_of_plain_types_and_the_bare_model(output):
    names = build_model(get_cfg()).state_dict().keys()
    files = {path.name: torch.load(path) for path in output.glob("*.pth")}
    numbered = {f"model_{number:07d}.pth" for number in (1, 3, 5, 7, 9, 11)}
    assert files.keys() == numbered | {"model_final.pth", "model_best.pth"}
    assert all(file["model"].keys() == names for file in files.values())
    assert (output / "last_checkpoint").read_text() == "model_final.pth"


# A run that was killed and resumed is the run that was not.

KILLS = {  # before which call of which function of train.py, and again after the resume
    "before the first save": [("sum_losses", 2)],
    "in an iteration": [("sum_losses", 7)],
    "between save and evaluation": [("do_test", 2)],
    "during an evaluation": [("log_results", 2)],
    "after the last save": [("do_test", 3)],
    "twice": [("sum_losses", 7), ("do_test", 2)],
}


def killed(output, words, name, call):
    """Train until the call-th call of a function of train.py, before which the process ends."""
    function, calls = getattr(train, name), itertools.count(1)

    def last(*args, **kwargs):
        if next(calls) == call:
            os._exit(9)
        return function(*args, **kwargs)

    setattr(train, name, last)
    train_here(output, words)


@pytest.mark.parametrize("kills", KILLS.values(), ids=KILLS)
def test_a_killed_and_resumed_run_is_the_same_to_the_bit(kills, straight, on_ranks, tmp_path):
    for number, kill in enumerate(kills):
        (rank,) = on_ranks(1, killed, tmp_path / "run", " --resume" * number, *kill)
        assert rank.code == 9, rank.printed
    train_here(tmp_path / "run", "--resume DATALOADER.NUM_WORKERS 2")
    assert differences(outcome_of(straight), outcome_of(tmp_path / "run")) == []


def test_two_ranks_killed_and_resumed_are_the_same_to_the_bit(runs, on_ranks, tmp_path):
    ended = on_ranks(2, killed, tmp_path / "run", "", "sum_losses", 7)
    assert all(rank.code for rank in ended)
    resumed = on_ranks(2, train_here, tmp_path / "run", "--resume DATALOADER.NUM_WORKERS 2")
    assert [rank.code for rank in resumed] == [0, 0], resumed
    assert differences(outcome_of(runs[2]), outcome_of(tmp_path / "run")) == []


def test_a_resumed_run_drops_what_was_logged_after_the_checkpoint(straight, tmp_path):
    run = rewound(straight, tmp_path / "run")
    train_here(run, "--resume")
    assert differences(outcome_of(straight), outcome_of(run)) == []
    steps = [event.step for event in EventAccumulator(str(run)).Reload().Scalars("total_loss")]
    assert steps == [0, 1, 2, 3, 5, 7, 8, 9, 11]


BREAKS = {  # what a resume may forget: how, and where it shows
    "random state": ("train.set_random_state", lambda *args: None, "/file/model/"),
    "data position": (
        "train.build_train_loader",
        lambda cfg, _, *more, build=train.build_train_loader: build(cfg, 0, *more),
        "/file/model/",
    ),
    "optimizer": ("torch.optim.SGD.load_state_dict", lambda *args: None, "/file/model/"),
    "storage": ("plumbing.events.EventStorage.load_state_dict", lambda *args: None, "/rows/"),
    "evaluation": ("train.catch_up", lambda *args: {}, "/rows/"),
}


@pytest.mark.parametrize(("name", "function", "where"), BREAKS.values(), ids=BREAKS)
def test_the_comparison_notices_what_a_resume_forgets(
    name, function, where, straight, tmp_path, monkeypatch
):
    run = rewound(straight, tmp_path / "run")
    monkeypatch.setattr(name, function)
    train_here(run, "--resume")
    found = differences(outcome_of(straight), outcome_of(run))
    assert any(spot.startswith(where) for spot in found)


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
    one, other = checkpoint_of(straight), checkpoint_of(tmp_path / "run")
    for part in ("model", "optimizer"):
        assert differences(one[part], other[part]) == []


def test_periods_change_no_weight_of_two_ranks(runs, on_ranks, tmp_path):
    words = "LOG_PERIOD 5 SOLVER.CHECKPOINT_PERIOD 0 TEST.EVAL_PERIOD 5"
    ranks = on_ranks(2, train_here, tmp_path / "run", words)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    one, other = checkpoint_of(runs[2]), checkpoint_of(tmp_path / "run")
    for part in ("model", "rank_buffers", "optimizer"):
        assert differences(one[part], other[part]) == []


TINY = "SOLVER.BATCH_SIZE 8 LOG_PERIOD 1 LOG_WINDOW 1"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Output of the tiny model on whole batches of 8 in one process."""
    output = tmp_path_factory.mktemp("tiny") / "run"
    train_tiny(output, f"{TINY} SOLVER.ACCUM_STEPS 1")
    return output


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 2), (1, 8), (2, 1), (2, 2)])
def test_a_batch_may_be_divided(num_ranks, num_micro_batches, tiny, on_ranks, tmp_path):
    words = f"{TINY} SOLVER.ACCUM_STEPS {num_micro_batches}"
    for rank in on_ranks(num_ranks, train_tiny, tmp_path / "run", words):
        assert rank.code == 0, rank.printed
    one, other = checkpoint_of(tiny)["model"], checkpoint_of(tmp_path / "run")["model"]
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for name in ("grad_norm", "total_loss", "loss_cls"):
        assert column(tmp_path / "run", name) == pytest.approx(column(tiny, name), rel=1e-4)


def test_training_is_plain_gradient_descent(tmp_path):
    words = f"{TINY} SOLVER.WEIGHT_DECAY 0."
    model, plain = Tiny(), Tiny()
    train_with(model, tmp_path / "run", words)
    train_with(plain, tmp_path / "still", f"{words} SOLVER.BASE_LR 1e-30 SOLVER.MAX_ITER 1")
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9)
    cfg = get_cfg()
    merge_settings(cfg, str(tmp_path / "run/config.yaml"), [])
    batches, losses = train.build_train_loader(cfg, 0), {}
    for iteration, lr in column(tmp_path / "run", "lr").items():
        optimizer.param_groups[0]["lr"] = lr
        loss = plain.train()(next(batches)[0])["loss_cls"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[iteration] = loss.item()
    assert column(tmp_path / "run", "total_loss") == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


# A loss that is not finite ends the run, on all ranks, before it is saved.


def train_faulty(output, words, iteration, rank):
    train_with(Faulty(iteration, rank), output, words)


def non_finite_files(output):
    return [
        path.name
        for path in output.glob("*.pth")
        if not all(value.isfinite().all() for value in torch.load(path)["model"].values())
    ]


@pytest.mark.parametrize("periods", list(itertools.permutations((20, 3, 7))))
def test_nothing_that_is_not_finite_is_saved_whatever_the_periods(periods, tmp_path):
    words = "LOG_PERIOD {} SOLVER.CHECKPOINT_PERIOD {} TEST.EVAL_PERIOD {}".format(*periods)
    with pytest.raises(comm.NonFiniteError, match="iteration 4 on rank 0: .*loss_cls nan"):
        train_faulty(tmp_path / "run", words, iteration=4, rank=0)
    assert non_finite_files(tmp_path / "run") == []
    assert [row for row in rows_of(tmp_path / "run") if row["iteration"] > 5] == []


def test_a_loss_that_is_not_finite_on_one_rank_ends_both(on_ranks, tmp_path):
    words = "LOG_PERIOD 20 SOLVER.CHECKPOINT_PERIOD 3 TEST.EVAL_PERIOD 7"
    ranks = on_ranks(2, train_faulty, tmp_path / "run", words, 4, 1)  # read after iteration 5
    assert [rank.code for rank in ranks] == [2, 2]
    message = "error: not finite at iteration 4 on rank 1: "
    assert [rank.printed.count(message) for rank in ranks] == [1, 0]
    assert "Traceback" not in ranks[0].printed + ranks[1].printed
    assert [path.name for path in (tmp_path / "run").glob("*.pth")] == ["model_0000002.pth"]


def train_skipping(output, iterations, max_skips, only_gradient):
    words = f"{TINY} SOLVER.NONFINITE skip SOLVER.MAX_SKIPS {max_skips}"
    model = Faulty(iterations, comm.get_world_size() - 1, only_gradient)
    train_with(model, output, words)
    finite = all(value.isfinite().all() for value in model.state_dict().values())
    return {"digest": digest(model), "finite": bool(finite)}


def digest(model):
    return [value.double().sum().item() for value in model.layers.state_dict().values()]


@pytest.mark.parametrize("only_gradient", [False, True])
def test_a_step_that_is_not_finite_is_skipped_by_all_ranks(on_ranks, tmp_path, only_gradient):
    ranks = on_ranks(2, train_skipping, tmp_path / "run", [0, 7], 2, only_gradient)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].printed
    assert ranks[0].result == ranks[1].result
    assert ranks[0].result["finite"]
    assert rows_of(tmp_path / "run")[-1]["skips"] == 2
    assert rows_of(tmp_path / "run")[-1]["skips_in_a_row"] == 0
    assert non_finite_files(tmp_path / "run") == []


def test_a_skipped_step_changes_nothing(tmp_path):
    one = train_skipping(tmp_path / "skipped", [11], 2, False)
    state = checkpoint_of(tmp_path / "skipped")
    words = f"{TINY} SOLVER.MAX_ITER 11 SOLVER.LR_SCHEDULER_NAME constant"
    train_with(model := Faulty([], 0), tmp_path / "short", words)
    words = f"{TINY} SOLVER.LR_SCHEDULER_NAME constant SOLVER.NONFINITE skip"
    train_with(skipped := Faulty([11], 0), tmp_path / "long", words)
    assert digest(skipped) == digest(model)
    assert one["finite"]
    assert state["scaler"]["skips"] == 1


class Moving(Faulty):
    """Has a statistic that each forward pass replaces by a new tensor."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("average", torch.zeros(1))

    def forward(self, batch):
        result = super().forward(batch)
        if self.training:
            self.average = 0.9 * self.average + result["loss_cls"].detach().reshape(1)
        return result


def test_a_skipped_step_leaves_a_statistic_that_is_replaced_as_it_was(tmp_path):
    words = f"{TINY} SOLVER.NONFINITE skip"
    train_with(model := Moving([3], 0), tmp_path / "run", words)
    assert model.average.isfinite()
    assert rows_of(tmp_path / "run")[-1]["skips"] == 1


def test_too_many_skips_in_a_row_end_the_run(tmp_path):
    train_skipping(tmp_path / "enough", [3, 4, 6, 7], 3, False)
    with pytest.raises(comm.NonFiniteError, match="iteration 8 .*skips_in_a_row inf"):
        train_skipping(tmp_path / "run", [6, 7, 8], 3, False)


def test_torchrun_shows_the_line_of_a_loss_that_is_not_finite_once(faulty_run):
    output, done = faulty_run
    assert done.returncode != 0
    assert done.stderr.count("error: not finite at iteration 5 on rank 1: ") == 1
    assert [path.name for path in output.glob("*.pth")] == ["model_0000002.pth"]


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
    assert len(alone["1"]) == 4  # three of all, and that of one class


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
    monkeypatch.setattr("evaluation.DigitsEvaluator.process", lambda *args: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        train_here(tmp_path / "run")
    assert torch.load(tmp_path / "run/model_0000003.pth")["iteration"] == 3
    assert rows_of(tmp_path / "run")[-1]["iteration"] == 3


@pytest.mark.parametrize("words", ["--resume", "MODEL.WEIGHTS {output}/model_final.pth"])
def test_eval_only_gives_the_numbers_of_the_training_and_changes_only_the_log(words, output):
    before = contents(output, "log.txt")
    results = train_here(output, f"--eval-only {words}")
    assert results == {k: v for k, v in rows_of(output)[-1].items() if k in results}
    assert 0 < results["digits_test/accuracy"] < 1
    assert contents(output, "log.txt") == before


@pytest.mark.parametrize(
    "line",
    [
        "--config c.yaml --resume --eval-only SEED 1 LOG_PERIOD 2",
        "SEED 1 LOG_PERIOD 2 --eval-only --resume --config c.yaml",
        "SEED 1 --resume LOG_PERIOD 2 --config c.yaml --eval-only",
    ],
)
def test_flags_stand_anywhere(line):
    args = parse(line.split())
    assert (args.config, args.resume, args.eval_only) == ("c.yaml", True, True)
    assert args.opts == ["SEED", "1", "LOG_PERIOD", "2"]


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
    words += " LOG_PERIOD 1 LOG_WINDOW 1 SOLVER.BATCH_SIZE 60"
    train_here(tmp_path / "run", words)
    losses = list(column(tmp_path / "run", "total_loss").values())
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    scaler = checkpoint_of(tmp_path / "run")["scaler"]
    assert ("scale" in scaler) == ("float16" in words.split())
    train_here(rewound(tmp_path / "run", tmp_path / "copy"), f"--resume {words}")
    assert differences(outcome_of(tmp_path / "run"), outcome_of(tmp_path / "copy")) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_amp_computes_in_its_type_and_logs_the_true_norm(dtype, tiny, tmp_path):
    class Model(Tiny):
        def forward(self, data):
            result = super().forward(data)
            if self.training:
                types.add(self.layers(data["images"].flatten(1)).dtype)
            return result

    types = set()
    words = f"{TINY} SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE {dtype}"
    train_with(Model(), tmp_path / "run", words)
    assert types == {getattr(torch, dtype)}
    norms, true = column(tmp_path / "run", "grad_norm"), column(tiny, "grad_norm")
    assert norms[0] == pytest.approx(true[0], rel=0.02)
    assert norms[11] == pytest.approx(true[11], rel=0.1)


def test_gradients_are_clipped_and_their_norm_before_that_is_logged(tmp_path):
    words = """ SOLVER.MAX_ITER 1 SOLVER.BASE_LR 1. SOLVER.WARMUP_ITERS 0 SOLVER.WEIGHT_DECAY 0.
        SOLVER.CLIP_GRAD_NORM 0.01 """
    model = Tiny()
    train_with(model, tmp_path / "run", words)
    weights = nn.utils.parameters_to_vector(model.parameters())
    train_with(model, tmp_path / "still", words + "SOLVER.BASE_LR 1e-30")
    start = nn.utils.parameters_to_vector(model.parameters())
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


# Bad input: one line, and nothing is touched.

BAD = {
    "an unknown setting": ("SOLVER.MAX_ITR 5", "SOLVER.MAX_ITR: .*SOLVER.MAX_ITER"),
    "a section": ("SOLVER 5", "SOLVER: .*SOLVER.BASE_LR"),
    "a wrong type": ("SOLVER.MAX_ITER ten", "SOLVER.MAX_ITER: 'ten'.* int"),
    "an impossible value": ("SOLVER.BASE_LR -1", "SOLVER.BASE_LR: -1.0 .*greater than 0"),
    "an unknown choice": ("SOLVER.OPTIMIZER Adan", "SOLVER.OPTIMIZER: 'Adan'.*Adam"),
    "a setting without a value": ("SEED", "SEED"),
    "an equals sign": ("SEED=1", "SEED=1"),
    "no such file of settings": ("--config {tmp}/none.yaml", "none.yaml"),
    "an empty file of settings": ("--config {tmp}/empty.yaml", "empty.yaml"),
    "a file that is not YAML": ("--config {tmp}/not.yaml", "not.yaml"),
    "a folder that holds a run": ("OUTPUT_DIR {tmp}/taken", "OUTPUT_DIR: .*taken .*--resume"),
    "a folder below a file": ("OUTPUT_DIR {tmp}/empty.yaml/run", "OUTPUT_DIR: .*empty.yaml/run"),
    "a batch that does not divide": ("SOLVER.ACCUM_STEPS 7", "SOLVER.BATCH_SIZE: 240 .*7"),
    "no such weights": ("MODEL.WEIGHTS {tmp}/none.pth", "MODEL.WEIGHTS: .*none.pth"),
    "no such data": ("DATASETS.PATH {tmp}/none.npz", "DATASETS.PATH: .*none.npz"),
}
LATE = {
    "a batch larger than the data": ("SOLVER.BATCH_SIZE 2000", "SOLVER.BATCH_SIZE: 2000 .*1437"),
    "nothing to evaluate": ("--eval-only", "--eval-only: .*MODEL.WEIGHTS"),
    "damaged weights": ("MODEL.WEIGHTS {tmp}/empty.yaml", "empty.yaml"),
}


def refusal(words, tmp_path, capsys):
    """What a refused run prints to stderr; it exits with 2."""
    words = arguments(tmp_path / "run", words.format(tmp=tmp_path))
    with own_log(), pytest.raises(SystemExit) as stop:
        launch(train.main, parse(words))
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "not.yaml").write_text("a: [")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/metrics.json").write_text("{}\n")
    return tmp_path


@pytest.mark.parametrize(("words", "pattern"), BAD.values(), ids=BAD)
def test_bad_input_ends_in_one_line_and_touches_nothing(words, pattern, folder, capsys):
    before = contents(folder)
    assert re.fullmatch(f"error: .*{pattern}.*\n", refusal(words, folder, capsys))
    assert contents(folder) == before
    assert not (folder / "run").exists()


@pytest.mark.parametrize(("words", "pattern"), LATE.values(), ids=LATE)
def test_input_that_is_bad_on_a_closer_look_leaves_the_folder_free(words, pattern, folder, capsys):
    assert re.fullmatch(f"error: .*{pattern}.*\n", refusal(words, folder, capsys))
    assert not [name for name in contents(folder / "run") if not name.endswith((".txt", ".yaml"))]
    assert train_here(folder / "run", "SOLVER.MAX_ITER 1")


@pytest.mark.parametrize(
    ("words", "pattern"),
    [("MODEL.WIDTH 9", "another model"), ("SOLVER.MAX_ITER 7", "MAX_ITER: 7, but 12 have been")],
)
def test_a_refused_resume_leaves_the_run_as_it_was(words, pattern, straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run/results.json").unlink()
    before = contents(tmp_path, "log.txt")
    error = refusal(f"--resume {words}", tmp_path, capsys)
    assert re.fullmatch(f"error: .*{pattern}.*\n", error)
    assert contents(tmp_path, "log.txt") == before


WRONG = "error: command line: SED: no such setting; did you mean SEED?"


def test_the_shell_gets_one_line_and_no_traceback(tmp_path):
    done = shell("train.py", *arguments(tmp_path / "run", "SED 1"))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{WRONG}\n")


def start_late(output):
    time.sleep(comm.get_local_rank() == 0)
    return train.main(parse(arguments(output, "SED 1")))


def test_two_ranks_print_the_line_once_even_if_the_first_comes_late(on_ranks, tmp_path):
    ranks = on_ranks(2, start_late, str(tmp_path / "run"))
    assert all(rank.code != 0 for rank in ranks)
    assert "".join(rank.printed for rank in ranks) == f"{WRONG}\n"
    assert not (tmp_path / "run").exists()


# Where a run starts and ends.


def test_a_finished_run_says_so_and_gives_its_results(output):
    before = contents(output, "log.txt")
    results = train_here(output, "--resume")
    assert results == {k: v for k, v in rows_of(output)[-1].items() if k.startswith("digits_test/")}
    assert "has finished" in (output / "log.txt").read_text().splitlines()[-1]
    assert contents(output, "log.txt") == before


@pytest.mark.parametrize("final", ["missing", "damaged"])
def test_a_run_killed_between_its_last_two_files_gets_the_final_one(final, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run/results.json").unlink()
    file = tmp_path / "run/model_final.pth"
    file.unlink()
    if final == "damaged":
        file.write_bytes(b"PK")
    (tmp_path / "run/last_checkpoint").write_text("model_0000011.pth")
    train_here(tmp_path / "run", "--resume")
    assert differences(checkpoint_of(tmp_path / "run"), checkpoint_of(straight)) == []
    assert (tmp_path / "run/last_checkpoint").read_text() == "model_final.pth"


def test_a_finished_run_goes_on_when_max_iter_is_raised(straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    train_here(tmp_path / "run", "--resume SOLVER.MAX_ITER 14")
    iterations = [row["iteration"] for row in rows_of(tmp_path / "run")]
    assert iterations == [0, 1, 2, 3, 5, 7, 8, 9, 11, 13]
    assert torch.load(tmp_path / "run/model_final.pth")["iteration"] == 13


def test_a_resume_of_nothing_warns_and_starts_from_scratch(straight, tmp_path):
    train_here(tmp_path / "run", "--resume")
    log = (tmp_path / "run/log.txt").read_text()
    assert re.search(r"nothing to resume in .* starting from scratch", log)
    assert differences(outcome_of(straight), outcome_of(tmp_path / "run")) == []


def test_weights_of_another_run_start_at_iteration_0(straight, tmp_path):
    words = f"MODEL.WEIGHTS {straight}/model_final.pth SOLVER.MAX_ITER 1 SOLVER.BASE_LR 1e-30"
    train_here(tmp_path / "run", words)
    assert [row["iteration"] for row in rows_of(tmp_path / "run")] == [0]
    given, kept = checkpoint_of(straight)["model"], checkpoint_of(tmp_path / "run")["model"]
    learned = [name for name, _ in build_model(get_cfg()).named_parameters()]
    assert all(torch.equal(given[name], kept[name]) for name in learned)


# What an iteration in which nothing is due leaves out.


def count_waits(output, words):
    """For each batch, [reads of tensors, collectives] between it and the next one."""
    per_batch, build = [], train.build_train_loader

    def watched_loader(*args):
        for batches in build(*args):
            counts.clear()
            yield batches
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
        waits = rank.result[4:]  # in the first iterations the ranks settle how gradients are sent
        assert waits[:3] == [[0, num_ranks - 1]] * 3
        assert waits[3][0] > 0
        assert num_ranks == 1 or waits[3][1] > 1


def count_batches(monkeypatch):
    """A list that grows by the iteration of each batch that is drawn."""
    drawn, build = [], train.build_train_loader

    def watched_loader(cfg, start_iter, *more):
        for number, batches in enumerate(build(cfg, start_iter, *more), start_iter):
            drawn.append(number)
            yield batches

    monkeypatch.setattr(train, "build_train_loader", watched_loader)
    return drawn


def test_a_run_draws_as_many_batches_as_it_has_iterations(straight, tmp_path, monkeypatch):
    drawn = count_batches(monkeypatch)
    train_here(tmp_path / "run")
    assert drawn == list(range(12))


def test_a_run_that_only_lacks_its_last_evaluation_draws_no_batch(straight, tmp_path, monkeypatch):
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run/results.json").unlink()
    drawn = count_batches(monkeypatch)
    train_here(tmp_path / "run", "--resume")
    assert drawn == []
    assert differences(outcome_of(straight), outcome_of(tmp_path / "run")) == []


@pytest.mark.parametrize("max_iter", [1, 5])
def test_a_run_of_any_length_leaves_a_row_for_its_last_iteration(max_iter, tmp_path):
    words = f"SOLVER.MAX_ITER {max_iter} LOG_PERIOD 1000"
    train_here(tmp_path / "run", f"{words} TEST.EVAL_PERIOD 0 SOLVER.CHECKPOINT_PERIOD -1")
    row = rows_of(tmp_path / "run")[-1]
    assert row["iteration"] == max_iter - 1
    assert {"total_loss", "lr", "digits_test/accuracy"} <= row.keys()


def test_the_log_shows_the_model_and_the_iteration_that_a_run_starts_from(output):
    log = (output / "log.txt").read_text()
    assert "Model:\nDigitNet(" in log
    assert "Starting training from iteration 0\n" in log
