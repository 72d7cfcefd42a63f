"""Parameter groups, resuming the optimizer, mixed precision, the sum of losses."""

import copy
import io
import math

import pytest
import torch
from conftest import settings, train_here
from defaults import get_cfg
from gradients import Gradients, build_grad_scaler, build_gradients
from hardware import build_autocast
from model import sum_losses
from optimizer import (
    SETTINGS,
    build_optimizer,
    layer_numbers,
    setup_optimizer,
)
from plumbing.comm import NonFiniteError, SettingsError
from plumbing.events import EventStorage
from torch import nn


def error_of(function, *args):
    """The one line of the SettingsError that a call raises."""
    with pytest.raises(SettingsError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def groups_of(model, **solver):
    """{name: (learning rate, weight decay)}"""
    decays = {"WEIGHT_DECAY": 1.0, "WEIGHT_DECAY_NORM": 0.5, "WEIGHT_DECAY_BIAS": 0.25}
    cfg = settings(**{"BASE_LR": 0.1, "BIAS_LR_FACTOR": 2.0, **decays, **solver})
    return {
        name: (group["lr"], group["weight_decay"])
        for group in build_optimizer(cfg, model).param_groups
        for name in group["param_names"]
    }


# Parameter groups


def test_norms_biases_and_the_rest_have_a_decay_of_their_own():
    model = nn.Sequential(nn.Conv1d(1, 2, 1), nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert groups_of(model) == {
        "0.weight": (0.1, 1.0),
        "0.bias": (0.2, 0.25),
        "1.weight": (0.1, 0.5),
        "1.bias": (0.2, 0.5),
        "2.weight": (0.1, 1.0),
        "2.bias": (0.2, 0.25),
    }


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(2),
        nn.SyncBatchNorm(2),
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
        nn.InstanceNorm2d(2, affine=True),
        nn.RMSNorm(2),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_every_kind_of_norm_is_known(norm):
    groups = groups_of(nn.ModuleDict({"norm": norm}))
    assert groups["norm.weight"] == (0.1, 0.5)
    assert {decay for _, decay in groups.values()} == {0.5}


def test_equal_settings_share_a_group():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    for bias_decay, number in ((0.0, 2), (1.0, 1), (-1.0, 1)):
        cfg = settings(WEIGHT_DECAY=1.0, WEIGHT_DECAY_BIAS=bias_decay)
        assert len(build_optimizer(cfg, model).param_groups) == number


def test_frozen_parameters_are_left_out_and_shared_ones_count_once():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    model["c"].weight.requires_grad_(False)
    assert set(groups_of(model)) == {"a.weight", "a.bias", "b.bias", "c.bias"}


def test_names_are_those_of_the_bare_model_and_parameters_at_the_top_are_found():
    model = nn.DataParallel(nn.Linear(2, 2))
    assert set(groups_of(model)) == {"weight", "bias"}
    assert set(groups_of(nn.Linear(2, 2))) == {"weight", "bias"}


def test_every_bias_is_one_whatever_its_module_calls_it():
    groups = groups_of(nn.ModuleList([nn.MultiheadAttention(4, 2), nn.LSTM(2, 2)]))
    biases = {name for name, rates in groups.items() if rates == (0.2, 0.25)}
    assert biases == {
        *("0.in_proj_bias", "0.out_proj.bias"),
        *("1.bias_ih_l0", "1.bias_hh_l0"),
    }


def test_the_first_pattern_that_matches_gives_the_factor_and_all_factors_multiply():
    model = nn.ModuleDict(
        {"stem": nn.Linear(2, 2), "norm": nn.LayerNorm(2), "head": nn.Linear(2, 2)}
    )
    assert groups_of(
        model,
        LR_FACTORS=("head.bias=20", "head.*=10", "st?m.weight = 0"),
        WEIGHT_DECAY_FACTORS=("*.bias=0.5", "norm.weight=4"),
    ) == {
        "stem.weight": (0.0, 1.0),
        "stem.bias": (0.2, 0.125),
        "norm.weight": (0.1, 2.0),
        "norm.bias": (0.2, 0.25),
        "head.weight": (1.0, 1.0),
        "head.bias": (4.0, 0.125),
    }


def test_a_parameter_whose_factor_is_0_stays_as_it_is_to_the_bit():
    for name in ("SGD", "AdamW", "Adagrad"):
        model = Net("a", "b")
        before = copy.deepcopy(model)
        trained(settings(OPTIMIZER=name, LR_FACTORS=("a.*=0",)), model, GRADIENTS)
        assert torch.equal(model.a.weight, before.a.weight)
        assert not torch.equal(model.b.weight, before.b.weight)


@pytest.mark.parametrize("key", ["LR_FACTORS", "WEIGHT_DECAY_FACTORS"])
@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (("heat.*=2",), ("'heat.*=2'", "matches no parameter", "head.*?")),
        (("head=2",), ("'head=2'", "matches no parameter", "head.*?")),
        (("*=2", "head.*=3"), ("'head.*=3'", "comes after")),
        (("head.weight=2", "head.bias=2", "head.*=3"), ("'head.*=3'", "comes after")),
        *(((rule,), (repr(rule), "PATTERN=FACTOR")) for rule in ("head.*", "=2", "head.*=x", 5)),
        *(((f"*={factor}",), ("PATTERN=FACTOR",)) for factor in ("-1", "inf", "nan", "")),
    ],
)
def test_a_rule_without_effect_or_sense_is_refused_by_its_text(key, rules, words):
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    message = error_of(build_optimizer, settings(**{key: rules}), model)
    for word in (f"SOLVER.{key}: ", *words):
        assert word in message


