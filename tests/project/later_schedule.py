"""The learning rate is a function of the iteration."""

import itertools
import json
import math
import re
import shutil
import sys
import types
import warnings

import pytest
import schedule
import torch
from conftest import ROOT, arguments, own_log, settings
from defaults import check_cfg
from optimizer import build_optimizer
from plumbing.comm import SettingsError
from schedule import LRMultiplier, MomentumCycle, build_lr_scheduler
from torch import nn
from torch.optim import lr_scheduler


def rates(num=None, model=None, **solver):
    cfg = settings(**{"BASE_LR": 1.0, **solver})
    scheduler = build_lr_scheduler(cfg, build_optimizer(cfg, model or nn.Linear(1, 1, bias=False)))
    values = []
    for _ in range(cfg.SOLVER.MAX_ITER + 1 if num is None else num):
        values.append(scheduler.get_last_lr()[0])
        scheduler.step()
    return values


def test_the_warm_up_is_linear_from_the_factor_to_the_full_rate():
    values = rates(12, LR_SCHEDULER_NAME="constant", WARMUP_ITERS=10, WARMUP_FACTOR=0.001)
    expected = [0.001, 0.1009, 0.2008, 0.3007, 0.4006, 0.5005, 0.6004, 0.7003, 0.8002, 0.9001, 1, 1]
    assert values == pytest.approx(expected, abs=1e-12)


def test_a_constant_warm_up_stays_at_the_factor():
    warm_up = {"WARMUP_ITERS": 3, "WARMUP_FACTOR": 0.25, "WARMUP_METHOD": "constant"}
    assert rates(5, LR_SCHEDULER_NAME="constant", **warm_up) == [0.25, 0.25, 0.25, 1, 1]


def test_a_warm_up_ends_at_the_rate_of_the_schedule():
    values = rates(MAX_ITER=10, WARMUP_ITERS=5, WARMUP_FACTOR=0.0)
    plain = rates(MAX_ITER=10)
    assert values[5:] == plain[5:]
    assert values[:5] == pytest.approx([plain[i] * i / 5 for i in range(5)])
    stepped = {"LR_SCHEDULER_NAME": "multistep", "STEPS": (2,), "GAMMA": 0.5}
    values = rates(6, WARMUP_ITERS=4, WARMUP_FACTOR=0.0, **stepped)
    assert values == [0, 0.25, 0.25, 0.375, 0.5, 0.5]


