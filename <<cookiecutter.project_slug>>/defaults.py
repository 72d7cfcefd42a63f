"""Every setting, with its meaning and unit.  cfg.yaml and the command line change them.

A default is a bool, a number, a text, or a tuple of one of these; it tells what a setting may be.
The limits are further down.  Periods are in iterations; an iteration is one step of the optimizer,
counted from 0.  The last one always counts; a period of 0 means only then, a negative one never.
"""

import contextlib
import glob
import logging
import math
import os
import re

import torch
from yacs.config import CfgNode, yaml

from plumbing import comm
from plumbing.checkpoint.files import load_file, write_atomically
from plumbing.comm import SettingsError
from plumbing.settings import leaves

logger = logging.getLogger(__name__)

HERE = os.path.dirname(os.path.abspath(__file__))

_C = CfgNode()
_C.OUTPUT_DIR = "output"  # folder of the run: log, metrics, checkpoints
_C.SEED = 0  # of weights, order, augmentation, dropout; negative: drawn at the start and kept
_C.LOG_PERIOD = 20  # also logged: the first, and each after which a checkpoint or evaluation is due
_C.LOG_WINDOW = 20  # iterations over which the logged losses are the median
_C.PROFILE = (0, 0)  # iterations, from the first up to the second, that are traced; (0, 0): none
_C.TIMEOUT_SECONDS = 1800.0  # a rank that waits longer for the others ends the job
_C.FLOAT32_PRECISION = "highest"  # of products, convolutions too: "high", "medium" use TF32 on GPUs
_C.CUDNN_BENCHMARK = False  # choose convolutions by trial: faster, but a resume is not exact
_C.DETERMINISTIC = False  # only kernels that always round alike; an error where there are none

_C.MODEL = CfgNode()
_C.MODEL.DEVICE = "auto"  # "auto": a GPU for each rank where there are GPUs, else the CPU; or "cpu"
_C.MODEL.WEIGHTS = ""  # checkpoint to start from or to evaluate; "": from initialization
_C.MODEL.FROZEN = ()  # patterns for the names of parameters that are not trained: ("features.*",);
# batch norms all of whose parameters are frozen keep their statistics too; (): all are trained
_C.MODEL.COMPILE = ""  # torch.compile: "inductor", or "aot_eager", "eager" to debug; "": off
_C.MODEL.CHANNELS_LAST = False  # keep channels together in memory: faster convolutions on GPUs
_C.MODEL.SYNC_BN = False  # batch-norm statistics of a batch over all ranks; GPUs only
_C.MODEL.STATIC_GRAPH = False  # all iterations use the same parameters: DDP then does less
_C.MODEL.FIND_UNUSED_PARAMETERS = False  # for parameters that not every iteration uses, on several
# ranks; it costs a little
_C.MODEL.WIDTH = 32  # channels of the first layer
_C.MODEL.DROPOUT = 0.1  # probability, before the last layer
_C.MODEL.NUM_CLASSES = 10

_C.DATASETS = CfgNode()
_C.DATASETS.PATH = "assets/digits.npz"  # a file or a folder, relative to this file
_C.DATASETS.TRAIN = ("digits_train",)  # one after the other, as one data set
_C.DATASETS.TRAIN_WEIGHTS = ()  # of the samples, the shares that come from each of TRAIN, relative
# to their sum, so (3, 1) or (0.75, 0.25); (): by size
_C.DATASETS.TEST = ("digits_test",)  # evaluated one after the other
_C.DATASETS.MAX_SHIFT = 1  # augmentation: shift by up to so many pixels; 0: off

_C.DATALOADER = CfgNode()
_C.DATALOADER.NUM_WORKERS = 0  # processes that load, on each rank; 0: the training process itself
_C.DATALOADER.PREFETCH_FACTOR = 2  # micro-batches that each of these processes loads ahead
_C.DATALOADER.SAMPLER_TRAIN = "uniform"  # "class_balanced": each class equally often;
# "repeat_factor": rare classes more often (LVIS).  An epoch has as many samples with any of them.
_C.DATALOADER.REPEAT_THRESHOLD = 0.0  # repeat_factor, which needs one above 0: a class with a share
# f of the samples that is smaller comes sqrt(REPEAT_THRESHOLD / f) times as often
_C.DATALOADER.RANDOM_SUBSET_RATIO = 1.0  # share of the training samples that are used; 1: all
_C.DATALOADER.RANDOM_SUBSET_SEED = 0  # which ones: the same for each SEED