def test_a_pattern_may_match_frozen_parameters_only():
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    model["stem"].requires_grad_(False)
    assert set(groups_of(model, LR_FACTORS=("stem.*=0.1",))) == {"head.weight", "head.bias"}


def numbers_of(model):
    numbers = layer_numbers(model)
    return {name: numbers[parameter] for name, parameter in model.named_parameters()}


class ViT(nn.Module):
    """The names of a vision transformer; its parameters are registered in another order."""

    def __init__(self, depth):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 4, 2, bias=False)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(4, bias=False),
                    "mlp": nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)),
                }
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.pos_embed = nn.Parameter(torch.zeros(4))


def test_the_layers_of_a_vision_transformer_are_those_of_beit():
    blocks = {
        f"blocks.{i}.{name}": i + 1
        for i in range(3)
        for name in ("norm.weight", "mlp.0.weight", "mlp.1.weight")
    }
    ends = {"norm.weight": 4, "head.weight": 4}
    assert numbers_of(ViT(3)) == {"pos_embed": 0, "patch_embed.weight": 0, **blocks, **ends}


def test_the_layers_of_a_sequential_are_its_children_and_norms_belong_to_the_one_before():
    block = nn.Sequential(nn.Linear(2, 2, False), nn.LayerNorm(2, bias=False))
    stack = nn.Sequential(nn.Linear(2, 2, False), nn.ReLU(), block, nn.Linear(2, 2, False))
    numbers = {"0.weight": 1, "2.0.weight": 2, "2.1.weight": 2, "3.weight": 3}
    assert numbers_of(stack) == numbers
    model = nn.ModuleDict({"features": stack, "classifier": nn.Linear(2, 2, False)})
    numbers = {f"features.{name}": number for name, number in numbers.items()}
    assert numbers_of(model) == {**numbers, "classifier.weight": 4}


def test_what_is_between_two_stacks_belongs_to_the_layer_before_and_shared_layers_count_once():
    layer = nn.Linear(2, 2, False)
    first, second = nn.Sequential(layer, layer), nn.Sequential(layer, nn.Linear(2, 2, False))
    modules = {"first": first, "between": nn.Linear(2, 2, False), "second": second}
    numbers = {"first.0.weight": 1, "between.weight": 1, "second.1.weight": 2}
    assert numbers_of(nn.ModuleDict(modules)) == numbers


def test_layer_decay_counts_once_for_each_layer_above_and_multiplies_the_rest():
    groups = groups_of(nn.DataParallel(ViT(2)), LAYER_DECAY=0.5, LR_FACTORS=("head.*=10",))
    rates = {name: lr for name, (lr, _) in groups.items()}
    assert rates.pop("head.weight") == 1.0
    assert rates.pop("norm.weight") == 0.1
    for name, rate in rates.items():
        layer = {"blocks.0": 1, "blocks.1": 2}.get(name[: len("blocks.0")], 0)
        assert rate == pytest.approx(0.1 * 0.5 ** (3 - layer))


