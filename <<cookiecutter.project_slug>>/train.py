"""Train and evaluate.  Everything happens in do_train below, which is meant to be edited.

    python train.py --config cfg.yaml                               one process, on a GPU or the CPU
    torchrun --nproc_per_node 8 train.py --config cfg.yaml          8 processes on one machine
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 [...]
                                                                    the same on each of 2 machines

Add --resume to go on with a run, --eval-only to train nothing, KEY VALUE to change a setting.
"""

import argparse
import logging
import os

import torch

from data import build_test_loader, build_train_loader, dataset_size
from defaults import check_cfg, expected_results, freeze_cfg, get_cfg, save_cfg
from evaluation import build_best_checkpointer, build_evaluators, inference_on_dataset
from gradients import build_grad_scaler, build_gradients
from hardware import build_autocast, build_parallel, choose_device, gradient_sync, setup_backends
from model import build_model, sum_losses
from optimizer import build_optimizer, setup_optimizer
from plumbing import comm
from plumbing.checkpoint import Checkpointer, PeriodicCheckpointer
from plumbing.events import EventStorage, get_event_storage
from plumbing.preemption import StopRequest
from plumbing.settings import merge_settings
from plumbing.setup import launch, set_random_state, setup_run
from records import load_results, log_results, open_writers, save_results, verify_results
from sampling import build_train_sampler
from scaling import maybe_scale_to_ranks, setup_length
from schedule import build_lr_scheduler
from timing import build_timer

logger = logging.getLogger("train")


def is_due(iteration, max_iter, *periods):
    """Whether one of the periods ends with this iteration; the meaning of 0 is in defaults.py."""
    if iteration == max_iter - 1:
        return max(periods) >= 0
    return iteration >= 0 and 0 in [(iteration + 1) % period for period in periods if period > 0]


def do_test(cfg, model):
    """Evaluate on every test set: {"digits_test/accuracy": 0.99, ...}, the same on all ranks."""
    results = {}
    autocast = build_autocast(cfg) if cfg.TEST.AMP else None
    for name in cfg.DATASETS.TEST:
        set_random_state(cfg.SEED)
        evaluators, data_loader = build_evaluators(cfg, name), build_test_loader(cfg, name)
        numbers = inference_on_dataset(model, data_loader, evaluators, name, autocast)
        log_results(name, numbers)
        results.update((f"{name}/{key}", value) for key, value in numbers.items())
    return results


def catch_up(cfg, model, iteration, periods, writers, periodic_checkpointer, best_checkpointer):
    """Begin with what the loop does after a save of ``iteration``: a kill may have cut it off."""
    logger.info("Starting training from iteration %d", iteration + 1)
    storage, results = get_event_storage(), {}
    storage.iter = iteration
    save_cfg(cfg)
    if iteration == cfg.SOLVER.MAX_ITER - 1:
        periodic_checkpointer.step(iteration, seed=cfg.SEED)  # the final one may be missing
    if is_due(iteration, cfg.SOLVER.MAX_ITER, cfg.TEST.EVAL_PERIOD):
        results = do_test(cfg, model)
        storage.put_scalars(results, smoothing_hint=False)
        best_checkpointer.step(iteration, results)
    if iteration == 0 or is_due(iteration, cfg.SOLVER.MAX_ITER, *periods):
        for writer in writers:
            writer.write()
    return results


