"""Optimizers and schedulers resume exactly: state by names, settings of the present run."""

import copy
import inspect
import logging
import re

import pytest
import torch
from plumbing.checkpoint import Checkpointer, load_file
from plumbing.checkpoint.archive import save_file
from plumbing.checkpoint.optimizer_state import check_parameter_state, parameter_names
from plumbing.checkpoint.scheduler_state import load_scheduler, save_scheduler
from plumbing.errors import SettingsError
from plumbing.schedule import LRMultiplier
from torch import nn
from torch.optim import lr_scheduler

KINDS = [
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "LBFGS")
]
# So that an optimizer keeps all that it can.
OPTIONS = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "RMSprop": {"centered": True, "momentum": 0.9},
}


def build(name, parameters, **options):
    return getattr(torch.optim, name)(parameters, lr=0.1, **{**OPTIONS.get(name, {}), **options})


class Net(nn.Module):
    """Parameters of one shape, (1, 1), by name."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(1, 1, bias=False))


def sgd(model, groups=None, **options):
    options = {"lr": 0.1, "momentum": 0.9, **options}
    return torch.optim.SGD(groups or model.named_parameters(), **options)


GRADIENTS = {"a.weight": 10.0, "norm.weight": 20.0, "b.weight": 30.0, "c.weight": 40.0}


def step(model, optimizer):
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, GRADIENTS[name])
    optimizer.step()


def momenta(optimizer, model):
    """{name: its momentum, rounded}"""
    found = {}
    for name, parameter in model.named_parameters():
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if momentum is not None:
            found[name] = round(momentum.item())
    return found


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="plumbing.checkpoint")
    return lambda: caplog.messages


@pytest.fixture
def resume(folder):
    """resume(model, optimizer, saved model, saved optimizer) by way of a file."""

    def call(model, optimizer, saved_model, saved_optimizer):
        Checkpointer(saved_model, folder, optimizer=saved_optimizer).save("x", iteration=1)
        # A model that has changed would be refused by a resume.
        checkpointer = Checkpointer(model, folder, optimizer=optimizer)
        checkpointer.load(f"{folder}/x.pth")

    return call


# By name


def test_momenta_are_restored_by_name_even_if_groups_and_order_changed(resume):
    saved = Net("a", "norm", "b", "c")
    optimizer = sgd(saved)
    step(saved, optimizer)
    for names, at in ((("a", "norm", "b", "c"), 1), (("c", "norm", "a", "b"), 2)):
        model = Net(*names)
        parameters = list(model.named_parameters())
        groups = [{"params": parameters[at:]}, {"params": parameters[:at]}]
        other = sgd(model, groups)
        resume(model, other, saved, optimizer)
        assert momenta(other, model) == GRADIENTS


@pytest.mark.parametrize("is_named", [(True, False), (False, True), (False, False)])
def test_parameters_that_an_optimizer_got_without_names_have_those_of_the_model(resume, is_named):
    models = [Net("a", "b", "c"), Net("c", "a", "b")]
    optimizers = []
    for model, named in zip(models, is_named):
        optimizers.append(sgd(model, None if named else list(model.parameters())))
    step(models[0], optimizers[0])
    resume(models[1], optimizers[1], models[0], optimizers[0])
    assert momenta(optimizers[1], models[1]) == {"a.weight": 10, "b.weight": 30, "c.weight": 40}


def test_a_model_that_was_wrapped_for_several_ranks_has_the_names_of_the_bare_one():
    model = Net("a", "b")
    optimizer = sgd(model, list(nn.DataParallel(model).named_parameters()))
    assert parameter_names(optimizer, {"model": model}) == [["a.weight", "b.weight"]]


def test_parameters_of_other_modules_are_named_after_them_and_unknown_ones_by_position():
    model, head = Net("a"), Net("a")
    alone = nn.Parameter(torch.zeros(1))
    optimizer = sgd(model, [*model.parameters(), *head.parameters(), alone])
    names = parameter_names(optimizer, {"model": model, "head": head})
    assert names == [["a.weight", "head.a.weight", "parameter 2"]]


def test_equal_names_in_one_optimizer_are_told_apart(resume):
    def build():
        first, second = Net("a"), Net("a")
        groups = [{"params": list(net.named_parameters())} for net in (first, second)]
        return first, second, sgd(first, groups)

    first, second, optimizer = build()
    step(first, optimizer)
    second.a.weight.grad = torch.full((1, 1), 77.0)
    first.a.weight.grad = None
    optimizer.step()
    model, other, resumed = build()
    resume(model, resumed, first, optimizer)
    assert momenta(resumed, model) == {"a.weight": 10}
    assert momenta(resumed, other) == {"a.weight": 77}


def test_a_file_without_names_goes_by_position(folder):
    saved = Net("a", "b")
    optimizer = sgd(saved, list(saved.parameters()))
    step(saved, optimizer)
    content = {"model": saved.state_dict(), "optimizer": optimizer.state_dict(), "iteration": 1}
    torch.save(content, f"{folder}/model_0000001.pth")
    model = Net("a", "b")
    other = sgd(model)
    Checkpointer(model, folder, optimizer=other).resume_or_load("")
    assert momenta(other, model) == {"a.weight": 10, "b.weight": 30}


def test_a_parameter_that_is_new_starts_anew_with_a_warning(resume, warnings):
    saved, model = Net("a", "b"), Net("a", "new", "b")
    optimizer, other = sgd(saved), sgd(model)
    step(saved, optimizer)
    resume(model, other, saved, optimizer)
    assert momenta(other, model) == {"a.weight": 10, "b.weight": 30}
    assert "The optimizer starts anew for new.weight" in warnings()


def test_a_parameter_that_was_frozen_before_a_resume_is_trained_after_it(resume):
    for name in KINDS:
        saved = Net("a", "b")
        saved.b.requires_grad_(False)
        optimizer = build(name, saved.a.parameters())
        step(saved, optimizer)
        model = Net("a", "b")
        other = build(name, model.parameters())
        resume(model, other, saved, optimizer)
        before = model.b.weight.item()
        step(model, other)
        assert model.b.weight.item() < before, name


def test_a_parameter_that_is_frozen_now_gives_its_state_to_no_other_in_the_next_resume(resume):
    saved = Net("a", "b", "norm")
    optimizer = sgd(saved)
    step(saved, optimizer)
    for _ in range(2):
        model = Net("norm", "a", "b")
        other = sgd(model, [*model.norm.parameters(), *model.a.parameters()])
        resume(model, other, saved, optimizer)
        saved, optimizer = model, other
    assert momenta(optimizer, saved) == {"norm.weight": 20, "a.weight": 10}


# Settings


def test_edited_settings_win_over_those_of_the_file(resume):
    saved, model = Net("a", "b"), Net("a", "b")
    optimizer = sgd(saved)
    step(saved, optimizer)
    other = sgd(model, lr=0.75, weight_decay=0.25, momentum=0.5, nesterov=True)
    (group,) = other.param_groups
    resume(model, other, saved, optimizer)
    # The same object: a scheduler may hold it.
    assert other.param_groups[0] is group
    assert (group["lr"], group["weight_decay"]) == (0.75, 0.25)
    assert (group["momentum"], group["nesterov"]) == (0.5, True)
    assert momenta(other, model) == {"a.weight": 10, "b.weight": 30}


@pytest.mark.parametrize(
    ("name", "off", "on", "key"),
    [
        ("AdamW", {}, {"amsgrad": True}, "max_exp_avg_sq"),
        ("RMSprop", {"centered": False}, {"centered": True}, "grad_avg"),
        ("RMSprop", {"momentum": 0.0}, {"momentum": 0.9}, "momentum_buffer"),
    ],
)
def test_what_an_edited_setting_keeps_begins_at_zero_and_goes_when_it_is_off(
    resume, name, off, on, key
):
    def edited(saved, optimizer, options):
        model = Net("a", "b")
        other = build(name, model.parameters(), **options)
        resume(model, other, saved, optimizer)
        return model, other, [other.state[parameter] for parameter in model.parameters()]

    model = Net("a", "b")
    optimizer = build(name, model.parameters(), **off)
    step(model, optimizer)
    model, optimizer, states = edited(model, optimizer, on)
    assert [state[key].item() for state in states] == [0, 0]
    step(model, optimizer)
    assert all(state[key].item() > 0 for state in states)
    model, optimizer, states = edited(model, optimizer, off)
    assert not any(key in state for state in states)
    step(model, optimizer)


@pytest.mark.parametrize(("saved", "now"), [("SGD", "AdamW"), ("Adam", "AdamW"), ("AdamW", "Adam")])
def test_the_state_of_another_optimizer_is_refused_with_both_names(resume, saved, now):
    model = Net("a")
    optimizer = build(saved, model.parameters())
    step(model, optimizer)
    with pytest.raises(SettingsError) as caught:
        resume(model, build(now, model.parameters()), model, optimizer)
    words = f"--resume: the optimizer is {now}, and .*x.pth holds the state of {saved}: go back to"
    assert re.match(words, str(caught.value))


# To the bit


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["plain", "foreach", "fused"])
def test_a_resumed_optimizer_goes_on_as_if_it_had_not_stopped_to_the_bit(folder, name, kind):
    options = {} if kind == "plain" else {kind: True}
    if not set(options) <= set(inspect.signature(getattr(torch.optim, name)).parameters):
        pytest.skip(f"{name} has no {kind}")
    if name == "Adafactor" and kind == "foreach":
        pytest.skip("which is not for it")
    torch.manual_seed(0)
    # Muon takes no vectors.
    model = nn.Sequential(nn.Linear(3, 4, name != "Muon"), nn.Linear(4, 2, name != "Muon"))
    optimizer = build(name, model.named_parameters(), **options)

    def train(model, optimizer, number):
        optimizer.zero_grad()
        (model(torch.arange(3.0) - number) - number).square().mean().div(100).backward()
        optimizer.step()

    for number in range(3):
        train(model, optimizer, number)
    Checkpointer(model, folder, optimizer=optimizer).save("x", iteration=2)
    other = copy.deepcopy(model)
    resumed = build(name, other.named_parameters(), **options)
    Checkpointer(other, folder, optimizer=resumed).resume_or_load("")
    for number in range(3, 9):
        train(model, optimizer, number)
        train(other, resumed, number)
    for one, two in zip(model.parameters(), other.parameters()):
        assert one.isfinite().all()
        assert torch.equal(one, two)
        assert optimizer.state[one].keys() == resumed.state[two].keys()


class Averaging(torch.optim.Optimizer):
    """An optimizer as a researcher may write it: other types, other shapes, and a common state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})
        self.calls = 0

    @torch.no_grad()
    def step(self):
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["total"] = torch.zeros_like(parameter, dtype=torch.float64)
                    state["norms"] = torch.zeros(5)
                    state["history"] = []
                state["total"] += parameter.grad
                state["norms"][self.calls % 5] = parameter.grad.norm()
                state["history"].append(parameter.grad.clone())
                mean = state["total"] / self.calls + state["norms"].mean() + len(state["history"])
                parameter -= group["lr"] * mean

    def state_dict(self):
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
        super().load_state_dict(state)