def test_the_rate_that_is_logged_is_that_of_a_group_without_factors():
    cfg = settings(LAYER_DECAY=0.5, BASE_LR=0.1)
    assert build_optimizer(cfg, ViT(2)).param_groups[0]["lr"] == 0.1


def test_layer_decay_without_layers_is_refused():
    message = error_of(build_optimizer, settings(LAYER_DECAY=0.5), nn.Linear(2, 2))
    assert message.startswith("SOLVER.LAYER_DECAY: 0.5")


def test_a_model_without_anything_to_train_is_refused():
    assert "to be trained" in error_of(build_optimizer, settings(), nn.ReLU())


def test_the_groups_are_logged_as_a_table(caplog):
    caplog.set_level("INFO", logger="optimizer")
    model = nn.ModuleDict({name: nn.Linear(30, 40) for name in ("a", "b", "c", "d", "e")})
    model["b"].requires_grad_(False)
    build_optimizer(settings(WEIGHT_DECAY=0.5, LR_FACTORS=("c.weight=0.1",)), model)
    (message,) = caplog.messages
    assert [" ".join(line.split()) for line in message.splitlines()] == [
        "Groups of parameters for SGD:",
        "lr decay tensors parameters names",
        "0.1 0.5 7 3,760 a.weight, a.bias, c.bias, ...",
        "0.01 0.5 1 1,200 c.weight",
        "frozen 2 1,240 b.weight, b.bias",
    ]


# Which optimizer

# Those that take any gradient of the loop.
KINDS = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "NAdam", "RAdam"]
KINDS += ["Adamax", "ASGD", "Rprop", "Muon"]
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]
DECAY_FREE = {"WEIGHT_DECAY": 0.0, "WEIGHT_DECAY_BIAS": 0.0}


def settings_for(name, **solver):
    decay = DECAY_FREE if name == "Rprop" else {}
    return settings(**{"OPTIMIZER": name, "BASE_LR": 0.01, **decay, **solver})


def test_every_optimizer_of_torch_is_possible_or_refused_with_a_reason():
    names = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    assert names - {"Optimizer"} <= {*KINDS, "LBFGS", "SparseAdam"}
    for name, reason in (("LBFGS", "closure"), ("SparseAdam", "sparse")):
        message = error_of(setup_optimizer, settings(OPTIMIZER=name))
        assert f"SOLVER.OPTIMIZER: {name}" in message
        assert reason in message


@pytest.mark.parametrize("name", KINDS)
def test_the_optimizer_has_the_settings(name):
    solver = {"BASE_LR": 0.5, "MOMENTUM": 0.75, "BETAS": (0.5, 0.75)}
    wanted = {"lr": 0.5, "momentum": 0.75, "betas": (0.5, 0.75)}
    if name != "Rprop":
        solver["WEIGHT_DECAY"] = wanted["weight_decay"] = 0.125
    if name in ("SGD", "Muon"):
        solver["NESTEROV"] = wanted["nesterov"] = True
    optimizer = build_optimizer(settings_for(name, **solver), nn.Linear(2, 2, bias=False))
    assert type(optimizer).__name__ == name
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in wanted if key in group} == {
        key: value for key, value in wanted.items() if key in group
    }
    assert bool(group.get("fused")) == (name in FUSED)
    if "foreach" in group:
        assert bool(group["foreach"]) == (name not in (*FUSED, "Adafactor"))


def test_a_class_of_the_file_is_known_by_its_name_with_its_own_arguments():
    class Halving(torch.optim.SGD):
        __module__ = "optimizer"

        def __init__(self, params, lr, weight_decay=0.0, warmth: int = 3):
            super().__init__(params, lr, weight_decay=weight_decay)
            self.warmth = warmth

    optimizer = build_optimizer(settings_for("Halving", OPTIMIZER_ARGS="warmth=5"), Net("a"))
    assert (type(optimizer), optimizer.warmth) == (Halving, 5)
    assert "warmth" in error_of(
        setup_optimizer, settings_for("Halving", OPTIMIZER_ARGS="warmth=0.5")
    )


