"""The edits of FROM_HOOKS.md and EDITS.md, applied to the files as they are."""

import json
import os
import pickle
import re
import shutil
import signal
import sys
import types

import numpy as np
import pytest
import torch
from conftest import ROOT, arguments, own_log
from plumbing import comm
from plumbing.settings import leaves
from torch import nn

PAGES = "FROM_HOOKS.md", "EDITS.md"
SMALL_EDITS = "Small edits"
OWN_DATA = "Your own data set"
GAN = "Two optimizers (a GAN)"
CLOCKS = "time", "data_time", "samples_per_second", "eta_seconds", "max_mem"


def read_edits():
    """{heading: the diffs below it} of both pages."""
    pages = "\n".join((ROOT / name).read_text() for name in PAGES)
    sections = re.split(r"^## (.*)\n", pages, flags=re.M)
    pairs = zip(sections[1::2], sections[2::2])
    diffs = {heading: re.findall(r"```diff\n(.*?)```", text, re.S) for heading, text in pairs}
    return {heading: diff for heading, diff in diffs.items() if diff}


EDITS = read_edits()


def edited(*headings):
    """{file: its text after the edits}; each old part must stand in the file once."""
    texts = {}
    for diff in (diff for heading in headings for diff in EDITS[heading]):
        for part in re.split(r"^--- a/", diff, flags=re.M)[1:]:
            file, *hunks = re.split(r"^@@\n", part, flags=re.M)
            file = file.splitlines()[0]
            text = texts.get(file) or (ROOT / file).read_text()
            for hunk in hunks:
                lines = hunk.splitlines(keepends=True)
                old = "".join(line[1:] for line in lines if line[0] != "+")
                assert text.count(old) == 1, f"{file} does not hold once:\n{old}"
                text = text.replace(old, "".join(line[1:] for line in lines if line[0] != "-"))
            texts[file] = text
    return texts


def load(texts):
    """The edited train.py as a module; the other edited files are in sys.modules."""
    for file in sorted(texts, key="train.py".__eq__):
        module = sys.modules[file.removesuffix(".py")] = types.ModuleType(file.removesuffix(".py"))
        module.__file__ = str(ROOT / file)
        exec(compile(texts[file], file, "exec"), module.__dict__)
    return sys.modules["train"]


@pytest.fixture
def apply(monkeypatch):
    """apply(*headings): train.py as a module, with these edits, until the end of the test."""

    def call(*headings):
        texts = {"train.py": (ROOT / "train.py").read_text(), **edited(*headings)}
        for file in texts:
            monkeypatch.setitem(sys.modules, file.removesuffix(".py"), None)
        return load(texts)

    return call


def run(train, output, words=""):
    with own_log():
        return train.main(train.parse_args(arguments(output, words)))


def run_on_a_rank(texts, output, words):
    return run(load(texts), output, words)


def run_and_tell_how_gradients_are_sent(texts, output, words):
    """The results, and the names of what sends the gradients."""
    train, names = load(texts), []
    build_parallel = train.build_parallel

    def recorded(cfg, model):
        parallel = build_parallel(cfg, model)
        names.extend(hook.__name__ for hook, _ in parallel._comm_hooks)
        return parallel

    train.build_parallel = recorded
    return {**run(train, output, words), "hooks": names}


def rows_of(output):
    lines = (output / "metrics.json").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKS} for line in lines]


def rewound(output, copy, iteration):
    """Copy a run and put it back to right after the save of an iteration."""
    shutil.copytree(output, copy)
    for path in [copy / "model_final.pth", copy / "results.json", *copy.glob("model_0*.pth")]:
        if path.name > f"model_{iteration:07}.pth":
            path.unlink()
    (copy / "last_checkpoint").write_text(f"model_{iteration:07}.pth")
    return copy


def are_equal(one, other):
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return one == other or one != one and other != other  # both of them NaN


def ended_alike(one, other):
    files = [torch.load(output / "model_final.pth") for output in (one, other)]
    for file in files:
        for name in CLOCKS:
            file["storage"]["histories"].pop(name, None)
    results = [(output / "results.json").read_text() for output in (one, other)]
    rows = map(rows_of, (one, other))
    return are_equal(*files) and are_equal(*rows) and results[0] == results[1]


