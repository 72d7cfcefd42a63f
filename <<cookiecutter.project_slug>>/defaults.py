"""The settings, each with its meaning above it.  cfg.yaml and the command line change them.

The type of a default is the type of its setting.  Periods and lengths are in iterations; an
iteration is one step of the optimizer.  Everything periodic also happens after the last iteration;
a period of 0 means only then, a negative period never.
"""

import math
import os

import torch
from yacs.config import CfgNode

from plumbing.errors import SettingsError
from plumbing.settings import expand_path

HERE = os.path.dirname(os.path.abspath(__file__))

_C = CfgNode()
# Folder of the run: log, metrics and checkpoints.  Ranks on several machines have to share it.
_C.OUTPUT_DIR = "output"
# Seed of the weights, the order of samples, augmentation and dropout.  Negative: draw one at the
# start; it is in config.yaml and in each checkpoint.
_C.SEED = 0
# The first iteration, and each after which a checkpoint or an evaluation is due, are logged too.
_C.LOG_PERIOD = 20
# A rank that waits this long for another rank, or for a batch, ends the run with an error.
_C.TIMEOUT_SECONDS = 1800.0
# Precision of float32 products: "high" and "medium" use TF32 and bfloat16 on GPUs, which is faster.
_C.FLOAT32_PRECISION = "highest"
# Choose the kernels of convolutions by trial: faster, but a resume is no longer exact to the bit.
_C.CUDNN_BENCHMARK = False
# Use only kernels that give the same bits in each run on a GPU, or raise an error: slower.
_C.DETERMINISTIC = False

_C.MODEL = CfgNode()
# "cpu", "cuda" (a GPU for each rank), or "auto": GPUs where there are any, else the CPU.
_C.MODEL.DEVICE = "auto"
# Checkpoint to start from or to evaluate.  "": start from new weights.
_C.MODEL.WEIGHTS = ""
# Backend of torch.compile, such as "inductor".  "": off.
_C.MODEL.COMPILE = ""
# Channels of the first layer.
_C.MODEL.WIDTH = 32
# Probability that a feature is dropped before the last layer.
_C.MODEL.DROPOUT = 0.1
_C.MODEL.NUM_CLASSES = 10

_C.DATASETS = CfgNode()
# A file or folder, relative to this file.
_C.DATASETS.PATH = "assets/digits.npz"
# Names of the data sets to train on, one after the other as one data set.
_C.DATASETS.TRAIN = ("digits_train",)
# Names of the data sets to evaluate on.
_C.DATASETS.TEST = ("digits_test",)
# Training images are shifted by up to this many pixels.  0: off.
_C.DATASETS.MAX_SHIFT = 1

_C.DATALOADER = CfgNode()
# Processes on each rank that load data.  0: the training process loads it itself.
_C.DATALOADER.NUM_WORKERS = 0

_C.SOLVER = CfgNode()
# Length of the training.
_C.SOLVER.MAX_ITER = 1000
# Samples in an iteration, over all ranks and micro-batches.
_C.SOLVER.BATCH_SIZE = 64
# Micro-batches in an iteration, one after the other: gradient accumulation.
_C.SOLVER.ACCUM_STEPS = 1
# "SGD" or "AdamW"; any other is an edit of solver.py.
_C.SOLVER.OPTIMIZER = "SGD"
# The highest learning rate.
_C.SOLVER.BASE_LR = 0.1
# For SGD.
_C.SOLVER.MOMENTUM = 0.9
# For AdamW.
_C.SOLVER.BETAS = (0.9, 0.999)
_C.SOLVER.WEIGHT_DECAY = 1e-4
# Weight decay of all parameters of norm layers.
_C.SOLVER.WEIGHT_DECAY_NORM = 0.0
# The largest norm of all gradients together; larger ones are scaled down.  inf: off.
_C.SOLVER.CLIP_GRAD_NORM = math.inf
# "constant", "multistep" or "cosine"; any other is an edit of solver.py.
_C.SOLVER.LR_SCHEDULER_NAME = "cosine"
# cosine: the learning rate at the end.
_C.SOLVER.BASE_LR_END = 0.0
# multistep: iterations at which the learning rate is multiplied by GAMMA.
_C.SOLVER.STEPS = (600, 900)
_C.SOLVER.GAMMA = 0.1
# In the first iterations the learning rate rises from WARMUP_FACTOR * BASE_LR to BASE_LR.  0: off.
_C.SOLVER.WARMUP_ITERS = 0
_C.SOLVER.WARMUP_FACTOR = 0.001
# A checkpoint is also saved before each evaluation, and when a signal stops the run.
_C.SOLVER.CHECKPOINT_PERIOD = 200
# The newest checkpoints stay; the final and the best one always do.  0: keep all.
_C.SOLVER.CHECKPOINTS_TO_KEEP = 2
# Checkpoints that are never deleted: those after each multiple of this.  0: none.
_C.SOLVER.CHECKPOINT_KEEP_PERIOD = 0

