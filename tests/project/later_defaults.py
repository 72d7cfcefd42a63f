"""The defaults: their limits, how they are kept with a run, and that every setting is read."""

import ast
import logging
import math
import re
from pathlib import Path

import defaults
import pytest
from defaults import check_cfg, freeze_cfg, get_cfg, save_cfg
from plumbing.errors import SettingsError
from plumbing.settings import leaves, merge_settings

ROOT = Path(defaults.__file__).parent


@pytest.fixture
def read(tmp_path):
    """read(text, *opts): the settings after a file with this text and these words."""

    def merged(text="OUTPUT_DIR: output", *opts):
        path = tmp_path / "cfg.yaml"
        path.write_text(text)
        cfg = get_cfg()
        merge_settings(cfg, str(path), list(opts))
        return cfg

    return merged


def error_of(function, *args):
    """The one line of the SettingsError that a call raises."""
    with pytest.raises(SettingsError) as caught:
        function(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Keeping


@pytest.fixture
def keep(tmp_path, caplog):
    """keep(resume, **settings): the frozen settings of a run and its warnings."""
    caplog.set_level(logging.INFO, logger="defaults")

    def kept(resume=False, is_training=True, **changes):
        caplog.clear()
        cfg = get_cfg()
        cfg.OUTPUT_DIR = str(tmp_path)
        for key, value in changes.items():
            (cfg if key in cfg else cfg.SOLVER)[key] = value
        freeze_cfg(cfg, resume, is_training)
        save_cfg(cfg)
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        return cfg, warnings

    return kept


def test_a_run_scaled_to_some_ranks_goes_on_with_as_many_or_with_its_own_settings(keep):
    keep(REFERENCE_WORLD_SIZE=2)
    keep(resume=True, REFERENCE_WORLD_SIZE=2)
    with pytest.raises(SettingsError, match="scaled to 2 ranks.* to 4: resume with 2, or.*config"):
        keep(resume=True, REFERENCE_WORLD_SIZE=4)
    keep(resume=True, is_training=False, REFERENCE_WORLD_SIZE=4)
    keep(resume=True, REFERENCE_WORLD_SIZE=0)
    keep(REFERENCE_WORLD_SIZE=4)


def test_settings_are_frozen_logged_and_saved_so_that_they_can_be_read_again(
    keep, tmp_path, caplog
):
    cfg, warnings = keep(SEED=7)
    assert cfg.is_frozen()
    assert warnings == []
    assert "SEED: 7" in caplog.text
    again = get_cfg()
    merge_settings(again, str(tmp_path / "config.yaml"), [])
    assert dict(leaves(again)) == dict(leaves(cfg))


def test_a_negative_seed_is_drawn_once_and_kept_by_a_resume(keep):
    (first, _), (second, _) = keep(SEED=-1), keep(SEED=-1)
    assert 0 <= first.SEED < 2**31
    assert first.SEED != second.SEED
    resumed, warnings = keep(resume=True, SEED=-1)
    assert resumed.SEED == second.SEED
    assert warnings == []


def test_a_resume_tells_each_setting_that_differs_and_tells_it_once(keep):
    keep(SEED=1)
    _, warnings = keep(resume=True, SEED=2, LOG_PERIOD=5)
    assert len(warnings) == 2
    for key, new, old in (("SEED", 2, 1), ("LOG_PERIOD", 5, 20)):
        (message,) = [message for message in warnings if key in message]
        assert re.search(rf"\b{new}\b.*\b{old}\b", message)
    _, warnings = keep(resume=True, SEED=2, LOG_PERIOD=5)
    assert warnings == []


def test_a_resume_without_saved_settings_is_a_start(keep):
    cfg, warnings = keep(resume=True, SEED=-1)
    assert cfg.SEED >= 0
    assert warnings == []
    assert keep(resume=True, SEED=-1)[0].SEED == cfg.SEED


# Defaults


def test_the_defaults_and_the_example_are_possible():
    check_cfg(get_cfg(), num_ranks=1)
    cfg = get_cfg()
    merge_settings(cfg, str(ROOT / "cfg.yaml"), [])
    check_cfg(cfg, num_ranks=8)


def test_each_call_gives_defaults_of_its_own():
    get_cfg().SOLVER.BASE_LR = 99.0
    assert get_cfg().SOLVER.BASE_LR != 99.0


IMPOSSIBLE = {
    "LOG_PERIOD": (0, -1),
    "LOG_WINDOW": (0,),
    "TIMEOUT_SECONDS": (0.0, 0.5, -1.0, 1e308, math.inf, math.nan),
    "FLOAT32_PRECISION": ("low", ""),
    "PROFILE": ((), (5,), (8, 3), (-5, 3), (1, 2, 3)),
    "MODEL.COMPILE": ("foo", "cudagraphs"),
    "MODEL.DEVICE": ("gpu", "cuda:1"),
    "MODEL.WEIGHTS": ("not/there.pth", "/"),
    "MODEL.WIDTH": (0,),
    "MODEL.DROPOUT": (-0.1, 1.0, math.nan),
    "MODEL.NUM_CLASSES": (0,),
    "DATASETS.PATH": ("not/there.npz",),
    "DATASETS.TRAIN": ("mnist",),
    "DATASETS.TEST": (("mnist",), ("digits_test", "mnist")),
    "DATASETS.MAX_SHIFT": (-1,),
    "DATALOADER.NUM_WORKERS": (-1, 1000),
    "SOLVER.MAX_ITER": (0, -5, 10**18),
    "SOLVER.BATCH_SIZE": (0, -64),
    "SOLVER.ACCUM_STEPS": (0, -1),
    "SOLVER.LAYER_DECAY": (0.0, 1.1, math.nan),
    "SOLVER.BASE_LR": (0.0, -0.1, math.inf, math.nan),
    "SOLVER.MOMENTUM": (-0.1, 1.0),
    "SOLVER.BETAS": ((0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, 0.9, 0.9), ()),
    "SOLVER.WEIGHT_DECAY": (-1e-4, math.nan),
    "SOLVER.WEIGHT_DECAY_NORM": (-1e-4,),
    "SOLVER.MAX_SKIPS": (0, -1),
    "SOLVER.NONFINITE": ("ignore",),
    "SOLVER.BIAS_LR_FACTOR": (-1.0,),
    "SOLVER.CLIP_GRAD_NORM": (0.0, -1.0, math.nan),
    "SOLVER.LR_SCHEDULER_NAME": ("poly",),
    "SOLVER.BASE_LR_END": (-0.1,),
    "SOLVER.STEPS": ((-1,), (5, -5)),
    "SOLVER.GAMMA": (0.0, -0.1),
    "SOLVER.WARMUP_ITERS": (-1,),
    "SOLVER.WARMUP_FACTOR": (-0.1, math.inf),
    "SOLVER.WARMUP_METHOD": ("burnin",),
    "SOLVER.CHECKPOINTS_TO_KEEP": (0, -1),
    "SOLVER.AMP.DTYPE": ("float32",),
    "TEST.BATCH_SIZE": (0,),
    "TEST.BEST_MODE": ("larger",),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in IMPOSSIBLE.items() for value in values]
)
def test_an_impossible_value_is_refused_by_its_key(key, value):
    cfg = get_cfg()
    *sections, name = key.split(".")
    node = cfg
    for section in sections:
        node = node[section]
    node[name] = value
    assert error_of(check_cfg, cfg, 1).startswith(f"{key}: ")


