"""What do_train does on a GPU: whether it waits while nothing is due, its speed, exact resumes.

    python tests/bench/gpu.py [--project DIR] [--iters 200] [--rounds 3] [--width 256]
        [--batch 1024]

* Waits: under torch.cuda.set_sync_debug_mode("error") an operation that waits for the GPU raises.
  The mode is on from the batch of an iteration in which nothing is due to the next batch; the first
  iterations, in which libraries set themselves up, are left out.
* Slow copies to the GPU, in the same iterations: not from pinned memory, or not non_blocking.
* Parameters whose optimizer is not the fused one.
* Speed: iterations of the real do_train, its batches on the GPU already, with one setting changed;
  the settings take turns, and the GPU has caught up at both ends of what is timed.
* A run, and the same resumed half-way: elements of the checkpoint's tensors that differ.
* All but the speed again on two ranks, where there are two GPUs.

Without a GPU it says so and ends; ``--device cpu`` tries the program itself, on which there is then
nothing to be learnt about waiting.
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
VARIANTS = {
    "as it is": "",
    "bfloat16": "SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE bfloat16",
    "float16": "SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE float16",
    "TF32": "FLOAT32_PRECISION high",
    "channels_last": "MODEL.CHANNELS_LAST True",
    "compiled": "MODEL.COMPILE inductor",
    "compiled, bfloat16, channels_last": "MODEL.COMPILE inductor MODEL.CHANNELS_LAST True"
    " SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE bfloat16",
    "AdamW": "SOLVER.OPTIMIZER AdamW SOLVER.BASE_LR 0.001",
    "clipping": "SOLVER.CLIP_GRAD_NORM 1.0",
    "skipping": "SOLVER.NONFINITE skip",
    "accumulation": "SOLVER.ACCUM_STEPS 2",
    "2 workers": "DATALOADER.NUM_WORKERS 2",
    "synchronized batch norm": "MODEL.SYNC_BN True",
    "static graph": "MODEL.STATIC_GRAPH True",
}
SPEEDS = [
    "as it is",
    *("bfloat16", "float16", "TF32", "channels_last", "compiled"),
    "compiled, bfloat16, channels_last",
]
RANKS = int(os.environ.get("WORLD_SIZE", 1))
IS_MAIN = os.environ.get("RANK", "0") == "0"


class Watch:
    """Of one run: its optimizer, its copies to the GPU, the first place where it waited for it."""

    def __init__(self, train, device):
        self.train, self.on_gpu = train, device == "cuda"
        self.optimizer, self.place = None, None
        self.num_watched = 0  # iterations
        self.num_copies = {True: 0, False: 0}  # as they should be, others
        self._on = False

    def run(self, words):
        """Train with these settings until the end, or until it waits where it should not."""
        build_loader, build_optimizer = self.train.build_train_loader, self.train.build_optimizer
        to = torch.Tensor.to

        def watched_loader(cfg, start_iter, *more):
            return self._loader(cfg, start_iter, build_loader(cfg, start_iter, *more))

        def seen_optimizer(cfg, *args):
            self.optimizer = build_optimizer(cfg, *args)
            return self.optimizer

        def counted_to(tensor, *args, **kwargs):
            result = to(tensor, *args, **kwargs)
            if self._on and tensor.device.type == "cpu" and result.device.type != "cpu":
                non_blocking = kwargs.get("non_blocking", any(arg is True for arg in args))
                self.num_copies[non_blocking and tensor.is_pinned()] += 1
            return result

        self.train.build_train_loader, self.train.build_optimizer = watched_loader, seen_optimizer
        torch.Tensor.to = counted_to
        try:
            self.train.main(self.train.parse_args(words))
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            frames = traceback.extract_tb(error.__traceback__)
            root = os.path.dirname(self.train.__file__)
            own = [frame for frame in frames if frame.filename.startswith(root)] or frames
            self.place = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}: {own[-1].line}"
        finally:
            self._set(False)
            self.train.build_train_loader = build_loader
            self.train.build_optimizer = build_optimizer
            torch.Tensor.to = to

    def _loader(self, cfg, start_iter, loader):
        max_iter = cfg.SOLVER.MAX_ITER
        periods = cfg.LOG_PERIOD, cfg.SOLVER.CHECKPOINT_PERIOD, cfg.TEST.EVAL_PERIOD
        for iteration, item in zip(itertools.count(start_iter), loader):
            due = self.train.is_due(iteration, max_iter, *periods)
            self._set(iteration >= start_iter + NUM_FIRST and not due)
            self.num_watched += self._on
            yield item

    def _set(self, on):
        self._on = on
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode("error" if on else "default")


def known(train, text):
    """Whether the project has all of the settings in "KEY VALUE KEY VALUE"."""
    from plumbing.settings import leaves

    return set(text.split()[::2]) <= set(dict(leaves(train.get_cfg())))


def arguments(args, folder, text=""):
    words = ["--config", str(args.project / "cfg.yaml"), "OUTPUT_DIR", str(folder)]
    words += f"MODEL.DEVICE {args.device} MODEL.WIDTH {args.width} LOG_PERIOD 20".split()
    words += f"SOLVER.BATCH_SIZE {args.batch} SOLVER.WARMUP_ITERS 0".split()
    fixed = "SOLVER.BASE_LR 0.01 SOLVER.CHECKPOINT_PERIOD -1 TEST.EVAL_PERIOD -1 TIMEOUT_SECONDS 60"
    return [*words, *f"{fixed} {text}".split()]


def on_ranks(name, num_ranks=RANKS):
    return f"{name}, {num_ranks} ranks" if num_ranks > 1 else name


def watch_all(train, args, folder):
    """Rows on waiting and copies for each variant, and on the optimizers."""
    num_parameters = {True: 0, False: 0}  # with a fused optimizer, without
    for number, (name, text) in enumerate(VARIANTS.items()):
        if not known(train, text):
            continue
        watch = Watch(train, args.device)
        num_iters = f" SOLVER.MAX_ITER {min(args.iters, 45)}"
        try:
            watch.run(arguments(args, folder / f"watched{number}", text + num_iters))
        except train.comm.SettingsError as error:
            print(f"{on_ranks(name)}: {error}")
            continue
        groups = watch.optimizer.param_groups
        for group in groups:
            num_parameters[bool(group.get("fused"))] += len(group["params"])
        if not IS_MAIN:
            continue
        if watch.place:
            print(f"{on_ranks(name)} waits for the GPU at {watch.place}")
        waits, iterations = int(watch.place is not None), f"{watch.num_watched} iterations"
        print_row(f"waits, {on_ranks(name)}", f"{waits}", iterations, f"{waits}", "<= 0")
        good, bad = watch.num_copies[True], watch.num_copies[False]
        print_row(f"slow copies, {on_ranks(name)}", f"{bad}", f"{good} fast", f"{bad}", "<= 0")
    if IS_MAIN:
        good, bad = num_parameters[True], num_parameters[False]
        print_row(on_ranks("parameters not fused"), f"{bad}", f"{good} fused", f"{bad}", "<= 0")


def time_of(train, args, folder, text):
    """Seconds of an iteration, the batches being on the device already."""
    build_loader, moments = train.build_train_loader, []
    first = args.iters // 4

    def cycling_loader(*args):
        batches = list(itertools.islice(build_loader(*args), 8))
        for iteration, item in enumerate(itertools.cycle(batches)):
            if iteration in (first, args.iters - 1):
                if args.device == "cuda":
                    torch.cuda.synchronize()
                moments.append(time.perf_counter())
            yield item

    train.build_train_loader = cycling_loader
    try:
        words = arguments(args, folder, f"{text} SOLVER.MAX_ITER {args.iters}")
        train.main(train.parse_args(words))
    finally:
        train.build_train_loader = build_loader
    return (moments[1] - moments[0]) / (args.iters - 1 - first)


def time_all(train, args, folder):
    names = [name for name in SPEEDS if known(train, VARIANTS[name])]
    seconds = {name: [] for name in names}
    for i, name in itertools.product(range(args.rounds), names):
        number = names.index(name)
        seconds[name].append(time_of(train, args, folder / f"timed{i}_{number}", VARIANTS[name]))
    base = statistics.median(seconds["as it is"])
    for name, values in seconds.items():
        median = statistics.median(values)
        figures = f"{median * 1e3:.3f} ms", f"{base * 1e3:.3f} ms, as it is", f"{median / base:.2f}"
        print_row(f"iteration, {name}", *figures)


def tensors_in(tree):
    """All tensors in nested dicts and lists, in their order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)