_C.SOLVER.AMP = CfgNode()
# Mixed precision in the forward pass.
_C.SOLVER.AMP.ENABLED = False
# "bfloat16", or "float16", which scales the loss and skips steps whose gradients overflow.
_C.SOLVER.AMP.DTYPE = "bfloat16"

_C.TEST = CfgNode()
_C.TEST.EVAL_PERIOD = 200
# Samples in a batch of an evaluation, on each rank.
_C.TEST.BATCH_SIZE = 256
# model_best.pth is the best model by this metric, DATASET/METRIC.  "": keep none.
_C.TEST.BEST_METRIC = "digits_test/accuracy"
# Whether higher ("max") or lower ("min") values of it are better.
_C.TEST.BEST_MODE = "max"


def get_cfg():
    """A copy of the defaults."""
    return _C.clone()


def expand_paths(cfg):
    """Replace ~ and $HOME in the settings that are paths."""
    cfg.OUTPUT_DIR = expand_path(cfg.OUTPUT_DIR, "OUTPUT_DIR")
    cfg.MODEL.WEIGHTS = expand_path(cfg.MODEL.WEIGHTS, "MODEL.WEIGHTS")
    cfg.DATASETS.PATH = expand_path(cfg.DATASETS.PATH, "DATASETS.PATH")


