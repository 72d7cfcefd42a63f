"""Bad input of train.py: one line that says what is wrong, and nothing is touched."""

import re
import shutil
import time

import pytest
import torch
import train
from conftest import arguments, own_log, parse, shell, train_here
from outcomes import contents
from plumbing import comm
from plumbing.launch import launch

BAD = {
    "an unknown setting": ("SOLVER.MAX_ITR 5", "SOLVER.MAX_ITR: .*SOLVER.MAX_ITER"),
    "a section": ("SOLVER 5", "SOLVER: .*SOLVER.BASE_LR"),
    "a wrong type": ("SOLVER.MAX_ITER ten", "SOLVER.MAX_ITER: .*ten"),
    "an impossible value": ("SOLVER.BASE_LR -1", "SOLVER.BASE_LR: -1.0 must be a number above 0"),
    "an unknown choice": ("SOLVER.OPTIMIZER Adan", "SOLVER.OPTIMIZER: 'Adan'.*AdamW"),
    "an unknown schedule": ("SOLVER.LR_SCHEDULER_NAME poly", "LR_SCHEDULER_NAME: 'poly'.*cosine"),
    "an unknown compiler": ("MODEL.COMPILE foo", "MODEL.COMPILE: 'foo' must be one of .*inductor"),
    "a setting without a value": ("SEED", "SEED"),
    "an equals sign": ("SEED=1", "SEED=1"),
    "no such file of settings": ("--config {tmp}/none.yaml", "none.yaml"),
    "an empty file of settings": ("--config {tmp}/empty.yaml", "empty.yaml"),
    "a file that is not YAML": ("--config {tmp}/not.yaml", "not.yaml"),
    "a folder that holds a run": ("OUTPUT_DIR {tmp}/taken", "OUTPUT_DIR: .*taken .*--resume"),
    "a folder below a file": ("OUTPUT_DIR {tmp}/empty.yaml/run", "OUTPUT_DIR: .*empty.yaml/run"),
    "a URL": ("OUTPUT_DIR s3://bucket/run", "OUTPUT_DIR: s3://bucket/run is a URL"),
    "a batch that does not divide": ("SOLVER.ACCUM_STEPS 7", "SOLVER.BATCH_SIZE: 240 .*7"),
    "no such weights": ("MODEL.WEIGHTS {tmp}/none.pth", "MODEL.WEIGHTS: .*none.pth"),
    "no such data": ("DATASETS.PATH {tmp}/none.npz", "DATASETS.PATH: .*none.npz"),
    "nothing to evaluate": ("--eval-only", "--eval-only needs a model: set MODEL.WEIGHTS"),
    "nothing to resume and evaluate": ("--eval-only --resume", "--eval-only needs a model"),
    "no GPU": ("MODEL.DEVICE cuda", "MODEL.DEVICE: cuda, but there is no GPU on"),
}
LATE = {
    "a data set that does not exist": ("DATASETS.TRAIN ('mnist',)", "DATASETS: 'mnist' must be"),
    "damaged weights": ("MODEL.WEIGHTS {tmp}/empty.yaml", "empty.yaml"),
    "weights of a different model": ("MODEL.WEIGHTS {tmp}/other.pth", "other.pth has nothing for"),
}


def refusal(words, tmp_path, capsys):
    """What a refused run prints to stderr; it exits with 2."""
    words = arguments(tmp_path / "run", words.format(tmp=tmp_path))
    with own_log(), pytest.raises(SystemExit) as stop:
        launch(train.main, parse(words))
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "not.yaml").write_text("a: [")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/metrics.json").write_text("{}\n")
    torch.save({"model": {"a.weight": torch.ones(2)}}, tmp_path / "other.pth")
    return tmp_path


@pytest.mark.parametrize(("words", "pattern"), BAD.values(), ids=BAD)
def test_bad_input_ends_in_one_line_and_touches_nothing(words, pattern, folder, capsys):
    before = contents(folder)
    assert re.fullmatch(f"error: .*{pattern}.*\n", refusal(words, folder, capsys))
    assert contents(folder) == before
    assert not (folder / "run").exists()


@pytest.mark.parametrize(("words", "pattern"), LATE.values(), ids=LATE)
def test_input_that_is_bad_on_a_closer_look_leaves_the_folder_free(words, pattern, folder, capsys):
    assert re.fullmatch(f"error: .*{pattern}.*\n", refusal(words, folder, capsys))
    assert not [name for name in contents(folder / "run") if not name.endswith((".txt", ".yaml"))]
    assert re.search(pattern, (folder / "run/log.txt").read_text().splitlines()[-1])
    assert train_here(folder / "run", "SOLVER.MAX_ITER 1")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Output of a run of one process."""
    output = tmp_path_factory.mktemp("straight") / "run"
    train_here(output)
    return output


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("MODEL.WIDTH 9", "has a different model: .*restore the settings of the run"),
        ("SOLVER.MAX_ITER 7", "SOLVER.MAX_ITER: 7, but 12 have been trained"),
    ],
)
def test_a_refused_resume_leaves_the_run_as_it_was(words, pattern, straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "run")
    notes = ("log.txt", "launcher.txt")
    before = contents(tmp_path, *notes)
    error = refusal(f"--resume {words}", tmp_path, capsys)
    assert re.fullmatch(f"error: .*{pattern}.*\n", error)
    assert contents(tmp_path, *notes) == before


WRONG = "error: command line: SED: there is no such setting; did you mean SEED?"


def test_the_shell_gets_one_line_and_no_traceback(tmp_path):
    done = shell("train.py", *arguments(tmp_path / "run", "SED 1"))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{WRONG}\n")


def start_late(output):
    time.sleep(comm.get_local_rank() == 0)
    return train.main(parse(arguments(output, "SED 1")))


def test_two_ranks_print_the_line_once_even_if_the_first_comes_late(on_ranks, tmp_path):
    ranks = on_ranks(2, start_late, str(tmp_path / "run"))
    assert all(rank.code != 0 for rank in ranks)
    assert "".join(rank.printed for rank in ranks) == f"{WRONG}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "line",
    [
        "--config c.yaml --resume --eval-only SEED 1 LOG_PERIOD 2",
        "SEED 1 LOG_PERIOD 2 --eval-only --resume --config c.yaml",
        "SEED 1 --resume LOG_PERIOD 2 --config c.yaml --eval-only",
    ],
)
def test_flags_stand_anywhere(line):
    args = parse(line.split())
    assert (args.config, args.resume, args.eval_only) == ("c.yaml", True, True)
    assert args.opts == ["SEED", "1", "LOG_PERIOD", "2"]
