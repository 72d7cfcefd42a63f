"""What may happen to a run: kills in a save, other numbers of ranks, files of strangers."""

import collections
import functools
import itertools
import json
import os
import pickle
import re
import signal

import numpy as np
import pytest
import torch
import train
from conftest import arguments, own_log, parse, train_here
from models import Tiny, train_with
from outcomes import assert_same_outcome, model_of, starts_of
from plumbing import comm
from plumbing.checkpoint import Checkpointer
from plumbing.errors import SettingsError
from plumbing.launch import init_process_group, launch
from plumbing.parallel import DistributedDataParallel
from plumbing.seeding import SeededDataset
from torch import nn


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The output of a run that nothing happened to."""
    output = tmp_path_factory.mktemp("straight") / "output"
    train_here(output)
    return output


# A kill in a save leaves what was there, and the resumed run is the run without it.


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(data, file, save=torch.save):
    save(data, file)
    file.seek(0)
    file.truncate(len(file.read()) // 2)
    file.flush()
    die()


def die_at(name, call):
    """A function that is ``call``, but kills the process when its last path has this name."""

    def deadly(*paths):
        if os.path.basename(paths[-1]) == name:
            die()
        call(*paths)

    return deadly


def killed_in_save(output, words, moment):
    """Train; the process is killed at this moment of the save after iteration 5."""
    step = train.PeriodicCheckpointer.step

    def faulty_step(self, iteration, **kwargs):
        if iteration == 5:
            if moment == "half-way in the data":
                torch.save = die_half_way
            elif moment == "before the data has its name":
                os.replace = die_at("model_0000005.pth", os.replace)
            elif moment == "between data and pointer":
                os.replace = die_at("last_checkpoint", os.replace)
            else:
                os.remove = die_at("model_0000003.pth", os.remove)
        step(self, iteration, **kwargs)

    train.PeriodicCheckpointer.step = faulty_step
    train_here(output, words)


@pytest.mark.parametrize(
    ("moment", "left", "start"),
    [
        ("half-way in the data", 3, 4),
        ("before the data has its name", 3, 4),
        ("between data and pointer", 5, 4),
        ("before the old file goes", 5, 6),
    ],
)
def test_a_kill_in_a_save_leaves_a_good_file_even_if_one_is_kept(
    moment, left, start, straight, on_ranks, tmp_path
):
    output = tmp_path / "run"
    words = "SOLVER.CHECKPOINTS_TO_KEEP 1"
    (rank,) = on_ranks(1, killed_in_save, output, words, moment)
    assert rank.code == -signal.SIGKILL, rank.printed
    good = sorted(path.name for path in output.glob("*_0*.pth"))
    assert good[-1] == f"model_{left:07d}.pth"
    for name in good:  # none is torn
        assert torch.load(output / name)["iteration"] == int(name[6:13])
    train_here(output, f"--resume {words}")
    assert starts_of(output) == [start]
    assert list(output.glob("*.tmp")) == []
    assert [path.name for path in output.glob("*_0*.pth")] == ["model_0000011.pth"]
    assert_same_outcome(straight, output)


# With another number of ranks a run goes on with the same samples.


def train_recorded(output, words, stop=None):
    """Train a model without norms and dropout; returns {iteration: keys of this rank's samples}.

    The process ends before it draws the batch of iteration ``stop``; then there is a file instead.
    """
    keys = {}
    start_iter = []
    build = train.build_train_loader
    getitems = SeededDataset.__getitems__

    def build_train_loader(cfg, start):
        start_iter.append(start)
        return build(cfg, start)

    def recorded(self, batch):
        # The evaluation at the end draws samples, too.
        iteration = start_iter[0] + len(keys)
        if iteration == stop:
            comm.synchronize()
            (output / f"keys {comm.get_rank()}.json").write_text(json.dumps(keys))
            comm.synchronize()
            os._exit(9)
        keys[iteration] = np.asarray(batch).tolist()
        return getitems(self, batch)

    train.build_train_loader = build_train_loader
    SeededDataset.__getitems__ = recorded
    train_with(Tiny, output, words)
    return {iteration: keys[iteration] for iteration in keys if iteration < 14}


def test_no_sample_is_lost_or_repeated_from_2_ranks_to_1_to_4_and_back(on_ranks, tmp_path):
    words = "SOLVER.MAX_ITER 14 SOLVER.BASE_LR 0.1 TEST.EVAL_PERIOD 0"
    (alone,) = on_ranks(1, train_recorded, tmp_path / "alone", words)
    assert alone.code == 0, alone.printed
    expected = {int(i): sorted(keys) for i, keys in alone.result.items()}
    epochs = collections.Counter(map(tuple, itertools.chain(*expected.values())))
    assert set(epochs.values()) == {1}

    output = tmp_path / "run"
    seen = collections.defaultdict(list)
    for num_ranks, stop in ((2, 3), (1, 5), (4, 9), (2, None)):
        resume = " --resume" if output.exists() else ""
        ranks = on_ranks(num_ranks, train_recorded, output, words + resume, stop)
        if stop is None:
            assert [rank.code for rank in ranks] == [0] * num_ranks, ranks
            parts = [rank.result for rank in ranks]
        else:
            assert all(rank.code for rank in ranks)
            parts = [json.loads((output / f"keys {i}.json").read_text()) for i in range(num_ranks)]
        for iteration in parts[0]:
            together = itertools.chain(*(part[iteration] for part in parts))
            seen[int(iteration)].append(sorted(together))
    assert seen.keys() == expected.keys()
    for iteration, times in seen.items():  # one that came after the last save is done again
        assert all(keys == expected[iteration] for keys in times)
    assert starts_of(output) == [2, 4, 8]
    for name, value in model_of(tmp_path / "alone").items():  # the sums round differently
        assert torch.allclose(value, model_of(output)[name], atol=1e-4), name


# Ranks agree.


def resumes_with_a_stale_listing(output):
    """Rank 1 sees the folder as it was some saves ago; returns the file that was resumed."""
    if os.environ["RANK"] == "1":
        listdir = os.listdir
        stale = ["model_0000001.pth", "log.txt"]
        os.listdir = lambda path: stale if str(path) == str(output) else listdir(path)
        tagged = os.path.join(output, "model_0000001.pth")
        Checkpointer.get_checkpoint_file = lambda self: tagged
    resumed = []
    resume_or_load = train.Checkpointer.resume_or_load

    def recorded(self, *args, **kwargs):
        rest = resume_or_load(self, *args, **kwargs)
        resumed.append(rest["iteration"])
        return rest

    train.Checkpointer.resume_or_load = recorded
    train_here(output, "--resume SOLVER.MAX_ITER 14")
    return resumed


def test_all_ranks_resume_the_file_that_the_first_one_chose(straight, on_ranks, tmp_path):
    output = tmp_path / "run"
    output.mkdir()
    for name in ("model_0000001.pth", "model_0000009.pth", "model_0000011.pth"):
        (output / name).write_bytes((straight / name).read_bytes())
    ranks = on_ranks(2, resumes_with_a_stale_listing, output)
    assert [rank.result for rank in ranks] == [[11], [11]], ranks


def killed_ranks(output, words):
    set_random_state = train.set_random_state

    def last(seed, iteration=0, rank=0):
        if iteration == 6:
            os._exit(9)
        set_random_state(seed, iteration, rank)

    train.set_random_state = last
    train_here(output, words)


def test_three_ranks_killed_and_resumed_are_the_same_to_the_bit(on_ranks, tmp_path):
    words = "MODEL.WIDTH 16 TEST.EVAL_PERIOD 0 LOG_PERIOD 100"
    whole = on_ranks(3, train_here, tmp_path / "whole", words)
    assert [rank.code for rank in whole] == [0] * 3, whole
    assert all(rank.code for rank in on_ranks(3, killed_ranks, tmp_path / "run", words))
    resumed = on_ranks(3, train_here, tmp_path / "run", f"{words} --resume")
    assert [rank.code for rank in resumed] == [0] * 3, resumed
    assert starts_of(tmp_path / "run") == [6]
    assert same(model_of(tmp_path / "whole"), model_of(tmp_path / "run"))


def messages_of_gradients():
    """The weights, by their numbers, in each message of the first three iterations."""
    init_process_group(torch.device("cpu"), timeout_seconds=60)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(300, 300) for _ in range(6))))
    number_of = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    iterations = []

    def send(_, bucket):
        iterations[-1].append([number_of[id(parameter)] for parameter in bucket.parameters()])
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, send)
    for _ in range(3):
        iterations.append([])
        model(torch.ones(2, 300)).sum().backward()
    return iterations


def test_gradients_are_sent_alike_from_the_first_iteration_on(on_ranks):
    """So a resume adds them in the order of the run, and the last layers are sent first."""
    for rank in on_ranks(2, messages_of_gradients):
        assert rank.code == 0, rank.printed
        assert rank.result == [rank.result[0]] * 3
        assert list(itertools.chain(*rank.result[0])) == list(range(11, -1, -1))
        assert len(rank.result[0]) == 2


# Nothing in a file is run, wherever it stands.


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


SAVES = {
    "archive": torch.save,
    "torch before 1.6": functools.partial(torch.save, _use_new_zipfile_serialization=False),
    "pickle": lambda checkpoint, path: path.write_bytes(pickle.dumps(checkpoint, 2)),
}
PARTS = ("model", "optimizer", "iteration", "storage")


@pytest.mark.parametrize(
    ("form", "part"),
    [*(("archive", part) for part in PARTS), *((form, "model") for form in [*SAVES][1:])],
)
@pytest.mark.parametrize("place", ["newest", "tagged", "final", "best", "weights"])
def test_code_in_a_file_is_refused_in_one_line_and_not_passed_over(
    place, form, part, straight, tmp_path, capsys
):
    output = tmp_path / "run"
    victim = tmp_path / "victim"
    output.mkdir()
    good = output / "model_0000001.pth"
    good.write_bytes((straight / good.name).read_bytes())
    names = {
        "newest": "model_0000003.pth",
        "tagged": "x.pth",
        "final": "model_final.pth",
        "best": "model_best.pth",
    }
    bad = output / names.get(place, "model_other.bin")
    SAVES[form]({**torch.load(good), part: Malicious(str(victim))}, bad)
    if place == "tagged":
        (output / "last_checkpoint").write_text(bad.name)
    words = f"--eval-only MODEL.WEIGHTS {bad}" if place == "weights" else "--resume"
    with own_log(), pytest.raises(SystemExit) as stop:
        launch(train.main, parse(arguments(output, words)))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(f"error: .*{bad.name} holds code or unknown types.*not loaded.*\n", error)
    assert not victim.exists()


# A file that is not a checkpoint of this run.


def with_part(source, target, **parts):
    checkpoint = torch.load(source)
    checkpoint.update(parts)
    torch.save({key: part for key, part in checkpoint.items() if part is not None}, target)


WRONG = {
    "no iteration": {"iteration": None},
    "an iteration that is a text": {"iteration": "3"},
    "a model that is a number": {"model": 5},
    "a model of numbers": {"model": {"weight": 5}},
    "an optimizer that is a list": {"optimizer": [1]},
}


@pytest.mark.parametrize("parts", WRONG.values(), ids=WRONG)
def test_a_resume_passes_over_what_is_no_checkpoint_and_says_so(parts, straight, tmp_path):
    output = tmp_path / "run"
    output.mkdir()
    good = output / "model_0000001.pth"
    bad = output / "model_0000003.pth"
    good.write_bytes((straight / good.name).read_bytes())
    with_part(good, bad, **parts)
    (output / "last_checkpoint").write_text(bad.name)
    train_here(output, "--resume SOLVER.MAX_ITER 3")
    assert starts_of(output) == [2]
    assert re.search("WARNING.*Passing over.*model_0000003", (output / "log.txt").read_text())


@pytest.mark.parametrize("model", [5, [1], {"weight": 5}], ids=["number", "list", "no tensors"])
def test_weights_that_are_none_are_an_error_in_one_line(model, tmp_path):
    torch.save({"model": model}, tmp_path / "x.pth")
    with pytest.raises(SettingsError, match=r"x\.pth") as caught:
        Checkpointer(nn.Linear(1, 1)).load(str(tmp_path / "x.pth"))
    assert "\n" not in str(caught.value)


def test_a_final_file_of_a_shorter_run_is_not_the_newest(tmp_path):
    checkpointer = Checkpointer(nn.Linear(1, 1), str(tmp_path))
    for name, iteration in (("final", 9), ("0000014", 14), ("0000004", 4)):
        checkpointer.save(f"model_{name}", iteration=iteration)
    for pointer in ("", "model_0000099.pth"):
        (tmp_path / "last_checkpoint").write_text(pointer)
        assert checkpointer.resume_or_load("")["iteration"] == 14
    (tmp_path / "model_0000014.pth").write_bytes(b"")
    assert checkpointer.resume_or_load("")["iteration"] == 9
    (tmp_path / "model_final.pth").write_bytes(b"")
    assert checkpointer.resume_or_load("")["iteration"] == 4


# The seed that was drawn.


def test_a_seed_that_was_drawn_outlives_the_file_of_settings(tmp_path):
    output = tmp_path / "run"
    train_here(output, "SEED -1 SOLVER.MAX_ITER 4")
    (seed,) = re.findall(r"^SEED: (\d+)$", (output / "config.yaml").read_text(), re.M)
    assert f"SEED: {seed}\n" in torch.load(output / "model_final.pth")["config"]
    for text in (None, "SEED: [", "5"):
        (output / "config.yaml").unlink()
        if text is not None:
            (output / "config.yaml").write_text(text)
        train_here(output, "--resume SEED -1 SOLVER.MAX_ITER 4")
        assert f"SEED: {seed}\n" in (output / "config.yaml").read_text()


def test_another_run_draws_another_seed(tmp_path):
    seeds = set()
    for name in ("one", "other"):
        train_here(tmp_path / name, "SEED -1 SOLVER.MAX_ITER 1")
        seeds.update(re.findall(r"^SEED: .*$", (tmp_path / name / "config.yaml").read_text(), re.M))
    assert len(seeds) == 2