def check_cfg(cfg, num_ranks):
    """Refuse mistakes before anything is read or written.

    Raises:
        SettingsError: names the setting, its value and what is possible.
    """
    solver = cfg.SOLVER
    test = cfg.TEST

    # A range that is wrong.
    if cfg.SEED >= 2**32:
        raise SettingsError(f"SEED: {cfg.SEED} must be less than 2**32")
    if cfg.LOG_PERIOD < 1:
        raise SettingsError(f"LOG_PERIOD: {cfg.LOG_PERIOD} must be at least 1")
    if not 1 <= cfg.TIMEOUT_SECONDS <= 1e9:
        raise SettingsError(f"TIMEOUT_SECONDS: {cfg.TIMEOUT_SECONDS} must be 1 to 1e9")
    if cfg.MODEL.WIDTH < 1:
        raise SettingsError(f"MODEL.WIDTH: {cfg.MODEL.WIDTH} must be at least 1")
    if not 0 <= cfg.MODEL.DROPOUT < 1:
        raise SettingsError(f"MODEL.DROPOUT: {cfg.MODEL.DROPOUT} must be at least 0 and below 1")
    if cfg.DATASETS.MAX_SHIFT < 0:
        raise SettingsError(f"DATASETS.MAX_SHIFT: {cfg.DATASETS.MAX_SHIFT} must be at least 0")
    if not 0 <= cfg.DATALOADER.NUM_WORKERS < 1000:
        raise SettingsError(
            f"DATALOADER.NUM_WORKERS: {cfg.DATALOADER.NUM_WORKERS} must be 0 to 999"
        )
    if not 1 <= solver.MAX_ITER <= 10**10:
        raise SettingsError(f"SOLVER.MAX_ITER: {solver.MAX_ITER} must be 1 to 10**10")
    if solver.CHECKPOINTS_TO_KEEP < 0:
        rule = "must be at least 1, or 0 to keep all"
        raise SettingsError(f"SOLVER.CHECKPOINTS_TO_KEEP: {solver.CHECKPOINTS_TO_KEEP} {rule}")
    if test.BATCH_SIZE < 1:
        raise SettingsError(f"TEST.BATCH_SIZE: {test.BATCH_SIZE} must be at least 1")
    if not 0 < solver.BASE_LR < math.inf:
        raise SettingsError(f"SOLVER.BASE_LR: {solver.BASE_LR} must be a number above 0")
    if not 0 <= solver.BASE_LR_END <= solver.BASE_LR:
        raise SettingsError(f"SOLVER.BASE_LR_END: {solver.BASE_LR_END} must be 0 to SOLVER.BASE_LR")
    if not 0 < solver.GAMMA < math.inf:
        raise SettingsError(f"SOLVER.GAMMA: {solver.GAMMA} must be a number above 0")
    if not (0 <= solver.WEIGHT_DECAY < math.inf and 0 <= solver.WEIGHT_DECAY_NORM < math.inf):
        raise SettingsError("SOLVER.WEIGHT_DECAY, SOLVER.WEIGHT_DECAY_NORM: must be at least 0")
    if not solver.CLIP_GRAD_NORM > 0:
        rule = "must be above 0, or inf for no clipping"
        raise SettingsError(f"SOLVER.CLIP_GRAD_NORM: {solver.CLIP_GRAD_NORM} {rule}")

    # A choice that does not exist.  solver.py checks OPTIMIZER and LR_SCHEDULER_NAME.
    if cfg.FLOAT32_PRECISION not in ("highest", "high", "medium"):
        rule = "must be highest, high or medium"
        raise SettingsError(f"FLOAT32_PRECISION: {cfg.FLOAT32_PRECISION!r} {rule}")
    if cfg.MODEL.DEVICE not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"MODEL.DEVICE: {cfg.MODEL.DEVICE!r} must be auto, cpu or cuda")
    if cfg.MODEL.COMPILE and cfg.MODEL.COMPILE not in torch.compiler.list_backends(()):
        backends = ", ".join(torch.compiler.list_backends())
        raise SettingsError(f"MODEL.COMPILE: {cfg.MODEL.COMPILE!r} must be one of {backends}")
    if solver.AMP.DTYPE not in ("bfloat16", "float16"):
        raise SettingsError(f"SOLVER.AMP.DTYPE: {solver.AMP.DTYPE!r} must be bfloat16 or float16")
    if test.BEST_MODE not in ("max", "min"):
        raise SettingsError(f"TEST.BEST_MODE: {test.BEST_MODE!r} must be max or min")

    # Settings that do not fit each other, or the machine.
    parts = num_ranks * max(solver.ACCUM_STEPS, 1)
    if solver.ACCUM_STEPS < 1 or solver.BATCH_SIZE < 1 or solver.BATCH_SIZE % parts != 0:
        rule = f"must be a multiple of {num_ranks} ranks times SOLVER.ACCUM_STEPS"
        raise SettingsError(
            f"SOLVER.BATCH_SIZE: {solver.BATCH_SIZE} {rule} {solver.ACCUM_STEPS}, both at least 1"
        )
    if test.BEST_METRIC and test.BEST_METRIC.partition("/")[0] not in cfg.DATASETS.TEST:
        rule = f'must be DATASET/METRIC with one of {", ".join(cfg.DATASETS.TEST)}, or ""'
        raise SettingsError(f"TEST.BEST_METRIC: {test.BEST_METRIC!r} {rule}")
    if not cfg.DATASETS.TRAIN:
        raise SettingsError("DATASETS.TRAIN: is empty, and must name a data set")
    if cfg.MODEL.WEIGHTS and not os.path.isfile(cfg.MODEL.WEIGHTS):
        raise SettingsError(f"MODEL.WEIGHTS: there is no file {cfg.MODEL.WEIGHTS}")
    if not os.path.exists(os.path.join(HERE, cfg.DATASETS.PATH)):
        raise SettingsError(f"DATASETS.PATH: there is no {os.path.join(HERE, cfg.DATASETS.PATH)}")
