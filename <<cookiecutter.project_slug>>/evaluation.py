"""How the model is judged.  An evaluator has reset, process and evaluate."""

import contextlib

import torch
from torch.nn import functional

from plumbing import comm
from plumbing.events import EventStorage, get_event_storage, has_event_storage

NUM_SHOWN = 16  # misclassified images on the sheet


def build_evaluator(cfg, name):
    """The evaluator of the test set called ``name``."""
    return DigitsEvaluator(name, cfg.MODEL.NUM_CLASSES, cfg.MODEL.DEVICE)


class DigitsEvaluator:
    """Accuracy in all and for each class, exact for any number of ranks.

    Counts stay on the device until ``evaluate``, which communicates once.  It also puts two images:
    the confusion matrix (rows: labels, columns: predictions), and a sheet of the digits that were
    misclassified with the most confidence.
    """

    def __init__(self, name, num_classes, device):
        self.name, self.num_classes, self.device = name, num_classes, device
        self.reset()

    def reset(self):
        num_pairs = self.num_classes**2
        self.counts = torch.zeros(num_pairs, dtype=torch.int64, device=self.device)
        self.confidence = torch.zeros(NUM_SHOWN, device=self.device)  # of wrong answers; 0: none
        self.images = torch.zeros(NUM_SHOWN, 8, 8, device=self.device)

    def process(self, data, predictions):
        """predictions: logits, (B, num_classes)."""
        labels, probabilities = data["labels"], predictions.float().softmax(dim=1)
        confidence, predicted = probabilities.max(dim=1)
        pairs = labels * self.num_classes + predicted
        self.counts.scatter_add_(0, pairs, torch.ones_like(pairs))
        wrong = torch.cat([self.confidence, confidence * (predicted != labels)])
        self.confidence, order = wrong.topk(NUM_SHOWN)
        self.images = torch.cat([self.images, data["images"][:, 0]])[order]

    def evaluate(self):
        """{name: number}, the same on every rank.  Collective."""
        parts = self.counts, self.confidence, self.images.flatten()
        ranks = comm.gather_tensor(torch.cat([part.double() for part in parts])).cpu()
        counts, confidence, images = ranks.split([len(part) for part in parts], dim=1)
        counts = counts.sum(dim=0).view(self.num_classes, self.num_classes)
        confidence, order = confidence.flatten().topk(NUM_SHOWN)
        images = images.reshape(-1, 8, 8)[order] * (confidence > 0).view(-1, 1, 1)
        if has_event_storage():
            self._put_images(counts, images)

        correct, totals = counts.diagonal(), counts.sum(dim=1)
        results = {"accuracy": correct.sum() / totals.sum()}
        for i in totals.nonzero().flatten().tolist():
            results[f"accuracy_class_{i}"] = correct[i] / totals[i]
        return {name: value.item() for name, value in results.items()}

    def _put_images(self, counts, images):
        storage = get_event_storage()
        rates = (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).float()
        storage.put_image(f"{self.name}/confusion", _enlarge(rates, 16))
        framed = functional.pad(images.float(), (1, 1, 1, 1), value=0.3).view(4, 4, 10, 10)
        sheet = framed.transpose(1, 2).reshape(40, 40)
        storage.put_image(f"{self.name}/misclassified", _enlarge(sheet, 8))


def _enlarge(image, factor):
    """(H, W) -> (1, H * factor, W * factor)"""
    return torch.kron(image, torch.ones(factor, factor))[None]


@contextlib.contextmanager
def inference_context(model):
    """Evaluation mode, no gradients, buffers averaged over the ranks; all of it only inside.

    What the model puts into the storage meanwhile is dropped: it is not of the training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), comm.averaged_buffers(model), EventStorage():
            yield
    finally:
        for module, training in modes:
            module.training = training