def test_a_warm_up_longer_than_the_run_is_no_error():
    values = rates(MAX_ITER=4, WARMUP_ITERS=8, LR_SCHEDULER_NAME="constant", WARMUP_FACTOR=0.0)
    assert values == [0.0, 0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), [1, 1, 1, 1, 1, 1]),
        ((2, 4), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ((4, 2), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ((0,), [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
        ((2, 2), [1, 1, 0.25, 0.25, 0.25, 0.25]),
        ((5,), [1, 1, 1, 1, 1, 0.5]),
        ((3, 99), [1, 1, 1, 0.5, 0.5, 0.5]),
    ],
)
def test_steps_may_be_zero_equal_at_the_end_or_past_it(steps, expected):
    schedule = {"LR_SCHEDULER_NAME": "multistep", "GAMMA": 0.5, "MAX_ITER": 5}
    assert rates(STEPS=steps, **schedule) == expected


def test_steps_of_a_long_run_are_exact():
    cfg = settings(LR_SCHEDULER_NAME="multistep", STEPS=(5_000_000,), MAX_ITER=10_000_000)
    scheduler = build_lr_scheduler(cfg, build_optimizer(cfg, nn.Linear(1, 1)))
    for iteration, expected in ((4_999_999, 0.1), (5_000_000, 0.01)):
        scheduler.load_state_dict({"iteration": iteration})
        assert scheduler.get_last_lr()[0] == pytest.approx(expected)


def test_a_cosine_falls_to_its_end_and_stays_there():
    values = rates(16, MAX_ITER=8, BASE_LR=2.0, BASE_LR_END=0.5)
    expected = [0.5 + 1.5 * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(9)]
    assert values == pytest.approx(expected + [0.5] * 7)
    assert values[4] == pytest.approx(1.25)


def test_every_group_keeps_its_ratio():
    cfg = settings(BASE_LR=0.5, BIAS_LR_FACTOR=2.0, MAX_ITER=4, WEIGHT_DECAY_BIAS=0.0)
    scheduler = build_lr_scheduler(cfg, build_optimizer(cfg, nn.Linear(1, 1)))
    for _ in range(4):
        weight, bias = scheduler.get_last_lr()
        assert bias == 2 * weight > 0
        scheduler.step()


def test_any_function_of_the_iteration_is_a_schedule():
    optimizer = torch.optim.SGD([{"params": torch.zeros(1), "lr": 2.0}], lr=1.0)
    scheduler = LRMultiplier(optimizer, lambda iteration: iteration + 1)
    assert scheduler.get_last_lr() == [2.0]
    scheduler.step()
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [4.0]


def test_a_state_of_the_schedule_is_its_iteration_alone():
    def build(max_iter):
        cfg = settings(BASE_LR=1.0, MAX_ITER=max_iter)
        optimizer = build_optimizer(cfg, nn.Linear(1, 1, bias=False))
        return build_lr_scheduler(cfg, optimizer), optimizer

    scheduler, _ = build(10)
    for _ in range(5):
        scheduler.step()
    longer, optimizer = build(20)
    longer.load_state_dict(scheduler.state_dict())
    assert longer.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    assert longer.get_last_lr() == pytest.approx([(1 + math.cos(math.pi / 4)) / 2])
    longer.step()
    assert longer.get_last_lr() == [rates(7, MAX_ITER=20)[6]]
    shorter, _ = build(3)
    shorter.load_state_dict(scheduler.state_dict())
    assert shorter.get_last_lr() == [0.0]


# Each schedule against torch's own, or an independent formula.


def torch_rates(num, build, momentum=0.9):
    """What a scheduler of torch sets in each iteration, from 1: rates, momenta."""
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0, momentum=momentum)
    scheduler, values = build(optimizer), []
    optimizer.step()
    for _ in range(num):
        values.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some call themselves in a way that they deprecate
            scheduler.step()
    return map(list, zip(*values))


LONG = 60
PEERS = {
    "multistep": (
        {"STEPS": (7, 30), "GAMMA": 0.3},
        lambda opt: lr_scheduler.MultiStepLR(opt, [7, 30], 0.3),
    ),
    "step": ({"STEP_SIZE": 7, "GAMMA": 0.5}, lambda opt: lr_scheduler.StepLR(opt, 7, 0.5)),
    "exponential": (
        {"STEP_SIZE": 10, "GAMMA": 0.5},
        lambda opt: lr_scheduler.ExponentialLR(opt, 0.5**0.1),
    ),
    "linear": (
        {"BASE_LR_END": 0.1},
        lambda opt: lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=LONG),
    ),
    "polynomial": ({"POWER": 2.5}, lambda opt: lr_scheduler.PolynomialLR(opt, LONG, 2.5)),
    "cosine": ({"BASE_LR_END": 0.1}, lambda opt: lr_scheduler.CosineAnnealingLR(opt, LONG, 0.1)),
    "cosine_restarts": (
        {"CYCLE_ITERS": 7, "CYCLE_GROWTH": 2, "BASE_LR_END": 0.1},
        lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 7, 2, 0.1),
    ),
    "flat_cosine": (
        {"FLAT_ITERS": 20, "BASE_LR_END": 0.1},
        lambda opt: lr_scheduler.LambdaLR(
            opt,
            lambda i: 1 if i < 20 else 0.1 + 0.9 * (1 + math.cos(math.pi * (i - 20) / 40)) / 2,
        ),
    ),
    "inverse_sqrt": (
        {"WARMUP_ITERS": 16, "WARMUP_FACTOR": 0.0},
        lambda opt: lr_scheduler.LambdaLR(
            opt, lambda i: 4 * min(max(i, 1) ** -0.5, i * 16**-1.5) if i else 0.0
        ),
    ),
    "constant": ({}, lambda opt: lr_scheduler.ConstantLR(opt, 1.0)),
}


