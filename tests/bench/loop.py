"""The cost of one iteration of do_train, compared with a bare loop around the same model.

    python tests/bench/loop.py [--project DIR] [--iters 500] [--rounds 31]

The real do_train of a project, with its storage, writers, checkpointer, schedule and random state,
on batches in memory and on one core; it logs every 20 iterations, into files.  Those of accelerate,
lightning and mmengine that are installed train the same model, with their usual loggers, which
write as often.  A bare loop runs before and after each run of another loop.  The figures are the
medians of the ratios to the mean of these two, in time that the process computed, which other
programs disturb less than the wall clock.
"""

import argparse
import contextlib
import importlib.util
import io
import itertools
import logging
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from table import print_row
from torch import nn

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"
LOG_PERIOD = 20
NEVER = 10**9


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, batch):
        inputs, labels = batch
        logits = self.net(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss_ce": loss, "loss_reg": 1e-4 * logits.square().mean()}


class Batches(torch.utils.data.IterableDataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.batches = []
        for _ in range(32):
            inputs = torch.randn(64, 64, generator=generator)
            labels = torch.randint(0, 10, (64,), generator=generator)
            self.batches.append((inputs, labels))

    def __iter__(self):
        return itertools.cycle(self.batches)


def build_optimizer_and_scheduler(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iteration: 1.0)


class Clock:
    """Seconds that the process computes between the first batch and the end."""

    def start(self):
        self.began = time.process_time()

    def stop(self):
        self.seconds = time.process_time() - self.began

    def watched(self, batches):
        iterator = iter(batches)
        self.start()
        yield from iterator


def bare(clock, batches, num_iters, folder):
    model = Net()
    optimizer, scheduler = build_optimizer_and_scheduler(model)
    for _, batch in zip(range(num_iters), clock.watched(batches)):
        loss = sum(model(batch).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    clock.stop()


def do_train(clock, batches, num_iters, folder):
    import train

    def batches_in_memory(cfg, start_iter):
        return ([batch] for batch in clock.watched(batches))

    cfg = train.get_cfg()
    cfg.OUTPUT_DIR = folder
    cfg.MODEL.DEVICE = "cpu"
    cfg.LOG_PERIOD = LOG_PERIOD
    cfg.SOLVER.MAX_ITER = num_iters
    cfg.SOLVER.BASE_LR = 0.01
    cfg.SOLVER.WEIGHT_DECAY = 0.0
    cfg.SOLVER.CHECKPOINT_PERIOD = -1
    cfg.TEST.EVAL_PERIOD = -1
    build_train_loader = train.build_train_loader
    train.build_train_loader = batches_in_memory
    train.do_train(cfg, Net())
    clock.stop()
    train.build_train_loader = build_train_loader


def accelerate(clock, batches, num_iters, folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("run")
    model = Net()
    optimizer, scheduler = build_optimizer_and_scheduler(model)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    prepared = accelerator.prepare(model, optimizer, scheduler, loader)
    model, optimizer, scheduler, loader = prepared
    for iteration, batch in zip(range(num_iters), clock.watched(loader)):
        with accelerator.accumulate(model):
            losses = model(batch)
            total = sum(losses.values())
            accelerator.backward(total)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if (iteration + 1) % LOG_PERIOD == 0:
            values = {name: loss.item() for name, loss in {"total": total, **losses}.items()}
            accelerator.log({**values, "lr": scheduler.get_last_lr()[0]}, step=iteration)
    accelerator.end_training()
    clock.stop()


def lightning(clock, batches, num_iters, folder):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            losses = self.net(batch)
            total = sum(losses.values())
            self.log_dict({"total": total, **losses})
            return total

        def configure_optimizers(self):
            optimizer, scheduler = build_optimizer_and_scheduler(self)
            each_step = {"scheduler": scheduler, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": each_step}

        def on_train_start(self):
            clock.start()

        def on_train_end(self):
            clock.stop()

    trainer = Trainer(
        max_steps=num_iters,
        accelerator="cpu",
        logger=TensorBoardLogger(folder),
        log_every_n_steps=LOG_PERIOD,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))


def mmengine(clock, batches, num_iters, folder):
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, *batch, mode="loss"):
            return self.net(batch)

    class Watch(Hook):
        def before_train(self, runner):
            clock.start()

        def after_train(self, runner):
            clock.stop()

    name = Path(folder).name
    no_checkpoints = {
        "type": "CheckpointHook",
        "interval": NEVER,
        "by_epoch": False,
        "save_last": False,
    }
    runner = Runner(
        model=Model(),
        work_dir=folder,
        custom_hooks=[Watch()],
        log_level="ERROR",
        train_dataloader=torch.utils.data.DataLoader(batches, batch_size=None),
        train_cfg={"type": "IterBasedTrainLoop", "max_iters": num_iters},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01, "momentum": 0.9}},
        default_hooks={
            "logger": {"type": "LoggerHook", "interval": LOG_PERIOD},
            "checkpoint": no_checkpoints,
        },
        visualizer={
            "type": "Visualizer",
            "name": name,
            "vis_backends": [{"type": "TensorboardVisBackend"}],
        },
        experiment_name=name,
    )
    runner.train()


PEERS = {"accelerate": accelerate, "lightning": lightning, "mmengine": mmengine}


def seconds_of(loop, batches, num_iters):
    """Seconds of one iteration of a loop."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        log = logging.FileHandler(f"{folder}/log.txt")
        logging.getLogger().addHandler(log)
        loop(clock, batches, num_iters, folder)
        logging.getLogger().removeHandler(log)
        log.close()
    return clock.seconds / num_iters


def measure(loops, num_iters, num_rounds):
    """Return {name: seconds of an iteration} and {name: ratio to a bare loop}, both lists."""
    batches = Batches()
    for loop in (bare, *loops.values()):
        seconds_of(loop, batches, 2 * LOG_PERIOD)  # what is slow the first time
    seconds = {name: [] for name in ("bare", *loops)}
    ratios = {name: [] for name in loops}
    for _ in range(num_rounds):
        for name, loop in loops.items():
            before = seconds_of(bare, batches, num_iters)
            between = seconds_of(loop, batches, num_iters)
            after = seconds_of(bare, batches, num_iters)
            base = (before + after) / 2
            seconds["bare"].append(base)
            seconds[name].append(between)
            ratios[name].append(between / base)
    return seconds, ratios


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--iters", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.INFO)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    sys.path.insert(0, str(args.project))

    installed = {name: loop for name, loop in PEERS.items() if importlib.util.find_spec(name)}
    loops = {"do_train": do_train, **installed}
    seconds, ratios = measure(loops, args.iters, args.rounds)
    base = f"{statistics.median(seconds['bare']) * 1e6:.0f} us, a bare loop"
    for name in loops:
        is_ours = name == "do_train"
        print_row(
            "iteration, small MLP" if is_ours else f"the same in {name}",
            f"{statistics.median(seconds[name]) * 1e6:.0f} us",
            base,
            f"{statistics.median(ratios[name]):.2f}",
            "<= 1.20" if is_ours else "",
        )


if __name__ == "__main__":
    main()
