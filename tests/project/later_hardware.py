"""Precision, kernels and profile: settings that change how, not what, is computed."""

import json
import logging
import math
import sys
from unittest.mock import MagicMock

import hardware
import numpy as np
import pytest
import torch
from conftest import train_here
from defaults import check_cfg, get_cfg
from hardware import build_parallel, choose_device, setup_backends
from plumbing.checkpoint import Checkpointer
from plumbing.comm import NonFiniteError, SettingsError
from torch import nn


@pytest.fixture
def backends():
    """Afterwards they are as before."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield torch.backends.cudnn
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, False
    torch.backends.cudnn.allow_tf32 = True
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
    assert (backends.benchmark, backends.deterministic, backends.allow_tf32) == (True, False, True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_kernels_prevail_over_the_choice_of_fast_ones(backends):
    setup_backends(with_settings(DETERMINISTIC=True, CUDNN_BENCHMARK=True))
    assert (backends.benchmark, backends.deterministic, backends.allow_tf32) == (False, True, False)
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


def test_the_device_is_the_cpu_without_a_gpu_or_if_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_rank_has_the_gpu_of_its_local_rank(monkeypatch, name):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert choose_device(name) == torch.device("cuda", 3)
    assert [torch.device("cuda", getattr(each, "index", each)).index for each in chosen] == [3]


@pytest.mark.parametrize(("name", "num_gpus"), [("auto", 2), ("cuda", 2), ("cuda", 0)])
def test_more_ranks_than_gpus_is_an_error_that_counts_both(monkeypatch, name, num_gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(SettingsError, match=rf"4 ranks.*{num_gpus} GPUs.*MODEL\.DEVICE"):
        choose_device(name)


def test_the_log_tells_the_environment(backends, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="hardware")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "c.yaml"])
    setup_backends(with_settings())
    version = ".".join(map(str, sys.version_info[:3]))
    for words in (f"Python {version}", torch.__version__, np.__version__, " ".join(sys.argv)):
        assert words in caplog.messages[0]


def test_a_missing_tensorboard_is_told_at_the_start(backends, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(SettingsError, match="no tensorboard"):
        setup_backends(with_settings())


@pytest.mark.parametrize("on", [False, True])
def test_ranks_train_with_the_settings_of_ddp_and_of_batch_norms(on, monkeypatch):
    made = {}

    def parallel(model, devices, **options):
        made.update(options, model=model, devices=devices)
        return MagicMock()

    monkeypatch.setattr(hardware.comm, "get_world_size", lambda: 2)
    monkeypatch.setattr(hardware, "OrderedDDP", parallel)
    build_parallel(
        with_settings(SYNC_BN=on, FIND_UNUSED_PARAMETERS=on, STATIC_GRAPH=on),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
    )
    assert isinstance(made["model"][1], nn.SyncBatchNorm if on else nn.BatchNorm2d)
    assert (made["find_unused_parameters"], made["static_graph"]) == (on, on)
    assert made["devices"] is None
    assert made["gradient_as_bucket_view"]
    assert not made["forward_sync_buffers"]  # each rank has its own


def test_batch_norms_over_ranks_are_refused_without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"^MODEL.SYNC_BN: True needs GPUs"):
        check_cfg(with_settings(SYNC_BN=True), num_ranks=2)


@pytest.mark.parametrize("name", ["0.weight", "1.running_var", "wave", "sparse"])
def test_weights_and_statistics_that_are_not_finite_are_not_saved(tmp_path, name):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.full((2,), -math.inf))
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    checkpointer = Checkpointer(build_parallel(with_settings(), model), str(tmp_path))
    checkpointer.save("good")
    tensor = model.state_dict()[name]
    (tensor._values() if tensor.is_sparse else tensor.view(-1))[0] = math.inf
    with pytest.raises(NonFiniteError, match=rf"not saved: {name}; last good.*good\.pth"):
        checkpointer.save("bad")
    assert {path.name for path in tmp_path.iterdir()} == {"good.pth", "last_checkpoint"}


def test_large_numbers_and_layers_without_a_shape_yet_are_no_fault():
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16())
    with torch.no_grad():
        model[1].weight.fill_(1e300)
    build_parallel(with_settings(), model).state_dict()
    with torch.no_grad():
        model[2].bias.fill_(math.nan)
    with pytest.raises(NonFiniteError, match=r"not saved: 2\.bias;"):
        model.state_dict()
