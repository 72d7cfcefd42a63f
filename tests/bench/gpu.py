"""What do_train does on a GPU: whether it waits while nothing is due, its speed, exact resumes.

    python tests/bench/gpu.py [--project DIR] [--iters 200] [--rounds 3] [--width 256]
        [--batch 1024]

* Waits: under torch.cuda.set_sync_debug_mode("error") an operation that waits for the GPU raises.
  The mode is on from the batch of an iteration in which nothing is due to the next batch, except in
  the first iterations, in which libraries set themselves up.
* Slow copies to the GPU, in the same iterations: not from pinned memory, or not non_blocking.
* Parameters whose optimizer is not the fused one.
* Speed: iterations of the real do_train, its batches on the GPU already, with one setting changed.
  The settings take turns, and the GPU has caught up at both ends of the timed part.
* A run, and the same resumed half-way: elements of the checkpoint's tensors that differ.
* All but the speed again on two ranks, if there are two GPUs.

Without a GPU it says so and ends.  ``--device cpu`` tries the program itself, and then says nothing
about waiting.
"""

import argparse
import itertools
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from table import print_row

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"
NUM_FIRST = 3  # iterations that are never watched
BFLOAT16 = "SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE bfloat16"
VARIANTS = {
    "as it is": "",
    "bfloat16": BFLOAT16,
    "float16": "SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE float16",
    "TF32": "FLOAT32_PRECISION high",
    "compiled": "MODEL.COMPILE inductor",
    "compiled, bfloat16": f"MODEL.COMPILE inductor {BFLOAT16}",
    "AdamW": "SOLVER.OPTIMIZER AdamW SOLVER.BASE_LR 0.001",
    "clipping": "SOLVER.CLIP_GRAD_NORM 1.0",
    "accumulation": "SOLVER.ACCUM_STEPS 2",
    "2 workers": "DATALOADER.NUM_WORKERS 2",
}
SPEEDS = ("as it is", "bfloat16", "float16", "TF32", "compiled", "compiled, bfloat16")
RANKS = int(os.environ.get("WORLD_SIZE", 1))
IS_MAIN = os.environ.get("RANK", "0") == "0"


class Watch:
    """Of one run: its optimizer, its copies to the GPU, the first place where it waits for it.

    Attributes:
        place: "file.py:7: line" of the wait, or None.
        num_watched: iterations in which waiting was forbidden.
        num_fast_copies, num_slow_copies: copies to the GPU in these iterations.
    """

    def __init__(self, train, device):
        self.train = train
        self.on_gpu = device == "cuda"
        self.optimizer = None
        self.place = None
        self.num_watched = 0
        self.num_fast_copies = 0
        self.num_slow_copies = 0
        self._is_on = False

    def run(self, words):
        """Train with these settings until the end, or until it waits where it should not."""
        build_train_loader = self.train.build_train_loader
        build_optimizer = self.train.build_optimizer
        to = torch.Tensor.to

        def watched_loader(cfg, start_iter):
            return self._loader(cfg, start_iter, build_train_loader(cfg, start_iter))

        def seen_optimizer(cfg, *args):
            self.optimizer = build_optimizer(cfg, *args)
            return self.optimizer

        def counted_to(tensor, *args, **kwargs):
            result = to(tensor, *args, **kwargs)
            if self._is_on and tensor.device.type == "cpu" and result.device.type != "cpu":
                non_blocking = kwargs.get("non_blocking", any(arg is True for arg in args))
                self._count_copy(is_fast=non_blocking and tensor.is_pinned())
            return result

        self.train.build_train_loader = watched_loader
        self.train.build_optimizer = seen_optimizer
        torch.Tensor.to = counted_to
        try:
            self.train.main(self.train.parse_args("", words))
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            self.place = self._place_of(error)
        finally:
            self._switch(False)
            self.train.build_train_loader = build_train_loader
            self.train.build_optimizer = build_optimizer
            torch.Tensor.to = to

    def _place_of(self, error):
        """The innermost line of the project in a traceback."""
        frames = traceback.extract_tb(error.__traceback__)
        root = os.path.dirname(self.train.__file__)
        own = [frame for frame in frames if frame.filename.startswith(root)] or frames
        return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}: {own[-1].line}"

    def _count_copy(self, is_fast):
        if is_fast:
            self.num_fast_copies += 1
        else:
            self.num_slow_copies += 1

    def _loader(self, cfg, start_iter, loader):
        max_iter = cfg.SOLVER.MAX_ITER
        periods = (cfg.LOG_PERIOD, cfg.SOLVER.CHECKPOINT_PERIOD, cfg.TEST.EVAL_PERIOD)
        for iteration, item in zip(itertools.count(start_iter), loader):
            is_due = self.train.is_due(iteration, max_iter, *periods)
            self._switch(iteration >= start_iter + NUM_FIRST and not is_due)
            self.num_watched += self._is_on
            yield item

    def _switch(self, on):
        self._is_on = on
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode("error" if on else "default")


def arguments(args, folder, text=""):
    """The command line of a run that neither evaluates nor saves."""
    fixed = f"""
        MODEL.DEVICE {args.device} MODEL.WIDTH {args.width} LOG_PERIOD 20 TIMEOUT_SECONDS 60
        SOLVER.BATCH_SIZE {args.batch} SOLVER.WARMUP_ITERS 0 SOLVER.BASE_LR 0.01
        SOLVER.CHECKPOINT_PERIOD -1 TEST.EVAL_PERIOD -1
    """
    words = ["--config", str(args.project / "cfg.yaml"), "OUTPUT_DIR", str(folder)]
    return [*words, *fixed.split(), *text.split()]


