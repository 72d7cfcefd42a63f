"""Edits of the root files by hand, of a few lines each: they train, and a resume is exact."""

import os
import re
import signal
import sys
import types

import numpy as np
import pytest
import torch
from conftest import ROOT, arguments, own_log, parse
from outcomes import assert_same_outcome, checkpoint_of, column, rewound
from plumbing import comm
from plumbing.errors import SettingsError

# {file: [(old, new), ...]}; each old part stands in the file once.

# An own data set: these lines of data.py, and settings, which stand in cfg.yaml.
OWN_DATA = {
    "data.py": [
        (
            "def build_dataset(cfg",
            '''class Images(Dataset):
    """The files path/name/CLASS/*.npy, each (1, H, W) uint8; a CLASS is a number."""

    def __init__(self, path, name, transform=None):
        self.files = sorted(glob.glob(os.path.join(path, name, "*", "*.npy")))
        if not self.files:
            raise SettingsError(f"DATASETS.PATH: {path} holds no file {name}/CLASS/*.npy")
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = torch.from_numpy(np.load(self.files[index])).float() / 255
        if self.transform is not None:
            image = self.transform(image)
            # Transforms may draw from any of the three global generators.
            image = image * random.uniform(0.9, 1.1) + np.random.normal(0, 0.01)
        return {"images": image, "labels": int(self.files[index].split(os.sep)[-2])}


def build_dataset(cfg''',
        ),
        ("ConcatDataset([Digits(", "ConcatDataset([Images("),
        ("import os\n", "import glob\nimport os\nimport random\n"),
    ]
}


def other_optimizer(name, arguments=""):
    return {
        "solver.py": [
            (
                "torch.optim.SGD(groups, solver.BASE_LR, momentum=solver.MOMENTUM, fused=True)",
                f"torch.optim.{name}(groups, solver.BASE_LR{arguments})",
            )
        ]
    }


def other_scheduler(text):
    return {
        "solver.py": [
            (
                "LRMultiplier(optimizer, lambda iteration: lr_multiplier(solver, iteration))",
                f"torch.optim.lr_scheduler.{text}",
            )
        ]
    }


SECOND_OPTIMIZER = {
    "train.py": [
        ("import logging\n", "import logging\n\nimport torch\n"),
        (
            "import DistributedDataParallel",
            "import DistributedDataParallel, unwrap",
        ),
        (
            "    optimizer = build_optimizer(cfg, model)\n",
            "    optimizer = build_optimizer(cfg, unwrap(model).features)\n"
            "    critic = torch.optim.AdamW(unwrap(model).classifier.parameters(), 0.01)\n",
        ),
        (
            "        optimizer=optimizer,\n",
            "        optimizer=optimizer,\n        critic=critic,\n",
        ),
        (
            "            scaler.step(optimizer)\n",
            "            scaler.step(optimizer)\n            critic.step()\n",
        ),
        (
            "            optimizer.zero_grad()\n",
            "            optimizer.zero_grad()\n            critic.zero_grad()\n",
        ),
    ]
}
ONE_MORE_OBJECT = {
    "train.py": [
        ("import logging\n", "import logging\n\nimport torch\n"),
        (
            "        storage=storage,\n    )",
            "        storage=storage,\n        extra=torch.nn.Linear(1, 1),\n    )",
        ),
    ]
}


def edited(edit):
    """{file: its text after an edit}"""
    texts = {"train.py": (ROOT / "train.py").read_text()}
    for file, changes in edit.items():
        text = (ROOT / file).read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{file} does not hold once:\n{old}"
            text = text.replace(old, new)
        texts[file] = text
    return texts


def load(texts):
    """The edited train.py as a module; the other edited files are in sys.modules."""
    # train.py comes last, because it imports the others.
    for file in sorted(texts, key="train.py".__eq__):
        name = file.removesuffix(".py")
        module = types.ModuleType(name)
        module.__file__ = str(ROOT / file)
        sys.modules[name] = module
        exec(compile(texts[file], file, "exec"), module.__dict__)
    return sys.modules["train"]


