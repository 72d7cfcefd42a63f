"""The edits of FROM_HOOKS.md, applied to the files as they are."""

import json
import re
import shutil
import sys
import types

import pytest
import torch
from conftest import ROOT, arguments, own_log
from torch import nn

SMALL_EDITS = "Small edits"
CLOCKS = "time", "data_time", "samples_per_second", "eta_seconds", "max_mem"


def read_edits():
    """{heading: the diffs below it} of FROM_HOOKS.md."""
    sections = re.split(r"^## (.*)\n", (ROOT / "FROM_HOOKS.md").read_text(), flags=re.M)
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
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return one == other


def ended_alike(one, other):
    files = [torch.load(output / "model_final.pth") for output in (one, other)]
    for file in files:
        for name in CLOCKS:
            file["storage"]["histories"].pop(name, None)
    results = [(output / "results.json").read_text() for output in (one, other)]
    return are_equal(*files) and rows_of(one) == rows_of(other) and results[0] == results[1]


def test_every_edit_applies_to_the_files_as_they_are():
    assert len(EDITS) == 7
    for heading in EDITS:
        for file, text in edited(heading).items():
            compile(text, file, "exec")
            assert max(map(len, text.splitlines())) <= 100
    assert all(edited(SMALL_EDITS).values())


def test_every_link_leads_to_a_heading_and_every_setting_exists():
    import defaults
    from plumbing.settings import leaves

    text = (ROOT / "FROM_HOOKS.md").read_text()
    anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in
               re.findall(r"^## (.*)$", text, re.M)}  # fmt: skip
    assert set(re.findall(r"\]\(#(.*?)\)", text)) <= anchors
    known = {key for key, _ in leaves(defaults.get_cfg())} | {"SOLVER.AMP"}
    sections = {key.split(".")[0] for key in known if "." in key}
    named = {n for n in re.findall(r"[A-Z]+(?:\.[A-Z_]+)+", text) if n.split(".")[0] in sections}
    assert len(named) > 30
    assert named <= known


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
    for iteration in (3, 6):  # on the way, and before the evaluation that ended the run
        resumed = rewound(tmp_path / "run", tmp_path / f"from {iteration}", iteration)
        run(train, resumed, f"--resume {words}")
        assert ended_alike(tmp_path / "run", resumed)


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
    alone = run(train, tmp_path / "alone", f"--eval-only MODEL.WEIGHTS {tmp_path / 'ema.pth'}")
    assert alone == results


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