def test_other_arguments_are_as_in_python_and_reach_every_group():
    text = "eps=1e-6, amsgrad=True,maximize = True"
    optimizer = build_optimizer(settings_for("Adam", OPTIMIZER_ARGS=text), nn.Linear(2, 2))
    for group in optimizer.param_groups:
        assert (group["eps"], group["amsgrad"], group["maximize"]) == (1e-6, True, True)
    for name, text, wanted in (
        ("Rprop", "etas=(0.25, 1.5)", {"etas": (0.25, 1.5)}),
        ("Adafactor", "eps=(None, 1e-4), d=2", {"eps": (None, 1e-4), "d": 2}),
        ("Muon", "adjust_lr_fn='match_rms_adamw', ns_steps=3", {"ns_steps": 3}),
        ("AdamW", "foreach=True", {"foreach": True, "fused": None}),
        ("SGD", "", {"dampening": 0}),
    ):
        _, arguments = setup_optimizer(settings_for(name, OPTIMIZER_ARGS=text))
        made = build_optimizer(settings_for(name, OPTIMIZER_ARGS=text), nn.Linear(2, 2, bias=False))
        assert {key: made.param_groups[0][key] for key in wanted} == wanted
        assert "params" not in arguments


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        ({"OPTIMIZER": "adamw"}, ("SOLVER.OPTIMIZER: 'adamw'", "mean AdamW?", "SGD")),
        ({"OPTIMIZER": "Optimizer"}, ("SOLVER.OPTIMIZER: 'Optimizer'", "AdamW")),
        ({"OPTIMIZER": ""}, ("SOLVER.OPTIMIZER: ''", "AdamW")),
        ({"OPTIMIZER_ARGS": "dampning=0.1"}, ("dampning", "SGD", "dampening?", "maximize")),
        ({"OPTIMIZER_ARGS": "dampening='a'"}, ("dampening: 'a'", "float")),
        ({"OPTIMIZER_ARGS": "dampening=True"}, ("dampening: True", "float")),
        ({"OPTIMIZER_ARGS": "dampening=1e999"}, ("dampening: inf", "float")),
        ({"OPTIMIZER_ARGS": "maximize=1"}, ("maximize: 1", "bool")),
        ({"OPTIMIZER": "Adam", "OPTIMIZER_ARGS": "eps=-1"}, ("'eps=-1'", "Adam", "epsilon")),
        ({"OPTIMIZER": "Rprop", "OPTIMIZER_ARGS": "etas=(0.5,)", **DECAY_FREE}, ("etas", "tuple")),
        ({"OPTIMIZER": "Muon", "OPTIMIZER_ARGS": "ns_steps=1.5"}, ("ns_steps: 1.5", "int")),
        ({"OPTIMIZER": "Muon", "OPTIMIZER_ARGS": "ns_steps=500"}, ("'ns_steps=500'", "Muon")),
        ({"OPTIMIZER": "Muon", "OPTIMIZER_ARGS": "adjust_lr_fn='x'"}, ("Muon", "adjust")),
        *(
            ({"OPTIMIZER_ARGS": text}, ("SOLVER.OPTIMIZER_ARGS: ", "must be as in Python"))
            for text in ("a", "a=", "a=1 b=2", "a=1, a=2", "**{}", "a=1)(b=2", "a=b", "a=\0")
        ),
        *(
            ({"OPTIMIZER": "AdamW", "OPTIMIZER_ARGS": f"{argument}=0"}, (f"SOLVER.{key} ",))
            for argument, key in SETTINGS.items()
        ),
        ({"OPTIMIZER_ARGS": "capturable=True"}, ("capturable: SGD has no such", "foreach")),
        *(
            ({"OPTIMIZER": "AdamW", "OPTIMIZER_ARGS": text}, (f"{argument}: is chosen ",))
            for argument, text in (
                *(("fused", "fused=False"), ("capturable", "capturable=True")),
                *(("differentiable", "differentiable=True"), ("params", "params=0")),
            )
        ),
        ({"OPTIMIZER": "Rprop"}, ("SOLVER.WEIGHT_DECAY: 0.0001", "set 0.0")),
        ({"OPTIMIZER": "AdamW", "NESTEROV": True}, ("SOLVER.NESTEROV: True", "set False")),
        ({"NESTEROV": True, "OPTIMIZER_ARGS": "dampening=0.5"}, ("'dampening=0.5'", "esterov")),
        ({"OPTIMIZER": "RMSprop", "NONFINITE": "skip"}, ("SOLVER.NONFINITE: 'skip'", "AdamW")),
        ({"OPTIMIZER_ARGS": "foreach=True", "NONFINITE": "skip"}, ("SOLVER.NONFINITE", "fused")),
    ],
)
def test_an_impossible_optimizer_or_argument_is_one_line_that_tells_what_is_possible(solver, words):
    message = error_of(setup_optimizer, settings(**solver))
    for word in words:
        assert word in message