def do_train(cfg, model, resume=False):
    """Train to iteration SOLVER.MAX_ITER; return the last results, or None if asked to stop."""
    model.train()
    optimizer = build_optimizer(cfg, model)
    scheduler = build_lr_scheduler(cfg, optimizer)
    gradients = build_gradients(cfg, optimizer)
    scaler = build_grad_scaler(cfg, model)  # does nothing unless float16, or told to skip
    autocast = build_autocast(cfg)
    share = torch.tensor(1 / cfg.SOLVER.ACCUM_STEPS, device=cfg.MODEL.DEVICE)  # of a micro-batch

    checkpointer = Checkpointer(
        model, cfg.OUTPUT_DIR, optimizer=optimizer, scheduler=scheduler, scaler=scaler
    )
    extra = checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume)
    start_iter, max_iter = extra.get("iteration", -1) + 1, cfg.SOLVER.MAX_ITER
    seed, rank, eval_period = cfg.SEED, comm.get_rank(), cfg.TEST.EVAL_PERIOD
    periods = cfg.LOG_PERIOD, cfg.SOLVER.CHECKPOINT_PERIOD, eval_period
    periodic_checkpointer = PeriodicCheckpointer(
        checkpointer, cfg.SOLVER.CHECKPOINT_PERIOD, max_iter, cfg.SOLVER.CHECKPOINTS_TO_KEEP
    )
    best_checkpointer = build_best_checkpointer(cfg, checkpointer)
    timer = build_timer(cfg, start_iter, build_train_loader(cfg, start_iter, build_train_sampler))

    with (
        EventStorage(start_iter) as storage,
        open_writers(cfg, start_iter) as writers,
        StopRequest(start_iter) as stop_request,
        timer,
    ):
        checkpointer.add_checkpointable("storage", storage)
        checkpointers = periodic_checkpointer, best_checkpointer
        results = catch_up(cfg, model, start_iter - 1, periods, writers, *checkpointers)
        for iteration, batches in zip(range(start_iter, max_iter), timer):
            storage.iter = iteration
            set_random_state(seed, iteration, rank)

            for data in batches:
                with gradient_sync(model, enabled=data is batches[-1]):
                    with autocast:
                        loss_dict = model(data)
                        losses = sum_losses(loss_dict)
                    scaler.scale(losses).backward(share)
                storage.put_scalars({"total_loss": losses, **loss_dict})

            scaler.unscale_(optimizer)
            storage.put_norm("grad_norm", gradients.clip())
            scaler.step(optimizer)
            scaler.update()
            gradients.clear()
            storage.put_scalar("lr", optimizer.param_groups[0]["lr"], smoothing_hint=False)
            scheduler.step()

            # Log before saving: a loss that is not finite raises here, on all ranks.
            stop = stop_request.agreed(iteration)
            if stop or iteration == 0 or is_due(iteration, max_iter, *periods):
                storage.reduce(finite=scaler.must_be_finite)
                storage.put_scalars(timer.lap(), smoothing_hint=False)
                for writer in writers:
                    writer.write()

            # Save before evaluating: a bug in an evaluator must not cost the run.
            periodic_checkpointer.step(iteration, force=stop, seed=seed)
            if stop:
                return None

            if is_due(iteration, max_iter, eval_period):
                results = do_test(cfg, model)
                storage.put_scalars(results, smoothing_hint=False)
                best_checkpointer.step(iteration, results)
    return results


def setup(args):
    """The settings, checked and frozen; joins the other ranks, opens OUTPUT_DIR and the log.

    torchrun's restart of a run is a resume: then it sets ``args.resume``.
    """
    cfg = get_cfg()
    merge_settings(cfg, args.config, args.opts)
    if args.eval_only and not (cfg.MODEL.WEIGHTS or args.resume):
        raise comm.SettingsError("--eval-only: of what?  Set MODEL.WEIGHTS, or add --resume")
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    changes = maybe_scale_to_ranks(cfg, num_ranks)
    check_cfg(cfg, num_ranks)
    setup_optimizer(cfg)  # now, so that what cannot work is refused before anything is done
    device = choose_device(cfg.MODEL.DEVICE)
    cfg.MODEL.DEVICE = device.type
    comm.init_process_group(device, cfg.TIMEOUT_SECONDS)
    restarted = setup_run(cfg.OUTPUT_DIR, may_exist=args.resume or args.eval_only)
    args.resume = args.resume or restarted
    setup_backends(cfg)
    setup_length(cfg, dataset_size, changes, is_training=not args.eval_only)
    freeze_cfg(cfg, args.resume, is_training=not args.eval_only)
    set_random_state(cfg.SEED)
    return cfg


def main(args):
    """Train, or only evaluate: the results, or None if the training was asked to stop."""
    cfg = setup(args)
    expected = expected_results(cfg.TEST.EXPECTED_RESULTS)
    model = build_model(cfg).to(cfg.MODEL.DEVICE)
    logger.info("Model:\n%s", model)
    if args.eval_only:
        checkpointer = Checkpointer(model, cfg.OUTPUT_DIR)
        if not (cfg.MODEL.WEIGHTS or checkpointer.get_all_checkpoint_files()):
            raise comm.SettingsError(f"--eval-only: nothing was saved in {cfg.OUTPUT_DIR}")
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        return verify_results(do_test(cfg, model), expected)
    last_iter = cfg.SOLVER.MAX_ITER - 1
    results = load_results(cfg.OUTPUT_DIR, last_iter) if args.resume else None
    if results is not None:
        logger.info("This training has finished; to go on, raise SOLVER.MAX_ITER")
        return verify_results(results, expected)
    model = build_parallel(cfg, model)
    results = do_train(cfg, model, resume=args.resume)
    if results is not None:
        save_results(cfg.OUTPUT_DIR, last_iter, results)
        verify_results(results, expected)
    return results


def parse_args(words=None):
    parser = argparse.ArgumentParser(
        usage="%(prog)s --config FILE [--resume] [--eval-only] [KEY VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="settings, YAML")
    parser.add_argument("--resume", action="store_true", help="go on with the run in OUTPUT_DIR")
    parser.add_argument("--eval-only", action="store_true", help="evaluate, and do not train")
    args, args.opts = parser.parse_known_args(words)  # a value such as -1e-3 is no flag
    if unknown := [word for word in args.opts[::2] if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


if __name__ == "__main__":
    launch(main, parse_args())
