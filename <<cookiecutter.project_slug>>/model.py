"""The model.  In training it returns losses, in evaluation predictions."""

import difflib
import fnmatch
import functools
import logging

import torch
from torch import nn
from torch.nn import functional

from plumbing.comm import SettingsError

logger = logging.getLogger(__name__)


def build_model(cfg):
    model = DigitNet(cfg.MODEL.WIDTH, cfg.MODEL.NUM_CLASSES, cfg.MODEL.DROPOUT)
    return maybe_freeze(cfg, model)


def maybe_freeze(cfg, model):
    """The model, with the parameters that MODEL.FROZEN names without gradients.

    A pattern is one of the shell (fnmatch) for whole names: "*" matches dots too.  Norm layers with
    running statistics all of whose parameters are named (if they have none: whose statistics are)
    stay in evaluation mode, also after ``model.train()``.

    Raises:
        SettingsError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    norms = {}  # name: names of its parameters or statistics
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            own = dict(module.named_parameters()) or dict(module.named_buffers())
            norms[name] = {f"{name}.{key}".removeprefix(".") for key in own}
    names = sorted(set(parameters).union(*norms.values()))
    frozen = set()
    for pattern in cfg.MODEL.FROZEN:
        found = fnmatch.filter(names, str(pattern))
        if not found:
            modules = {f"{name[:i]}.*" for name in names for i, c in enumerate(name) if c == "."}
            possible = [*sorted(modules), *names]
            near = difflib.get_close_matches(str(pattern), possible, 1, cutoff=0.0) or ["none"]
            rule = f"matches no parameter: did you mean {near[0]}?"
            raise SettingsError(f"MODEL.FROZEN: {pattern!r} {rule}")
        frozen.update(found)
    for name in frozen & parameters.keys():
        parameters[name].requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in parameters.values()):
        raise SettingsError(f"MODEL.FROZEN: {cfg.MODEL.FROZEN} leaves nothing to train")

    if frozen:
        in_eval_mode = [name for name, own in norms.items() if own <= frozen]
        model.train = functools.partial(_train_but, model, in_eval_mode)  # deepcopy copies it too
        model.train(model.training)
        some = len(frozen & parameters.keys()), len(parameters), len(in_eval_mode)
        logger.info("Frozen: %d of %d parameters, and the statistics of %d norm layers", *some)
    return model


def _train_but(model, norms, mode=True):
    """nn.Module.train, except for the modules with these names, which stay in evaluation mode."""
    type(model).train(model, mode)
    for name in norms:
        nn.Module.train(model.get_submodule(name), False)
    return model


def sum_losses(loss_dict):
    """The sum of the entries with "loss" in their name: what is minimized."""
    is_dict, total = isinstance(loss_dict, dict), None
    for name, loss in loss_dict.items() if is_dict else ():
        if "loss" in name:
            total = loss if total is None else total + loss
    if not isinstance(total, torch.Tensor) or total.ndim or "total_loss" in loss_dict:
        got = type(loss_dict)
        if is_dict:
            got = {name: getattr(value, "shape", value) for name, value in loss_dict.items()}
        raise ValueError(
            'in training the model must return a dict of scalar tensors, one or more with "loss" in'
            f" the name, none called total_loss, which is their sum; got {got}"
        )
    return total


class DigitNet(nn.Module):
    """A small convolutional network for the batches of data.py.

    Returns:
        in training, a dict of scalar tensors: those with "loss" in their name are summed and
        minimized, the others only logged; in evaluation, logits of shape (B, num_classes).
    """

    def __init__(self, width, num_classes, dropout):
        super().__init__()
        self.features = nn.Sequential(
            *_conv_block(1, width),
            *_conv_block(width, 2 * width),
            nn.MaxPool2d(2),  # (B, 2 * width, 4, 4)
            *_conv_block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        self.classifier = nn.Linear(2 * width, num_classes)

    def forward(self, data):
        logits = self.classifier(self.features(data["images"]))
        if not self.training:
            return logits
        with torch.no_grad():
            accuracy = (logits.argmax(dim=1) == data["labels"]).float().mean()
        return {"loss_cls": functional.cross_entropy(logits, data["labels"]), "accuracy": accuracy}


def _conv_block(num_inputs, num_outputs):
    return (
        nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(),
    )