def test_every_edit_applies_to_the_files_as_they_are():
    assert len(EDITS) == 9
    for heading in EDITS:
        for file, text in edited(heading).items():
            compile(text, file, "exec")
            assert max(map(len, text.splitlines())) <= 100
    assert all(edited(SMALL_EDITS).values())


def anchors(text):
    headings = re.findall(r"^##+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


def test_every_link_leads_to_a_heading_and_every_setting_exists():
    import defaults

    texts = {name: (ROOT / name).read_text() for name in (*PAGES, "README.md")}
    text = texts["FROM_HOOKS.md"]
    for name, page in texts.items():
        for link in re.findall(r"\]\((?!http)(.*?)\)", page):
            file, _, anchor = link.partition("#")
            assert (ROOT / file).exists(), link
            assert not anchor or anchor in anchors(texts[file or name]), link
    known = {key for key, _ in leaves(defaults.get_cfg())} | {"SOLVER.AMP"}
    sections = {key.split(".")[0] for key in known if "." in key}
    named = {n for n in re.findall(r"[A-Z]+(?:\.[A-Z_]+)+", text) if n.split(".")[0] in sections}
    assert len(named) > 30
    assert named <= known


def test_an_epoch_begins_where_the_line_that_is_printed_says_so():
    import train

    (row,) = re.findall(r"^\| `before_epoch`.*$", (ROOT / "FROM_HOOKS.md").read_text(), re.M)
    condition, before = re.findall(r"`(if .*?:|\w+ = .*?)`", row)
    names = {"dataset_size": train.dataset_size, "cfg": train.get_cfg()}
    for iters_per_epoch, length in ((0, 23), (7, 7)):  # 1437 samples, 64 of them an iteration
        names["cfg"].SOLVER.ITERS_PER_EPOCH, names["begun"] = iters_per_epoch, []
        loop = f"for iteration in range(70):\n    {condition}\n        begun.append(iteration)"
        exec(f"{before}\n{loop}", names)
        assert names["begun"] == list(range(0, 70, length))


@pytest.mark.parametrize("name", ["overfit_batches", "fast_dev_run", "LearningRateFinder"])
def test_what_is_tried_by_settings_runs_beside_a_run(name, apply, tmp_path, monkeypatch):
    page = (ROOT / "FROM_HOOKS.md").read_text()
    (words,) = re.findall(rf"^\| `{name}` \| `(.*?)`", page, re.M)
    monkeypatch.chdir(tmp_path)
    train, length = apply(), "SOLVER.MAX_ITER 3 SOLVER.BATCH_SIZE 64"
    run(train, tmp_path / "run", length)
    words = words.replace("500", "3") + " OUTPUT_DIR tried" * (name == "overfit_batches")
    run(train, tmp_path / "run", f"{length} {words}")
    assert rows_of(tmp_path / "tried")[-1]["iteration"] == (0 if name == "fast_dev_run" else 2)


@pytest.mark.parametrize("is_pickle", [False, True])
def test_the_printed_lines_rename_weights_so_that_they_load(is_pickle, tmp_path, monkeypatch):
    import train

    readme, cfg = (ROOT / "README.md").read_text(), train.get_cfg()
    code = re.search(r"### Weights from elsewhere\n.*?```python\n(.*?)```", readme, re.S)[1]
    model, other = train.build_model(cfg), train.build_model(cfg)
    state = {k.replace("features.", "stem."): v for k, v in model.state_dict().items()}
    monkeypatch.chdir(tmp_path)
    if is_pickle:
        code = re.sub(r"torch.load.*# or ", "", code)
        arrays = {"model": {key: value.numpy() for key, value in state.items()}}
        (tmp_path / "there.pkl").write_bytes(pickle.dumps(arrays))
    else:
        torch.save(state, "there.pth")
    exec(code, {"torch": torch, "pickle": pickle})
    train.Checkpointer(other).load("here.pth")
    assert are_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_early_stopping_ends_a_run_that_gets_no_better_and_resumes_exactly(apply, tmp_path):
    train = apply("Early stopping")
    values = iter([0.1, 0.5, 0.5005, 0.4, 0.5, 0.5, 0.5, 0.5])
    seen = {}  # iteration: value

    def do_test(cfg, model):
        iteration = train.get_event_storage().iter
        seen.setdefault(iteration, next(values, None))
        return {"digits_test/accuracy": seen[iteration]}

    train.do_test = do_test
    words = "TEST.EVAL_PERIOD 1 SOLVER.CHECKPOINT_PERIOD 1"
    results = run(train, tmp_path / "run", words)
    assert results == {"digits_test/accuracy": 0.5}
    assert [row["iteration"] for row in rows_of(tmp_path / "run")] == list(range(7))
    why = "Stopping after iteration 6: none of the last 5 digits_test/accuracy is by 0.001 better"
    assert (tmp_path / "run/log.txt").read_text().count(f"{why} than 0.5\n") == 1
    for iteration in (3, 6):  # on the way, and before the evaluation that ended the run
        resumed = rewound(tmp_path / "run", tmp_path / f"from {iteration}", iteration)
        log = (resumed / "log.txt").read_text()
        run(train, resumed, f"--resume {words}")
        assert ended_alike(tmp_path / "run", resumed)
        assert (resumed / "log.txt").read_text()[len(log) :].count(why) == 1


def test_early_stopping_tells_where_it_stopped_and_more_patience_goes_on(
    apply, tmp_path, monkeypatch
):
    train, seen = apply("Early stopping"), []

    def do_test(cfg, model):
        seen.append(train.get_event_storage().iter)
        return {"digits_test/accuracy": 0.5}

    train.do_test = do_test
    words = "TEST.EVAL_PERIOD 1 SOLVER.CHECKPOINT_PERIOD 20"
    run(train, tmp_path / "run", words)
    assert json.loads((tmp_path / "run/results.json").read_text())["iteration"] == 5
    final = torch.load(tmp_path / "run/model_final.pth")
    assert (final["iteration"], final["seed"], seen) == (5, 0, [0, 1, 2, 3, 4, 5])
    copy = shutil.copytree(tmp_path / "run", tmp_path / "again")
    run(train, copy, f"--resume {words}")
    assert seen[6:] == [5]
    assert ended_alike(tmp_path / "run", copy)

    diff = EDITS["Early stopping"][0].replace("patience=5", "patience=99")
    monkeypatch.setitem(EDITS, "Early stopping", [diff])
    train = apply("Early stopping")
    train.do_test = do_test
    saved, save = [], train.Checkpointer.save
    monkeypatch.setattr(
        train.Checkpointer,
        "save",
        lambda self, name, **others: (saved.append(name), save(self, name, **others)),
    )
    run(train, copy, f"--resume {words}")
    assert json.loads((copy / "results.json").read_text())["iteration"] == 11
    assert saved.count("model_final") == 1


def test_early_stopping_may_take_less_as_better(apply):
    train = apply("Early stopping")
    for values, sign, expected in (
        ((3.0, 2.0, 1.0), -1, False),
        ((1.0, 2.0, 3.0), -1, True),
        ((1.0, 2.0, 3.0), 1, False),
    ):
        with train.EventStorage() as storage:
            for storage.iter, value in enumerate(values):
                storage.put_scalar("metric", value, smoothing_hint=False)
            assert train.has_stalled(storage, "metric", patience=2, sign=sign) == expected


AVERAGED = "Averaged weights (EMA, SWA)"


def test_the_averaged_weights_are_what_is_evaluated_and_saved(apply, tmp_path):
    train = apply(AVERAGED)
    words = "SOLVER.CHECKPOINT_PERIOD 1 SOLVER.CHECKPOINTS_TO_KEEP 99 LOG_PERIOD 1"
    results = run(train, tmp_path / "run", words)
    files = [torch.load(tmp_path / f"run/model_{i:07}.pth") for i in range(12)]
    cfg = torch.load(tmp_path / "run/model_final.pth")
    names = [name for name in cfg["ema"] if not re.search("running|num_batches", name)]
    first = files[0]["ema"]  # of the initial weights and those after iteration 0
    average = {name: first[name].double() for name in names}
    for iteration, file in enumerate(files[1:], 1):
        share = max(0.001, 9 / (10 + iteration))
        for name in names:
            average[name] += share * (file["model"][name].double() - average[name])
    assert all(torch.allclose(average[n].float(), cfg["ema"][n], atol=1e-6) for n in names)
    assert not torch.allclose(cfg["model"][names[0]], cfg["ema"][names[0]])
    assert all(torch.equal(cfg["ema"][n], cfg["model"][n]) for n in cfg["ema"] if n not in names)

    torch.save(cfg["ema"], tmp_path / "ema.pth")
    for path in (tmp_path / "ema.pth", tmp_path / "run/model_final.pth"):
        assert run(train, tmp_path / "alone", f"--eval-only MODEL.WEIGHTS {path}") == results
    assert run(train, tmp_path / "run", "--eval-only --resume") == results
    best = json.loads((tmp_path / "run/model_best.json").read_text())
    words = f"--eval-only MODEL.WEIGHTS {tmp_path / 'run/model_best.pth'}"
    assert run(train, tmp_path / "alone", words).items() >= {
        ("digits_test/accuracy", best["digits_test/accuracy"])
    }


def test_averaged_weights_resume_to_the_bit_on_ranks_that_have_statistics_of_their_own(
    on_ranks, tmp_path
):
    texts = {"train.py": (ROOT / "train.py").read_text(), **edited(AVERAGED)}
    words = "SOLVER.CHECKPOINT_PERIOD 4"
    for output in (tmp_path / "run", tmp_path / "copy"):
        ranks = on_ranks(2, run_on_a_rank, texts, output, words)
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].printed
        if output.name == "run":
            words += " --resume"
            rewound(tmp_path / "run", tmp_path / "copy", 7)  # an evaluation is due
    assert ended_alike(tmp_path / "run", tmp_path / "copy")
    evaluated = on_ranks(2, run_on_a_rank, texts, tmp_path / "run", "--eval-only --resume")
    assert [rank.result for rank in evaluated] == [rank.result for rank in ranks]


