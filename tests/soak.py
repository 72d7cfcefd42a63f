"""Kill trainings at random moments, resume them, and compare with runs that were left alone.

    python tests/soak.py [--kills 100] [--ranks 1 2] [--seed 0] [--project DIR]

Each round draws a number of ranks, loader workers, micro-batches, precision and periods, trains
once without a disturbance, and once with SIGKILL to all ranks at random moments and --resume after
each.  After every kill all files are looked at.  Prints the kills survived, the rounds in which
weights, state or metrics differ in a bit, and the files found invalid; exits with 1 if any are.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import TCPStore

TEMPLATE_PROJECT = Path(__file__).resolve().parents[1] / "<<cookiecutter.project_slug>>"
CLOCKS = ("time", "data_time", "samples_per_second", "eta_seconds")
PRELOAD = ["torch", "torch._dynamo", "torch.utils.tensorboard", "yacs.config"]
LIMIT_SECONDS = 300  # after which ranks that were left alone are taken to hang


class Round(NamedTuple):
    """What a round trains."""

    project: Path
    num_ranks: int
    words: list
    log: Path


def be_rank(rank, round_, port, words):
    """Train as a rank of torchrun would, in a process group of its own with its workers."""
    os.setsid()
    descriptor = os.open(round_.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(round_.num_ranks),
        LOCAL_WORLD_SIZE=str(round_.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    sys.path.insert(0, str(round_.project))
    import train

    train.launch(train.main, train.parse_args("", words))


class Session:
    """The ranks of one start, and the store through which they find each other."""

    def __init__(self, round_, output, *flags):
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        words = [*round_.words, "OUTPUT_DIR", str(output), *flags]
        context = multiprocessing.get_context("forkserver")
        self.ranks = []
        for rank in range(round_.num_ranks):
            args = (rank, round_, self.store.port, words)
            self.ranks.append(context.Process(target=be_rank, args=args))
        for rank in self.ranks:
            rank.start()

    def wait(self, seconds):
        """Wait until all ranks have ended, or for so long."""
        deadline = time.monotonic() + seconds
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))

    def kill(self):
        """SIGKILL to the ranks and their workers.  Returns whether they were still at work."""
        alive = any(rank.exitcode is None for rank in self.ranks)
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.join()
        return alive

    def codes(self):
        return [rank.exitcode for rank in self.ranks]


def invalid_files(folder, load_file):
    """What is wrong with the checkpoints and the metrics of a run that was just killed."""
    bad = []
    for path in folder.glob("*.pth"):
        try:
            load_file(str(path))
        except ValueError as error:
            bad.append(f"{path.name}: {error}")
    metrics = folder / "metrics.json"
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    for line in lines[:-1]:  # the last one may be torn
        try:
            json.loads(line)
        except ValueError:
            bad.append(f"metrics.json: {line!r}")
    return bad


def outcome(folder, load_file):
    """Everything that two runs must have in common to the bit."""
    state = load_file(str(folder / "model_final.pth"))
    del state["config"]  # it names the folder
    for part in ("histories", "smoothing_hints"):
        for clock in CLOCKS:
            state["storage"][part].pop(clock, None)
    rows = []
    for line in (folder / "metrics.json").read_text().splitlines():
        row = json.loads(line)
        rows.append({name: value for name, value in row.items() if name not in CLOCKS})
    results = [(folder / name).read_text() for name in ("results.json", "model_best.json")]
    return {"state": state, "rows": rows, "results": results}


def differences(one, other, place=""):
    """The places where two trees differ in a bit."""
    if type(one) is not type(other):
        return [place]
    if hasattr(one, "full_tensor"):
        # It was divided between the ranks, as the recipe fsdp does.
        one = one.full_tensor()
        other = other.full_tensor()
    if isinstance(one, dict):
        found = [f"{place}/{key}" for key in one.keys() ^ other.keys()]
        for key in one.keys() & other.keys():
            found += differences(one[key], other[key], f"{place}/{key}")
        return found
    if isinstance(one, (list, tuple)):
        found = [] if len(one) == len(other) else [f"{place}/length"]
        for number, pair in enumerate(zip(one, other)):
            found += differences(*pair, f"{place}/{number}")
        return found
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [place]


def draw_words(rng):
    """Settings of a round."""
    log_period = rng.choice((3, 7, 20))
    checkpoint_period = rng.choice((5, 8, 25))
    eval_period = rng.choice((4, 15, 30))
    amp = rng.choice(("", "", "SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE float16"))
    return f"""
        MODEL.DEVICE cpu MODEL.WIDTH 8 SOLVER.BATCH_SIZE 96 SOLVER.MAX_ITER 150 SOLVER.BASE_LR 0.05
        SOLVER.OPTIMIZER {rng.choice(("SGD", "AdamW"))} SOLVER.ACCUM_STEPS {rng.choice((1, 2))}
        SOLVER.CHECKPOINTS_TO_KEEP {rng.choice((0, 1, 2))}
        LOG_PERIOD {log_period} SOLVER.CHECKPOINT_PERIOD {checkpoint_period}
        TEST.EVAL_PERIOD {eval_period} DATALOADER.NUM_WORKERS {rng.choice((0, 0, 2))} {amp}
    """.split()


def kill_until_it_ends(round_, output, rng, seconds, load_file):
    """Train with kills.  Returns the codes of the last session, the kills, the invalid files."""
    num_kills = 0
    invalid = []
    flags = []
    while True:
        session = Session(round_, output, *flags)
        session.wait(rng.uniform(0.1, 0.8) * seconds)
        if not session.kill():
            return session.codes(), num_kills, invalid
        num_kills += 1
        if output.exists():
            invalid += invalid_files(output, load_file)
        flags = ["--resume"]


def run_round(project, rng, num_ranks, load_file):
    """Returns the kills, what is wrong with the outcome, and the invalid files."""
    folder = Path(tempfile.mkdtemp())
    words = ["--config", str(project / "cfg.yaml"), *draw_words(rng)]
    round_ = Round(project, num_ranks, words, folder / "log")
    began = time.monotonic()
    alone = Session(round_, folder / "alone")
    alone.wait(LIMIT_SECONDS)
    alone.kill()
    assert alone.codes() == [0] * num_ranks, round_.log.read_text()
    seconds = time.monotonic() - began

    codes, num_kills, invalid = kill_until_it_ends(
        round_, folder / "killed", rng, seconds, load_file
    )
    wrong = ""
    if codes != [0] * num_ranks:
        wrong = f"exit codes {codes}"
    else:
        found = differences(
            outcome(folder / "alone", load_file), outcome(folder / "killed", load_file)
        )
        if found:
            wrong = f"{len(found)} differences, such as {', '.join(found[:3])}"
    if wrong:
        wrong = f"{num_ranks} ranks: {wrong}: {' '.join(words)}: see {folder}"
    else:
        shutil.rmtree(folder)
    return num_kills, wrong, invalid


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="drawn for each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    args = parser.parse_args()
    # What killed processes leave behind is tidied up at the end, without a word.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    multiprocessing.set_forkserver_preload(PRELOAD)
    sys.path.insert(0, str(args.project))
    from plumbing.checkpoint import load_file

    rng = random.Random(args.seed)
    num_kills = 0
    num_rounds = 0
    mismatches = []
    invalid = []
    while num_kills < args.kills:
        num_rounds += 1
        num_ranks = rng.choice(args.ranks)
        kills_of_round, wrong, bad_files = run_round(args.project, rng, num_ranks, load_file)
        num_kills += kills_of_round
        invalid += bad_files
        if wrong:
            mismatches.append(wrong)
            print(f"round {num_rounds}: {wrong}", flush=True)
        print(f"round {num_rounds}: {num_ranks} ranks, {num_kills} kills so far", flush=True)
    print(f"kills survived: {num_kills}")
    print(f"mismatches: {len(mismatches)} of {num_rounds} rounds")
    print(f"files found invalid: {len(invalid)}", *invalid)
    sys.exit(1 if mismatches or invalid else 0)


if __name__ == "__main__":
    main()
