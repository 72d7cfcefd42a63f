"""The settings of a run: its seed, what the log says of them, and the copy in config.yaml."""

import glob
import logging
import os
from collections.abc import Iterator

from yacs.config import CfgNode, yaml

from plumbing import comm
from plumbing.checkpoint import load_file
from plumbing.errors import SettingsError
from plumbing.files import write_atomically
from plumbing.settings import changed_settings, differences, leaves

logger = logging.getLogger(__name__)


def has_checkpoint(output_dir: str) -> bool:
    """Whether a folder holds any checkpoint."""
    return bool(_checkpoint_files(output_dir))


def require_model(weights: str, output_dir: str, resume: bool) -> None:
    """Check that there is a model to evaluate.

    Raises:
        SettingsError: there is none.
    """
    if weights or (resume and has_checkpoint(output_dir)):
        return
    raise SettingsError(
        "--eval-only needs a model: set MODEL.WEIGHTS to a checkpoint, or add --resume for the"
        f" newest one in {output_dir}"
    )


def _checkpoint_files(output_dir: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(output_dir), "*.pth")))


def require_same_settings(cfg: CfgNode) -> None:
    """Check that all ranks have the same settings.  Collective.

    Raises:
        SettingsError: names the first setting that differs, and a rank where it does.
    """
    every_rank = comm.all_gather({key: repr(value) for key, value in leaves(cfg)})
    for rank, settings in enumerate(every_rank):
        for key, value in every_rank[0].items():
            other = settings.get(key, "unknown")
            if value != other:
                raise SettingsError(
                    f"{key}: {value} on rank 0, but {other} on rank {rank}: start all ranks with"
                    " the same settings and the same files"
                )


def choose_seed(seed: int, output_dir: str, resume: bool) -> int:
    """Replace a negative seed by a random one.  Collective.

    A resumed run keeps the random seed that it began with.
    """
    if seed >= 0:
        return seed
    return comm.from_main_process(lambda: _random_seed(output_dir, resume))


def _random_seed(output_dir: str, resume: bool) -> int:
    if resume:
        seed = _seed_of_run(output_dir)
        if seed is not None:
            return seed
        if has_checkpoint(output_dir):
            logger.warning("SEED: the random seed of this run is lost; a new one is drawn")
    return int.from_bytes(os.urandom(4), "little") // 2


def _seed_of_run(output_dir: str) -> int | None:
    """The seed in config.yaml, or if that is lost in the newest checkpoint that has one."""
    for text in _saved_settings(output_dir):
        try:
            seed = yaml.safe_load(text)["SEED"]
        except (yaml.YAMLError, TypeError, KeyError):
            continue
        if isinstance(seed, int) and seed >= 0:
            return seed
    return None


def _saved_settings(output_dir: str) -> Iterator[str]:
    try:
        with open(os.path.join(output_dir, "config.yaml"), encoding="utf-8") as file:
            yield file.read()
    except (OSError, ValueError):
        # The checkpoints below hold the settings as well.
        pass
    for path in reversed(_checkpoint_files(output_dir)):
        try:
            yield load_file(path, check_tensors=False).get("config", "")
        except SettingsError:
            # Whoever resumes from this file says what is wrong with it.
            continue


def log_settings(cfg: CfgNode, defaults: CfgNode, output_dir: str, resume: bool) -> None:
    """Log the settings that are not the defaults, and those that changed since the run began."""
    lines = [f"  {key}: {value!r}" for key, value in differences(cfg, defaults).items()]
    logger.info("Settings that are not the defaults:\n%s", "\n".join(lines) or "  none")
    if resume and comm.is_main_process():
        for key, old, new in changed_settings(cfg, os.path.join(output_dir, "config.yaml")):
            logger.warning("%s: %s in this session, it was %s before", key, new, old)


def save_settings(cfg: CfgNode, output_dir: str) -> None:
    """Write all settings to OUTPUT_DIR/config.yaml, on rank 0."""
    if comm.is_main_process():
        path = os.path.join(output_dir, "config.yaml")
        write_atomically(path, lambda file: file.write(cfg.dump().encode()))