def test_the_loss_on_a_test_set_is_the_mean_over_its_samples(apply, tmp_path):
    train = apply("The loss on test sets")
    results = run(train, tmp_path / "run", "TEST.BATCH_SIZE 100 SOLVER.ACCUM_STEPS 2")
    likelihood = results["digits_test/negative_log_likelihood"]
    assert results["digits_test/loss"] == pytest.approx(likelihood, rel=1e-5)
    straight = torch.load(tmp_path / "run/model_final.pth")["model"]
    run(apply(), tmp_path / "plain", "SOLVER.ACCUM_STEPS 2")
    assert are_equal(straight, torch.load(tmp_path / "plain/model_final.pth")["model"])


def test_the_statistics_of_batch_norms_are_means_over_many_batches(apply, tmp_path, monkeypatch):
    heading = "Statistics of batch norms from more batches"
    monkeypatch.setitem(EDITS, heading, [EDITS[heading][0].replace("200", "20")])
    train = apply(heading)
    words = "TEST.EVAL_PERIOD 4 SOLVER.CHECKPOINT_PERIOD 4 MODEL.DROPOUT 0.0"
    run(train, tmp_path / "run", words)
    state = torch.load(tmp_path / "run/model_final.pth")["model"]
    name = next(name for name in state if name.endswith("running_mean"))
    assert state[name.replace("running_mean", "num_batches_tracked")] == 20
    cfg = train.get_cfg()
    train.merge_settings(cfg, str(ROOT / "cfg.yaml"), arguments("", "")[4:])
    model = train.build_model(cfg)
    model.load_state_dict(state)
    norm = next(each for each in model.modules() if isinstance(each, nn.BatchNorm2d))
    means = []
    norm.register_forward_pre_hook(lambda _, args: means.append(args[0].mean(dim=(0, 2, 3))))
    with torch.no_grad():
        for _, (data,) in zip(range(20), train.build_train_loader(cfg, 0)):
            model(data)
    expected = torch.stack(means).mean(dim=0)
    assert torch.allclose(state[name], expected, atol=1e-5)
    run(train, rewound(tmp_path / "run", tmp_path / "copy", 7), f"--resume {words}")
    assert ended_alike(tmp_path / "run", tmp_path / "copy")


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.rows, self.ended, self.options = [], 0, []
        self.log, self.define_metric = self.rows.append, lambda *args, **options: None

    def init(self, **options):
        self.options.append(options)
        return self

    def finish(self):
        self.ended += 1