@pytest.mark.parametrize("name", PEERS)
def test_a_schedule_is_that_of_torch_or_of_its_paper(name):
    solver, peer = PEERS[name]
    values = rates(LONG, LR_SCHEDULER_NAME=name, MAX_ITER=LONG, **solver)
    assert values == pytest.approx(next(torch_rates(LONG, peer)), rel=1e-9, abs=1e-12)
    assert len(set(values)) > 1 or name == "constant"


def momenta(num, **solver):
    """The rates and momenta of the first group, iteration by iteration."""
    cfg = settings(**{"BASE_LR": 1.0, **solver})
    optimizer = build_optimizer(cfg, nn.Linear(1, 1, bias=False))
    scheduler, pairs = build_lr_scheduler(cfg, optimizer), []
    for _ in range(num):
        group = optimizer.param_groups[0]
        pairs.append((group["lr"], schedule.momentum_of(group)))
        scheduler.step()
    return map(list, zip(*pairs))


@pytest.mark.parametrize(("shape", "name"), [("cosine", "cos"), ("linear", "linear")])
def test_one_cycle_is_that_of_torch_momentum_too(shape, name):
    def peer(opt):  # its last iteration is the one before total_steps
        phases = {"total_steps": LONG + 1, "pct_start": (20 + 1) / (LONG + 1)}
        factors = {"div_factor": 10, "final_div_factor": 5}
        bounds = {"base_momentum": 0.7, "max_momentum": 0.9}
        return lr_scheduler.OneCycleLR(
            opt, 1.0, anneal_strategy=name, **phases, **factors, **bounds
        )

    solver = {"CYCLE_UP_ITERS": 20, "CYCLE_START_FACTOR": 0.1, "BASE_LR_END": 0.02}
    solver.update(CYCLE_SHAPE=shape, CYCLE_MOMENTUM=0.7, MAX_ITER=LONG)
    values, moved = momenta(LONG, LR_SCHEDULER_NAME="one_cycle", **solver)
    expected, expected_momenta = torch_rates(LONG, peer)
    assert values == pytest.approx(expected, rel=1e-9)
    assert moved == pytest.approx(expected_momenta, rel=1e-9)
    assert (values[20], moved[20]) == (1.0, 0.7)


@pytest.mark.parametrize(("decay", "mode"), [(1.0, "triangular"), (0.5, "triangular2")])
def test_cyclic_is_that_of_torch_momentum_too(decay, mode):
    def peer(opt):
        bounds = {"base_momentum": 0.7, "max_momentum": 0.9}
        return lr_scheduler.CyclicLR(opt, 0.1, 1.0, 6, 10, mode=mode, **bounds)

    solver = {"CYCLE_ITERS": 16, "CYCLE_UP_ITERS": 6, "CYCLE_START_FACTOR": 0.1, "MAX_ITER": LONG}
    solver.update(CYCLE_DECAY=decay, CYCLE_MOMENTUM=0.7)
    values, moved = momenta(LONG, LR_SCHEDULER_NAME="cyclic", **solver)
    expected, expected_momenta = torch_rates(LONG, peer)
    assert values == pytest.approx(expected, rel=1e-9)
    assert moved == pytest.approx(expected_momenta, rel=1e-9)


def test_restarts_may_be_lower_each_time():
    cycle = {"LR_SCHEDULER_NAME": "cosine_restarts", "CYCLE_ITERS": 4, "CYCLE_DECAY": 0.5}
    values = rates(12, MAX_ITER=12, **cycle)
    assert [values[i] for i in (0, 4, 8)] == [1.0, 0.5, 0.25]
    assert values[6] == pytest.approx(0.25)


