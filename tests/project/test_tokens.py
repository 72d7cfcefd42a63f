"""The edit of the README for losses that are means over tokens, applied to train.py as it is."""

import importlib.util
import json
import re

import pytest
import torch
from conftest import ROOT, arguments, own_log, parse
from plumbing import comm
from torch import nn

COUNTS = 1, 7, 0, 4  # tokens of each micro-batch
HEADING = "### Losses that are means over tokens"


class Tagger(nn.Module):
    """Classifies each token; labels are (B, length), negative where there is no token."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, data):
        logits, labels = self.layer(data["inputs"]).flatten(0, 1), data["labels"].flatten()
        total = nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        return {"loss_tag": total / (labels >= 0).sum().clamp(min=1)}


def tagger():
    torch.manual_seed(0)
    return Tagger()


def sentences(first, last):
    """The batch of these micro-batches together; each is one row."""
    inputs = torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(1))
    labels = torch.full((4, 8), -1)
    for row, count in enumerate(COUNTS):
        labels[row, :count] = torch.arange(count) % 4
    return {"inputs": inputs[first:last], "labels": labels[first:last]}


def edited(source):
    """train.py after the diff below the heading in the README."""
    readme = (ROOT / "README.md").read_text()
    diff = re.search(r"```diff\n(.*?)```", readme.partition(HEADING)[2], re.DOTALL)[1]
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert source.count(old) == 1, f"train.py does not hold once:\n{old}"
        source = source.replace(old, new)
    return source


def step_with(path, output, num_ranks, num_batches):
    """One step of plain gradient descent at a rate of 1 with the train.py at ``path``."""
    spec = importlib.util.spec_from_file_location("edited_train", path)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    each = len(COUNTS) // num_ranks // num_batches

    def build_train_loader(cfg, start_iter, *_):
        starts = [(comm.get_rank() * num_batches + i) * each for i in range(num_batches)]
        return [[sentences(start, start + each) for start in starts]]

    train.build_model, train.build_train_loader = lambda cfg: tagger(), build_train_loader
    words = f" SOLVER.MAX_ITER 1 SOLVER.ACCUM_STEPS {num_batches} SOLVER.BASE_LR 1.0"
    words += " SOLVER.MOMENTUM 0.0 SOLVER.WEIGHT_DECAY 0.0 SOLVER.LR_SCHEDULER_NAME constant"
    words += " SOLVER.WARMUP_ITERS 0 TEST.EVAL_PERIOD -1"
    with own_log():
        train.main(parse(arguments(output, words)))


@pytest.fixture
def result_of(tmp_path, on_ranks):
    """result_of(source, ranks, micro-batches): (the logged loss, {name: gradient})."""

    def call(source, num_ranks, num_batches):
        path, output = tmp_path / "edited_train.py", tmp_path / f"{num_ranks} {num_batches}"
        path.write_text(source)
        if num_ranks == 1:
            step_with(path, output, num_ranks, num_batches)
        else:
            ranks = on_ranks(num_ranks, step_with, path, output, num_ranks, num_batches)
            assert [rank.code for rank in ranks] == [0] * num_ranks, ranks[0].printed
        before, after = tagger().state_dict(), torch.load(output / "model_final.pth")["model"]
        loss = json.loads((output / "metrics.json").read_text().splitlines()[0])["total_loss"]
        return loss, {name: before[name] - after[name] for name in before}

    return call


@pytest.fixture
def whole():
    """The loss and the gradients of all sentences at once."""
    model = tagger()
    loss = model(sentences(0, 4))["loss_tag"]
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def is_close(result, whole):
    near = [torch.allclose(result[1][name], whole[1][name], atol=1e-6) for name in whole[1]]
    return result[0] == pytest.approx(whole[0], rel=1e-5) and all(near)


@pytest.mark.parametrize(("num_ranks", "num_batches"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)])
def test_the_edited_loop_has_the_loss_and_gradients_of_the_whole_batch(
    result_of, whole, num_ranks, num_batches
):
    source = edited((ROOT / "train.py").read_text())
    assert is_close(result_of(source, num_ranks, num_batches), whole)


def test_the_loop_as_it_is_counts_every_micro_batch_the_same(result_of, whole):
    assert not is_close(result_of((ROOT / "train.py").read_text(), 1, 2), whole)
