"""Limits of settings that belong to recipes now, as they were checked in defaults.py."""

import pytest
from defaults import check_cfg, get_cfg
from plumbing.errors import SettingsError

IMPOSSIBLE = {
    "LOG_WINDOW": (0,),
    "PROFILE": ((), (5,), (8, 3), (-5, 3), (1, 2, 3)),
    "SOLVER.LAYER_DECAY": (0.0, 1.1, float("nan")),
    "SOLVER.MAX_SKIPS": (0, -1),
    "SOLVER.NONFINITE": ("ignore",),
    "SOLVER.BIAS_LR_FACTOR": (-1.0,),
    "SOLVER.WARMUP_METHOD": ("burnin",),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in IMPOSSIBLE.items() for value in values]
)
def test_an_impossible_value_is_refused_by_its_key(key, value):
    cfg = get_cfg()
    *sections, name = key.split(".")
    node = cfg
    for section in sections:
        node = node[section]
    node[name] = value
    with pytest.raises(SettingsError, match=f"^{key}: "):
        check_cfg(cfg, 1)


def test_nesterov_needs_momentum():
    cfg = get_cfg()
    cfg.SOLVER.NESTEROV = True
    cfg.SOLVER.MOMENTUM = 0.0
    with pytest.raises(SettingsError, match="SOLVER.MOMENTUM"):
        check_cfg(cfg, 1)