_C.SOLVER = CfgNode()
_C.SOLVER.MAX_ITER = 1000  # iterations
_C.SOLVER.MAX_EPOCH = 0  # above 0: takes the place of MAX_ITER, and then these count epochs too:
# STEPS, STEP_SIZE, WARMUP_ITERS, FLAT_ITERS, CYCLE_ITERS, CYCLE_UP_ITERS, CHECKPOINT_PERIOD,
# TEST.EVAL_PERIOD.  The kept config.yaml holds them in iterations, and 0 here.
_C.SOLVER.ITERS_PER_EPOCH = 0  # 0: samples of DATASETS.TRAIN / BATCH_SIZE, rounded up
_C.SOLVER.REFERENCE_WORLD_SIZE = 0  # ranks that these settings are meant for; 0: any number.  On s
# times as many, BATCH_SIZE, BASE_LR and BASE_LR_END are times s, and what is in iterations, but for
# LOG_PERIOD, LOG_WINDOW, PROFILE and MAX_SKIPS, is divided by s.  The kept config.yaml holds the
# result, and the present ranks here: a resume on another number of ranks wants 0.
_C.SOLVER.BATCH_SIZE = 64  # samples in an iteration, over all ranks and micro-batches
_C.SOLVER.ACCUM_STEPS = 1  # micro-batches in an iteration, one after the other
_C.SOLVER.OPTIMIZER = "SGD"  # one of torch.optim: "AdamW", "Adam", "RMSprop", "Adagrad", "NAdam",
# "RAdam", "Adadelta", "Adafactor", "Adamax", "ASGD", "Rprop", "Muon" (if all is matrices); or a
# class of optimizer.py.  SGD, Adam, AdamW and Adagrad are fused, the fastest, as NONFINITE "skip"
# needs; with float16 the others read the GPU in each iteration, as Adafactor always does.
_C.SOLVER.OPTIMIZER_ARGS = ""  # its other arguments, as in Python: "eps=1e-6, amsgrad=True"
_C.SOLVER.BASE_LR = 0.1  # Rprop: the size of its first step, and of no other
_C.SOLVER.MOMENTUM = 0.9  # SGD, RMSprop, Muon
_C.SOLVER.NESTEROV = False  # SGD, Muon
_C.SOLVER.BETAS = (0.9, 0.999)  # Adam, AdamW, NAdam, RAdam, Adamax
_C.SOLVER.WEIGHT_DECAY = 1e-4  # as the optimizer has it: AdamW, Muon: apart from the gradient
_C.SOLVER.WEIGHT_DECAY_NORM = 0.0  # of normalization layers
_C.SOLVER.WEIGHT_DECAY_BIAS = -1.0  # of biases elsewhere; negative: as WEIGHT_DECAY
_C.SOLVER.WEIGHT_DECAY_FACTORS = ()  # times the decay, by name, as LR_FACTORS: ("*.pos_embed=0",)
_C.SOLVER.BIAS_LR_FACTOR = 1.0  # times BASE_LR, of all biases
_C.SOLVER.LR_FACTORS = ()  # times BASE_LR, by name: ("head.bias=20", "head.*=10", "stem.*=0.1").
# The first pattern that matches counts, "*" matches dots too.  At 0 a parameter stays as it is, but
# its gradient is computed and counts in the norm: MODEL.FROZEN saves that.
_C.SOLVER.LAYER_DECAY = 1.0  # times BASE_LR, once for each layer above the parameter's.  Layers are
# the children of nn.Sequential and nn.ModuleList: see optimizer.layer_numbers; 1: off
_C.SOLVER.CLIP_GRAD_NORM = math.inf  # largest norm of all gradients together; inf: off
_C.SOLVER.CLIP_GRAD_VALUE = math.inf  # largest absolute value of a gradient; inf: off
_C.SOLVER.NONFINITE = "raise"  # at a loss or gradient that is not finite; "skip": a step whose
# gradients are not finite is left out
_C.SOLVER.MAX_SKIPS = 10  # so many skipped steps in a row are an error
_C.SOLVER.LR_SCHEDULER_NAME = "cosine"  # "constant", "multistep", "step", "exponential", "linear",
# "polynomial", "inverse_sqrt" (from WARMUP_ITERS on), "cosine", "flat_cosine", "cosine_restarts",
# "one_cycle", "cyclic"; python plot_schedule.py --config cfg.yaml shows it
_C.SOLVER.LR_BY_EPOCH = False  # the schedule, but not the warm-up, goes on only after each epoch
_C.SOLVER.BASE_LR_END = 0.0  # linear, polynomial, cosines, one_cycle: the lowest rate, at the end
_C.SOLVER.STEPS = (600, 900)  # multistep: iterations at which the rate is multiplied by GAMMA
_C.SOLVER.STEP_SIZE = 300  # step: iterations after each of which it is so; exponential: over which
_C.SOLVER.GAMMA = 0.1
_C.SOLVER.POWER = 0.9  # polynomial: of the share of iterations that are left
_C.SOLVER.FLAT_ITERS = 700  # flat_cosine: iterations before the cosine
_C.SOLVER.CYCLE_ITERS = 250  # iterations, cosine_restarts: of the first cycle; cyclic: of each
_C.SOLVER.CYCLE_GROWTH = 1  # cosine_restarts: length of a cycle over that before
_C.SOLVER.CYCLE_DECAY = 1.0  # cosine_restarts, cyclic: height of a cycle over that before
_C.SOLVER.CYCLE_UP_ITERS = 125  # one_cycle, cyclic: iterations from the lowest to the highest rate
_C.SOLVER.CYCLE_START_FACTOR = 0.04  # one_cycle, cyclic: of BASE_LR, the highest rate, at the start
_C.SOLVER.CYCLE_SHAPE = "linear"  # one_cycle, cyclic: goes up and down so; or "cosine"
_C.SOLVER.CYCLE_MOMENTUM = 0.85  # one_cycle, cyclic: MOMENTUM, or the first of BETAS, falls to this
# as the rate rises to its highest; one that is not above it stays, so 1: off
_C.SOLVER.WARMUP_ITERS = 0  # iterations; 0: no warm-up
_C.SOLVER.WARMUP_FACTOR = 0.001  # of the schedule's rate, in the first iteration
_C.SOLVER.WARMUP_METHOD = "linear"  # "exponential", or "constant": WARMUP_FACTOR throughout
_C.SOLVER.CHECKPOINT_PERIOD = 200
_C.SOLVER.CHECKPOINTS_TO_KEEP = 2  # the newest ones; the final and the best are kept besides

