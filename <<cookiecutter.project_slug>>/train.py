"""Train and evaluate.  Everything happens in do_train below, which is meant to be edited.

    python train.py --config cfg.yaml                               one process, on a GPU or the CPU
    torchrun --nproc_per_node 8 train.py --config cfg.yaml          8 processes on one machine
    torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...     on each of 2 machines

Add --resume to continue a run, --eval-only to only evaluate, KEY VALUE to change a setting.
"""

import logging

from data import build_test_loader, build_train_loader
from defaults import check_cfg, expand_paths, get_cfg
from evaluation import build_evaluators
from model import build_model
from plumbing import comm, run_settings
from plumbing.arguments import parse_args
from plumbing.checkpoint import BestCheckpointer, Checkpointer, PeriodicCheckpointer
from plumbing.environment import log_environment, setup_backends
from plumbing.errors import SettingsError
from plumbing.events import EventStorage, default_writers, open_writers, save_results
from plumbing.gradients import clip_grad_norm_, gradient_sync
from plumbing.inference import inference_on_dataset, log_results
from plumbing.launch import choose_device, init_process_group, launch, launched_ranks
from plumbing.parallel import DistributedDataParallel
from plumbing.preemption import StopRequest
from plumbing.random_state import set_random_state
from plumbing.run_folder import open_run
from plumbing.settings import merge_settings
from plumbing.timing import TimedLoader
from solver import (
    build_autocast,
    build_grad_scaler,
    build_lr_scheduler,
    build_optimizer,
    check_solver,
)

logger = logging.getLogger("train")


def is_due(iteration, max_iter, *periods):
    """Whether one of the periods ends with this iteration.  0: only the last, negative: never."""
    if iteration < 0:
        return False
    if iteration == max_iter - 1:
        return max(periods) >= 0
    return any(period > 0 and (iteration + 1) % period == 0 for period in periods)


def do_test(cfg, model):
    """Evaluate on all test sets.  Returns {"digits_test/accuracy": 0.99, ...}, on all ranks."""
    results = {}
    for name in cfg.DATASETS.TEST:
        set_random_state(cfg.SEED)  # so that each evaluation draws the same random numbers
        data_loader = build_test_loader(cfg, name)
        evaluators = build_evaluators(cfg, name)
        # In evaluation mode, without gradients; afterwards the model is as before.
        metrics = inference_on_dataset(model, data_loader, evaluators, name)
        log_results(name, metrics)
        results.update({f"{name}/{key}": value for key, value in metrics.items()})
    return results


def evaluate(cfg, model, storage, best_checkpointer, iteration):
    """Evaluate during a training: log the results, and keep the model if it is the best so far."""
    results = do_test(cfg, model)
    # The next write adds them to the row of this iteration, as they are and not as medians.
    storage.put_scalars(results, smoothing_hint=False)
    best_checkpointer.step(iteration, results)
    return results


