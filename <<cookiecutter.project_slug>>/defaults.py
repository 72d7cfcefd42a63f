"""Every setting, with its meaning and unit.  cfg.yaml and the command line change them.

A default is a bool, a number, a text, or a tuple of one of these; it tells what a setting may be.
The limits are further down.  Periods are in iterations; an iteration is one step of the optimizer,
counted from 0.  The last one always counts; a period of 0 means only then, a negative one never.
"""

import logging
import math
import os

from yacs.config import CfgNode

from plumbing import comm
from plumbing.checkpoint.files import write_atomically
from plumbing.comm import SettingsError
from plumbing.settings import leaves, read_settings

logger = logging.getLogger(__name__)

HERE = os.path.dirname(os.path.abspath(__file__))

_C = CfgNode()
_C.OUTPUT_DIR = "output"  # folder of the run: log, metrics, checkpoints
_C.SEED = 0  # of weights, order, augmentation, dropout; negative: drawn at the start and kept
_C.LOG_PERIOD = 20  # also logged: every iteration after which a checkpoint or evaluation is due
_C.LOG_WINDOW = 20  # iterations over which the logged losses are the median
_C.TIMEOUT_SECONDS = 1800.0  # a rank that waits longer for the others ends the job
_C.FLOAT32_PRECISION = "highest"  # of matrix products: "high" and "medium" use TF32 on GPUs
_C.CUDNN_BENCHMARK = False  # choose convolutions by trial: faster, but a resume is not exact

_C.MODEL = CfgNode()
_C.MODEL.DEVICE = "auto"  # "auto": a GPU for each rank where there are GPUs, else the CPU; or "cpu"
_C.MODEL.WEIGHTS = ""  # checkpoint to start from or to evaluate; "": from initialization
_C.MODEL.FIND_UNUSED_PARAMETERS = False  # for parameters that not every iteration uses, on several
# ranks.  It costs a little; on three or more ranks it makes a resume exact to the bit, for DDP then
# adds gradients in one order always, and otherwise in another in the first iteration after a start.
_C.MODEL.WIDTH = 32  # channels of the first layer
_C.MODEL.DROPOUT = 0.1  # probability, before the last layer
_C.MODEL.NUM_CLASSES = 10

_C.DATASETS = CfgNode()
_C.DATASETS.PATH = "assets/digits.npz"  # relative to this file
_C.DATASETS.TRAIN = "digits_train"
_C.DATASETS.TEST = ("digits_test",)  # evaluated one after the other
_C.DATASETS.MAX_SHIFT = 1  # augmentation: shift by up to so many pixels; 0: off

_C.DATALOADER = CfgNode()
_C.DATALOADER.NUM_WORKERS = 0  # processes that load, on each rank; 0: the training process itself

_C.SOLVER = CfgNode()
_C.SOLVER.MAX_ITER = 1000  # iterations
_C.SOLVER.BATCH_SIZE = 64  # samples in an iteration, over all ranks and micro-batches
_C.SOLVER.ACCUM_STEPS = 1  # micro-batches in an iteration, one after the other
_C.SOLVER.OPTIMIZER = "SGD"  # or "AdamW"
_C.SOLVER.BASE_LR = 0.1
_C.SOLVER.MOMENTUM = 0.9  # SGD
_C.SOLVER.NESTEROV = False  # SGD
_C.SOLVER.BETAS = (0.9, 0.999)  # AdamW
_C.SOLVER.WEIGHT_DECAY = 1e-4
_C.SOLVER.WEIGHT_DECAY_NORM = 0.0  # of normalization layers
_C.SOLVER.WEIGHT_DECAY_BIAS = -1.0  # of biases elsewhere; negative: as WEIGHT_DECAY
_C.SOLVER.BIAS_LR_FACTOR = 1.0  # times BASE_LR, of all biases
_C.SOLVER.CLIP_GRAD_NORM = math.inf  # largest norm of all gradients together; inf: off
_C.SOLVER.NONFINITE = "raise"  # a loss or gradient that is not finite: "raise", or "skip" the step
_C.SOLVER.MAX_SKIPS = 10  # so many skipped steps in a row are an error
_C.SOLVER.LR_SCHEDULER_NAME = "cosine"  # "constant", "multistep", "cosine"
_C.SOLVER.BASE_LR_END = 0.0  # cosine: the rate at MAX_ITER
_C.SOLVER.STEPS = (600, 900)  # multistep: iterations at which the rate is multiplied by GAMMA
_C.SOLVER.GAMMA = 0.1
_C.SOLVER.WARMUP_ITERS = 0  # iterations; 0: no warm-up
_C.SOLVER.WARMUP_FACTOR = 0.001  # of the schedule's rate, in the first iteration
_C.SOLVER.WARMUP_METHOD = "linear"  # or "constant": WARMUP_FACTOR throughout
_C.SOLVER.CHECKPOINT_PERIOD = 200
_C.SOLVER.CHECKPOINTS_TO_KEEP = 2  # the newest ones; the final and the best are kept besides