def test_one_more_writer_gets_each_row_once_also_of_a_resumed_run(apply, tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train = apply("One more place for metrics")
    words = "LOG_WINDOW 1 SOLVER.CHECKPOINT_PERIOD 4"
    run(train, tmp_path / "run", words)
    losses = [row["total_loss"] for row in wandb.rows if "total_loss" in row]
    assert losses == [row["total_loss"] for row in rows_of(tmp_path / "run")]
    copy = rewound(tmp_path / "run", tmp_path / "copy/run", 7)
    wandb.rows.clear()
    run(train, copy, f"--resume {words}")
    steps = [row["iteration"] for row in wandb.rows if "total_loss" in row]
    assert steps == [row["iteration"] for row in rows_of(copy) if row["iteration"] >= 7]
    assert [each["id"] for each in wandb.options] == ["run", "run"]
    assert wandb.ended == 2


def test_other_data_from_an_iteration_on_and_a_resume_is_exact(apply, tmp_path, monkeypatch):
    heading = "Other data from an iteration on"
    monkeypatch.setitem(EDITS, heading, [EDITS[heading][0].replace("500", "6")])
    train, drawn = apply(heading), []
    build = train.build_train_loader

    def build_train_loader(cfg, start_iter, *others):
        for iteration, batches in enumerate(build(cfg, start_iter, *others), start_iter):
            drawn.append((iteration, cfg.DATASETS.MAX_SHIFT))
            yield batches

    train.build_train_loader = build_train_loader
    run(train, tmp_path / "run")
    assert drawn == [(i, int(i < 6)) for i in range(12)]
    for iteration in (3, 7):
        drawn.clear()
        copy = rewound(tmp_path / "run", tmp_path / f"from {iteration}", iteration)
        run(train, copy, "--resume")
        assert drawn == [(i, int(i < 6)) for i in range(iteration + 1, 12)]
        assert ended_alike(tmp_path / "run", copy)


def test_the_small_edits_do_what_they_say(apply, tmp_path):
    train = apply(SMALL_EDITS)
    words = "TEST.BATCH_SIZE 3 SOLVER.LR_FACTORS ('classifier.*=10',) SOLVER.AMP.ENABLED True"
    run(train, tmp_path / "run", f"{words} SOLVER.AMP.DTYPE float16 LOG_PERIOD 1")
    log, rows = (tmp_path / "run/log.txt").read_text(), rows_of(tmp_path / "run")
    before, training = log.split("Starting training from iteration 0")
    assert "Evaluated 30 samples of digits_test" in before
    assert training.count("Evaluated 30 samples of digits_test") == 3
    assert training.count("Without a gradient: none") == 1
    rates = [value for name, value in rows[5].items() if name.startswith("lr/")]
    assert max(rates) == pytest.approx(10 * min(rates))
    assert rows[5]["[metric]epoch"] == pytest.approx(6 * 240 / 1437, rel=1e-6)
    assert "[metric]epoch: " in training
    assert rows[0]["grad_scale"] <= 512
    likely = json.loads((tmp_path / "run/model_likely.json").read_text())
    likelihoods = {
        row["iteration"]: row["digits_test/negative_log_likelihood"]
        for row in rows
        if "digits_test/negative_log_likelihood" in row
    }
    assert likelihoods[likely["iteration"]] == min(likelihoods.values()) == min(likely.values())
    assert torch.load(tmp_path / "run/model_likely.pth")["seed"] == 0
    assert (tmp_path / "run/model_best.pth").exists()


def test_all_edits_that_go_together_train_on_two_ranks(on_ranks, tmp_path):
    headings = "The loss on test sets", "Statistics of batch norms from more batches", SMALL_EDITS
    texts = {"train.py": (ROOT / "train.py").read_text(), **edited(*headings)}
    function, words = run_and_tell_how_gradients_are_sent, "TEST.BATCH_SIZE 100"
    ranks = on_ranks(2, function, texts, tmp_path / "run", words)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].printed
    assert [rank.result["hooks"] for rank in ranks] == [["fp16_compress_hook"]] * 2
    losses = [rank.result["digits_test/loss"] for rank in ranks]
    assert losses[0] == losses[1]
    likelihood = ranks[0].result["digits_test/negative_log_likelihood"]
    assert losses[0] == pytest.approx(likelihood, rel=1e-4)


