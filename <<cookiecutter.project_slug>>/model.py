"""The model.  In training it returns losses, in evaluation predictions."""

import torch
from torch import nn
from torch.nn import functional


def build_model(cfg):
    return DigitNet(cfg.MODEL.WIDTH, cfg.MODEL.NUM_CLASSES, cfg.MODEL.DROPOUT)


def sum_losses(loss_dict):
    """The sum of the entries with "loss" in their name: what is minimized."""
    is_dict = isinstance(loss_dict, dict)
    losses = [loss for name, loss in loss_dict.items() if "loss" in name] if is_dict else []
    if not losses or "total_loss" in loss_dict or any(loss.ndim for loss in losses):
        got = {k: tuple(v.shape) for k, v in loss_dict.items()} if is_dict else type(loss_dict)
        raise ValueError(
            'in training the model must return a dict of scalar tensors, one or more with "loss" in'
            f" the name, none called total_loss, which is their sum; got {got}"
        )
    return sum(losses)


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
