"""What recipes now hold of the settings of hardware.py: layouts, DDP's options, the profiler."""

import json

import pytest
import torch
from conftest import train_here


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


def test_channels_last_holds_for_the_weights_of_convolutions(tmp_path):
    train_here(tmp_path, "CHANNELS_LAST True SOLVER.MAX_ITER 1")
    weight = torch.load(tmp_path / "model_final.pth")["model"]["features.3.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)
