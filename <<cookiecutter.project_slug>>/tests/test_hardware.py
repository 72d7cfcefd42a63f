"""Precision, kernels and profile: settings that change how, not what, is computed."""

import json

import pytest
import torch
from conftest import train_here
from torch import nn

from defaults import get_cfg
from hardware import build_parallel, setup_backends


@pytest.fixture
def backends():
    """Afterwards they are as before."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield torch.backends.cudnn
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, False
    torch.use_deterministic_algorithms(False)


def with_settings(**settings):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    for key, value in settings.items():
        (cfg.MODEL if key in cfg.MODEL else cfg)[key] = value
    return cfg


def test_the_backends_follow_the_settings(backends):
    setup_backends(with_settings(FLOAT32_PRECISION="medium", CUDNN_BENCHMARK=True))
    assert torch.get_float32_matmul_precision() == "medium"
    assert (backends.benchmark, backends.deterministic) == (True, False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_kernels_prevail_over_the_choice_of_fast_ones(backends):
    setup_backends(with_settings(DETERMINISTIC=True, CUDNN_BENCHMARK=True))
    assert (backends.benchmark, backends.deterministic) == (False, True)
    assert torch.are_deterministic_algorithms_enabled()


def test_channels_last_holds_for_the_weights_of_convolutions():
    weight = build_parallel(with_settings(CHANNELS_LAST=True), nn.Conv2d(3, 4, 3)).weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


def test_a_compiled_model_has_the_same_names_and_learns_the_same(tmp_path):
    train_here(tmp_path / "plain")
    train_here(tmp_path / "compiled", " MODEL.COMPILE eager")
    plain, compiled = (
        torch.load(tmp_path / name / "model_final.pth")["model"] for name in ("plain", "compiled")
    )
    assert plain.keys() == compiled.keys()
    assert all(torch.equal(plain[name], compiled[name]) for name in plain)


def traced(output):
    (path,) = (output / "profile").iterdir()
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    return sorted({name for name in names if name.startswith("ProfilerStep#")})


@pytest.mark.parametrize(
    ("setting", "steps"),
    [("(2,4)", 2), ("(0,1)", 1), ("(10,99)", 2)],
    ids=["in the middle", "the first", "past the end"],
)
def test_the_stated_iterations_are_traced(tmp_path, setting, steps):
    train_here(tmp_path, f" SOLVER.MAX_ITER 12 PROFILE {setting}")
    assert len(traced(tmp_path)) == steps


def test_without_the_setting_nothing_is_traced(tmp_path):
    train_here(tmp_path)
    assert not (tmp_path / "profile").exists()
