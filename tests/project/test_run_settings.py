"""The settings of a run: its seed, what the log says of them, and the copy in config.yaml."""

import logging
import re

import pytest
import torch
from defaults import get_cfg
from plumbing import comm, run_settings
from plumbing.checkpoint import Checkpointer
from plumbing.errors import SettingsError
from plumbing.settings import leaves, merge_settings
from ranks import run_on_ranks


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="plumbing.run_settings")
    return caplog


def warnings(log):
    found = [each.getMessage() for each in log.records if each.levelno == logging.WARNING]
    log.clear()
    return found


@pytest.fixture
def start(tmp_path):
    """start(resume, **settings): the settings of a run, logged and kept as train.py does."""

    def started(resume=False, **changes):
        cfg = get_cfg()
        cfg.OUTPUT_DIR = str(tmp_path)
        cfg.update(changes)
        cfg.SEED = run_settings.choose_seed(cfg.SEED, cfg.OUTPUT_DIR, resume)
        run_settings.log_settings(cfg, get_cfg(), cfg.OUTPUT_DIR, resume)
        run_settings.save_settings(cfg, cfg.OUTPUT_DIR)
        return cfg

    return started


def test_settings_that_are_kept_can_be_read_again(start, tmp_path):
    cfg = start(SEED=7)
    again = get_cfg()
    merge_settings(again, str(tmp_path / "config.yaml"), [])
    assert dict(leaves(again)) == dict(leaves(cfg))


def test_the_log_lists_the_settings_that_are_not_the_defaults_and_no_others(start, log):
    start(SEED=7)
    assert "Settings that are not the defaults:\n" in log.text
    assert "  SEED: 7\n" in log.text
    assert "LOG_PERIOD" not in log.text


def test_without_a_difference_the_log_says_none(log, tmp_path):
    run_settings.log_settings(get_cfg(), get_cfg(), str(tmp_path), resume=False)
    assert log.messages == ["Settings that are not the defaults:\n  none"]


def test_a_resume_logs_each_setting_that_differs_with_both_values_and_does_so_once(start, log):
    start(SEED=1)
    assert warnings(log) == []
    start(resume=True, SEED=2, LOG_PERIOD=5)
    found = warnings(log)
    assert len(found) == 2
    for key, new, old in (("SEED", 2, 1), ("LOG_PERIOD", 5, 20)):
        (message,) = [message for message in found if key in message]
        assert re.search(rf"\b{new} in this session, it was {old} before", message)
    start(resume=True, SEED=2, LOG_PERIOD=5)
    assert warnings(log) == []


def test_a_start_that_is_no_resume_compares_nothing(start, log):
    start(SEED=1)
    start(SEED=2)
    assert warnings(log) == []


# The seed


def test_a_seed_that_is_given_is_taken_also_by_a_resume(start):
    assert start(SEED=5).SEED == 5
    assert start(resume=True, SEED=6).SEED == 6


def test_a_negative_seed_is_drawn_and_kept_by_a_resume(start, log):
    first = start(SEED=-1).SEED
    second = start(SEED=-1).SEED
    assert 0 <= first < 2**31
    assert first != second
    third = start(resume=True, SEED=-1).SEED
    assert third == second
    assert warnings(log) == []


def test_a_resume_without_anything_to_resume_draws_a_seed(start, log):
    assert start(resume=True, SEED=-1).SEED >= 0
    assert warnings(log) == []


def save_checkpoint(folder, text):
    Checkpointer(torch.nn.Linear(1, 1), str(folder), config=text).save("model_0000004", iteration=4)


@pytest.mark.parametrize("damage", [None, b"SEED: [", b"5", b"\xff", b"SEED: -1"])
def test_a_seed_that_is_lost_in_config_yaml_is_found_in_the_newest_checkpoint(
    damage, start, tmp_path
):
    save_checkpoint(tmp_path, "SEED: 77\n")
    (tmp_path / "model_0000009.pth").write_bytes(b"damaged")
    if damage is not None:
        (tmp_path / "config.yaml").write_bytes(damage)
    assert start(resume=True, SEED=-1).SEED == 77


def test_a_random_seed_that_is_lost_altogether_is_a_warning(start, log, tmp_path):
    save_checkpoint(tmp_path, "")
    start(resume=True, SEED=-1)
    (message,) = warnings(log)
    assert message.startswith("SEED: the random seed of this run is lost")


# Whether there is something to resume


@pytest.mark.parametrize("name", ["a run", "a [run]", "runs*"])
def test_a_folder_with_a_checkpoint_is_known_whatever_its_name(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    assert not run_settings.has_checkpoint(str(folder))
    (folder / "model_0000004.pth").touch()
    assert run_settings.has_checkpoint(str(folder))
    assert not run_settings.has_checkpoint(str(tmp_path / "none"))


# All ranks


def disagrees():
    cfg = get_cfg()
    run_settings.require_same_settings(cfg)
    if comm.get_rank() == 1:
        cfg.SOLVER.BASE_LR = 0.5
    try:
        run_settings.require_same_settings(cfg)
    except SettingsError as error:
        return str(error)


def draws_one_seed():
    return run_settings.choose_seed(-1, "none", resume=False)


def test_all_ranks_have_the_same_settings_and_draw_one_seed():
    ranks = run_on_ranks(disagrees, draws_one_seed)
    message = (
        "SOLVER.BASE_LR: 0.1 on rank 0, but 0.5 on rank 1: start all ranks with the same settings"
        " and the same files"
    )
    assert [rank["disagrees"] for rank in ranks] == [message, message]
    assert ranks[0]["draws_one_seed"] == ranks[1]["draws_one_seed"] >= 0


def test_only_rank_0_writes(start, tmp_path, monkeypatch):
    monkeypatch.setattr(comm, "is_main_process", lambda: False)
    start()
    assert not (tmp_path / "config.yaml").exists()