def run(train, output, words=""):
    with own_log():
        return train.main(parse(arguments(output, words)))


def run_on_a_rank(texts, output, words):
    return run(load(texts), output, words)


def run_killed(texts, output, words, iteration):
    """All ranks die as this iteration begins."""
    train = load(texts)
    set_random_state = train.set_random_state

    def call(seed, current=0, rank=0):
        if current == iteration:
            comm.synchronize()  # so that none of them has an error of the others
            os.kill(os.getpid(), signal.SIGKILL)
        set_random_state(seed, current, rank)

    train.set_random_state = call
    run(train, output, words)


@pytest.fixture
def apply(monkeypatch):
    """apply(edit): train.py as a module, with this edit, until the end of the test."""

    def call(edit):
        texts = edited(edit)
        for file in texts:
            monkeypatch.setitem(sys.modules, file.removesuffix(".py"), None)
        return load(texts)

    return call


@pytest.fixture
def resumes_exactly(apply, tmp_path):
    """resumes_exactly(edit, words): train, and again from the middle on; the folder."""

    def call(edit, words=""):
        train = apply(edit)
        run(train, tmp_path / "run", words)
        for iteration in (3, 7):
            copy = rewound(tmp_path / "run", tmp_path / f"from {iteration}", iteration)
            run(train, copy, f"{words} --resume")
            assert_same_outcome(tmp_path / "run", copy)
        return tmp_path / "run"

    return call


# An own data set