def test_an_optimizer_of_ones_own_resumes_to_the_bit_with_its_types_shapes_and_other_state(folder):
    model = Net("a", "b")
    optimizer = Averaging(model.parameters())
    for _ in range(3):
        step(model, optimizer)
    Checkpointer(model, folder, optimizer=optimizer).save("x", iteration=2)
    other = copy.deepcopy(model)
    resumed = Averaging(list(other.parameters())[::-1])
    Checkpointer(other, folder, optimizer=resumed).resume_or_load("")
    assert resumed.state[other.a.weight]["total"].dtype == torch.float64
    for _ in range(3):
        step(model, optimizer)
        step(other, resumed)
    assert torch.equal(model.a.weight, other.a.weight)
    assert torch.equal(model.b.weight, other.b.weight)


def test_a_resume_into_another_memory_layout_keeps_the_momenta(resume):
    saved, plain, other = (nn.Conv2d(3, 4, 3, bias=False) for _ in range(3))
    other.to(memory_format=torch.channels_last)
    optimizer = sgd(saved, fused=True)
    saved.weight.grad = torch.arange(108.0).reshape(4, 3, 3, 3)
    optimizer.step()
    for model in (plain, other):
        resumed = sgd(model, fused=True)
        resume(model, resumed, saved, optimizer)
        state = resumed.state[model.weight]["momentum_buffer"]
        assert state.stride() == model.weight.stride()
        model.weight.grad = torch.zeros_like(model.weight)
        resumed.step()
    assert torch.equal(plain.weight, other.weight)