_C.SOLVER.AMP = CfgNode()
_C.SOLVER.AMP.ENABLED = False  # mixed precision
_C.SOLVER.AMP.DTYPE = "bfloat16"  # or "float16", which scales the loss

_C.TEST = CfgNode()
_C.TEST.EVAL_PERIOD = 200
_C.TEST.BATCH_SIZE = 256  # samples at a time, on each rank
_C.TEST.AMP = False  # evaluate in the precision of SOLVER.AMP too, which must be enabled
_C.TEST.BEST_METRIC = "digits_test/accuracy"  # model_best.pth is the best by this one; "": none
_C.TEST.BEST_MODE = "max"  # or "min": which values are better
_C.TEST.EXPECTED_RESULTS = ()  # such as ("digits_test/accuracy = 0.99 +- 0.01",): the last results
# must be so, else the program ends with exit status 1; checked after training and by --eval-only

_CHOICES = {
    "FLOAT32_PRECISION": ("highest", "high", "medium"),
    "MODEL.COMPILE": ("", "inductor", "aot_eager", "eager"),
    "MODEL.DEVICE": ("auto", "cpu", "cuda"),
    "DATASETS.TRAIN": ("digits_train", "digits_test"),
    "DATASETS.TEST": ("digits_train", "digits_test"),
    "DATALOADER.SAMPLER_TRAIN": ("uniform", "class_balanced", "repeat_factor"),
    "SOLVER.LR_SCHEDULER_NAME": (
        *("constant", "multistep", "step", "exponential", "linear", "polynomial", "inverse_sqrt"),
        *("cosine", "flat_cosine", "cosine_restarts", "one_cycle", "cyclic"),
    ),
    "SOLVER.CYCLE_SHAPE": ("linear", "cosine"),
    "SOLVER.NONFINITE": ("raise", "skip"),
    "SOLVER.WARMUP_METHOD": ("linear", "exponential", "constant"),
    "SOLVER.AMP.DTYPE": ("bfloat16", "float16"),
    "TEST.BEST_MODE": ("max", "min"),
}
_AT_LEAST = {
    "TIMEOUT_SECONDS": 1,
    "LOG_PERIOD": 1,
    "LOG_WINDOW": 1,
    "MODEL.WIDTH": 1,
    "MODEL.DROPOUT": 0,
    "MODEL.NUM_CLASSES": 10,
    "DATASETS.MAX_SHIFT": 0,
    "DATALOADER.NUM_WORKERS": 0,
    "DATALOADER.PREFETCH_FACTOR": 1,
    "DATALOADER.REPEAT_THRESHOLD": 0,
    "DATALOADER.RANDOM_SUBSET_SEED": 0,
    "SOLVER.MAX_ITER": 1,
    "SOLVER.MAX_EPOCH": 0,
    "SOLVER.ITERS_PER_EPOCH": 0,
    "SOLVER.REFERENCE_WORLD_SIZE": 0,
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
    "SOLVER.STEP_SIZE": 1,
    "SOLVER.FLAT_ITERS": 0,
    "SOLVER.CYCLE_ITERS": 1,
    "SOLVER.CYCLE_GROWTH": 1,
    "SOLVER.CYCLE_UP_ITERS": 0,
    "SOLVER.CYCLE_START_FACTOR": 0,
    "SOLVER.WARMUP_ITERS": 0,
    "SOLVER.WARMUP_FACTOR": 0,
    "SOLVER.CHECKPOINTS_TO_KEEP": 1,
    "TEST.BATCH_SIZE": 1,
}
_ABOVE = {
    "DATALOADER.RANDOM_SUBSET_RATIO": 0,
    "SOLVER.BASE_LR": 0,
    "SOLVER.GAMMA": 0,
    "SOLVER.LAYER_DECAY": 0,
    "SOLVER.POWER": 0,
    "SOLVER.CYCLE_DECAY": 0,
    "SOLVER.CYCLE_MOMENTUM": 0,
    "SOLVER.CLIP_GRAD_NORM": 0,
    "SOLVER.CLIP_GRAD_VALUE": 0,
}
_AT_MOST = {
    "DATALOADER.REPEAT_THRESHOLD": 1,
    "DATALOADER.RANDOM_SUBSET_RATIO": 1,
    "SOLVER.CYCLE_START_FACTOR": 1,
    "SOLVER.CYCLE_DECAY": 1,
    "SOLVER.LAYER_DECAY": 1,
    "SOLVER.CYCLE_MOMENTUM": 1,
}
_BELOW = {
    "SEED": 2**32,
    "MODEL.WIDTH": 10**5,
    "MODEL.NUM_CLASSES": 10**6,
    "DATASETS.MAX_SHIFT": 100,
    "TIMEOUT_SECONDS": 1e9,
    "SOLVER.MAX_ITER": 10**10,
    "LOG_WINDOW": 1001,
    "MODEL.DROPOUT": 1,
    "DATALOADER.NUM_WORKERS": 1000,
    "DATALOADER.RANDOM_SUBSET_SEED": 2**32,
    "SOLVER.MOMENTUM": 1,
    "SOLVER.BETAS": 1,
}