def test_the_command_refuses_an_argument_before_it_makes_a_folder(tmp_path):
    with pytest.raises(SettingsError, match="dampening"):
        train_here(tmp_path / "run", "SOLVER.OPTIMIZER_ARGS dampning=0.1")
    assert not (tmp_path / "run").exists()


def test_a_model_that_the_optimizer_does_not_take_is_refused_in_one_line():
    message = error_of(build_optimizer, settings_for("Muon"), nn.Linear(2, 2))
    assert message.startswith("SOLVER.OPTIMIZER: Muon")
    assert "2D" in message
    assert message.endswith(": SGD or AdamW takes any parameters")


# Resuming the optimizer


class Net(nn.Module):
    """Four parameters of one shape; gradients are told by ``marked``."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            norm = name.startswith("norm")
            self.add_module(name, nn.LayerNorm(1, bias=False) if norm else nn.Linear(1, 1, False))


def trained(cfg, model, gradients):
    """An optimizer after one step with these gradients, by name."""
    optimizer = build_optimizer(cfg, model)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, gradients[name])
    optimizer.step()
    return optimizer


def momenta(optimizer, model):
    """{name: its momentum, rounded}"""
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return {
        name: round(state["momentum_buffer"].item())
        for name, state in states.items()
        if state.get("momentum_buffer") is not None
    }


GRADIENTS = {"a.weight": 10.0, "norm.weight": 20.0, "b.weight": 30.0, "c.weight": 40.0}


def test_momenta_are_restored_by_name_even_if_groups_and_order_changed():
    model = Net("a", "norm", "b", "c")
    saved = trained(settings(WEIGHT_DECAY_NORM=0.0), model, GRADIENTS).state_dict()
    for names, decay in ((("a", "norm", "b", "c"), 1e-4), (("c", "norm", "a", "b"), 0.5)):
        other = Net(*names)
        optimizer = build_optimizer(settings(WEIGHT_DECAY_NORM=decay), other)
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert momenta(optimizer, other) == GRADIENTS


def test_a_parameter_that_is_new_starts_anew_with_a_warning(caplog):
    saved = trained(settings(), Net("a", "b"), GRADIENTS).state_dict()
    other = Net("a", "new", "b")
    optimizer = build_optimizer(settings(), other)
    optimizer.load_state_dict(saved)
    assert momenta(optimizer, other) == {"a.weight": 10, "new.weight": 0, "b.weight": 30}
    assert "new.weight" in caplog.text
    assert "a.weight" not in caplog.text


@pytest.mark.parametrize("name", KINDS)
def test_a_parameter_that_was_frozen_before_a_resume_is_trained_after_it(name):
    cfg, model = settings_for(name), Net("a", "b")
    model.b.requires_grad_(False)
    gradients = {"a.weight": 10.0, "b.weight": 0.0}
    saved = trained(cfg, model, gradients).state_dict()
    model.b.requires_grad_(True)
    before = model.b.weight.item()
    optimizer = build_optimizer(cfg, model)
    optimizer.load_state_dict(saved)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert model.b.weight.item() < before


def test_a_parameter_that_is_frozen_now_is_no_error():
    saved = trained(settings(), Net("a", "b", "c"), GRADIENTS).state_dict()
    other = Net("a", "b", "c")
    other.b.requires_grad_(False)
    optimizer = build_optimizer(settings(), other)
    optimizer.load_state_dict(saved)
    assert momenta(optimizer, other) == {"a.weight": 10, "c.weight": 40}


def test_a_parameter_that_is_frozen_now_gives_its_state_to_no_other_in_the_next_resume():
    saved = trained(settings(), Net("a", "b", "norm"), GRADIENTS).state_dict()
    other = Net("norm", "a", "b")
    other.b.requires_grad_(False)
    for _ in range(2):
        optimizer = build_optimizer(settings(), other)
        optimizer.load_state_dict(saved)
        saved = copy.deepcopy(optimizer.state_dict())
    assert momenta(optimizer, other) == {"norm.weight": 20, "a.weight": 10}


def test_edited_settings_win_over_those_of_the_file():
    model = Net("a", "b")
    saved = trained(settings(), model, GRADIENTS).state_dict()
    cfg = settings(BASE_LR=0.75, WEIGHT_DECAY=0.25, MOMENTUM=0.5, NESTEROV=True)
    optimizer = build_optimizer(cfg, model)
    optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.75, 0.25)
    assert (group["momentum"], group["nesterov"]) == (0.5, True)
    assert momenta(optimizer, model) == {"a.weight": 10, "b.weight": 30}


def test_edited_arguments_win_over_those_of_the_file_and_begin_their_state_at_zero():
    for name, text, key in (
        ("AdamW", "amsgrad=True", "max_exp_avg_sq"),
        ("RMSprop", "centered=True", "grad_avg"),
    ):
        model = Net("a", "b")
        saved = trained(settings_for(name), model, GRADIENTS).state_dict()
        optimizer = build_optimizer(settings_for(name, OPTIMIZER_ARGS=text), model)
        optimizer.load_state_dict(saved)
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        assert [state[key].item() for state in states] == [0, 0]
        optimizer.step()
        saved = optimizer.state_dict()
        assert all(state[key].item() > 0 for state in states)
        optimizer = build_optimizer(settings_for(name), model)
        optimizer.load_state_dict(saved)
        assert not any(key in optimizer.state[parameter] for parameter in model.parameters())
        optimizer.step()


def test_a_momentum_that_is_turned_on_by_an_edit_begins_at_zero():
    for name in ("SGD", "RMSprop"):
        model = Net("a", "b")
        saved = trained(settings_for(name, MOMENTUM=0.0), model, GRADIENTS).state_dict()
        optimizer = build_optimizer(settings_for(name), model)
        optimizer.load_state_dict(saved)
        assert momenta(optimizer, model) == {"a.weight": 0, "b.weight": 0}


@pytest.mark.parametrize(("saved", "now"), [("SGD", "AdamW"), ("Adam", "AdamW"), ("AdamW", "Adam")])
def test_the_state_of_another_optimizer_is_refused_with_both_names(saved, now):
    model = Net("a")
    state = trained(settings(OPTIMIZER=saved), model, GRADIENTS).state_dict()
    optimizer = build_optimizer(settings(OPTIMIZER=now), model)
    message = error_of(optimizer.load_state_dict, state)
    assert message.startswith(f"SOLVER.OPTIMIZER: {now}: {saved} was saved")


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_optimizer_goes_on_as_if_it_had_not_stopped_to_the_bit(name):
    args = {"Adam": "amsgrad=True", "RMSprop": "centered=True"}.get(name, "")
    cfg = settings_for(name, OPTIMIZER_ARGS=args, LR_FACTORS=("1.weight=0.5",), BASE_LR=0.1)
    bias = name != "Muon"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias), nn.Linear(4, 2, bias))
    optimizer = build_optimizer(cfg, model)

    def step(model, optimizer, number):
        optimizer.zero_grad()
        (model(torch.arange(3.0) - number) - number).square().sum().backward()
        optimizer.step()

    for number in range(3):
        step(model, optimizer, number)
    other, file = copy.deepcopy(model), io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = build_optimizer(cfg, other)
    resumed.load_state_dict(torch.load(file))
    for number in range(3, 9):
        step(model, optimizer, number)
        step(other, resumed, number)
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)
        assert optimizer.state[one].keys() == resumed.state[two].keys()


# Gradients


def test_a_scaler_that_is_off_passes_everything_through():
    model = nn.Linear(1, 1, bias=False)
    for amp, dtype in ((False, "float16"), (True, "bfloat16")):
        cfg = settings(MOMENTUM=0.0, BASE_LR=1.0, WEIGHT_DECAY=0.0)
        cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE = amp, dtype
        scaler = build_grad_scaler(cfg, model)
        loss = model(torch.ones(1)).sum()
        assert scaler.scale(loss) is loss
        optimizer = build_optimizer(cfg, model)
        before = model.weight.item()
        loss.backward()
        scaler.unscale_(optimizer)
        assert model.weight.grad.item() == 1.0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert model.weight.item() == pytest.approx(before - 1.0)
        assert scaler.state_dict() == {}


def test_float16_scales_the_loss_and_skips_a_step_that_overflows():
    cfg = settings(MOMENTUM=0.0, BASE_LR=1.0)
    cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE = True, "float16"
    model = nn.Linear(1, 1, bias=False)
    scaler = build_grad_scaler(cfg, model)
    optimizer, before = build_optimizer(cfg, model), model.weight.item()
    scaler.scale(model(torch.full((1,), math.inf)).sum()).backward()
    scaler.unscale_(optimizer)
    scale = scaler.get_scale()
    with EventStorage() as storage:
        scaler.step(optimizer)
        scaler.update()
    assert storage.latest()["grad_scale"][0] == scale
    assert scale > 1
    assert scaler.get_scale() < scale
    assert model.weight.item() == before


@pytest.mark.parametrize(
    ("enabled", "name", "dtype"),
    [
        (False, "float16", torch.float32),
        (True, "float16", torch.float16),
        (True, "bfloat16", torch.bfloat16),
    ],
)
def test_mixed_precision_is_of_the_chosen_type_again_and_again(enabled, name, dtype):
    cfg = settings()
    cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE = enabled, name
    autocast = build_autocast(cfg)
    for _ in range(2):
        with autocast:
            assert nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == dtype
        assert nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32


def test_only_entries_with_loss_in_their_name_are_summed():
    values = {"loss_cls": 1.0, "aux_loss": 2.0, "accuracy": 9.0}
    assert sum_losses({name: torch.tensor(v) for name, v in values.items()}).item() == 3.0
    assert sum_losses({"loss": torch.tensor(4.0)}).item() == 4.0


@pytest.mark.parametrize(
    "losses", [{}, {"acc": torch.tensor(1.0)}, {"total_loss": torch.tensor(1.0)}]
)
def test_a_dict_without_losses_or_with_their_sum_is_an_error_that_shows_it(losses):
    with pytest.raises(ValueError, match="total_loss") as caught:
        sum_losses(losses)
    assert all(name in str(caught.value) for name in losses)


# Gradients between backward and step


def with_gradients(num_parameters):
    """A model of so many parameters with gradients, one more without, and its optimizer."""
    generator = torch.Generator().manual_seed(num_parameters)
    model = nn.ParameterList(torch.zeros(3, 2) for _ in range(num_parameters + 1))
    for parameter in list(model)[1:]:
        parameter.grad = torch.randn(3, 2, generator=generator)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.mark.parametrize("max_norm", [0.5, 100.0, math.inf])
@pytest.mark.parametrize("max_value", [0.25, 100.0, math.inf])
@pytest.mark.parametrize("num_parameters", [3, 40])
def test_values_and_then_the_norm_of_all_gradients_are_clipped_as_torch_does(
    num_parameters, max_value, max_norm
):
    model, optimizer = with_gradients(num_parameters)
    expected, _ = with_gradients(num_parameters)
    whole = torch.cat([p.grad.flatten() for p in expected if p.grad is not None]).norm()
    nn.utils.clip_grad_value_(expected.parameters(), max_value)
    nn.utils.clip_grad_norm_(expected.parameters(), max_norm)
    norms = Gradients(optimizer, max_value, max_norm).clip()
    assert torch.stack(norms).norm() == pytest.approx(whole.item())  # of before
    for ours, theirs in zip(model, expected):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad)


def test_gradients_are_clipped_by_the_settings_and_then_cleared():
    model, optimizer = with_gradients(3)
    cfg = get_cfg()
    cfg.SOLVER.CLIP_GRAD_VALUE, cfg.SOLVER.CLIP_GRAD_NORM = 0.25, 0.5
    gradients = build_gradients(cfg, optimizer)
    gradients.clip()
    vector = torch.cat([p.grad.flatten() for p in model if p.grad is not None])
    assert vector.abs().max() <= 0.25
    assert vector.norm() == pytest.approx(0.5, rel=1e-4)
    gradients.clear()
    assert [p.grad for p in model] == [None] * 4


def test_a_resume_into_another_memory_layout_keeps_the_momenta():
    cfg = settings(MOMENTUM=0.9)
    saved, plain, other = (nn.Conv2d(3, 4, 3, bias=False) for _ in range(3))
    other.to(memory_format=torch.channels_last)
    optimizers = [build_optimizer(cfg, model) for model in (saved, plain, other)]
    saved.weight.grad = torch.arange(108.0).reshape(4, 3, 3, 3)
    optimizers[0].step()
    for model, optimizer in zip((plain, other), optimizers[1:]):
        model.load_state_dict(saved.state_dict())
        optimizer.load_state_dict(optimizers[0].state_dict())
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    assert torch.equal(plain.weight, other.weight)


@pytest.mark.parametrize("float16", [False, True])
def test_clipping_by_value_hides_no_infinite_gradient_from_the_skip(float16):
    cfg = settings(NONFINITE="skip", CLIP_GRAD_VALUE=1.0)
    cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE = float16, "float16"
    model = nn.Linear(1, 1, bias=False)
    optimizer, before = build_optimizer(cfg, model), model.weight.item()
    scaler, gradients = build_grad_scaler(cfg, model), build_gradients(cfg, optimizer)
    with EventStorage() as storage:
        scaler.scale(model(torch.full((1,), math.inf)).sum()).backward()
        scaler.unscale_(optimizer)
        gradients.clip()
        scaler.step(optimizer)
        scaler.update()
    assert storage.latest()["skips"] == (1.0, 0)
    assert model.weight.item() == before


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_float16_may_be_turned_on_by_a_resume(nonfinite):
    cfg = settings(NONFINITE="skip")
    saved = build_grad_scaler(cfg, nn.Linear(1, 1)).state_dict()
    cfg.SOLVER.NONFINITE = nonfinite
    cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE = True, "float16"
    scaler = build_grad_scaler(cfg, nn.Linear(1, 1))
    scale = scaler.get_scale()
    scaler.load_state_dict(saved)
    assert scaler.get_scale() == scale


@pytest.mark.parametrize("losses", [{"loss": 0.5}, {"loss": torch.ones(2)}, torch.ones(()), {}])
def test_what_is_no_dict_of_scalar_tensors_is_one_error(losses):
    with pytest.raises(ValueError, match="must return a dict of scalar tensors"):
        sum_losses(losses)


def test_float16_without_a_finite_gradient_for_long_is_an_error_in_the_end():
    cfg = settings()
    cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE = True, "float16"
    model = nn.Linear(1, 1, bias=False)
    optimizer, scaler = build_optimizer(cfg, model), build_grad_scaler(cfg, model)
    with EventStorage() as storage:
        for storage.iter in range(60):
            scaler.scale(model(torch.full((1,), math.nan)).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        with pytest.raises(NonFiniteError, match="iteration 5[0-9] .*grad_scale nan"):
            storage.reduce(scaler.must_be_finite)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("float16", [False, True])
def test_every_fused_optimizer_leaves_out_the_steps_of_bad_gradients(name, float16):
    cfg = settings(NONFINITE="skip", OPTIMIZER=name, MOMENTUM=0.0)
    cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE = float16, "float16"
    model = nn.Linear(1, 1, bias=False)
    optimizer, scaler = build_optimizer(cfg, model), build_grad_scaler(cfg, model)
    moved = []
    with EventStorage() as storage:
        for storage.iter, value in enumerate((math.nan, 1.0, math.nan, 1.0)):
            before = model.weight.item()
            scaler.scale(model(torch.full((1,), value)).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved.append(model.weight.item() != before)
    assert moved == [False, True, False, True]
    assert storage.latest()["skips"] == (2.0, 3)
