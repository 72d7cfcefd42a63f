"""How many collectives a run calls at its start, in a log, in a save and in an evaluation.

    python tests/bench/messages.py [--project DIR]

They are counted in a short training on two ranks; their number does not depend on that of the
ranks.  DistributedDataParallel adds its own in C++, which are not counted: one for each 25 MiB of
gradients in an iteration.
"""

import argparse
import collections
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
from table import print_row

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"
NUM_RANKS = 2
COLLECTIVES = ("all_gather", "all_gather_object", "all_reduce", "barrier", "new_group")
WORDS = """
    MODEL.DEVICE cpu MODEL.WIDTH 8 SOLVER.MAX_ITER 40 LOG_PERIOD 10
    SOLVER.CHECKPOINT_PERIOD 20 TEST.EVAL_PERIOD 20
"""


class Counts:
    """Counts the calls of functions of torch.distributed, by the phase in which they are made."""

    def __init__(self):
        self._phases = ["the start and the end"]
        self._num_calls = collections.Counter({"the start and the end": 1})
        self._collectives = collections.defaultdict(collections.Counter)

    def watch(self, name):
        """Count the calls of this collective."""
        function = getattr(dist, name)

        @functools.wraps(function)
        def call(*args, **kwargs):
            self._collectives[self._phases[-1]][name] += 1
            return function(*args, **kwargs)

        setattr(dist, name, call)

    def watch_phase(self, owner, name, phase):
        """Count what is called inside this method as part of a phase."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args, **kwargs):
            self._num_calls[phase] += 1
            self._phases.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._phases.pop()

        setattr(owner, name, call)

    def of_each_phase(self):
        """{phase: {collective: calls in one such phase}}."""
        shares = {}
        for phase, num_calls in self._num_calls.items():
            counter = self._collectives[phase]
            shares[phase] = {name: count / num_calls for name, count in sorted(counter.items())}
        return shares


def be_rank(folder):
    """Train, and write the counts to a file."""
    import train
    from plumbing.arguments import parse_args
    from plumbing.checkpoint import Checkpointer
    from plumbing.events import EventStorage
    from plumbing.timing import TimedLoader

    counts = Counts()
    for name in COLLECTIVES:
        counts.watch(name)
    counts.watch_phase(EventStorage, "reduce", "a log, its values")
    counts.watch_phase(TimedLoader, "times", "a log, its times")
    counts.watch_phase(Checkpointer, "save", "a save")
    counts.watch_phase(train, "do_test", "an evaluation")
    config = Path(train.__file__).with_name("cfg.yaml")
    words = ["--config", str(config), *WORDS.split(), "OUTPUT_DIR", f"{folder}/output"]
    train.main(parse_args("", words))
    path = Path(folder, f"{os.environ['RANK']}.json")
    path.write_text(json.dumps(counts.of_each_phase()))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--folder", help="of a rank; the program sets it for the ranks")
    args = parser.parse_args()
    if args.folder is not None:
        sys.path.insert(0, str(args.project))
        be_rank(args.folder)
        return
    # A rank connects to this store, as it would to that of torchrun.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE), "--project", str(args.project), "--folder", folder]
        ranks = []
        for rank in range(NUM_RANKS):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": NUM_RANKS,
                "LOCAL_WORLD_SIZE": NUM_RANKS,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": store.port,
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "OMP_NUM_THREADS": 1,
            }
            env = {**os.environ, **{key: str(value) for key, value in variables.items()}}
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        phases = json.loads(Path(folder, "0.json").read_text())
    for phase, counter in phases.items():
        shown = ", ".join(f"{count:g} {name}" for name, count in counter.items())
        print_row(f"collectives of {phase}", shown, "-", f"{sum(counter.values()):g}")


if __name__ == "__main__":
    main()