def test_the_momentum_moves_in_adam_too_and_stays_where_there_is_none():
    cycle = {"LR_SCHEDULER_NAME": "one_cycle", "CYCLE_UP_ITERS": 2, "MAX_ITER": 4}
    _, moved = momenta(5, OPTIMIZER="AdamW", BETAS=(0.95, 0.99), CYCLE_MOMENTUM=0.85, **cycle)
    assert moved == pytest.approx([0.95, 0.9, 0.85, 0.9, 0.95])
    assert set(next(itertools.islice(momenta(5, MOMENTUM=0.0, **cycle), 1, None))) == {0.0}
    assert set(next(itertools.islice(momenta(5, CYCLE_MOMENTUM=1.0, **cycle), 1, None))) == {0.9}
    cfg = settings(OPTIMIZER="AdamW", **cycle)
    optimizer = build_optimizer(cfg, nn.Linear(1, 1))
    build_lr_scheduler(cfg, optimizer).step()
    assert optimizer.param_groups[0]["betas"][1] == cfg.SOLVER.BETAS[1]


def test_a_momentum_after_a_resume_is_that_of_the_edited_settings():
    def build(**solver):
        cycle = {"LR_SCHEDULER_NAME": "one_cycle", "CYCLE_UP_ITERS": 5, "MAX_ITER": 10, **solver}
        cfg = settings(BASE_LR=1.0, CYCLE_MOMENTUM=0.5, **cycle)
        optimizer = build_optimizer(cfg, nn.Linear(1, 1, bias=False))
        return build_lr_scheduler(cfg, optimizer), optimizer

    scheduler, optimizer = build(MOMENTUM=0.9)
    for _ in range(4):
        scheduler.step()
    saved = scheduler.state_dict(), optimizer.state_dict()
    edited, optimizer = build(MOMENTUM=0.8)
    optimizer.load_state_dict(saved[1])
    edited.load_state_dict(saved[0])
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.8 - 0.3 * 4 / 5)


SCHEDULES = [*PEERS, "one_cycle", "cyclic"]


TO_ZERO = "linear", "polynomial", "cosine", "flat_cosine", "cosine_restarts", "one_cycle"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("max_iter", [1, 2, 7, 500])  # at 500 a cycle would start again
def test_past_the_end_the_rate_stays_and_does_not_climb(name, max_iter):
    steps = {"GAMMA": 0.5, "STEPS": (max_iter + 1,), "FLAT_ITERS": 0, "CYCLE_UP_ITERS": 0}
    values = rates(max_iter + 60, LR_SCHEDULER_NAME=name, MAX_ITER=max_iter, **steps)
    assert len(set(values[max_iter:])) == 1
    assert values[max_iter] <= values[max_iter - 1] <= 1
    if name in TO_ZERO and (name != "cosine_restarts" or max_iter == 500):
        assert values[max_iter] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", ["multistep", "step", "cosine_restarts", "cyclic"])
def test_a_long_run_changes_in_its_iteration_and_not_before(name):
    size = {"STEPS": (5_000_000,), "STEP_SIZE": 5_000_000, "CYCLE_ITERS": 5_000_000}
    cycle = {"CYCLE_UP_ITERS": 0, "CYCLE_START_FACTOR": 0.0}
    cfg = settings(LR_SCHEDULER_NAME=name, MAX_ITER=10_000_000, BASE_LR=1.0, **size, **cycle)
    scheduler = build_lr_scheduler(cfg, build_optimizer(cfg, nn.Linear(1, 1)))
    at = {}
    for iteration in (4_999_998, 4_999_999, 5_000_000):
        scheduler.load_state_dict({"iteration": iteration})
        at[iteration] = scheduler.get_last_lr()[0]
    assert at[4_999_998] == pytest.approx(at[4_999_999], abs=1e-6)
    assert abs(at[5_000_000] - at[4_999_999]) > 0.8


def test_cycles_that_grow_are_as_long_as_they_should_be():
    cycle_at = schedule.cycles(70, 10, 2)
    assert [cycle_at(i) for i in (0, 9, 10, 29, 30, 69)] == [
        (0, 0, 10), (0, 9, 10), (1, 0, 20), (1, 19, 20), (2, 0, 40), (2, 39, 40),
    ]  # fmt: skip
    assert cycle_at(70) == (2, 40, 40)
    assert schedule.cycles(10**7, 1, 1)(10**7) == (10**7 - 1, 1, 1)