def on_ranks(name, num_ranks=RANKS):
    return f"{name}, {num_ranks} ranks" if num_ranks > 1 else name


def watch_all(train, args, folder):
    """Print rows on waiting and copies for each variant, and on the optimizers."""
    num_fused = 0  # parameters
    num_others = 0
    for number, (name, text) in enumerate(VARIANTS.items()):
        watch = Watch(train, args.device)
        num_iters = f" SOLVER.MAX_ITER {min(args.iters, 45)}"
        try:
            watch.run(arguments(args, folder / f"watched{number}", text + num_iters))
        except train.SettingsError as error:
            print(f"{on_ranks(name)}: {error}")
            continue
        for group in watch.optimizer.param_groups:
            if group.get("fused"):
                num_fused += len(group["params"])
            else:
                num_others += len(group["params"])
        if IS_MAIN:
            print_watched(on_ranks(name), watch)
    if IS_MAIN:
        what = on_ranks("parameters not fused")
        print_row(what, f"{num_others}", f"{num_fused} fused", f"{num_others}", "<= 0")


def print_watched(name, watch):
    num_waits = 0
    if watch.place is not None:
        num_waits = 1
        print(f"{name} waits for the GPU at {watch.place}")
    iterations = f"{watch.num_watched} iterations"
    print_row(f"waits, {name}", f"{num_waits}", iterations, f"{num_waits}", "<= 0")
    slow = watch.num_slow_copies
    print_row(f"slow copies, {name}", f"{slow}", f"{watch.num_fast_copies} fast", f"{slow}", "<= 0")


def seconds_of(train, args, folder, text):
    """Seconds of an iteration, the batches being on the device already."""
    build_train_loader = train.build_train_loader
    first = args.iters // 4
    last = args.iters - 1
    moments = []

    def cycling_loader(*loader_args):
        batches = list(itertools.islice(build_train_loader(*loader_args), 8))
        for iteration, item in enumerate(itertools.cycle(batches)):
            if iteration in (first, last):
                if args.device == "cuda":
                    torch.cuda.synchronize()
                moments.append(time.perf_counter())
            yield item

    train.build_train_loader = cycling_loader
    try:
        words = arguments(args, folder, f"{text} SOLVER.MAX_ITER {args.iters}")
        train.main(train.parse_args("", words))
    finally:
        train.build_train_loader = build_train_loader
    return (moments[1] - moments[0]) / (last - first)


def time_all(train, args, folder):
    seconds = {name: [] for name in SPEEDS}
    for round_number in range(args.rounds):
        for number, name in enumerate(SPEEDS):
            output = folder / f"timed{round_number}_{number}"
            seconds[name].append(seconds_of(train, args, output, VARIANTS[name]))
    base = statistics.median(seconds["as it is"])
    for name, values in seconds.items():
        median = statistics.median(values)
        ours = f"{median * 1e3:.3f} ms"
        print_row(
            f"iteration, {name}", ours, f"{base * 1e3:.3f} ms, as it is", f"{median / base:.2f}"
        )


def tensors_in(tree):
    """All tensors in nested dicts and lists, in their order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)


def torchrun(num_ranks):
    words = f"-m torch.distributed.run --standalone --nproc_per_node {num_ranks}".split()
    return words if num_ranks > 1 else []


def train_in_shell(args, words, num_ranks):
    command = [sys.executable, *torchrun(num_ranks), "train.py", *words]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    subprocess.run(command, cwd=args.project, env=environment, check=True, capture_output=True)


def compare_resumed(args, folder, num_ranks):
    """Print a row on the differences between a run and the same resumed half-way."""
    text = """
        SOLVER.MAX_ITER 20 SOLVER.CHECKPOINT_PERIOD 10 SOLVER.CHECKPOINTS_TO_KEEP 9
        DETERMINISTIC True
    """
    whole = folder / f"whole{num_ranks}"
    resumed = folder / f"resumed{num_ranks}"
    train_in_shell(args, arguments(args, whole, text), num_ranks)
    shutil.copytree(whole, resumed)
    for name in ("model_final.pth", "model_0000019.pth", "results.json"):
        (resumed / name).unlink(missing_ok=True)
    (resumed / "last_checkpoint").write_text("model_0000009.pth")
    train_in_shell(args, [*arguments(args, resumed, text), "--resume"], num_ranks)

    tensors = []
    for run in (whole, resumed):
        state = torch.load(run / "model_final.pth", map_location="cpu")
        tensors.append(list(tensors_in([state["model"], state["optimizer"]])))
    num_different = 0
    num_elements = 0
    for one, other in zip(*tensors, strict=True):
        num_different += int((one != other).sum())
        num_elements += one.numel()
    what = on_ranks("elements that a resume changes", num_ranks)
    print_row(what, f"{num_different}", f"{num_elements} in all", f"{num_different}", "<= 0")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    args.project = args.project.resolve()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        return
    sys.path.insert(0, str(args.project))
    import train

    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(os.environ.setdefault("GPU_CHECK_FOLDER", folder))  # one for all ranks
        watch_all(train, args, folder / f"ranks{RANKS}")
        if RANKS > 1:
            return
        time_all(train, args, folder)
        compare_resumed(args, folder, 1)
        if torch.cuda.device_count() > 1:
            command = [sys.executable, *torchrun(2), str(HERE), *sys.argv[1:]]
            subprocess.run(command, check=True)
            compare_resumed(args, folder, 2)


if __name__ == "__main__":
    main()
