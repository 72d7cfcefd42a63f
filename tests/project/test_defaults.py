"""The defaults: what is refused, and by which key."""

import math

import pytest
from conftest import ROOT
from defaults import check_cfg, expand_paths, get_cfg
from plumbing.errors import SettingsError
from plumbing.settings import leaves, merge_settings
from solver import check_solver


@pytest.fixture
def read(tmp_path):
    """read(*opts): the settings after these words."""

    def merged(*opts):
        path = tmp_path / "cfg.yaml"
        path.write_text("OUTPUT_DIR: output")
        cfg = get_cfg()
        merge_settings(cfg, str(path), list(opts))
        return cfg

    return merged


def error_of(cfg, num_ranks=1):
    """The one line with which settings are refused."""
    with pytest.raises(SettingsError) as caught:
        check(cfg, num_ranks)
    message = str(caught.value)
    assert "\n" not in message
    return message


def check(cfg, num_ranks=1):
    """As train.py does."""
    expand_paths(cfg)
    check_cfg(cfg, num_ranks)
    check_solver(cfg)


def test_the_defaults_and_the_example_are_possible():
    check(get_cfg())
    cfg = get_cfg()
    merge_settings(cfg, str(ROOT / "cfg.yaml"), [])
    check(cfg, num_ranks=8)


def test_each_call_gives_defaults_of_its_own():
    get_cfg().SOLVER.BASE_LR = 99.0
    assert get_cfg().SOLVER.BASE_LR != 99.0


def test_there_are_at_most_45_settings():
    assert len(list(leaves(get_cfg()))) <= 45


IMPOSSIBLE = {
    "SEED": (2**32,),
    "LOG_PERIOD": (0, -1),
    "TIMEOUT_SECONDS": (0.0, 0.5, -1.0, 1e308, math.inf, math.nan),
    "FLOAT32_PRECISION": ("low", ""),
    "MODEL.DEVICE": ("gpu", "cuda:1"),
    "MODEL.WEIGHTS": ("not/there.pth", "/", "s3://bucket/model.pth"),
    "MODEL.WIDTH": (0,),
    "MODEL.DROPOUT": (-0.1, 1.0, math.nan),
    "DATASETS.PATH": ("not/there.npz", "https://host/digits.npz"),
    "DATASETS.TRAIN": ((),),
    "DATASETS.MAX_SHIFT": (-1,),
    "DATALOADER.NUM_WORKERS": (-1, 1000),
    "SOLVER.MAX_ITER": (0, -5, 10**18),
    "SOLVER.BATCH_SIZE": (0, -64),
    "SOLVER.BASE_LR": (0.0, -0.1, math.inf, math.nan),
    "SOLVER.CLIP_GRAD_NORM": (0.0, -1.0, math.nan),
    "SOLVER.CHECKPOINTS_TO_KEEP": (-1,),
    "SOLVER.AMP.DTYPE": ("float32",),
    "TEST.BATCH_SIZE": (0,),
    "TEST.BEST_METRIC": ("accuracy", "digits_train/accuracy", "mnist/accuracy"),
    "TEST.BEST_MODE": ("larger",),
    "OUTPUT_DIR": ("s3://bucket/run",),
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
    assert error_of(cfg).startswith(f"{key}: ")


# What the classes of torch refuse, and what solver.py chooses by.
SOLVER = {
    "MOMENTUM": (-0.1,),
    "OPTIMIZER": ("Adam",),
    "LR_SCHEDULER_NAME": ("poly", "step"),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in SOLVER.items() for value in values]
)
def test_what_the_optimizer_or_the_schedule_does_not_take_is_refused(key, value):
    cfg = get_cfg()
    cfg.SOLVER[key] = value
    if key == "LR_SCHEDULER_NAME":
        cfg.SOLVER.WARMUP_ITERS = 5  # it must not be noticed only after the warm-up
    message = error_of(cfg)
    word = key.split("_")[0].lower()
    assert word in message.lower()
    assert str(value) in message


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9), (0.9,), (0.9, 0.9, 0.9), ()])
def test_betas_that_adamw_does_not_take_are_refused(betas):
    cfg = get_cfg()
    cfg.SOLVER.OPTIMIZER = "AdamW"
    cfg.SOLVER.BETAS = betas
    assert "SOLVER" in error_of(cfg)


@pytest.mark.parametrize(
    ("num_ranks", "accum_steps", "possible"),
    [(1, 1, True), (8, 8, True), (3, 1, False), (1, 3, False), (2, 64, False), (128, 1, False)],
)
def test_a_batch_must_be_divisible_among_ranks_and_micro_batches(num_ranks, accum_steps, possible):
    cfg = get_cfg()
    cfg.SOLVER.ACCUM_STEPS = accum_steps
    if possible:
        check(cfg, num_ranks)
    else:
        message = error_of(cfg, num_ranks)
        for word in ("SOLVER.BATCH_SIZE", "64", str(num_ranks), str(accum_steps)):
            assert word in message


@pytest.mark.parametrize("accum_steps", [0, -1])
def test_a_number_of_micro_batches_below_1_is_refused(accum_steps):
    cfg = get_cfg()
    cfg.SOLVER.ACCUM_STEPS = accum_steps
    assert f"SOLVER.ACCUM_STEPS {accum_steps}, both at least 1" in error_of(cfg)


def test_periods_may_be_zero_and_negative():
    for period in (0, -1):
        cfg = get_cfg()
        cfg.SOLVER.CHECKPOINT_PERIOD = period
        cfg.TEST.EVAL_PERIOD = period
        check(cfg)


def test_no_best_metric_and_no_test_set_are_possible(read):
    check(read("TEST.BEST_METRIC", "", "DATASETS.TEST", "()"))


def test_paths_are_expanded(read, monkeypatch):
    monkeypatch.setenv("HOME", str(ROOT))
    cfg = read("OUTPUT_DIR", "~/output", "MODEL.WEIGHTS", "$HOME/train.py")
    check(cfg)
    paths = (cfg.OUTPUT_DIR, cfg.MODEL.WEIGHTS)
    assert paths == (f"{ROOT}/output", f"{ROOT}/train.py")