def run_killed(texts, output, words, iteration):
    """All ranks die as this iteration begins."""
    train = load(texts)
    set_random_state = train.set_random_state

    def call(seed, *others, **options):
        if others[:1] == (iteration,):
            comm.synchronize()  # so that none of them has an error of the others
            os.kill(os.getpid(), signal.SIGKILL)
        set_random_state(seed, *others, **options)

    train.set_random_state = call
    return run(train, output, words)


def images(folder):
    """Noise, in class 1, a quarter of all, with more of it in the left half."""
    generator = np.random.default_rng(0)
    for name, number in (("train", 64), ("val", 30)):
        for index in range(number):
            image = generator.integers(0, 200, (3, 12, 12), np.uint8)
            label = int(index % 4 == 0)
            image[:, :, :6] += np.uint8(55 * label)
            path = folder / name / f"{label}/{index}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, image)
    return folder


@pytest.fixture
def own_data(tmp_path):
    return f"DATASETS.PATH {images(tmp_path / 'images')} SOLVER.BATCH_SIZE 16 TEST.BATCH_SIZE 8"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_your_own_data_train_the_same_with_workers_and_after_a_kill(
    num_ranks, own_data, on_ranks, tmp_path
):
    words = f"{own_data} SOLVER.ACCUM_STEPS 2 DATALOADER.SAMPLER_TRAIN class_balanced"
    texts = {"train.py": (ROOT / "train.py").read_text(), **edited(OWN_DATA)}
    straight = on_ranks(num_ranks, run_on_a_rank, texts, tmp_path / "run", words)
    assert [rank.code for rank in straight] == [0] * num_ranks, straight[0].printed
    assert set(straight[0].result) == {
        f"val/{name}"
        for name in ("accuracy", "expected_calibration_error", "negative_log_likelihood")
    }
    words += " DATALOADER.NUM_WORKERS 2"
    killed = on_ranks(num_ranks, run_killed, texts, tmp_path / "killed", words, 7)
    assert [rank.code for rank in killed] == [-signal.SIGKILL] * num_ranks, killed[0].printed
    resumed = on_ranks(num_ranks, run_on_a_rank, texts, tmp_path / "killed", f"{words} --resume")
    assert [rank.code for rank in resumed] == [0] * num_ranks, resumed[0].printed
    assert ended_alike(tmp_path / "run", tmp_path / "killed")
    assert (tmp_path / "run/model_best.json").exists()