_C.SOLVER.AMP = CfgNode()
_C.SOLVER.AMP.ENABLED = False  # mixed precision
_C.SOLVER.AMP.DTYPE = "bfloat16"  # or "float16", which scales the loss

_C.TEST = CfgNode()
_C.TEST.EVAL_PERIOD = 200
_C.TEST.BATCH_SIZE = 256  # samples at a time, on each rank
_C.TEST.BEST_METRIC = "digits_test/accuracy"  # model_best.pth is the best by this one; "": none
_C.TEST.BEST_MODE = "max"  # or "min": which values are better

_CHOICES = {
    "FLOAT32_PRECISION": ("highest", "high", "medium"),
    "MODEL.DEVICE": ("auto", "cpu", "cuda"),
    "DATASETS.TRAIN": ("digits_train", "digits_test"),
    "DATASETS.TEST": ("digits_train", "digits_test"),
    "SOLVER.OPTIMIZER": ("SGD", "AdamW"),
    "SOLVER.LR_SCHEDULER_NAME": ("constant", "multistep", "cosine"),
    "SOLVER.NONFINITE": ("raise", "skip"),
    "SOLVER.WARMUP_METHOD": ("linear", "constant"),
    "SOLVER.AMP.DTYPE": ("bfloat16", "float16"),
    "TEST.BEST_MODE": ("max", "min"),
}
_AT_LEAST = {
    "LOG_PERIOD": 1,
    "LOG_WINDOW": 1,
    "MODEL.WIDTH": 1,
    "MODEL.DROPOUT": 0,
    "MODEL.NUM_CLASSES": 10,
    "DATASETS.MAX_SHIFT": 0,
    "DATALOADER.NUM_WORKERS": 0,
    "SOLVER.MAX_ITER": 1,
    "SOLVER.BATCH_SIZE": 1,
    "SOLVER.ACCUM_STEPS": 1,
    "SOLVER.MOMENTUM": 0,
    "SOLVER.BETAS": 0,
    "SOLVER.WEIGHT_DECAY": 0,
    "SOLVER.WEIGHT_DECAY_NORM": 0,
    "SOLVER.BIAS_LR_FACTOR": 0,
    "SOLVER.BASE_LR_END": 0,
    "SOLVER.MAX_SKIPS": 1,
    "SOLVER.STEPS": 0,
    "SOLVER.WARMUP_ITERS": 0,
    "SOLVER.WARMUP_FACTOR": 0,
    "SOLVER.CHECKPOINTS_TO_KEEP": 1,
    "TEST.BATCH_SIZE": 1,
}
_ABOVE = {"TIMEOUT_SECONDS": 0, "SOLVER.BASE_LR": 0, "SOLVER.GAMMA": 0, "SOLVER.CLIP_GRAD_NORM": 0}
_BELOW = {
    "SEED": 2**32,
    "LOG_WINDOW": 1001,
    "MODEL.DROPOUT": 1,
    "DATALOADER.NUM_WORKERS": 1000,
    "SOLVER.MOMENTUM": 1,
    "SOLVER.BETAS": 1,
}