def test_an_exponential_warm_up_rises_by_equal_ratios():
    warm_up = {"WARMUP_ITERS": 4, "WARMUP_FACTOR": 1e-4, "WARMUP_METHOD": "exponential"}
    values = rates(6, LR_SCHEDULER_NAME="constant", **warm_up)
    assert values == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1, 1])


def test_the_rate_may_be_held_through_an_epoch_and_the_warm_up_is_not():
    solver = {"MAX_ITER": 10, "LR_BY_EPOCH": True, "ITERS_PER_EPOCH": 3}
    plain = rates(MAX_ITER=10)
    assert rates(12, **solver) == [plain[i] for i in (0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9)]
    values = rates(6, WARMUP_ITERS=2, WARMUP_FACTOR=0.0, **solver)
    assert values == [0, 0.5, 1, plain[3], plain[3], plain[3]]
    with pytest.raises(SettingsError, match="ITERS_PER_EPOCH"):
        rates(1, **{**solver, "ITERS_PER_EPOCH": 0})


@pytest.mark.parametrize("name", ["step", "exponential"])
def test_a_rate_beyond_all_numbers_is_refused_before_it_comes(name):
    solver = {"LR_SCHEDULER_NAME": name, "STEP_SIZE": 1, "GAMMA": 10.0}
    assert rates(4, MAX_ITER=3, **solver) == pytest.approx([1, 10, 100, 1000])
    with pytest.raises(SettingsError, match=r"^SOLVER.GAMMA: 10.0 .*too large"):
        rates(1, MAX_ITER=400, **solver)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("STEP_SIZE", 0),
        ("POWER", 0.0),
        ("FLAT_ITERS", -1),
        ("CYCLE_ITERS", 0),
        ("CYCLE_GROWTH", 0),
        ("CYCLE_DECAY", 0.0),
        ("CYCLE_DECAY", 1.1),
        ("CYCLE_UP_ITERS", -1),
        ("CYCLE_UP_ITERS", 251),
        ("CYCLE_START_FACTOR", -0.1),
        ("CYCLE_START_FACTOR", 1.1),
        ("CYCLE_SHAPE", "sine"),
        ("CYCLE_MOMENTUM", 0.0),
        ("CYCLE_MOMENTUM", 1.1),
        ("ITERS_PER_EPOCH", -1),
    ],
)
def test_what_no_schedule_can_mean_is_refused(key, value):
    check_cfg(settings(LR_SCHEDULER_NAME="cyclic"), num_ranks=1)
    with pytest.raises(SettingsError, match=f"^SOLVER.{key}: {value!r} "):
        check_cfg(settings(LR_SCHEDULER_NAME="cyclic", **{key: value}), num_ranks=1)


def test_an_exponential_warm_up_from_zero_is_refused():
    cfg = settings(WARMUP_METHOD="exponential", WARMUP_FACTOR=0.0)
    with pytest.raises(SettingsError, match="SOLVER.WARMUP_METHOD: .*WARMUP_FACTOR"):
        check_cfg(cfg, num_ranks=1)


def test_every_schedule_of_the_settings_is_built():
    for name in SCHEDULES:
        cfg = settings(LR_SCHEDULER_NAME=name)
        check_cfg(cfg, num_ranks=1)
        scheduler = build_lr_scheduler(cfg, build_optimizer(cfg, nn.Linear(1, 1)))
        assert isinstance(scheduler, MomentumCycle) == (name in ("one_cycle", "cyclic"))
    with pytest.raises(SettingsError) as caught:
        check_cfg(settings(LR_SCHEDULER_NAME="none"), num_ranks=1)
    assert sorted(str(caught.value).partition("one of ")[2].split(", ")) == sorted(SCHEDULES)


# torch's schedulers in place of ours.

TORCH = {
    "step": lambda opt: lr_scheduler.StepLR(opt, 3, 0.5),
    "multistep": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 5], 0.5),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.5, total_steps=12),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 0.1, 0.5, 3),
    "warm-up, then a cosine": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, 7)],
        [3],
    ),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR's own