def test_your_own_images_are_mirrored_at_random_in_training_only(apply, own_data, tmp_path):
    train = apply(OWN_DATA)
    cfg = train.get_cfg()
    train.merge_settings(cfg, str(ROOT / "cfg.yaml"), arguments("", own_data)[4:])
    train.check_cfg(cfg, 1)
    assert train.dataset_size(cfg) == 64

    def drawn():
        loader = train.build_train_loader(cfg, 0, train.build_train_sampler)
        return [batch for _, (batch,) in zip(range(4), loader)]  # an epoch

    def drawn_with(probability):
        cfg.DATASETS.FLIP = probability
        return torch.cat([batch["images"] for batch in drawn()])

    for name, counts in (("class_balanced", [32, 32]), ("uniform", [48, 16])):
        cfg.DATALOADER.SAMPLER_TRAIN = name
        labels = torch.cat([batch["labels"] for batch in drawn()])
        assert labels.bincount().tolist() == counts
    plain, some, every = map(drawn_with, (0.0, 0.5, 1.0))
    assert torch.equal(every, plain.flip(3))
    is_mirrored = (some == every).flatten(1).all(dim=1)
    assert ((some == plain).flatten(1).all(dim=1) != is_mirrored).all()
    assert 16 < is_mirrored.sum() < 48
    cfg.DATASETS.FLIP = 0.5
    datasets = []
    for cfg.SEED in (0, 0, 1):
        dataset, _ = sys.modules["data"].build_dataset(cfg, ["train"], train=True)
        datasets.append(torch.stack([dataset[0, index]["images"] for index in range(64)]))
    assert torch.equal(datasets[0], datasets[1])
    assert not torch.equal(datasets[0], datasets[2])
    test = torch.cat([batch["images"] for batch in train.build_test_loader(cfg, "val")])
    files = sorted((tmp_path / "images/val").glob("*/*.npy"))
    assert torch.equal(test, torch.stack([torch.from_numpy(np.load(f)) for f in files]) / 255)


