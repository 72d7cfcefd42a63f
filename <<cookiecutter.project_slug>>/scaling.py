"""How long a run is: scaled to the number of ranks, counted in epochs."""

import logging

from plumbing import comm
from plumbing.comm import SettingsError

logger = logging.getLogger(__name__)

MOST_ITERS = 10**10  # the limit of MAX_ITER in defaults.py
LENGTHS = (  # settings in iterations, or in epochs with MAX_EPOCH; 0 and negative values stay
    "SOLVER.STEPS",
    "SOLVER.STEP_SIZE",
    "SOLVER.WARMUP_ITERS",
    "SOLVER.FLAT_ITERS",
    "SOLVER.CYCLE_ITERS",
    "SOLVER.CYCLE_UP_ITERS",
    "SOLVER.CHECKPOINT_PERIOD",
    "TEST.EVAL_PERIOD",
)


def maybe_scale_to_ranks(cfg, num_ranks):
    """Linear scaling from SOLVER.REFERENCE_WORLD_SIZE ranks to ``num_ranks``.

    The batch size and the rates grow with the number of ranks, the lengths in iterations shrink: so
    the samples seen stay as many.  Goyal et al., Accurate, large minibatch SGD, 2017; detectron2's
    auto_scale_workers.

    Returns:
        One line for each setting that was changed.

    Raises:
        SettingsError: the batch size does not divide among the ranks of the reference.
    """
    solver, before = cfg.SOLVER, cfg.clone()
    reference = solver.REFERENCE_WORLD_SIZE
    if reference <= 0 or reference == num_ranks:
        return []
    if solver.BATCH_SIZE % reference:
        raise SettingsError(
            f"SOLVER.BATCH_SIZE: {solver.BATCH_SIZE} must be a multiple of the {reference} ranks of"
            " SOLVER.REFERENCE_WORLD_SIZE"
        )
    solver.BATCH_SIZE = solver.BATCH_SIZE // reference * num_ranks
    solver.BASE_LR = solver.BASE_LR * num_ranks / reference
    solver.BASE_LR_END = solver.BASE_LR_END * num_ranks / reference
    in_iters = ["SOLVER.ITERS_PER_EPOCH"]
    if solver.MAX_EPOCH <= 0:
        in_iters += ["SOLVER.MAX_ITER", *LENGTHS]
    for key in in_iters:
        change(cfg, key, lambda length: rounded_ratio(length * reference, num_ranks))
    solver.STEPS = tuple(dict.fromkeys(solver.STEPS))  # two may have become one
    solver.REFERENCE_WORLD_SIZE = num_ranks
    return changes_between(before, cfg, f"for {num_ranks} instead of {reference} ranks")


def setup_length(cfg, dataset_size, changes, is_training):
    """Turn lengths in epochs into iterations; log the ``changes``, and how long the run is.

    Of a training it also warns of what has no effect (see without_effect).

    Then MAX_EPOCH is 0, so that the settings as they are kept turn into no others.
    ``dataset_size(cfg)`` is called on the main process, and not at all where nobody needs it.
    Collective.

    Raises:
        SettingsError: the epochs are too many iterations.
    """
    solver, before = cfg.SOLVER, cfg.clone()
    for line in changes:
        logger.info(line)
    if not (is_training or solver.MAX_EPOCH > 0 or solver.LR_BY_EPOCH):
        return
    num_samples = comm.from_main_process(lambda: dataset_size(cfg))
    iters = solver.ITERS_PER_EPOCH or max(1, -(-num_samples // solver.BATCH_SIZE))
    if solver.LR_BY_EPOCH:
        solver.ITERS_PER_EPOCH = iters
    if solver.MAX_EPOCH > 0:
        solver.MAX_ITER = solver.MAX_EPOCH * iters
        if solver.MAX_ITER >= MOST_ITERS:
            length = f"{solver.MAX_ITER} iterations, and must be less than {MOST_ITERS}"
            raise SettingsError(f"SOLVER.MAX_EPOCH: {solver.MAX_EPOCH} are {length}")
        solver.MAX_EPOCH = 0
        for key in LENGTHS:
            change(cfg, key, lambda length: length * iters)
    for line in changes_between(before, cfg, f"with {iters} iterations in an epoch"):
        logger.info(line)
    for line in without_effect(cfg) if is_training else ():
        logger.warning(line)
    logger.info(
        "Length: %d iterations are %s epochs; %d samples, %d in an iteration: an epoch is %d"
        " iterations, and a sample comes %s times",
        solver.MAX_ITER,
        round(solver.MAX_ITER / iters, 2),
        num_samples,
        solver.BATCH_SIZE,
        iters,
        round(solver.MAX_ITER * solver.BATCH_SIZE / max(num_samples, 1), 2),
    )


def without_effect(cfg):
    """One line for each setting whose effect would come after the end of the run, or never."""
    solver, (first, end) = cfg.SOLVER, cfg.PROFILE
    late = f"the run ends before that: lower it, or raise SOLVER.MAX_ITER {solver.MAX_ITER}"
    names = {  # schedule: the setting that says when its rate first falls, or starts anew
        "multistep": "STEPS",
        "step": "STEP_SIZE",
        "flat_cosine": "FLAT_ITERS",
        "one_cycle": "CYCLE_UP_ITERS",
        "cyclic": "CYCLE_UP_ITERS",
        "cosine_restarts": "CYCLE_ITERS",
    }
    keys = ["WARMUP_ITERS", *filter(None, [names.get(solver.LR_SCHEDULER_NAME)])]
    for key, value in ((key, solver[key]) for key in keys):
        if (min(value, default=0) if isinstance(value, tuple) else value) >= solver.MAX_ITER:
            yield f"SOLVER.{key}: {value}: {late}"
    if solver.MAX_ITER <= first < end:
        yield f"PROFILE: {cfg.PROFILE}: {late}"
    if cfg.TEST.BEST_METRIC and cfg.TEST.EVAL_PERIOD < 0:
        never = 'no best model without evaluations: raise TEST.EVAL_PERIOD to 0, or set ""'
        yield f"TEST.BEST_METRIC: {cfg.TEST.BEST_METRIC}: {never}"


def change(cfg, key, function):
    """Replace a setting, or each of a tuple, by its function; 0 and negative values stay."""
    section, name = key.split(".")
    value = cfg[section][name]
    if isinstance(value, tuple):
        cfg[section][name] = tuple(function(item) if item > 0 else item for item in value)
    elif value > 0:
        cfg[section][name] = function(value)


def rounded_ratio(numerator, denominator):
    """The nearest whole number, up from a half, at least 1; in integers, so exact at any size."""
    return max(1, (2 * numerator + denominator) // (2 * denominator))


def changes_between(before, after, why):
    """One line for each setting of two sections deep that differs."""
    return [
        f"{section}.{name}: {before[section][name]!r} becomes {value!r}, {why}"
        for section in ("SOLVER", "TEST")
        for name, value in after[section].items()
        if value != before[section][name]
    ]