def do_train(cfg, model, resume=False):
    """Train until SOLVER.MAX_ITER.  Returns the last results, or None after a signal."""
    model.train()
    parameters = list(model.parameters())
    optimizer = build_optimizer(cfg, model)
    scheduler = build_lr_scheduler(cfg, optimizer)
    scaler = build_grad_scaler(cfg)
    autocast = build_autocast(cfg)

    # All that a resumed run needs is saved, also what was logged; the settings for predict.py.
    storage = EventStorage()
    checkpointer = Checkpointer(
        model,
        cfg.OUTPUT_DIR,
        config=cfg.dump(),
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        storage=storage,
    )
    checkpoint = checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume)
    start_iter = checkpoint.get("iteration", -1) + 1  # 0, unless a run is resumed
    max_iter = cfg.SOLVER.MAX_ITER
    if start_iter > max_iter:
        raise SettingsError(f"SOLVER.MAX_ITER: {max_iter}, but {start_iter} have been trained")

    periodic_checkpointer = PeriodicCheckpointer(
        checkpointer,
        cfg.SOLVER.CHECKPOINT_PERIOD,
        max_iter,
        max_to_keep=cfg.SOLVER.CHECKPOINTS_TO_KEEP,
        keep_period=cfg.SOLVER.CHECKPOINT_KEEP_PERIOD,
    )
    best_checkpointer = BestCheckpointer(checkpointer, cfg.TEST.BEST_METRIC, cfg.TEST.BEST_MODE)
    data_loader = TimedLoader(build_train_loader(cfg, start_iter), cfg.SOLVER.BATCH_SIZE)
    run_settings.save_settings(cfg, cfg.OUTPUT_DIR)  # only now that the checkpoint fits them
    eval_period = cfg.TEST.EVAL_PERIOD
    log_periods = (cfg.LOG_PERIOD, cfg.SOLVER.CHECKPOINT_PERIOD, eval_period)
    results = {}
    periodic_checkpointer.step(start_iter - 1)  # after a kill: what was missing of that save

    with (
        storage,  # inside, get_event_storage() returns it, in the model too
        data_loader,  # ends its workers
        # Deletes what a killed run logged after its checkpoint; at the end writes what is left.
        open_writers(default_writers(cfg.OUTPUT_DIR, max_iter, start_iter)) as writers,
        StopRequest() as request,  # sees a signal to any rank
    ):
        # After a kill, the evaluation and the row of the iteration that was saved come again.
        storage.iter = start_iter - 1
        if is_due(storage.iter, max_iter, eval_period):
            results = evaluate(cfg, model, storage, best_checkpointer, storage.iter)
        if storage.iter == 0 or is_due(storage.iter, max_iter, *log_periods):
            for writer in writers:
                writer.write()

        # The range comes first: zip then draws no batch after the last iteration.
        for iteration, micro_batches in zip(range(start_iter, max_iter), data_loader):
            storage.iter = iteration
            set_random_state(cfg.SEED, iteration, comm.get_rank())  # so that a resume is exact

            for index, data in enumerate(micro_batches):  # the loader has put them on the device
                # The ranks average their gradients in the last backward pass only.
                with gradient_sync(model, enabled=index == len(micro_batches) - 1):
                    with autocast:
                        loss_dict = model(data)
                    storage.put_scalars(loss_dict)  # the mean over the micro-batches is logged
                    losses = sum(loss_dict.values())
                    storage.put_scalar("total_loss", losses)
                    scaler.scale(losses / len(micro_batches)).backward()

            scaler.unscale_(optimizer)
            grad_norm = clip_grad_norm_(parameters, cfg.SOLVER.CLIP_GRAD_NORM)  # inf: only the norm
            storage.put_scalar("grad_norm", grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            storage.put_scalar("lr", optimizer.param_groups[0]["lr"], smoothing_hint=False)
            scheduler.step()

            # After a signal, True in the same iteration on all ranks; this does not communicate.
            stop = request.agreed()
            if stop or iteration == 0 or is_due(iteration, max_iter, *log_periods):
                # Reads the tensors that were put, averages them over the ranks, and raises on all
                # of them if a value named *loss* is not finite: that must come before a save.
                storage.reduce()
                storage.put_scalars(data_loader.times(), smoothing_hint=False)
                for writer in writers:
                    writer.write()

            # Save before evaluating: an error or a signal in an evaluation must not cost the run.
            evaluation_due = is_due(iteration, max_iter, eval_period)
            periodic_checkpointer.step(iteration, force=stop or evaluation_due)
            if stop:
                return None

            if evaluation_due:
                results = evaluate(cfg, model, storage, best_checkpointer, iteration)
    return results


def setup(args):
    """Read and check the settings, join the other ranks, open OUTPUT_DIR and its log."""
    cfg = get_cfg()
    merge_settings(cfg, args.config, args.opts)
    expand_paths(cfg)
    check_cfg(cfg, num_ranks=launched_ranks())
    check_solver(cfg)
    if args.eval_only:
        run_settings.require_model(cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR, args.resume)

    device = choose_device(cfg.MODEL.DEVICE)
    cfg.MODEL.DEVICE = device.type  # its index has been set for this process
    init_process_group(device, cfg.TIMEOUT_SECONDS)
    run_settings.require_same_settings(cfg)  # on all ranks
    setup_backends(cfg.FLOAT32_PRECISION, cfg.CUDNN_BENCHMARK, cfg.DETERMINISTIC)
    args.resume = open_run(cfg.OUTPUT_DIR, args.resume, args.eval_only)  # also after a restart
    cfg.SEED = run_settings.choose_seed(cfg.SEED, cfg.OUTPUT_DIR, args.resume)
    cfg.freeze()
    log_environment(device)
    run_settings.log_settings(cfg, get_cfg(), cfg.OUTPUT_DIR, args.resume)
    set_random_state(cfg.SEED)
    return cfg


def main(args):
    """Train, or only evaluate.  Returns the results, or None if a signal stopped the training."""
    cfg = setup(args)
    model = build_model(cfg).to(cfg.MODEL.DEVICE)
    logger.info("Parameters of the model: %d", sum(p.numel() for p in model.parameters()))
    if args.eval_only:
        checkpointer = Checkpointer(model, cfg.OUTPUT_DIR)
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        return do_test(cfg, model)

    if comm.get_world_size() > 1:
        model = DistributedDataParallel(model)
    if cfg.MODEL.COMPILE:
        model.compile(backend=cfg.MODEL.COMPILE)
    results = do_train(cfg, model, resume=args.resume)
    if results is not None:
        save_results(cfg.OUTPUT_DIR, cfg.SOLVER.MAX_ITER - 1, results)  # the sign of the end
    return results


if __name__ == "__main__":
    launch(main, parse_args(__doc__))