def test_a_folder_without_your_images_is_one_line(apply, tmp_path):
    train = apply(OWN_DATA)
    with pytest.raises(comm.SettingsError, match=r"^DATASETS.PATH: .* no file train/CLASS/\*.npy$"):
        run(train, tmp_path / "run", f"DATASETS.PATH {tmp_path}")


GAN_WORDS = "SOLVER.BASE_LR 0.02 SOLVER.MOMENTUM 0.5"


def test_a_gan_takes_the_steps_of_a_plain_loop(apply, tmp_path):
    train = apply(GAN)
    words = f"{GAN_WORDS} SOLVER.WEIGHT_DECAY 0.0 SOLVER.LR_SCHEDULER_NAME constant"
    results = run(train, tmp_path / "run", f"{words} SOLVER.WARMUP_ITERS 0 SOLVER.ACCUM_STEPS 2")
    assert 0 < results["digits_test/frechet_distance"] < 64

    cfg = train.get_cfg()
    train.merge_settings(cfg, str(ROOT / "cfg.yaml"), arguments("", "SOLVER.ACCUM_STEPS 2")[4:])
    train.set_random_state(cfg.SEED)
    model = train.build_model(cfg)
    optimizers = {
        name: torch.optim.SGD(model.get_submodule(name).parameters(), lr=0.02, momentum=0.5)
        for name in ("critic", "generator")
    }
    for iteration, batches in zip(range(12), train.build_train_loader(cfg, 0)):
        train.set_random_state(cfg.SEED, iteration)
        for name, optimizer in optimizers.items():
            model.zero_grad()
            for data in batches:
                (sum(model(data, name).values()) / 2).backward()
            optimizer.step()
    state = torch.load(tmp_path / "run/model_final.pth")["model"]
    for name, value in model.state_dict().items():
        assert torch.allclose(value, state[name], atol=1e-5), name


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_gan_resumes_to_the_bit_after_a_kill(num_ranks, on_ranks, tmp_path):
    texts = {"train.py": (ROOT / "train.py").read_text(), **edited(GAN)}
    words = f"{GAN_WORDS} SOLVER.OPTIMIZER AdamW SOLVER.ACCUM_STEPS 2 SOLVER.CLIP_GRAD_NORM 1.0"
    straight = on_ranks(num_ranks, run_on_a_rank, texts, tmp_path / "run", words)
    assert [rank.code for rank in straight] == [0] * num_ranks, straight[0].printed
    killed = on_ranks(num_ranks, run_killed, texts, tmp_path / "killed", words, 7)
    assert [rank.code for rank in killed] == [-signal.SIGKILL] * num_ranks, killed[0].printed
    resumed = on_ranks(num_ranks, run_on_a_rank, texts, tmp_path / "killed", f"{words} --resume")
    assert [rank.code for rank in resumed] == [0] * num_ranks, resumed[0].printed
    assert ended_alike(tmp_path / "run", tmp_path / "killed")
    final = torch.load(tmp_path / "run/model_final.pth")
    assert final["critic_scheduler"] == final["scheduler"]


