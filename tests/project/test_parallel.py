"""Data parallel training: the ranks average gradients, in one order from the first iteration on."""

from types import SimpleNamespace

import pytest
import torch
from plumbing import comm
from plumbing.errors import SettingsError
from plumbing.gradients import gradient_sync
from plumbing.parallel import DistributedDataParallel, unwrap
from ranks import run_on_ranks
from torch import nn

NUM_RANKS = 3  # two numbers have the same sum in any order


class Branches(nn.Module):
    """Registers its layers in another order than it uses them, and uses some only on demand."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(61, 7)
        self.first = nn.Linear(19, 61)
        self.spare = nn.Linear(61, 7)
        self.norm = nn.BatchNorm1d(61)

    def forward(self, inputs, spare=False):
        hidden = self.norm(self.first(inputs).tanh())
        outputs = self.last(hidden)
        if spare:
            outputs = outputs + self.spare(hidden)
        return outputs


def build(kind, uses_spare=False, **options):
    torch.manual_seed(0)
    model = Branches()
    if not uses_spare and "find_unused_parameters" not in options:
        model.spare.requires_grad_(False)
    return kind(model, **options)


def gradients_of_each_iteration(model, spare=False, num_iters=3):
    """The gradients of iterations that all begin with the same weights and batches."""
    gradients = []
    for _ in range(num_iters):
        generator = torch.Generator().manual_seed(comm.get_rank())
        inputs = torch.randn(5, 19, generator=generator)
        model(inputs, spare).square().sum().backward()
        present = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat([each.flatten() for each in present]))
        model.zero_grad()
    return gradients


def are_equal(gradients):
    return [bool(torch.equal(gradients[0], each)) for each in gradients]


def sums_in_one_order():
    return are_equal(gradients_of_each_iteration(build(DistributedDataParallel)))


def sums_in_one_order_with_a_static_graph():
    model = build(DistributedDataParallel, static_graph=True)
    return are_equal(gradients_of_each_iteration(model))


def sums_in_one_order_with_unused_parameters():
    model = build(DistributedDataParallel, find_unused_parameters=True)
    used = are_equal(gradients_of_each_iteration(model, spare=True))
    return [*used, *are_equal(gradients_of_each_iteration(model, spare=False))]


def torch_sums_in_two_orders():
    """torch's own class, so that a test notices when ours is no longer needed."""
    model = build(nn.parallel.DistributedDataParallel, forward_sync_buffers=False)
    return are_equal(gradients_of_each_iteration(model))


def averages_as_torch_does():
    ours = gradients_of_each_iteration(build(DistributedDataParallel), num_iters=1)[0]
    theirs = build(nn.parallel.DistributedDataParallel, forward_sync_buffers=False)
    theirs = gradients_of_each_iteration(theirs, num_iters=1)[0]
    return bool(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6))


def unused_parameters_without_the_option():
    model = build(DistributedDataParallel, uses_spare=True)
    try:
        gradients_of_each_iteration(model)
    except RuntimeError as error:
        return str(error)


def shares_gradients():
    """The gradient after a pass without and a pass with averaging."""
    layer = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(layer)
    gradients = []
    for enabled in (False, True):
        with gradient_sync(model, enabled=enabled):
            model(torch.tensor([[1.0 + comm.get_rank()]])).sum().backward()
        gradients.append(round(layer.weight.grad.item(), 4))
    return gradients


def keeps_its_buffers():
    model = build(DistributedDataParallel)
    gradients_of_each_iteration(model, num_iters=1)
    rank_mean = model.module.norm.running_mean.clone()
    every = comm.all_gather(rank_mean.tolist())
    return every[0] != every[1]


def begins_with_the_weights_of_rank_0():
    torch.manual_seed(comm.get_rank())
    model = DistributedDataParallel(nn.Linear(1, 1))
    return model.module.weight.item()


def unwraps():
    model = nn.Linear(1, 1)
    wrapped = DistributedDataParallel(model)
    compiled = torch.compile(wrapped, backend="eager")
    with gradient_sync(compiled, enabled=False):
        is_off = wrapped.require_backward_grad_sync is False
    return [unwrap(wrapped) is model, unwrap(compiled) is model, is_off]


