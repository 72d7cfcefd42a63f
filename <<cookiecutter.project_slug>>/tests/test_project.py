"""What the files beside plumbing/ promise each other."""

import ast

import pytest
import torch
from conftest import ROOT, SHORT, shell

from data import build_test_loader, build_train_loader
from defaults import check_cfg, get_cfg
from evaluation import build_evaluators
from model import build_model
from plumbing.errors import SettingsError
from plumbing.events import EventStorage
from plumbing.inference import inference_on_dataset
from plumbing.random_state import set_random_state
from plumbing.settings import leaves, merge_settings
from solver import build_lr_scheduler, build_optimizer


@pytest.fixture
def cfg():
    """The settings of cfg.yaml, for the CPU and a short run."""
    cfg = get_cfg()
    merge_settings(cfg, str(ROOT / "cfg.yaml"), SHORT.split())
    return cfg


def first_items(cfg, count, start_iter=0):
    """The first items of the training loader: a list of micro-batches for each iteration."""
    return [item for _, item in zip(range(count), build_train_loader(cfg, start_iter))]


def samples_of(micro_batches):
    """Every sample of some micro-batches as bytes, sorted."""
    samples = []
    for data in micro_batches:
        tensors = [value for value in data.values() if isinstance(value, torch.Tensor)]
        for parts in zip(*tensors):
            samples.append(b"".join(part.contiguous().numpy().tobytes() for part in parts))
    return sorted(samples)


def test_every_setting_is_read_somewhere():
    used = set()
    for path in ROOT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                used.add(node.attr)
    unread = [key for key, _ in leaves(get_cfg()) if key.rpartition(".")[2] not in used]
    assert unread == []


def test_every_setting_has_its_meaning_above_it_or_a_name_that_says_it():
    lines = (ROOT / "defaults.py").read_text(encoding="utf-8").splitlines()
    bare = []
    for above, line in zip(lines, lines[1:]):
        if line.startswith("_C.") and "CfgNode()" not in line and not above.startswith("#"):
            bare.append(line.partition(" ")[0])
    # Few settings speak for themselves, or belong to the line above them.
    assert len(bare) <= 8, bare


def test_the_settings_of_cfg_yaml_are_accepted(cfg):
    check_cfg(cfg, num_ranks=1)


def test_a_batch_that_the_ranks_cannot_share_is_refused(cfg):
    cfg.SOLVER.BATCH_SIZE = 7
    with pytest.raises(SettingsError, match="BATCH_SIZE"):
        check_cfg(cfg, num_ranks=2)


def test_the_model_gives_scalar_losses_in_training_that_reach_every_parameter(cfg):
    set_random_state(0)
    model = build_model(cfg).train()
    (data,) = first_items(cfg, 1)[0]
    with EventStorage():
        loss_dict = model(data)
    for name, loss in loss_dict.items():
        assert loss.ndim == 0, name
    assert "total_loss" not in loss_dict, "train.py adds up the losses and logs their sum"
    sum(loss_dict.values()).backward()
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.grad is not None, name


def test_the_loader_gives_the_same_iteration_wherever_it_starts(cfg):
    expected = first_items(cfg, 6)[4:]
    found = first_items(cfg, 2, start_iter=4)
    for micro_batches, others in zip(expected, found):
        assert samples_of(micro_batches) == samples_of(others)


def test_iterations_differ_so_the_comparison_would_notice(cfg):
    first, second = first_items(cfg, 2)
    assert samples_of(first) != samples_of(second)


def test_two_ranks_and_two_micro_batches_see_the_samples_of_one(cfg, as_rank):
    alone = first_items(cfg, 4)
    cfg.SOLVER.ACCUM_STEPS = 2
    of_rank = []
    for rank in range(2):
        as_rank(rank, 2)
        of_rank.append(first_items(cfg, 4))
    for iteration in range(4):
        both = [*of_rank[0][iteration], *of_rank[1][iteration]]
        assert samples_of(both) == samples_of(alone[iteration])


def test_the_ranks_together_evaluate_each_sample_once_in_equal_numbers_of_batches(cfg, as_rank):
    for name in cfg.DATASETS.TEST:
        alone = samples_of(build_test_loader(cfg, name))
        parts = []
        numbers = []
        for rank in range(3):
            as_rank(rank, 3)
            loader = build_test_loader(cfg, name)
            numbers.append(len(loader))
            parts.extend(samples_of(loader))
        as_rank(0, 1)
        assert sorted(parts) == alone
        assert len(set(numbers)) == 1


def test_an_evaluation_gives_numbers_and_leaves_the_model_as_it_was(cfg):
    model = build_model(cfg).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name in cfg.DATASETS.TEST:
        evaluators = build_evaluators(cfg, name)
        results = inference_on_dataset(model, build_test_loader(cfg, name), evaluators, name)
        assert results
        assert all(isinstance(value, float) for value in results.values())
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_optimizer_holds_every_parameter_that_is_trained_once(cfg):
    model = build_model(cfg)
    optimizer = build_optimizer(cfg, model)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(held) == len(trained)
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in trained}


def test_the_learning_rate_of_an_iteration_does_not_depend_on_where_a_run_began(cfg):
    optimizer = build_optimizer(cfg, build_model(cfg))
    scheduler = build_lr_scheduler(cfg, optimizer)
    for _ in range(5):
        scheduler.step()
    other_optimizer = build_optimizer(cfg, build_model(cfg))
    other = build_lr_scheduler(cfg, other_optimizer)
    other.load_state_dict(scheduler.state_dict())
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("program", ["train.py", "predict.py"])
def test_help_is_shown(program):
    done = shell(program, "--help")
    assert done.returncode == 0
    assert program in done.stdout


def test_a_mistake_is_one_line_and_leaves_nothing_behind(tmp_path):
    output = tmp_path / "output"
    done = shell("train.py", "--config", "cfg.yaml", "OUTPUT_DIR", output, "SOLVER.BASE_LR", "-1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: SOLVER.BASE_LR: -1.0")
    assert done.stderr.count("\n") == 1
    assert not output.exists()