def get_cfg():
    """A copy of the defaults."""
    return _C.clone()


def freeze_cfg(cfg, resume, is_training=True):
    """Replace a negative seed, then freeze and log the settings.  Collective.

    A resumed run keeps the seed that was drawn, and logs which of its settings differ.

    Raises:
        SettingsError: the number of ranks would scale batches and lengths to others than before.
    """
    saved, seed = {}, None
    if resume and comm.is_main_process():
        saved = _load_saved(cfg.OUTPUT_DIR)
        seed = saved.get("SEED", _load_seed(cfg.OUTPUT_DIR) if cfg.SEED < 0 else None)
    drawn = int.from_bytes(os.urandom(4), "little") // 2
    saved, seed = comm.all_gather((saved, drawn if seed is None else seed))[0]
    if cfg.SEED < 0:
        cfg.SEED = seed
    before, now = saved.get("SOLVER.REFERENCE_WORLD_SIZE"), cfg.SOLVER.REFERENCE_WORLD_SIZE
    if is_training and now > 0 and type(before) is int and before > 0 and before != now:
        raise SettingsError(
            f"--resume: SOLVER.REFERENCE_WORLD_SIZE: the run is scaled to {before} ranks, and would"
            f" be to {now}: resume with {before}, or keep its batches and lengths by --config"
            f" {os.path.join(cfg.OUTPUT_DIR, 'config.yaml')} SOLVER.REFERENCE_WORLD_SIZE 0"
        )
    cfg.freeze()
    logger.info("Settings:\n%s", cfg)
    for key, value in leaves(cfg):
        value = list(value) if isinstance(value, tuple) else value  # as YAML has it
        if saved and value != saved.get(key):
            logger.warning("Resuming with another %s: %r, it was %r", key, value, saved.get(key))


