"""Where the time goes: seconds of iterations and of the waits for data, and a profile."""

import datetime
import logging
import os
import time

import torch

from plumbing import comm
from plumbing.comm import SettingsError

logger = logging.getLogger(__name__)


class IterationTimer:
    """Hands on what a loader yields, and measures the iterations and the waits for data.

    ``batch_size`` is that of an iteration, over all ranks.  At the end of a ``with`` block it logs
    how long everything took.  The seconds of an iteration count until the next wait, but not what
    comes after a ``lap``: writing, saving and evaluating.
    """

    def __init__(self, data_loader, batch_size):
        self._data_loader, self._batch_size = data_loader, batch_size
        self._start, self._num_iters, self._waited = 0.0, 0, 0.0  # since the last lap
        self._total_iters, self._total_seconds = 0, 0.0  # of all laps

    def __iter__(self):
        clock = time.perf_counter
        start = clock()
        for item in self._data_loader:
            if self._num_iters == 0:
                self._start = start
            self._num_iters += 1
            self._waited += clock() - start
            yield item
            start = clock()

    def lap(self):
        """Means since the last lap, of the slowest rank: seconds, samples a second.  Collective.

        It belongs after the values of an iteration were read: then a GPU has caught up.  On GPUs it
        has ``max_mem`` too: the most MiB that tensors of a rank have taken.
        """
        num_iters, seconds = self._num_iters, time.perf_counter() - self._start
        self._total_iters += num_iters
        self._total_seconds += seconds
        on_gpu = torch.cuda.is_initialized()
        memory = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0
        numbers = [seconds / num_iters, self._waited / num_iters, memory]
        if comm.get_world_size() > 1:
            numbers = comm.gather_tensor(torch.tensor(numbers).double()).amax(dim=0).tolist()
        seconds, waited, memory = numbers
        self._num_iters, self._waited = 0, 0.0
        result = {"time": seconds, "data_time": waited}
        result["samples_per_second"] = self._batch_size / seconds
        return {**result, "max_mem": memory} if on_gpu else result

    def __enter__(self):
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_):
        if hasattr(self._data_loader, "close"):
            self._data_loader.close()  # ends loader workers, and a profile
        if self._total_iters:
            everything, training = time.perf_counter() - self._began, self._total_seconds
            speed = training / self._total_iters
            logger.info(
                "Overall training speed: %d iterations in %s (%.4f s / it)",
                *(self._total_iters, _hms(training), speed),
            )
            logger.info(
                "Total training time: %s (%s on writing, saving and evaluating)",
                *(_hms(everything), _hms(everything - training)),
            )


def build_timer(cfg, start_iter, data_loader):
    """The loader, timed; and the iterations PROFILE are traced by torch.profiler.

    Each rank writes a trace into OUTPUT_DIR/profile, for Perfetto (ui.perfetto.dev) or TensorBoard.

    Raises:
        SettingsError: when a batch is wanted and the loader has no more.
    """
    data_loader = _endless(data_loader)
    first, end = max(cfg.PROFILE[0], start_iter), cfg.PROFILE[1]
    if first < end:
        data_loader = _profiled(data_loader, first - start_iter, end - first, cfg.OUTPUT_DIR)
    return IterationTimer(data_loader, cfg.SOLVER.BATCH_SIZE)


def _endless(data_loader):
    yield from data_loader
    raise SettingsError(
        f"build_train_loader: rank {comm.get_rank()} has no more batches before SOLVER.MAX_ITER:"
        " a loader for training starts anew when its data ends"
    )


def _profiled(data_loader, num_before, num_iters, output_dir):
    warmup = min(num_before, 1)
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(
            skip_first=num_before - warmup, wait=0, warmup=warmup, active=num_iters, repeat=1
        ),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(
            os.path.join(output_dir, "profile"), worker_name=f"rank{comm.get_rank()}"
        ),
        record_shapes=True,
    )
    with profiler:
        for item in data_loader:
            yield item
            profiler.step()


def _hms(seconds):
    return f"{datetime.timedelta(seconds=int(seconds))}.{int(seconds * 10) % 10}"
