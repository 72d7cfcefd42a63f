"""Kill trainings at random moments, resume them, and compare with runs that were left alone.

    python tests/soak.py [--kills 100] [--seed 0] [--project DIR]

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
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch

TEMPLATE_PROJECT = Path(__file__).resolve().parents[1] / "<<cookiecutter.project_slug>>"
CLOCK = {"time", "data_time", "samples_per_second", "eta_seconds"}


def rank_main(rank, num_ranks, port, project, words, log):
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.update(WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    os.environ["MASTER_PORT"] = str(port)
    sys.path.insert(0, project)
    import train

    train.launch(train.main, train.parse_args(words))


def start(project, words, num_ranks, log):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    args = num_ranks, port, str(project), words, str(log)
    ranks = [context.Process(target=rank_main, args=(rank, *args)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    return ranks


def kill(ranks):
    """SIGKILL to the ranks and their loader workers; return whether they were still at work."""
    alive = any(rank.exitcode is None for rank in ranks)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.join()
    return alive


def invalid_files(folder, load_file):
    bad = []
    for path in folder.glob("*.pth"):
        try:
            load_file(str(path))
        except ValueError as error:
            bad.append(f"{path.name}: {error}")
    lines = (folder / "metrics.json").read_bytes() if (folder / "metrics.json").exists() else b""
    for line in lines.splitlines(keepends=True)[:-1]:  # the last one may be torn
        try:
            json.loads(line)
        except ValueError:
            bad.append(f"metrics.json: {line!r}")
    return bad


def outcome(folder):
    state = torch.load(folder / "model_final.pth")
    scalars = [name for name in state["storage"]["histories"] if name not in CLOCK]
    state["storage"] = {name: state["storage"]["histories"][name] for name in scalars}
    rows = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if k not in CLOCK} for row in rows]
    best = (folder / "model_best.json").read_text()
    return state, rows, best


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def draw_words(rng):
    periods = rng.choice((3, 7, 20)), rng.choice((5, 8, 25)), rng.choice((4, 15, 30))
    amp = rng.choice(("", "", "SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE float16"))
    return f"""
        MODEL.DEVICE cpu MODEL.WIDTH 8 SOLVER.BATCH_SIZE 96 SOLVER.MAX_ITER 150 SOLVER.BASE_LR 0.05
        SOLVER.OPTIMIZER {rng.choice(("SGD", "AdamW"))} SOLVER.ACCUM_STEPS {rng.choice((1, 2))}
        LOG_PERIOD {periods[0]} SOLVER.CHECKPOINT_PERIOD {periods[1]} TEST.EVAL_PERIOD {periods[2]}
        DATALOADER.NUM_WORKERS {rng.choice((0, 0, 2))} {amp}
    """.split()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    args = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch", "torch.utils.tensorboard", "yacs.config"])
    sys.path.insert(0, str(args.project))
    from plumbing.checkpoint.files import load_file

    rng, kills, rounds, mismatches, invalid = random.Random(args.seed), 0, 0, [], []
    while kills < args.kills:
        rounds += 1
        folder, num_ranks = Path(tempfile.mkdtemp()), rng.choice((1, 2))
        words = ["--config", str(args.project / "cfg.yaml"), *draw_words(rng)]
        log = folder / "log"
        began = time.monotonic()
        alone = start(args.project, [*words, "OUTPUT_DIR", str(folder / "a")], num_ranks, log)
        for rank in alone:
            rank.join()
        seconds = time.monotonic() - began
        assert all(rank.exitcode == 0 for rank in alone), log.read_text()
        resume = []
        while True:
            ranks = start(
                args.project, [*words, "OUTPUT_DIR", str(folder / "b"), *resume], num_ranks, log
            )
            deadline = time.monotonic() + rng.uniform(0.1, 0.8) * seconds
            while time.monotonic() < deadline and any(rank.exitcode is None for rank in ranks):
                time.sleep(0.005)
            if not kill(ranks):
                break
            kills += 1
            invalid += invalid_files(folder / "b", load_file) if (folder / "b").exists() else []
            resume = ["--resume"]
        codes = [rank.exitcode for rank in ranks]
        if codes != [0] * num_ranks or not same(outcome(folder / "a"), outcome(folder / "b")):
            mismatches.append(f"round {rounds}, {num_ranks} ranks, {codes}: {' '.join(words)}")
            print(mismatches[-1], "see", folder, flush=True)
        else:
            shutil.rmtree(folder)
        print(f"round {rounds}: {kills} kills so far", flush=True)
    print(f"kills survived: {kills}")
    print(f"mismatches: {len(mismatches)} of {rounds} rounds")
    print(f"files found invalid: {len(invalid)}", *invalid)
    sys.exit(bool(mismatches or invalid))


if __name__ == "__main__":
    main()