# Junk


def spoil_shape(state):
    state["state"][0]["exp_avg"] = torch.zeros(7)


def spoil_one_element(state):
    state["state"][0]["exp_avg_sq"] = torch.zeros(())


def spoil_type(state):
    state["state"][0]["exp_avg"] = "text"


def spoil_integers(state):
    state["state"][0]["exp_avg"] = torch.zeros(1, 1, dtype=torch.int64)


def spoil_step(state):
    state["state"][0]["step"] = torch.zeros(3)


def spoil_keys(state):
    del state["state"][0]["exp_avg"]


def spoil_state_of_one(state):
    state["state"][0] = 5


def spoil_state(state):
    state["state"] = [1, 2]


def spoil_groups(state):
    state["param_groups"] = [5]


def spoil_names(state):
    state["param_groups"][0]["param_names"] = ["a.weight"]


@pytest.mark.parametrize(
    "spoil",
    [value for name, value in list(globals().items()) if name.startswith("spoil_")],
)
def test_junk_in_a_file_with_a_good_checksum_is_one_line_and_no_abort(folder, spoil):
    model = Net("a", "b")
    optimizer = torch.optim.AdamW(model.named_parameters(), fused=True)
    step(model, optimizer)
    Checkpointer(model, folder, optimizer=optimizer).save("model_0000001", iteration=1)
    path = f"{folder}/model_0000001.pth"
    content = load_file(path)
    spoil(content["optimizer"])
    save_file(path, content)
    with pytest.raises(SettingsError, match=r"model_0000001\.pth") as caught:
        Checkpointer(model, folder, optimizer=optimizer).resume_or_load("")
    assert "\n" not in str(caught.value)