def test_a_scheduler_of_torch_resumes_exactly(name, monkeypatch, tmp_path):
    monkeypatch.setattr(schedule, "build_schedule", lambda cfg, optimizer: TORCH[name](optimizer))

    def start():
        model = nn.Linear(1, 1)
        cfg = settings(BASE_LR=0.1)
        optimizer = build_optimizer(cfg, model)
        return model, optimizer, build_lr_scheduler(cfg, optimizer)

    def train(model, optimizer, scheduler, num):
        seen = []
        for _ in range(num):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((scheduler.get_last_lr(), schedule.momentum_of(optimizer.param_groups[0])))
            scheduler.step()
        return seen

    straight = train(*start(), 11)
    first = start()
    train(*first, 6)
    parts = dict(zip(("model", "optimizer", "scheduler"), (part.state_dict() for part in first)))
    torch.save(parts, tmp_path / "model.pth")
    resumed, saved = start(), torch.load(tmp_path / "model.pth")
    for part, state in zip(resumed, saved.values()):
        part.load_state_dict(state)
    assert train(*resumed, 5) == straight[6:]


def test_a_resume_with_another_kind_of_scheduler_is_refused(monkeypatch):
    cfg = settings()
    ours = build_lr_scheduler(cfg, build_optimizer(cfg, nn.Linear(1, 1)))
    monkeypatch.setattr(schedule, "build_schedule", lambda cfg, optimizer: TORCH["step"](optimizer))
    theirs = build_lr_scheduler(cfg, build_optimizer(cfg, nn.Linear(1, 1)))
    for scheduler, state in ((ours, theirs.state_dict()), (theirs, ours.state_dict())):
        with pytest.raises(SettingsError, match=r"^--resume: another kind of scheduler"):
            scheduler.load_state_dict(state)


def edited(diff):
    """{file: its text after the edit}; each old part must stand in the file once."""
    texts = {}
    for file, body in re.findall(r"--- a/(.*)\n\+\+\+ b/.*\n((?:[@ +-](?!-- ).*\n)+)", diff):
        texts[file] = (ROOT / file).read_text()
        for hunk in body.split("@@\n")[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] != "+")
            assert texts[file].count(old) == 1, f"{file} has changed: {old}"
            texts[file] = texts[file].replace(old, "".join(x[1:] for x in lines if x[0] != "-"))
    return texts


@pytest.fixture
def plateau(monkeypatch):
    """train.py and schedule.py as modules, after the edit of the README."""
    readme = (ROOT / "README.md").read_text()
    (diff,) = [part for part in re.findall(r"```diff\n(.*?)```", readme, re.S) if "Plateau" in part]
    modules = {}
    for file, text in edited(diff).items():
        module = modules[file] = types.ModuleType(file.removesuffix(".py"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text, file, "exec"), module.__dict__)
    assert list(modules) == ["schedule.py", "train.py"]
    results = {"digits_test/accuracy": 0.5}  # never gets better
    monkeypatch.setattr(modules["train.py"], "do_test", lambda *_: dict(results))
    return modules["train.py"]


def test_the_edit_for_a_plateau_is_right_and_resumes_exactly(plateau, tmp_path):
    def train(folder, words=""):
        words = f"LOG_PERIOD 1 TEST.EVAL_PERIOD 1 SOLVER.CHECKPOINT_PERIOD 1 {words}"
        with own_log():
            plateau.main(plateau.parse_args(arguments(folder, words)))
        lines = (folder / "metrics.json").read_text().splitlines()
        return [row["lr"] for row in map(json.loads, lines)]

    rates = train(tmp_path / "run")  # the first result is the best, the fourth after it too many
    assert rates == pytest.approx([0.3] * 5 + [0.03] * 4 + [0.003] * 3)
    for iteration in (4, 6):  # right after the rate has fallen, and between
        run = shutil.copytree(tmp_path / "run", tmp_path / f"run{iteration}")
        for name in ("model_final.pth", "results.json"):
            (run / name).unlink()
        for later in range(iteration + 1, 12):
            (run / f"model_{later:07}.pth").unlink(missing_ok=True)
        (run / "last_checkpoint").write_text(f"model_{iteration:07}.pth")
        assert train(run, "--resume") == rates