def takes_few_options():
    model = DistributedDataParallel(nn.Linear(1, 1))
    other = DistributedDataParallel(nn.Linear(1, 1), gradient_as_bucket_view=False)
    return [
        model.device_ids,
        model.gradient_as_bucket_view,
        model.forward_sync_buffers,
        other.gradient_as_bucket_view,
    ]


CHECKS = (
    sums_in_one_order,
    sums_in_one_order_with_a_static_graph,
    sums_in_one_order_with_unused_parameters,
    torch_sums_in_two_orders,
    averages_as_torch_does,
    unused_parameters_without_the_option,
    shares_gradients,
    keeps_its_buffers,
    begins_with_the_weights_of_rank_0,
    unwraps,
    takes_few_options,
)


@pytest.fixture(scope="module")
def results():
    """{name of a check: what it returned on each rank}."""
    ranks = run_on_ranks(*CHECKS, num_ranks=NUM_RANKS)
    return {check.__name__: [rank[check.__name__] for rank in ranks] for check in CHECKS}


@pytest.mark.parametrize(
    "check",
    [
        sums_in_one_order,
        sums_in_one_order_with_a_static_graph,
        sums_in_one_order_with_unused_parameters,
    ],
)
def test_the_first_iteration_after_a_start_is_the_same_as_any_other_to_the_bit(results, check):
    for rank in results[check.__name__]:
        assert all(rank)


def test_the_comparison_notices_the_order_of_torch(results):
    for rank in results["torch_sums_in_two_orders"]:
        assert rank[:2] == [True, False]


def test_the_gradients_are_those_of_torch(results):
    assert results["averages_as_torch_does"] == [True] * NUM_RANKS


def test_parameters_that_are_not_used_end_in_an_error_that_names_the_option(results):
    for message in results["unused_parameters_without_the_option"]:
        assert "find_unused_parameters=True" in message


def test_gradients_are_averaged_only_when_enabled(results):
    expected = [[1.0 + rank, round((1 + 2 + 3) / 3 * 2, 4)] for rank in range(NUM_RANKS)]
    assert results["shares_gradients"] == expected


def test_each_rank_keeps_its_own_buffers(results):
    assert results["keeps_its_buffers"] == [True] * NUM_RANKS


def test_all_ranks_begin_with_the_weights_of_the_first(results):
    assert len(set(results["begins_with_the_weights_of_rank_0"])) == 1


def test_a_model_is_unwrapped_and_synchronized_under_a_compiled_one(results):
    assert results["unwraps"] == [[True, True, True]] * NUM_RANKS


def test_the_options_are_those_of_torch_with_other_defaults(results):
    assert results["takes_few_options"] == [[None, True, False, False]] * NUM_RANKS


def test_a_model_without_a_wrapper_is_itself_and_needs_no_synchronization():
    model = nn.BatchNorm1d(2)
    assert unwrap(model) is model
    assert unwrap(nn.DataParallel(model)) is model
    with gradient_sync(model, enabled=False):
        model(torch.randn(4, 2)).sum().backward()
    assert model.bias.grad.tolist() == [4, 4]


def test_a_model_with_nothing_to_train_is_an_error_of_one_line():
    for model in (nn.ReLU(), nn.Linear(1, 1).requires_grad_(False)):
        with pytest.raises(SettingsError, match="no parameter that requires a gradient"):
            DistributedDataParallel(model)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(["cpu"], None), (["cuda:1", "cuda:1"], [torch.device("cuda:1")]), (["cuda:0", "cpu"], None)],
)
def test_the_device_is_the_one_gpu_of_all_parameters(monkeypatch, devices, expected):
    class Model(nn.Module):
        def parameters(self):
            return [SimpleNamespace(device=torch.device(d), requires_grad=True) for d in devices]

    made = {}

    def init(self, module, device_ids, **options):
        made.update(options, device_ids=device_ids)

    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "__init__", init)
    DistributedDataParallel(Model(), find_unused_parameters=True)
    assert made["device_ids"] == expected