def test_the_state_of_every_optimizer_of_torch_is_as_it_is_checked():
    for name in KINDS:
        parameter = nn.Parameter(torch.zeros(3, 4))
        optimizer = build(name, [parameter])
        for _ in range(2):
            parameter.grad = torch.ones(3, 4)
            optimizer.step()
        check_parameter_state(optimizer, parameter, optimizer.state[parameter], name)


# Schedulers of torch

TORCH = {
    "step": lambda opt: lr_scheduler.StepLR(opt, 3, 0.5),
    "multistep": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 5], 0.5),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda i: 1 / (1 + i)),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.5, total_steps=12),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 0.1, 0.5, 3),
    "warm-up, then a cosine": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, 7)],
        [3],
    ),
    "two at once": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, "max", 0.5, patience=1),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR's own
def test_a_scheduler_of_torch_resumes_exactly(name, order, folder):
    def start():
        model = nn.Linear(1, 1)
        optimizer = sgd(model)
        return model, optimizer, TORCH[name](optimizer)

    def train(model, optimizer, scheduler, num):
        seen = []
        for _ in range(num):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            (group,) = optimizer.param_groups
            seen.append((group["lr"], group["momentum"], scheduler.get_last_lr()))
            scheduler.step(*[0.5] * (name == "plateau"))
        return seen

    straight = train(*start(), 11)
    model, optimizer, scheduler = start()
    train(model, optimizer, scheduler, 6)
    Checkpointer(model, folder, optimizer=optimizer, scheduler=scheduler).save("x", iteration=5)
    model, optimizer, scheduler = start()
    # Whichever of the two is loaded first.
    parts = [("optimizer", optimizer), ("scheduler", scheduler)][::order]
    Checkpointer(model, folder, **dict(parts)).resume_or_load("")
    assert train(model, optimizer, scheduler, 5) == straight[6:]
    assert len({rate for rate, *_ in straight}) > 1


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(folder):
    model = nn.Linear(1, 1)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = save_scheduler(scheduler)
    state["groups"][0]["lr"] = torch.tensor(0.125)
    load_scheduler(scheduler, state, "x.pth")
    assert optimizer.param_groups[0]["lr"].item() == 0.125
    saved = optimizer.param_groups[0]["lr"]
    load_scheduler(scheduler, save_scheduler(scheduler), "x.pth")
    assert optimizer.param_groups[0]["lr"] is saved


def test_a_resume_with_another_kind_of_scheduler_is_refused_in_one_line(folder):
    def parts(kind):
        model = nn.Linear(1, 1)
        optimizer = sgd(model)
        kinds = {**TORCH, "ours": lambda opt: LRMultiplier(opt, lambda iteration: 1.0)}
        return model, {"optimizer": optimizer, "scheduler": kinds[kind](optimizer)}

    for saved, now, words in (
        ("step", "cosine", "is CosineAnnealingLR, and .* holds the state of StepLR"),
        ("ours", "step", "is StepLR, and .* holds the state of a different kind"),
        ("step", "ours", "holds the state of StepLR as scheduler, which is a LRMultiplier now"),
    ):
        model, objects = parts(saved)
        Checkpointer(model, folder, **objects).save("x", iteration=1)
        model, objects = parts(now)
        with pytest.raises(SettingsError, match=words) as caught:
            Checkpointer(model, folder, **objects).resume_or_load("")
        assert "\n" not in str(caught.value)


def test_a_scheduler_of_other_groups_is_refused_in_one_line():
    def build(num_groups):
        groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(num_groups)]
        return lr_scheduler.StepLR(torch.optim.SGD(groups, 0.1), 3)

    with pytest.raises(SettingsError, match="has 2 groups of parameters, and .* x.pth has 1"):
        load_scheduler(build(2), save_scheduler(build(1)), "x.pth")
