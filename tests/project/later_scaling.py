"""How long a run is: scaled to the number of ranks, counted in epochs."""

import json
import logging
import math

import pytest
import torch
import train
from conftest import ROOT, arguments, own_log, parse, train_here
from data import dataset_size
from defaults import check_cfg, get_cfg
from plumbing.comm import SettingsError
from plumbing.settings import leaves, merge_settings
from scaling import LENGTHS, maybe_scale_to_ranks, rounded_ratio, setup_length


def settings(**changes):
    """Settings with some of SOLVER changed, and EVAL_PERIOD of TEST."""
    cfg = get_cfg()
    for key, value in changes.items():
        section = cfg.TEST if key == "EVAL_PERIOD" else cfg.SOLVER
        assert key in section
        section[key] = value
    return cfg


def differences(before, after):
    """{key: new value} of the settings that changed."""
    return {key: value for key, value in leaves(after) if value != dict(leaves(before))[key]}


EXAMPLE = {  # detectron2's: 8 GPUs
    "REFERENCE_WORLD_SIZE": 8,
    "BATCH_SIZE": 16,
    "BASE_LR": 0.1,
    "BASE_LR_END": 0.01,
    "MAX_ITER": 5000,
    "WARMUP_ITERS": 1000,
    "STEPS": (3000, 4000),
    "STEP_SIZE": 300,
    "FLAT_ITERS": 700,
    "CYCLE_ITERS": 250,
    "CYCLE_UP_ITERS": 125,
    "ITERS_PER_EPOCH": 90,
    "CHECKPOINT_PERIOD": 500,
    "EVAL_PERIOD": 200,
}


def test_twice_the_ranks_take_twice_the_batch_and_rate_and_half_the_iterations():
    cfg = settings(**EXAMPLE)
    lines = maybe_scale_to_ranks(cfg, 16)
    changes = {
        "SOLVER.REFERENCE_WORLD_SIZE": 16,
        "SOLVER.BATCH_SIZE": 32,
        "SOLVER.BASE_LR": 0.2,
        "SOLVER.BASE_LR_END": 0.02,
        "SOLVER.MAX_ITER": 2500,
        "SOLVER.WARMUP_ITERS": 500,
        "SOLVER.STEPS": (1500, 2000),
        "SOLVER.STEP_SIZE": 150,
        "SOLVER.FLAT_ITERS": 350,
        "SOLVER.CYCLE_ITERS": 125,
        "SOLVER.CYCLE_UP_ITERS": 63,
        "SOLVER.ITERS_PER_EPOCH": 45,
        "SOLVER.CHECKPOINT_PERIOD": 250,
        "TEST.EVAL_PERIOD": 100,
    }
    assert differences(settings(**EXAMPLE), cfg) == changes
    for key, value in changes.items():
        (line,) = [line for line in lines if line.startswith(f"{key}: ")]
        assert f"becomes {value!r}" in line
        assert "16 instead of 8 ranks" in line
    assert len(lines) == len(changes)


def test_fewer_ranks_take_more_iterations_and_scaling_back_gives_the_same_settings():
    cfg = settings(**EXAMPLE)
    maybe_scale_to_ranks(cfg, 2)
    assert (cfg.SOLVER.BATCH_SIZE, cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS) == (
        4,
        20000,
        (12000, 16000),
    )
    assert math.isclose(cfg.SOLVER.BASE_LR, 0.025)
    maybe_scale_to_ranks(cfg, 8)
    assert differences(settings(**EXAMPLE), cfg) == {}


@pytest.mark.parametrize("reference", [0, 4])
def test_without_a_reference_or_on_as_many_ranks_nothing_changes(reference):
    cfg = settings(**{**EXAMPLE, "REFERENCE_WORLD_SIZE": reference})
    assert maybe_scale_to_ranks(cfg, 4) == []
    assert differences(settings(**EXAMPLE), cfg).keys() == {"SOLVER.REFERENCE_WORLD_SIZE"}


def test_scaled_settings_scale_no_second_time():
    cfg = settings(**EXAMPLE)
    maybe_scale_to_ranks(cfg, 16)
    again = cfg.clone()
    assert maybe_scale_to_ranks(again, 16) == []
    assert differences(cfg, again) == {}


def test_lengths_never_become_zero_and_zero_and_negative_ones_stay():
    lengths = {"WARMUP_ITERS": 0, "CHECKPOINT_PERIOD": -1, "EVAL_PERIOD": 1, "STEPS": (0, 1, 2, 90)}
    cfg = settings(**{**EXAMPLE, **lengths, "MAX_ITER": 1})
    maybe_scale_to_ranks(cfg, 64)
    assert (cfg.SOLVER.MAX_ITER, cfg.TEST.EVAL_PERIOD) == (1, 1)
    assert (cfg.SOLVER.WARMUP_ITERS, cfg.SOLVER.CHECKPOINT_PERIOD) == (0, -1)
    assert cfg.SOLVER.STEPS == (0, 1, 11)  # those that have become equal count once