def torchrun(num_ranks):
    words = f"-m torch.distributed.run --standalone --nproc_per_node {num_ranks}".split()
    return words if num_ranks > 1 else []


def train_in_shell(args, words, num_ranks):
    command = [sys.executable, *torchrun(num_ranks), "train.py", *words]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    subprocess.run(command, cwd=args.project, env=environment, check=True, capture_output=True)


def compare_resumed(train, args, folder, num_ranks):
    """A row on what differs between a run and the same resumed half-way."""
    text = "SOLVER.MAX_ITER 20 SOLVER.CHECKPOINT_PERIOD 10 SOLVER.CHECKPOINTS_TO_KEEP 9"
    text += " DETERMINISTIC True" if known(train, "DETERMINISTIC True") else ""
    whole, resumed = folder / f"whole{num_ranks}", folder / f"resumed{num_ranks}"
    train_in_shell(args, arguments(args, whole, text), num_ranks)
    shutil.copytree(whole, resumed)
    for name in ("model_final.pth", "model_0000019.pth", "results.json"):
        (resumed / name).unlink(missing_ok=True)
    (resumed / "last_checkpoint").write_text("model_0000009.pth")
    train_in_shell(args, [*arguments(args, resumed, text), "--resume"], num_ranks)
    states = [torch.load(run / "model_final.pth", map_location="cpu") for run in (whole, resumed)]
    pairs = list(zip(*(tensors_in([s["model"], s["optimizer"]]) for s in states), strict=True))
    different = sum(int((one != other).sum()) for one, other in pairs)
    elements = sum(one.numel() for one, _ in pairs)
    name = on_ranks("elements that a resume changes", num_ranks)
    print_row(name, f"{different}", f"{elements} in all", f"{different}", "<= 0")


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
        compare_resumed(train, args, folder, 1)
        if torch.cuda.device_count() > 1:
            command = [sys.executable, *torchrun(2), str(HERE), *sys.argv[1:]]
            subprocess.run(command, check=True)
            compare_resumed(train, args, folder, 2)


if __name__ == "__main__":
    main()