def get_cfg():
    """A copy of the defaults."""
    return _C.clone()


def freeze_cfg(cfg, resume):
    """Replace a negative seed, then freeze and log the settings.  Collective.

    A resumed run keeps the seed that was drawn, and logs which of its settings differ.
    """
    path = os.path.join(cfg.OUTPUT_DIR, "config.yaml")
    drawn = int.from_bytes(os.urandom(4), "little") // 2
    saved = {}
    if resume and os.path.exists(path):
        try:
            saved = dict(read_settings(path))
        except SettingsError as error:
            logger.warning("The settings before this resume are lost: %s", error)
    saved, drawn = comm.all_gather((saved, drawn))[0]
    if cfg.SEED < 0:
        cfg.SEED = saved.get("SEED", drawn)
    cfg.freeze()
    logger.info("Settings:\n%s", cfg)
    for key, value in leaves(cfg):
        value = list(value) if isinstance(value, tuple) else value  # as YAML has it
        if saved and value != saved.get(key):
            logger.warning("Resuming with another %s: %r, it was %r", key, value, saved.get(key))


def save_cfg(cfg):
    """Keep the settings with the run, as OUTPUT_DIR/config.yaml."""
    if comm.is_main_process():
        path = os.path.join(cfg.OUTPUT_DIR, "config.yaml")
        write_atomically(path, lambda file: file.write(cfg.dump().encode()))


def check_cfg(cfg, num_ranks):
    """Refuse values that cannot work.

    Raises:
        SettingsError: names the key, the value and what is possible.
    """
    for key, setting in leaves(cfg):
        for value in setting if isinstance(setting, tuple) else (setting,):
            choices = _CHOICES.get(key, (value,))
            _require(value in choices, key, value, f"must be one of {', '.join(map(str, choices))}")
            if isinstance(value, float) and key != "SOLVER.CLIP_GRAD_NORM":
                _require(math.isfinite(value), key, value, "must be finite")
            if key in _AT_LEAST:
                _require(value >= _AT_LEAST[key], key, value, f"must be at least {_AT_LEAST[key]}")
            if key in _ABOVE:
                _require(value > _ABOVE[key], key, value, f"must be greater than {_ABOVE[key]}")
            if key in _BELOW:
                _require(value < _BELOW[key], key, value, f"must be less than {_BELOW[key]}")
    solver = cfg.SOLVER
    _require(
        solver.BATCH_SIZE % (num_ranks * solver.ACCUM_STEPS) == 0,
        "SOLVER.BATCH_SIZE",
        solver.BATCH_SIZE,
        f"must be a multiple of {num_ranks} ranks times SOLVER.ACCUM_STEPS {solver.ACCUM_STEPS}",
    )
    _require(len(solver.BETAS) == 2, "SOLVER.BETAS", solver.BETAS, "must be two numbers")
    best = cfg.TEST.BEST_METRIC
    known = not best or best.partition("/")[0] in cfg.DATASETS.TEST
    _require(known, "TEST.BEST_METRIC", best, 'must be DATASET/METRIC of DATASETS.TEST, or ""')
    nesterov = not solver.NESTEROV or solver.MOMENTUM > 0
    _require(nesterov, "SOLVER.NESTEROV", True, "needs SOLVER.MOMENTUM above 0")
    for key, path in {
        "MODEL.WEIGHTS": cfg.MODEL.WEIGHTS,
        "DATASETS.PATH": os.path.join(HERE, cfg.DATASETS.PATH),
    }.items():
        _require(not path or os.path.isfile(path), key, path, "must be a file, and is not there")


def _require(possible, key, value, rule):
    if not possible:
        raise SettingsError(f"{key}: {value!r} {rule}")