def passes_of_a_gan_on_a_rank(texts, output, words):
    """The sums of the weights on this rank in each pass of the training, of images elsewhere."""
    train, passes = load(texts), {"training": [], "evaluation": []}
    build_parallel = train.build_parallel

    def record(model, _, output):
        if model.training:
            sums = [each.double().sum().item() for each in model.parameters()]
            passes["training"].append(sums)
        else:
            passes["evaluation"].append(output.double().sum().item())

    def recorded(cfg, model):
        model = build_parallel(cfg, model)
        model.register_forward_hook(record)
        return model

    train.build_parallel = recorded
    run(train, output, words)
    return passes


def test_ranks_of_a_gan_have_the_same_weights_and_make_other_images(on_ranks, tmp_path):
    texts = {"train.py": (ROOT / "train.py").read_text(), **edited(GAN)}
    ranks = on_ranks(2, passes_of_a_gan_on_a_rank, texts, tmp_path / "run", GAN_WORDS)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].printed
    one, other = (rank.result for rank in ranks)
    assert one["training"] == other["training"]
    assert len({tuple(sums) for sums in one["training"]}) == len(one["training"]) == 24
    assert all(map(float.__ne__, one["evaluation"], other["evaluation"]))


def poison(train, *iterations):
    """Real images are not finite in these iterations."""
    build = train.build_train_loader

    def build_train_loader(cfg, start_iter, *others):
        for iteration, batches in enumerate(build(cfg, start_iter, *others), start_iter):
            if iteration in iterations:
                batches = [{**data, "images": data["images"] * torch.nan} for data in batches]
            yield batches

    train.build_train_loader = build_train_loader


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_each_player_of_a_gan_leaves_out_its_own_steps_and_a_resume_is_exact(
    apply, tmp_path, precision
):
    train = apply(GAN)
    poison(train, 4, 6)
    words = f"{GAN_WORDS} SOLVER.NONFINITE skip LOG_PERIOD 1 LOG_WINDOW 1 TEST.EVAL_PERIOD 0"
    if precision == "float16":
        words += " SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE float16"
    run(train, tmp_path / "run", words)
    rows = rows_of(tmp_path / "run")[3:]  # the first scales of float16 are too large
    skips = [row["critic/skips"] - rows[0]["critic/skips"] for row in rows]
    assert skips == [0, 1, 1, 2, 2, 2, 2, 2, 2]
    assert len({row["skips"] for row in rows}) == 1
    before, after = (torch.load(tmp_path / f"run/model_000000{i}.pth") for i in (3, 7))
    weights = [file["model"]["generator.0.weight"] for file in (before, after)]
    assert not torch.equal(*weights)
    assert all(value.isfinite().all() for value in after["model"].values())
    if precision == "float16":
        scales = [[file[f"{part}scaler"]["scale"] for file in (before, after)]
                  for part in ("", "critic_")]  # fmt: skip
        assert [one / other for one, other in scales] == [1, 4]
    for iteration in (3, 5):
        copy = rewound(tmp_path / "run", tmp_path / f"from {iteration}", iteration)
        run(train, copy, f"{words} --resume")
        assert ended_alike(tmp_path / "run", copy)


def test_steps_that_one_player_of_a_gan_always_leaves_out_are_an_error(apply, tmp_path):
    train = apply(GAN)
    poison(train, *range(3, 12))
    words = f"{GAN_WORDS} SOLVER.NONFINITE skip SOLVER.MAX_SKIPS 4 LOG_PERIOD 1"
    with pytest.raises(comm.NonFiniteError, match="iteration 6 .*critic/skips_in_a_row"):
        run(train, tmp_path / "run", words)
