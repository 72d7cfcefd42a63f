"""Frozen parts of the model: what they name, that they stay, and that a run with them is exact."""

import copy
import io
import shutil

import pytest
import torch
from conftest import train_here
from defaults import get_cfg
from model import build_model, maybe_freeze
from plumbing.comm import SettingsError
from torch import nn


def frozen(model, *patterns):
    cfg = get_cfg()
    cfg.MODEL.FROZEN = patterns
    return maybe_freeze(cfg, model)


def small():
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1))


def trained_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def modes(model):
    """{name: whether in training mode} of the batch norms."""
    norms = nn.modules.batchnorm._NormBase
    return {name: m.training for name, m in model.named_modules() if isinstance(m, norms)}


def test_nothing_is_frozen_unless_it_is_named():
    model = build_model(get_cfg())
    assert trained_names(model) == {name for name, _ in model.named_parameters()}
    assert all(modes(model.train()).values())


def test_patterns_name_parameters_and_the_star_matches_dots():
    assert trained_names(frozen(small(), "0.weight", "1.*")) == {"0.bias", "2.weight", "2.bias"}
    assert trained_names(frozen(nn.ModuleDict({"a": small()}), "a.*.bias")) == {
        *("a.0.weight", "a.1.weight", "a.2.weight")
    }


def test_a_batch_norm_stays_in_evaluation_mode_if_all_of_its_parameters_are_frozen():
    assert modes(frozen(small(), "1.*")) == modes(frozen(small(), "1.*").train()) == {"1": False}
    assert modes(frozen(small(), "0.*", "1.weight").train()) == {"1": True}
    assert modes(frozen(small(), "1.weight", "1.bias").train()) == {"1": False}
    model = frozen(nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)), "0.*")
    assert modes(model.train()) == {"0": False}


def test_it_stays_so_whatever_happens_to_the_model():
    model = frozen(small(), "1.*")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (
        model,
        copy.deepcopy(model),
        torch.load(file, weights_only=False),
        nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)),
        nn.DataParallel(model),
    ):
        for mode in (True, False, True):
            assert set(modes(each.train(mode)).values()) == {False}
            assert each.training == mode
            inner = each.module if isinstance(each, nn.DataParallel) else each
            assert inner[0].training == inner[2].training == mode


def test_a_copy_has_modes_of_its_own():
    model = frozen(small(), "1.*")
    copy.deepcopy(model).eval()
    assert model.training
    assert model[0].training


def test_a_shared_parameter_is_frozen_by_any_of_its_names():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert trained_names(frozen(model, "b.weight")) == {"a.bias", "b.bias"}


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (("classifer.*",), ("'classifer.*' matches no parameter", "classifier.*?")),
        (("feature.*",), ("'feature.*' matches no parameter", "mean features.*?")),
        (("features.1.running_mean",), ("matches no parameter",)),
        (("features.0.*", ""), ("'' matches no parameter",)),
        ((1.5,), ("1.5 matches no parameter",)),
        (("*",), ("leaves nothing to train",)),
        (("features.*", "classifier.*"), ("leaves nothing to train",)),
    ],
)
def test_a_pattern_without_effect_and_a_model_without_training_are_refused(patterns, words):
    cfg = get_cfg()
    cfg.MODEL.FROZEN = patterns
    with pytest.raises(SettingsError) as caught:
        build_model(cfg)
    message = str(caught.value)
    assert message.startswith("MODEL.FROZEN: ")
    assert "\n" not in message
    assert all(word in message for word in words)


FROZEN = " MODEL.FROZEN ('features.0.*','features.1.*') SOLVER.OPTIMIZER AdamW SOLVER.BASE_LR 0.01"


def model_in(folder, name="model_final.pth"):
    return torch.load(folder / name)["model"]


def test_a_run_leaves_frozen_weights_and_statistics_alone_and_resumes_to_the_bit(tmp_path):
    train_here(tmp_path / "whole", FROZEN)
    end = model_in(tmp_path / "whole")
    for epoch in ("model_0000001.pth", "model_0000007.pth"):  # before and after an evaluation
        start = model_in(tmp_path / "whole", epoch)
        same = {name for name in end if torch.equal(start[name], end[name])}
        assert same == {name for name in end if name.startswith(("features.0.", "features.1."))}
    assert end["features.1.running_mean"].abs().sum() == 0
    assert end["features.1.num_batches_tracked"] == 0
    assert end["features.4.num_batches_tracked"] == 12

    (tmp_path / "resumed").mkdir()
    shutil.copy(tmp_path / "whole" / "model_0000005.pth", tmp_path / "resumed")
    (tmp_path / "resumed" / "last_checkpoint").write_text("model_0000005.pth")
    train_here(tmp_path / "resumed", FROZEN + " --resume")
    resumed = model_in(tmp_path / "resumed")
    assert all(torch.equal(resumed[name], end[name]) for name in end)


def test_several_ranks_train_a_partly_frozen_model(tmp_path, on_ranks):
    ranks = on_ranks(2, train_here, tmp_path / "run", FROZEN)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].printed
    assert ranks[0].result == ranks[1].result
    end = model_in(tmp_path / "run")
    assert end["features.1.num_batches_tracked"] == 0
    assert end["features.4.num_batches_tracked"] == 12
