"""The model.  In training it returns losses, in evaluation predictions."""

from torch import nn
from torch.nn import functional


def build_model(cfg):
    return DigitNet(cfg.MODEL.WIDTH, cfg.MODEL.NUM_CLASSES, cfg.MODEL.DROPOUT)


class DigitNet(nn.Module):
    """A small convolutional network for the batches of data.py.

    Args:
        width: channels of the first layer.
        num_classes: number of different labels.
        dropout: probability that a feature is dropped before the last layer.
    """

    def __init__(self, width, num_classes, dropout):
        super().__init__()
        self.features = nn.Sequential(
            *conv_block(1, width),
            *conv_block(width, 2 * width),
            nn.MaxPool2d(2),  # (B, 2 * width, 4, 4)
            *conv_block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),  # (B, 2 * width)
            nn.Dropout(dropout),
        )
        self.classifier = nn.Linear(2 * width, num_classes)

    def forward(self, data):
        """Predict the digits of a batch.

        Args:
            data: a batch as data.py describes it.

        Returns:
            In training mode, a dict of scalar losses: train.py minimizes their sum, total_loss.
            In evaluation mode, logits of shape (B, num_classes).
        """
        logits = self.classifier(self.features(data["images"]))
        if not self.training:
            return logits
        return {"loss_cls": functional.cross_entropy(logits, data["labels"])}


def conv_block(num_inputs, num_outputs):
    return (
        nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(),
    )