@pytest.mark.parametrize("text", ["'a','b'", "None,1"])
def test_steps_that_are_no_numbers_are_refused(read, text):
    assert "SOLVER.STEPS" in error_of(lambda: check_cfg(read("SEED: 0", "SOLVER.STEPS", text), 1))


@pytest.mark.parametrize(
    ("num_ranks", "accum_steps", "possible"),
    [(1, 1, True), (8, 8, True), (3, 1, False), (1, 3, False), (2, 64, False), (128, 1, False)],
)
def test_a_batch_must_be_divisible_among_ranks_and_micro_batches(num_ranks, accum_steps, possible):
    cfg = get_cfg()
    cfg.SOLVER.ACCUM_STEPS = accum_steps
    if possible:
        check_cfg(cfg, num_ranks)
    else:
        message = error_of(check_cfg, cfg, num_ranks)
        for word in ("SOLVER.BATCH_SIZE", "64", str(num_ranks), str(accum_steps)):
            assert word in message


def test_nesterov_needs_momentum():
    cfg = get_cfg()
    cfg.SOLVER.NESTEROV, cfg.SOLVER.MOMENTUM = True, 0.0
    assert "SOLVER.MOMENTUM" in error_of(check_cfg, cfg, 1)


def test_periods_may_be_zero_and_negative():
    for period in (0, -1):
        cfg = get_cfg()
        cfg.SOLVER.CHECKPOINT_PERIOD = cfg.TEST.EVAL_PERIOD = period
        check_cfg(cfg, 1)


def attributes_of(path):
    """The dotted names that a file reads, such as "cfg.SOLVER.BASE_LR"."""
    nodes = ast.walk(ast.parse(path.read_text()))
    loads = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    return {ast.unparse(node) for node in loads}


def test_every_setting_is_read_somewhere_and_every_one_read_exists():
    files = [path for path in ROOT.rglob("*.py") if path.name != "defaults.py"]
    files = [path for path in files if path.relative_to(ROOT).parts[0] != "tests"]
    read = set().union(*map(attributes_of, files))
    keys = dict(leaves(get_cfg()))
    names = {key: {f"cfg.{key}", key.replace("SOLVER.", "solver.", 1)} for key in keys}
    assert [key for key in keys if not names[key] & read] == []
    sections = {key.rpartition(".")[0] for key in keys}
    known = {f"cfg.{key}" for key in (*keys, *sections)}
    used = {name for name in read if re.fullmatch(r"cfg(\.[A-Z0-9_]+)+", name)}
    assert used <= known