def _load_saved(folder):
    """What save_cfg kept; {} if nothing, or nothing that can be read."""
    try:
        with open(os.path.join(folder, "config.yaml"), encoding="utf-8") as file:
            return dict(leaves(yaml.safe_load(file)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        logger.warning("config.yaml of the run cannot be read: %s", " ".join(str(error).split()))
        return {}


def _load_seed(folder):
    """The seed that the checkpoints of a run hold; None if there are none."""
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), "*.pth")), reverse=True)
    for path in paths:
        with contextlib.suppress(SettingsError):  # whoever resumes from it tells
            if (seed := load_file(path).get("seed")) is not None:
                return seed
    if paths:
        logger.warning("SEED: the one that was drawn is lost; from here on there is another")
    return None


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
            if type(value) is int:
                _require(abs(value) < 10**15, key, value, "must have fewer digits")
            choices = _CHOICES.get(key, (value,))
            _require(value in choices, key, value, f"must be one of {', '.join(map(str, choices))}")
            if isinstance(value, float) and not key.startswith("SOLVER.CLIP_GRAD"):
                _require(math.isfinite(value), key, value, "must be finite")
            if key in _AT_LEAST:
                _require(value >= _AT_LEAST[key], key, value, f"must be at least {_AT_LEAST[key]}")
            if key in _ABOVE:
                _require(value > _ABOVE[key], key, value, f"must be greater than {_ABOVE[key]}")
            if key in _AT_MOST:
                _require(value <= _AT_MOST[key], key, value, f"must be at most {_AT_MOST[key]}")
            if key in _BELOW:
                _require(value < _BELOW[key], key, value, f"must be less than {_BELOW[key]}")
    solver = cfg.SOLVER
    _require(
        solver.BATCH_SIZE % (num_ranks * solver.ACCUM_STEPS) == 0,
        "SOLVER.BATCH_SIZE",
        solver.BATCH_SIZE,
        f"must be a multiple of {num_ranks} ranks times SOLVER.ACCUM_STEPS {solver.ACCUM_STEPS}",
    )
    _check_sampling(cfg.DATASETS, cfg.DATALOADER)
    _require(len(solver.BETAS) == 2, "SOLVER.BETAS", solver.BETAS, "must be two numbers")
    up_iters, possible = solver.CYCLE_UP_ITERS, f"must be at most CYCLE_ITERS {solver.CYCLE_ITERS}"
    cyclic = solver.LR_SCHEDULER_NAME == "cyclic"
    fits = not cyclic or up_iters <= solver.CYCLE_ITERS
    _require(fits, "SOLVER.CYCLE_UP_ITERS", up_iters, possible)
    rises = solver.WARMUP_METHOD != "exponential" or solver.WARMUP_FACTOR > 0
    _require(rises, "SOLVER.WARMUP_METHOD", "exponential", "needs SOLVER.WARMUP_FACTOR above 0")
    on_gpus = cfg.MODEL.DEVICE != "cpu" and torch.cuda.is_available()
    sync_bn = not cfg.MODEL.SYNC_BN or on_gpus
    _require(sync_bn, "MODEL.SYNC_BN", True, "needs GPUs: torch has it for them only")
    traced = len(cfg.PROFILE) == 2 and 0 <= cfg.PROFILE[0] <= cfg.PROFILE[1]
    rule = "must be two numbers from 0 up, the second not the smaller one"
    _require(traced, "PROFILE", cfg.PROFILE, rule)
    static = not cfg.MODEL.STATIC_GRAPH or solver.ACCUM_STEPS == 1
    _require(static, "MODEL.STATIC_GRAPH", True, "needs SOLVER.ACCUM_STEPS 1: DDP fails with more")
    best = cfg.TEST.BEST_METRIC
    test = cfg.DATASETS.TEST
    _require(len(set(test)) == len(test), "DATASETS.TEST", test, "must not name a data set twice")
    for name, _, _ in expected_results(cfg.TEST.EXPECTED_RESULTS):
        known, rule = name.partition("/")[0] in test, "must be DATASET/METRIC of DATASETS.TEST"
        _require(known, "TEST.EXPECTED_RESULTS", name, rule)
    never = "needs an evaluation: TEST.EVAL_PERIOD of 0 or more"
    evaluates = cfg.TEST.EVAL_PERIOD >= 0 or not cfg.TEST.EXPECTED_RESULTS
    _require(evaluates, "TEST.EXPECTED_RESULTS", cfg.TEST.EXPECTED_RESULTS, never)
    mixed = solver.AMP.ENABLED or not cfg.TEST.AMP
    _require(mixed, "TEST.AMP", True, "needs SOLVER.AMP.ENABLED True")
    known = not best or best.partition("/")[0] in cfg.DATASETS.TEST
    _require(known, "TEST.BEST_METRIC", best, 'must be DATASET/METRIC of DATASETS.TEST, or ""')
    nesterov = not solver.NESTEROV or solver.MOMENTUM > 0
    _require(nesterov, "SOLVER.NESTEROV", True, "needs SOLVER.MOMENTUM above 0")
    weights, data = cfg.MODEL.WEIGHTS, os.path.join(HERE, cfg.DATASETS.PATH)
    is_file = not weights or os.path.isfile(weights)
    _require(is_file, "MODEL.WEIGHTS", weights, "must be a file, and is not there")
    _require(os.path.exists(data), "DATASETS.PATH", data, "must be there, and is not")


