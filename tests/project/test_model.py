"""DigitNet: losses in training, predictions in evaluation."""

import math

import pytest
import torch
from defaults import get_cfg
from model import build_model


def batch(size=6):
    generator = torch.Generator().manual_seed(0)
    return {
        "images": torch.rand(size, 1, 8, 8, generator=generator),
        "labels": torch.arange(size) % 10,
    }


def test_training_gives_a_scalar_loss_near_that_of_chance_and_evaluation_gives_logits():
    torch.manual_seed(0)
    model = build_model(get_cfg())
    losses = model.train()(batch(60))
    assert list(losses) == ["loss_cls"]
    assert losses["loss_cls"].shape == ()
    assert losses["loss_cls"].item() == pytest.approx(math.log(10), abs=0.5)
    assert model.eval()(batch()).shape == (6, 10)


def test_every_parameter_gets_a_gradient():
    model = build_model(get_cfg()).train()
    model(batch())["loss_cls"].backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_the_settings_are_those_of_the_layers():
    cfg = get_cfg()
    cfg.MODEL.WIDTH = 3
    cfg.MODEL.NUM_CLASSES = 4
    cfg.MODEL.DROPOUT = 0.5
    model = build_model(cfg)
    assert model.features[0].weight.shape == (3, 1, 3, 3)
    assert model.classifier.weight.shape == (4, 6)
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.5]


def test_an_evaluation_is_the_same_each_time_and_for_an_empty_batch():
    model = build_model(get_cfg()).eval()
    assert torch.equal(model(batch()), model(batch()))
    assert model(batch(0)).shape == (0, 10)