@pytest.fixture
def own_data(tmp_path):
    """Noise, in class 1, a quarter of all, with more of it in the left half; the settings."""
    generator = np.random.default_rng(0)
    for name, number in (("train", 64), ("val", 30)):
        for index in range(number):
            label = int(index % 4 == 0)
            image = generator.integers(0, 200, (1, 12, 12), np.uint8)
            image[:, :, :6] += np.uint8(55 * label)
            path = tmp_path / "images" / name / f"{label}/{index}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, image)
    return f"""DATASETS.PATH {tmp_path}/images DATASETS.TRAIN ('train',) DATASETS.TEST ('val',)
        TEST.BEST_METRIC val/accuracy MODEL.NUM_CLASSES 2 SOLVER.BATCH_SIZE 16 TEST.BATCH_SIZE 8"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_your_own_data_train_the_same_with_workers_and_after_a_kill(
    num_ranks, own_data, on_ranks, tmp_path
):
    words = f"{own_data} SOLVER.ACCUM_STEPS 2"
    texts = edited(OWN_DATA)
    straight = on_ranks(num_ranks, run_on_a_rank, texts, tmp_path / "run", words)
    assert [rank.code for rank in straight] == [0] * num_ranks, straight[0].printed
    assert set(straight[0].result) == {"val/accuracy", "val/accuracy-0", "val/accuracy-1"}
    words += " DATALOADER.NUM_WORKERS 2"
    killed = on_ranks(num_ranks, run_killed, texts, tmp_path / "killed", words, 7)
    assert [rank.code for rank in killed] == [-signal.SIGKILL] * num_ranks, killed[0].printed
    resumed = on_ranks(num_ranks, run_on_a_rank, texts, tmp_path / "killed", f"{words} --resume")
    assert [rank.code for rank in resumed] == [0] * num_ranks, resumed[0].printed
    assert_same_outcome(tmp_path / "run", tmp_path / "killed")


def test_your_own_data_set_takes_one_file_and_settings_and_few_lines():
    changes = OWN_DATA["data.py"]
    assert list(OWN_DATA) == ["data.py"]
    assert sum(new.count("\n") for _, new in changes) <= 40


def test_a_folder_without_your_images_is_one_line(apply, own_data, tmp_path):
    train = apply(OWN_DATA)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"^DATASETS.PATH: .* no file train/CLASS/\*.npy$"):
        run(train, tmp_path / "run", f"{own_data} DATASETS.PATH {tmp_path}/empty")


# Any optimizer and any scheduler of torch


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Adadelta", ""),
        ("Adagrad", ""),
        ("Adam", ", amsgrad=True"),
        ("Adamax", ""),
        ("ASGD", ""),
        ("NAdam", ", decoupled_weight_decay=True"),
        ("RAdam", ""),
        ("RMSprop", ", momentum=0.9, centered=True"),
        ("SGD", ", momentum=0.9, nesterov=True"),
    ],
)
def test_any_optimizer_of_torch_resumes_exactly(name, arguments, resumes_exactly):
    words = "SOLVER.BASE_LR 0.02"
    output = resumes_exactly(other_optimizer(name, arguments), words)
    assert checkpoint_of(output)["optimizer"]


SCHEDULERS = {
    "steps": "StepLR(optimizer, 3, gamma=0.5)",
    "exponential": "ExponentialLR(optimizer, 0.9)",
    "one cycle": "OneCycleLR(optimizer, cfg.SOLVER.BASE_LR, total_steps=cfg.SOLVER.MAX_ITER + 1)",
    "restarts": "CosineAnnealingWarmRestarts(optimizer, 5)",
    "cycles": "CyclicLR(optimizer, 0.01, 0.3, step_size_up=4)",
    "a sequence": """SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
        ],
        milestones=[4],
    )""",
}


@pytest.mark.parametrize("text", SCHEDULERS.values(), ids=SCHEDULERS)
def test_any_scheduler_of_torch_resumes_exactly(text, resumes_exactly):
    output = resumes_exactly(other_scheduler(text), "LOG_PERIOD 1")
    assert len(set(column(output, "lr").values())) > 2


# More objects in the checkpoints


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_second_optimizer_is_saved_by_its_keyword_and_resumes_after_a_kill(
    num_ranks, on_ranks, tmp_path
):
    texts = edited(SECOND_OPTIMIZER)
    straight = on_ranks(num_ranks, run_on_a_rank, texts, tmp_path / "run", "")
    assert [rank.code for rank in straight] == [0] * num_ranks, straight[0].printed
    killed = on_ranks(num_ranks, run_killed, texts, tmp_path / "killed", "", 7)
    assert [rank.code for rank in killed] == [-signal.SIGKILL] * num_ranks, killed[0].printed
    resumed = on_ranks(num_ranks, run_on_a_rank, texts, tmp_path / "killed", "--resume")
    assert [rank.code for rank in resumed] == [0] * num_ranks, resumed[0].printed
    assert_same_outcome(tmp_path / "run", tmp_path / "killed")
    kept = checkpoint_of(tmp_path / "run")
    assert "exp_avg" in str(kept["critic"])
    assert "momentum_buffer" in str(kept["optimizer"])


def test_an_object_that_is_added_to_a_run_starts_anew_with_a_warning(apply, tmp_path):
    run(apply({}), tmp_path / "run", "SOLVER.MAX_ITER 4")
    run(apply(ONE_MORE_OBJECT), tmp_path / "run", "--resume")
    log = (tmp_path / "run/log.txt").read_text()
    line = "WARNING.*model_final.pth holds no extra, whose weights stay as they were built"
    assert re.search(line, log)
    assert "extra" in checkpoint_of(tmp_path / "run")


def test_an_object_that_is_taken_back_is_named_and_its_file_is_kept(apply, tmp_path):
    run(apply(ONE_MORE_OBJECT), tmp_path / "run", "SOLVER.MAX_ITER 4")
    run(apply({}), tmp_path / "run", "--resume SOLVER.CHECKPOINTS_TO_KEEP 1")
    log = (tmp_path / "run/log.txt").read_text()
    assert re.search("WARNING.*holds extra, but no object has this name", log)
    assert "extra" not in checkpoint_of(tmp_path / "run")
    (kept,) = (tmp_path / "run").glob("*_with_extra.pth")
    assert "extra" in torch.load(kept)
