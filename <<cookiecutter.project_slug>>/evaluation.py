"""How predictions are judged."""

import torch

from plumbing import comm
from plumbing.events import get_event_storage, has_event_storage
from plumbing.inference import DatasetEvaluator


def build_evaluators(cfg, name):
    """The evaluators of the test set called ``name``.  Each metric needs a name of its own."""
    return [AccuracyEvaluator(name, cfg.MODEL.NUM_CLASSES, cfg.MODEL.DEVICE)]


class AccuracyEvaluator(DatasetEvaluator):
    """The share of correct predictions, in all and for each class, and a confusion matrix.

    Counts stay on the device until the last batch, so that an evaluation never waits for a GPU.
    """

    def __init__(self, name, num_classes, device):
        self.name = name
        self.num_classes = num_classes
        self.device = device

    def reset(self):
        """Forget all batches."""
        self.counts = torch.zeros(self.num_classes**2, dtype=torch.int64, device=self.device)

    def process(self, inputs, outputs):
        """Count the pairs of label and prediction of one batch.

        Args:
            inputs: a batch as data.py describes it.
            outputs: logits of shape (B, num_classes).
        """
        predicted = outputs.argmax(dim=1)
        pairs = inputs["labels"] * self.num_classes + predicted
        self.counts.scatter_add_(0, pairs, torch.ones_like(pairs))

    def evaluate(self):
        """Returns {"accuracy": 0.99, "accuracy-0": 1.0, ...}; a class without samples is left out.

        All ranks call it and get the same numbers.
        """
        counts = comm.gather_tensor(self.counts).sum(dim=0).cpu()
        confusion = counts.view(self.num_classes, self.num_classes)  # [label, prediction]
        totals = confusion.sum(dim=1)
        if totals.sum() == 0:
            return None
        if has_event_storage():
            rates = confusion / totals.clamp(min=1)[:, None]
            get_event_storage().put_image(f"{self.name}/confusion", rates[None])

        correct = confusion.diagonal()
        results = {"accuracy": (correct.sum() / totals.sum()).item()}
        for label in range(self.num_classes):
            if totals[label] > 0:
                results[f"accuracy-{label}"] = (correct[label] / totals[label]).item()
        return results