def test_lengths_are_rounded_in_integers():
    assert [rounded_ratio(n, 4) for n in (1, 2, 5, 6, 7, 10)] == [1, 1, 1, 2, 2, 3]
    assert rounded_ratio(3 * 10**17 + 3, 3) == 10**17 + 1


def test_lengths_in_epochs_do_not_shrink_since_their_iterations_do():
    cfg = settings(**{**EXAMPLE, "MAX_EPOCH": 12})
    maybe_scale_to_ranks(cfg, 16)
    assert differences(settings(**EXAMPLE), cfg).keys() == {
        *("SOLVER.REFERENCE_WORLD_SIZE", "SOLVER.BATCH_SIZE", "SOLVER.BASE_LR"),
        *("SOLVER.BASE_LR_END", "SOLVER.MAX_EPOCH", "SOLVER.ITERS_PER_EPOCH"),
    }


def test_a_batch_that_does_not_divide_among_the_reference_is_refused():
    cfg = settings(**{**EXAMPLE, "BATCH_SIZE": 20})
    with pytest.raises(SettingsError, match=r"^SOLVER.BATCH_SIZE: 20 .* 8 ranks.*[^\n]*$"):
        maybe_scale_to_ranks(cfg, 16)


@pytest.mark.parametrize("key", ["REFERENCE_WORLD_SIZE", "MAX_EPOCH"])
def test_negative_numbers_of_ranks_and_epochs_are_refused(key):
    cfg = settings(**{key: -1})
    assert maybe_scale_to_ranks(cfg, 16) == []
    with pytest.raises(SettingsError, match=f"^SOLVER.{key}: -1 "):
        check_cfg(cfg, 16)


# Epochs


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, logger="scaling")
    return caplog


def test_epochs_become_iterations_once(logged):
    changes = {"MAX_EPOCH": 12, "WARMUP_ITERS": 1, "STEPS": (8, 11), "CHECKPOINT_PERIOD": 1}
    cfg = settings(BATCH_SIZE=64, EVAL_PERIOD=-1, FLAT_ITERS=0, **changes)
    setup_length(cfg, lambda cfg: 1437, ["a change"], is_training=True)
    solver = cfg.SOLVER  # 22.45 iterations are an epoch: 23
    assert (solver.MAX_ITER, solver.MAX_EPOCH) == (276, 0)
    assert (solver.WARMUP_ITERS, solver.STEPS) == (23, (184, 253))
    assert (solver.CHECKPOINT_PERIOD, cfg.TEST.EVAL_PERIOD, solver.FLAT_ITERS) == (23, -1, 0)
    assert logged.messages[0] == "a change"
    for key in differences(settings(BATCH_SIZE=64, EVAL_PERIOD=-1, FLAT_ITERS=0, **changes), cfg):
        (line,) = [line for line in logged.messages if line.startswith(f"{key}: ")]
        assert "23 iterations" in line
    again = cfg.clone()
    setup_length(again, lambda cfg: 1437, [], is_training=True)
    assert differences(cfg, again) == {}


def test_epochs_that_are_too_many_iterations_are_refused():
    cfg = settings(MAX_EPOCH=10**9)
    check_cfg(cfg, 1)
    with pytest.raises(SettingsError, match=r"^SOLVER.MAX_EPOCH: 1000000000 are 23000000000 iter"):
        setup_length(cfg, lambda cfg: 1437, [], is_training=True)


def test_every_length_of_the_defaults_is_known():
    """A new setting in iterations must be added to LENGTHS, or here."""
    names = "STEPS", "STEP_SIZE"
    keys = {key for key in dict(leaves(get_cfg())) if key.startswith(("SOLVER.", "TEST."))}
    found = {key for key in keys if key.endswith(("_ITERS", "_PERIOD")) or key[7:] in names}
    assert found == set(LENGTHS)


def test_the_log_tells_the_length_of_the_run_in_epochs(logged):
    cfg = settings(BATCH_SIZE=100, MAX_ITER=125)
    setup_length(cfg, lambda cfg: 1000, [], is_training=True)
    (line,) = logged.messages
    for words in ("125 iterations are 12.5 epochs", "1000 samples", "100 in", "is 10 iterations"):
        assert words in line


def test_an_epoch_may_be_as_long_as_one_says(logged):
    cfg = settings(BATCH_SIZE=100, MAX_EPOCH=3, ITERS_PER_EPOCH=50, LR_BY_EPOCH=True)
    setup_length(cfg, lambda cfg: 1000, [], is_training=True)
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.ITERS_PER_EPOCH) == (150, 50)
    assert "150 iterations are 3.0 epochs" in logged.text
    assert "15.0 times" in logged.text


def test_a_rate_by_epochs_gets_the_length_of_an_epoch():
    cfg = settings(BATCH_SIZE=64, LR_BY_EPOCH=True)
    setup_length(cfg, lambda cfg: 1437, [], is_training=False)
    assert cfg.SOLVER.ITERS_PER_EPOCH == 23


