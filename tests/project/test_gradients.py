"""Clipping of gradients by their norm: the results of torch, and nothing that costs time."""

import inspect
import math
import warnings

import pytest
import torch
from conftest import counted_waits
from plumbing import gradients
from plumbing.gradients import clip_grad_norm_
from torch import nn


def with_gradients(count, dtypes=(torch.float32,)):
    """Parameters with gradients, of the dtypes in turn, and first one without."""
    generator = torch.Generator().manual_seed(count)
    parameters = [nn.Parameter(torch.zeros(3, 2, dtype=dtypes[0]))]
    for index in range(count):
        dtype = dtypes[index % len(dtypes)]
        parameters.append(nn.Parameter(torch.zeros(3, 2, dtype=dtype)))
        parameters[-1].grad = torch.randn(3, 2, generator=generator).to(dtype)
    return parameters


def both(count, max_norm, dtypes=(torch.float32,), **options):
    """Parameters that were clipped by us and by torch, and the norm that each returned."""
    ours = with_gradients(count, dtypes)
    theirs = with_gradients(count, dtypes)
    norm = clip_grad_norm_(ours, max_norm, **options)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, **options)
    return ours, norm, theirs, expected


@pytest.mark.parametrize("max_norm", [0.5, 100.0, math.inf])
@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,), (torch.bfloat16,), (torch.float64, torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("num_small", [0, 2**16])
def test_gradients_and_the_norm_before_are_those_of_torch(
    monkeypatch, count, max_norm, dtypes, num_small
):
    monkeypatch.setattr(gradients, "_NUM_SMALL", num_small)
    ours, norm, theirs, expected = both(count, max_norm, dtypes)
    # The sum of many squares depends on their order in its last bits.
    torch.testing.assert_close(norm, expected)
    assert norm.shape == ()
    for one, other in zip(ours, theirs):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("max_norm", [0.5, math.inf])
@pytest.mark.parametrize("options", [{"norm_type": math.inf}, {"norm_type": 1}, {"foreach": False}])
def test_other_norms_and_options_are_those_of_torch(max_norm, options):
    ours, norm, theirs, expected = both(3, max_norm, **options)
    assert torch.equal(norm, expected)
    for one, other in zip(ours[1:], theirs[1:]):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_a_norm_that_is_not_finite_raises_only_when_asked_for(max_norm):
    parameters = with_gradients(3)
    parameters[1].grad[0] = math.nan
    assert clip_grad_norm_(parameters, math.inf).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)


def test_an_infinite_gradient_stays_as_it_is_when_nothing_is_clipped():
    parameters = with_gradients(3)
    parameters[1].grad[0] = math.inf
    before = [parameter.grad.clone() for parameter in parameters[1:]]
    assert clip_grad_norm_(parameters, math.inf).item() == math.inf
    for parameter, gradient in zip(parameters[1:], before):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_one_tensor_a_list_and_a_generator_are_accepted(max_norm):
    norms = []
    for form in (lambda p: p[1], lambda p: p[1:], lambda p: (each for each in p)):
        norms.append(clip_grad_norm_(form(with_gradients(1)), max_norm).item())
    assert norms == [norms[0]] * 3


@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_without_any_gradient_the_norm_is_zero(max_norm):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clip_grad_norm_(nn.Linear(1, 1).parameters(), max_norm).item() == 0.0
        assert clip_grad_norm_(nn.ReLU().parameters(), max_norm).item() == 0.0


class Special(torch.Tensor):
    """A kind of tensor that must be left to torch, as a DTensor must."""


def test_special_tensors_are_left_to_torch(monkeypatch):
    left = []
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *args: left.append(args))
    parameters = with_gradients(2)
    parameters[2].grad = parameters[2].grad.as_subclass(Special)
    clip_grad_norm_(parameters, math.inf)
    parameters[2].grad = torch.eye(3, 2).to_sparse()
    clip_grad_norm_(parameters, math.inf)
    assert len(left) == 2


def test_plain_tensors_are_not_left_to_torch_unless_they_are_clipped(monkeypatch):
    left = []
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *args: left.append(args))
    clip_grad_norm_(with_gradients(2), math.inf)
    assert left == []
    clip_grad_norm_(with_gradients(2), 1.0)
    assert len(left) == 1


@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_nothing_is_read_and_the_norm_needs_no_gradient(max_norm):
    parameters = with_gradients(40)
    with counted_waits() as counts:
        norm = clip_grad_norm_(parameters, max_norm)
    assert counts["reads"] == 0
    assert not norm.requires_grad


def test_the_signature_is_that_of_torch():
    ours = inspect.signature(clip_grad_norm_).parameters
    theirs = inspect.signature(nn.utils.clip_grad_norm_).parameters
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def test_the_private_functions_are_those_that_torch_uses_itself():
    source = inspect.getsource(gradients)
    assert "torch._foreach_norm(" in source
    assert "torch._foreach_norm(" in inspect.getsource(nn.utils.clip_grad)
    assert "torch._utils._flatten_dense_tensors(" in source
    assert "_flatten_dense_tensors(" in inspect.getsource(nn.parallel.comm)


def test_small_gradients_of_any_layout_in_memory_are_copied_together():
    image_weights = nn.Parameter(torch.zeros(4, 3, 2, 2))
    values = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    image_weights.grad = values.to(memory_format=torch.channels_last)
    norm = clip_grad_norm_([image_weights], math.inf)
    torch.testing.assert_close(norm, values.norm())
    assert torch.equal(image_weights.grad, values)


def test_gradients_that_are_not_small_are_not_copied(monkeypatch):
    copies = []
    flatten = torch._utils._flatten_dense_tensors
    monkeypatch.setattr(
        torch._utils, "_flatten_dense_tensors", lambda each: copies.append(1) or flatten(each)
    )
    large = nn.Parameter(torch.zeros(2**16 + 1))
    large.grad = torch.ones(2**16 + 1)
    clip_grad_norm_([large], math.inf)
    assert copies == []
    clip_grad_norm_(with_gradients(3), math.inf)
    assert copies == [1]