def expected_results(entries):
    """[("digits_test/accuracy", 0.99, 0.01)] of ("digits_test/accuracy = 0.99 +- 0.01",).

    Raises:
        SettingsError: one of them is not DATASET/METRIC = VALUE +- TOLERANCE.
    """
    return [_expected_result(entry) for entry in entries]


def _expected_result(entry):
    rule = 'must read "DATASET/METRIC = VALUE +- TOLERANCE"'
    match = re.fullmatch(r"\s*([^\s=]+/[^\s=]+)\s*=\s*(\S+?)\s*\+-\s*(\S+)\s*", str(entry))
    _require(isinstance(entry, str) and match, "TEST.EXPECTED_RESULTS", entry, rule)
    try:
        value, tolerance = float(match[2]), float(match[3])
    except ValueError:
        value = tolerance = math.nan
    possible = math.isfinite(value) and math.isfinite(tolerance) and tolerance >= 0
    _require(possible, "TEST.EXPECTED_RESULTS", entry, f"{rule}, two finite numbers")
    return match[1], value, tolerance


def _check_sampling(datasets, loader):
    _require(datasets.TRAIN, "DATASETS.TRAIN", datasets.TRAIN, "must name a data set")
    weights, count = datasets.TRAIN_WEIGHTS, len(datasets.TRAIN)
    fits = len(weights) in (0, count) and all(
        isinstance(weight, (int, float)) and weight > 0 for weight in weights
    )
    rule = f"must be (), or one number above 0 for each of the {count} data sets of TRAIN"
    _require(fits, "DATASETS.TRAIN_WEIGHTS", weights, rule)
    rare = loader.SAMPLER_TRAIN != "repeat_factor" or loader.REPEAT_THRESHOLD > 0
    rule = "must be above 0 for SAMPLER_TRAIN repeat_factor"
    _require(rare, "DATALOADER.REPEAT_THRESHOLD", loader.REPEAT_THRESHOLD, rule)


def _require(possible, key, value, rule):
    if not possible:
        raise SettingsError(f"{key}: {value!r} {rule}")
