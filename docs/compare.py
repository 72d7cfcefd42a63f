"""Prints the figures of docs/comparison.md.

    python docs/compare.py                    of the project folder of this template
    python docs/compare.py FOLDER FILE ...    of other programs: a checkout of nanoGPT, and
                                              detectron2's tools/plain_train_net.py

For the project it also trains a few iterations, and counts the files and lines that run from a
batch to the end of optimizer.step(), in an iteration in which nothing is due.
"""

import ast
import contextlib
import io
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "<<cookiecutter.project_slug>>"
RUN = """
    MODEL.DEVICE cpu SOLVER.MAX_ITER 6 SOLVER.WARMUP_ITERS 0 LOG_PERIOD 100
    SOLVER.CHECKPOINT_PERIOD -1 TEST.EVAL_PERIOD -1
"""
TRACED = 3  # an iteration in which nothing is due


def is_packed(node):
    """Whether a statement is of the form ``a, b = x, y``."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def loop_lines(tree):
    """Lines of the outermost loop that calls backward(); 0 if there is none."""
    loops = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.While)) and ".backward(" in ast.unparse(node):
            loops.append(node.end_lineno - node.lineno + 1)
    return max(loops, default=0)


def print_counts(path):
    """Count what stands in a file, or in the Python files at the top of a folder."""
    path = Path(path)
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    lines = 0
    comments = 0
    packed = 0
    loop = 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines += len(text.splitlines())
        comments += sum(line.strip().startswith("#") for line in text.splitlines())
        packed += sum(is_packed(node) for node in ast.walk(tree))
        loop = max(loop, loop_lines(tree))
    print(f"{path.name}:")
    print(f"  Python files at the top: {len(files)} with {lines} lines")
    print(f"  lines of the training loop: {loop}")
    print(f"  packed assignments per 1,000 lines: {1000 * packed / lines:.1f}")
    print(f"  lines that are a comment: {100 * comments / lines:.1f} %")


def print_settings():
    from defaults import get_cfg
    from plumbing.settings import leaves

    print(f"  settings: {len(list(leaves(get_cfg())))}")


def print_path_of_a_batch(output):
    """Train, and print which lines run from a batch to the end of optimizer.step()."""
    import torch
    import train
    from plumbing.arguments import parse_args

    executed = defaultdict(set)

    def trace(frame, event, _):
        path = frame.f_code.co_filename
        if not path.startswith(str(PROJECT)):
            return None
        executed[os.path.relpath(path, PROJECT)].add(frame.f_lineno)
        return trace

    set_random_state = train.set_random_state
    zero_grad = torch.optim.Optimizer.zero_grad

    def start(seed, iteration=0, rank=0):
        set_random_state(seed, iteration, rank)
        if iteration == TRACED:
            sys.settrace(trace)
            # The frame of do_train is there already.
            sys._getframe(1).f_trace = trace

    def stop(self, set_to_none=True):
        sys.settrace(None)
        sys._getframe(1).f_trace = None
        zero_grad(self, set_to_none)

    train.set_random_state = start
    torch.optim.Optimizer.zero_grad = stop
    words = ["--config", str(PROJECT / "cfg.yaml"), "OUTPUT_DIR", output, *RUN.split()]
    with contextlib.redirect_stdout(io.StringIO()):  # its log
        train.main(parse_args("", words))

    total = sum(len(lines) for lines in executed.values())
    print(f"  from a batch to optimizer.step(): {len(executed)} files, {total} lines")
    for path, lines in sorted(executed.items()):
        print(f"    {path}: {len(lines)} lines")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for argument in sys.argv[1:]:
            print_counts(argument)
    else:
        sys.path.insert(0, str(PROJECT))
        print_counts(PROJECT)
        print_settings()
        with tempfile.TemporaryDirectory() as folder:
            print_path_of_a_batch(os.path.join(folder, "output"))