def warnings_of(logged, profile=(0, 0), **changes):
    logged.clear()
    cfg = settings(**changes)
    cfg.PROFILE = profile
    setup_length(cfg, lambda cfg: 1000, [], is_training=True)
    return [record.getMessage() for record in logged.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("key", "name", "late", "in_time"),
    [
        ("WARMUP_ITERS", "constant", 100, 99),
        ("STEPS", "multistep", (100, 200), (200, 99)),
        ("STEP_SIZE", "step", 100, 99),
        ("FLAT_ITERS", "flat_cosine", 100, 99),
        ("CYCLE_UP_ITERS", "one_cycle", 100, 99),
        ("CYCLE_UP_ITERS", "cyclic", 100, 99),
        ("CYCLE_ITERS", "cosine_restarts", 100, 99),
    ],
)
def test_what_begins_after_the_end_of_the_run_is_one_warning(logged, key, name, late, in_time):
    solver = {"MAX_ITER": 100, "LR_SCHEDULER_NAME": name}
    (line,) = warnings_of(logged, **solver, **{key: late})
    assert line.startswith(f"SOLVER.{key}: {late}: the run ends before")
    assert line.endswith("SOLVER.MAX_ITER 100")
    assert warnings_of(logged, **solver, **{key: in_time}) == []
    if key != "WARMUP_ITERS":
        assert warnings_of(logged, MAX_ITER=100, LR_SCHEDULER_NAME="cosine", **{key: late}) == []


def test_a_profile_after_the_end_and_a_best_model_without_evaluations_are_one_warning(logged):
    (line,) = warnings_of(logged, profile=(1000, 1010))
    assert line.startswith("PROFILE: (1000, 1010): the run ends before")
    assert warnings_of(logged, profile=(999, 1010)) == []
    (line,) = warnings_of(logged, EVAL_PERIOD=-1)
    assert line.startswith("TEST.BEST_METRIC: digits_test/accuracy: no best model")
    assert warnings_of(logged, EVAL_PERIOD=0) == []


def test_the_defaults_and_the_example_are_no_warning(logged):
    assert warnings_of(logged) == []
    cfg = get_cfg()
    merge_settings(cfg, str(ROOT / "cfg.yaml"), [])
    setup_length(cfg, dataset_size, [], is_training=True)
    assert [record for record in logged.records if record.levelname == "WARNING"] == []


def test_an_evaluation_needs_no_training_data():
    def unread(cfg):
        raise AssertionError

    cfg = settings()
    setup_length(cfg, unread, [], is_training=False)
    assert differences(settings(), cfg) == {}


# In a run


def rows(output):
    return [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]


def test_a_run_in_epochs_keeps_its_iterations_and_goes_on_with_more_epochs(tmp_path):
    run = tmp_path / "run"
    words = "LOG_PERIOD 1 SOLVER.CHECKPOINT_PERIOD 1 TEST.EVAL_PERIOD 1 SOLVER.WARMUP_ITERS 0"
    words += " SOLVER.BASE_LR_END 0.03 SOLVER.LR_BY_EPOCH True"
    train_here(run, f"{words} SOLVER.MAX_EPOCH 1")  # of 1437 / 240: 6 iterations
    assert [row["iteration"] for row in rows(run)] == list(range(6))
    saved = get_cfg()
    merge_settings(saved, str(run / "config.yaml"), [])
    assert (saved.SOLVER.MAX_ITER, saved.SOLVER.MAX_EPOCH, saved.SOLVER.ITERS_PER_EPOCH) == (
        6,
        0,
        6,
    )
    assert (saved.SOLVER.CHECKPOINT_PERIOD, saved.TEST.EVAL_PERIOD) == (6, 6)
    assert f"{dataset_size(saved)} samples" in (run / "log.txt").read_text()

    train_here(run, f"{words} SOLVER.MAX_EPOCH 2 --resume")
    lrs = [row["lr"] for row in rows(run)]
    assert len(lrs) == 12
    assert set(lrs[:6]) == {0.3}
    assert lrs[6:] == pytest.approx([(0.3 + 0.03) / 2] * 6)
    assert torch.load(run / "model_final.pth")["iteration"] == 11


def test_the_settings_of_a_run_are_scaled_before_they_are_checked(tmp_path, monkeypatch):
    words = "SOLVER.REFERENCE_WORLD_SIZE 8 SOLVER.BATCH_SIZE 512 SOLVER.MAX_ITER 3"
    monkeypatch.setattr(train, "freeze_cfg", lambda cfg, *_, **__: cfg.freeze())
    with own_log():
        cfg = train.setup(parse(arguments(tmp_path / "run", words)))
    assert (cfg.SOLVER.BATCH_SIZE, cfg.SOLVER.MAX_ITER) == (64, 24)
    assert math.isclose(cfg.SOLVER.BASE_LR, 0.3 / 8)
    log = (tmp_path / "run/log.txt").read_text()
    assert "SOLVER.BATCH_SIZE: 512 becomes 64, for 1 instead of 8 ranks" in log
