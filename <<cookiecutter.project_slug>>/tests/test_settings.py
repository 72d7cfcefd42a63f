"""Settings: read and checked with errors that tell what to do; and the defaults."""

import ast
import logging
import math
import re
from pathlib import Path

import pytest

import defaults
from defaults import check_cfg, freeze_cfg, get_cfg, save_cfg
from plumbing.comm import SettingsError
from plumbing.settings import leaves, merge_settings

ROOT = Path(defaults.__file__).parent


@pytest.fixture
def read(tmp_path):
    """read(text, *opts): the settings after a file with this text and these words."""

    def merged(text="OUTPUT_DIR: output", *opts):
        path = tmp_path / "cfg.yaml"
        path.write_text(text)
        cfg = get_cfg()
        merge_settings(cfg, str(path), list(opts))
        return cfg

    return merged


def error_of(function, *args):
    """The one line of the SettingsError that a call raises."""
    with pytest.raises(SettingsError) as caught:
        function(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Reading


def test_a_file_and_then_the_command_line_change_the_defaults(read):
    cfg = read("SEED: 5\nSOLVER:\n  BASE_LR: 0.5\n  AMP: {ENABLED: true}", "SOLVER.BASE_LR", "0.25")
    changed = {"SEED": 5, "SOLVER.BASE_LR": 0.25, "SOLVER.AMP.ENABLED": True}
    assert dict(leaves(cfg)) == {**dict(leaves(get_cfg())), **changed}
    assert get_cfg().SEED == 0


def test_a_dotted_key_is_read_from_a_file_too(read):
    assert read("SOLVER.BASE_LR: 0.5").SOLVER.BASE_LR == 0.5


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("SOLVER.BASE_LR", "1", 1.0),
        ("SOLVER.BASE_LR", "1e-4", 1e-4),
        ("SOLVER.CLIP_GRAD_NORM", "inf", math.inf),
        ("SOLVER.MAX_ITER", "1e3", 1000),
        ("SOLVER.MAX_ITER", "90000.0", 90000),
        ("SEED", "-1", -1),
        ("SEED", str(2**53 + 1), 2**53 + 1),
        ("SOLVER.NESTEROV", "true", True),
        ("SOLVER.NESTEROV", "True", True),
        ("SOLVER.NESTEROV", "false", False),
        ("SOLVER.STEPS", "60,80", (60, 80)),
        ("SOLVER.STEPS", "[60, 80]", (60, 80)),
        ("SOLVER.STEPS", "()", ()),
        ("SOLVER.BETAS", "(0.5, 1)", (0.5, 1.0)),
        ("DATASETS.TEST", "('digits_test', 'digits_train')", ("digits_test", "digits_train")),
        ("OUTPUT_DIR", "some/where", "some/where"),
        ("OUTPUT_DIR", "007", "007"),
        ("OUTPUT_DIR", "7", "7"),
        ("TEST.BEST_METRIC", "", ""),
    ],
)
def test_words_become_the_type_of_the_default(read, key, text, expected):
    value = dict(leaves(read("SEED: 0", key, text)))[key]
    assert value == expected
    assert type(value) is type(expected)
    if isinstance(expected, tuple):
        assert list(map(type, value)) == list(map(type, expected))


@pytest.mark.parametrize("text", ["2024_01_05", "1e3", "1.10", "0x10"])
def test_a_word_that_could_be_a_number_is_kept_where_a_text_is_expected(read, text):
    folder = read("SEED: 0", "OUTPUT_DIR", text).OUTPUT_DIR
    assert folder == text


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("SOLVER: {BASE_LR: 1}", "SOLVER.BASE_LR", 1.0),
        ("SOLVER: {BASE_LR: 1e-4}", "SOLVER.BASE_LR", 1e-4),  # text in YAML 1.1
        ("SOLVER: {MAX_ITER: 1e3}", "SOLVER.MAX_ITER", 1000),
        ("SOLVER: {MAX_ITER: 1.0e+3}", "SOLVER.MAX_ITER", 1000),
        ("SOLVER: {CLIP_GRAD_NORM: .inf}", "SOLVER.CLIP_GRAD_NORM", math.inf),
        ("SOLVER: {CLIP_GRAD_NORM: inf}", "SOLVER.CLIP_GRAD_NORM", math.inf),
        ("SOLVER: {STEPS: [60, 80]}", "SOLVER.STEPS", (60, 80)),
        ("SOLVER: {NESTEROV: yes}", "SOLVER.NESTEROV", True),
        ("OUTPUT_DIR: 7", "OUTPUT_DIR", "7"),
    ],
)
def test_values_of_a_file_become_the_type_of_the_default(read, text, key, expected):
    value = dict(leaves(read(text)))[key]
    assert value == expected
    assert type(value) is type(expected)


# Errors


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("SOLVER.BASE_LR", "high", "float"),
        ("SOLVER.BASE_LR", "[1.0]", "float"),
        ("SOLVER.BASE_LR", "true", "float"),
        ("SOLVER.BASE_LR", "null", "float"),
        ("SOLVER.MAX_ITER", "1.5", "int"),
        ("SOLVER.MAX_ITER", "many", "int"),
        ("SOLVER.MAX_ITER", "true", "int"),
        ("SOLVER.MAX_ITER", ".inf", "int"),
        ("SOLVER.MAX_ITER", ".nan", "int"),
        ("SOLVER.MAX_ITER", "null", "int"),
        ("SOLVER.MAX_ITER", "2024-01-05", "int"),
        ("SOLVER.NESTEROV", "1", "bool"),
        ("SOLVER.NESTEROV", "maybe", "bool"),
        ("SOLVER.NESTEROV", "null", "bool"),
        ("SOLVER.STEPS", "60", "tuple"),
        ("SOLVER.STEPS", "null", "tuple"),
        ("SOLVER.BETAS", "[a, b]", "tuple"),
        ("SOLVER.BETAS", "[0.9, null]", "tuple"),
        ("DATASETS.TEST", "digits_test", "tuple"),
        ("OUTPUT_DIR", "null", "str"),
        ("OUTPUT_DIR", "[a]", "str"),
        ("OUTPUT_DIR", "true", "str"),
    ],
)
def test_a_value_of_a_wrong_type_is_named_with_file_key_and_what_is_expected(
    read, tmp_path, key, value, kind
):
    message = error_of(read, f"{key}: {value}")
    for word in (str(tmp_path / "cfg.yaml"), key, kind, repr(dict(leaves(get_cfg()))[key])):
        assert word in message


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("SOLVER.MAX_ITER", "inf"),
        ("SOLVER.MAX_ITER", "None"),
        ("SOLVER.NESTEROV", "2"),
        ("SOLVER.BASE_LR", "0.1x"),
        ("SOLVER.BASE_LR", "b'1'"),
        ("MODEL.WEIGHTS", "None"),
    ],
)
def test_a_word_of_a_wrong_type_is_named_with_its_key(read, key, text):
    message = error_of(read, "SEED: 0", key, text)
    for word in ("command line", key, text.strip("b'")):
        assert word in message


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("SOLVER.BASE_LRR", "SOLVER.BASE_LR"),
        ("BASE_LR", "SOLVER.BASE_LR"),
        ("SOLVER.LR", "SOLVER.BASE_LR"),
        ("SOLVER.AMP.ENABLE", "SOLVER.AMP.ENABLED"),
        ("OUTPUTDIR", "OUTPUT_DIR"),
        ("MODEL.WEIGHT", "MODEL.WEIGHTS"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(read, tmp_path, key, near):
    for message, source in (
        (error_of(read, f"{key}: 1"), str(tmp_path / "cfg.yaml")),
        (error_of(read, "SEED: 0", key, "1"), "command line"),
    ):
        assert message.count(source) == 1
        assert f"{key}:" in message
        assert re.search(rf"\b{near}\b", message.partition(f"{key}:")[2])


@pytest.mark.parametrize("text", ["SOLVER: 5", "SOLVER:", "SOLVER: {}", "SOLVER: []"])
def test_a_section_that_is_used_as_a_setting_is_told_with_its_settings(read, text):
    for message in (error_of(read, text), error_of(read, "SEED: 0", "SOLVER", "5")):
        assert "SOLVER:" in message
        assert "SOLVER.BASE_LR" in message


def test_a_setting_that_is_used_as_a_section_is_an_unknown_key(read):
    assert "SEED.X" in error_of(read, "SEED: {X: 1}")
    assert "1" in error_of(read, "1: 2")


@pytest.mark.parametrize(
    ("opts", "word"),
    [
        (["SEED"], "SEED"),
        (["SEED", "1", "SOLVER.BASE_LR"], "SOLVER.BASE_LR"),
        (["SEED=1"], "SEED=1"),
        (["SOLVER.MAX_ITER", "5", "SEED=1", "x"], "SEED=1"),
    ],
)
def test_words_that_are_no_pairs_are_told(read, opts, word):
    message = error_of(read, "SEED: 0", *opts)
    for part in ("command line", word, "KEY VALUE"):
        assert part in message


def test_an_equals_sign_in_a_value_is_fine(read):
    assert read("SEED: 0", "OUTPUT_DIR", "a=b").OUTPUT_DIR == "a=b"


@pytest.mark.parametrize(
    "text",
    ["", "# nothing\n", "[1, 2]", "5", "some words", "{}", "SEED: [1", "SEED:\t5", "a: b: c", "\0"],
)
def test_a_file_that_holds_no_settings_is_named(read, tmp_path, text):
    assert str(tmp_path / "cfg.yaml") in error_of(read, text)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "cfg.yaml"
    path.write_bytes(b"\xff\xfe\x00SEED")
    assert str(path) in error_of(merge_settings, get_cfg(), str(path), [])


@pytest.mark.parametrize("name", ["missing.yaml", "folder.yaml", "settings.py", "cfg", ""])
def test_a_file_that_is_missing_or_no_yaml_is_named_and_never_run(tmp_path, name):
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "settings.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    path = str(tmp_path / name) if name else ""
    message = error_of(merge_settings, get_cfg(), path, [])
    assert path in message
    assert "yaml" in message
    assert not (tmp_path / "ran").exists()


def test_a_yaml_file_runs_no_code(read, tmp_path):
    error_of(read, f"OUTPUT_DIR: !!python/object/apply:os.mkdir [{tmp_path / 'ran'}]")
    assert not (tmp_path / "ran").exists()


def test_leaves_are_all_settings_with_their_whole_names():
    tree = {"A": {"B": {"C": 1}, "D": ()}, "E": {}}
    assert list(leaves(tree)) == [("A.B.C", 1), ("A.D", ()), ("E", {})]


# Keeping


@pytest.fixture
def keep(tmp_path, caplog):
    """keep(resume, **settings): the frozen settings of a run and its warnings."""
    caplog.set_level(logging.INFO, logger="defaults")

    def kept(resume=False, is_training=True, **changes):
        caplog.clear()
        cfg = get_cfg()
        cfg.OUTPUT_DIR = str(tmp_path)
        for key, value in changes.items():
            (cfg if key in cfg else cfg.SOLVER)[key] = value
        freeze_cfg(cfg, resume, is_training)
        save_cfg(cfg)
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        return cfg, warnings

    return kept


def test_a_run_scaled_to_some_ranks_goes_on_with_as_many_or_with_its_own_settings(keep):
    keep(REFERENCE_WORLD_SIZE=2)
    keep(resume=True, REFERENCE_WORLD_SIZE=2)
    with pytest.raises(SettingsError, match="scaled to 2 ranks.* to 4: resume with 2, or.*config"):
        keep(resume=True, REFERENCE_WORLD_SIZE=4)
    keep(resume=True, is_training=False, REFERENCE_WORLD_SIZE=4)
    keep(resume=True, REFERENCE_WORLD_SIZE=0)
    keep(REFERENCE_WORLD_SIZE=4)


def test_settings_are_frozen_logged_and_saved_so_that_they_can_be_read_again(
    keep, tmp_path, caplog
):
    cfg, warnings = keep(SEED=7)
    assert cfg.is_frozen()
    assert warnings == []
    assert "SEED: 7" in caplog.text
    again = get_cfg()
    merge_settings(again, str(tmp_path / "config.yaml"), [])
    assert dict(leaves(again)) == dict(leaves(cfg))


def test_a_negative_seed_is_drawn_once_and_kept_by_a_resume(keep):
    (first, _), (second, _) = keep(SEED=-1), keep(SEED=-1)
    assert 0 <= first.SEED < 2**31
    assert first.SEED != second.SEED
    resumed, warnings = keep(resume=True, SEED=-1)
    assert resumed.SEED == second.SEED
    assert warnings == []


def test_a_resume_tells_each_setting_that_differs_and_tells_it_once(keep):
    keep(SEED=1)
    _, warnings = keep(resume=True, SEED=2, LOG_PERIOD=5)
    assert len(warnings) == 2
    for key, new, old in (("SEED", 2, 1), ("LOG_PERIOD", 5, 20)):
        (message,) = [message for message in warnings if key in message]
        assert re.search(rf"\b{new}\b.*\b{old}\b", message)
    _, warnings = keep(resume=True, SEED=2, LOG_PERIOD=5)
    assert warnings == []


def test_a_resume_without_saved_settings_is_a_start(keep):
    cfg, warnings = keep(resume=True, SEED=-1)
    assert cfg.SEED >= 0
    assert warnings == []
    assert keep(resume=True, SEED=-1)[0].SEED == cfg.SEED


# Defaults


def test_the_defaults_and_the_example_are_possible():
    check_cfg(get_cfg(), num_ranks=1)
    cfg = get_cfg()
    merge_settings(cfg, str(ROOT / "cfg.yaml"), [])
    check_cfg(cfg, num_ranks=8)


def test_each_call_gives_defaults_of_its_own():
    get_cfg().SOLVER.BASE_LR = 99.0
    assert get_cfg().SOLVER.BASE_LR != 99.0


IMPOSSIBLE = {
    "LOG_PERIOD": (0, -1),
    "LOG_WINDOW": (0,),
    "TIMEOUT_SECONDS": (0.0, 0.5, -1.0, 1e308, math.inf, math.nan),
    "FLOAT32_PRECISION": ("low", ""),
    "PROFILE": ((), (5,), (8, 3), (-5, 3), (1, 2, 3)),
    "MODEL.COMPILE": ("foo", "cudagraphs"),
    "MODEL.DEVICE": ("gpu", "cuda:1"),
    "MODEL.WEIGHTS": ("not/there.pth", "/"),
    "MODEL.WIDTH": (0,),
    "MODEL.DROPOUT": (-0.1, 1.0, math.nan),
    "MODEL.NUM_CLASSES": (0,),
    "DATASETS.PATH": ("not/there.npz",),
    "DATASETS.TRAIN": ("mnist",),
    "DATASETS.TEST": (("mnist",), ("digits_test", "mnist")),
    "DATASETS.MAX_SHIFT": (-1,),
    "DATALOADER.NUM_WORKERS": (-1, 1000),
    "SOLVER.MAX_ITER": (0, -5, 10**18),
    "SOLVER.BATCH_SIZE": (0, -64),
    "SOLVER.ACCUM_STEPS": (0, -1),
    "SOLVER.LAYER_DECAY": (0.0, 1.1, math.nan),
    "SOLVER.BASE_LR": (0.0, -0.1, math.inf, math.nan),
    "SOLVER.MOMENTUM": (-0.1, 1.0),
    "SOLVER.BETAS": ((0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, 0.9, 0.9), ()),
    "SOLVER.WEIGHT_DECAY": (-1e-4, math.nan),
    "SOLVER.WEIGHT_DECAY_NORM": (-1e-4,),
    "SOLVER.MAX_SKIPS": (0, -1),
    "SOLVER.NONFINITE": ("ignore",),
    "SOLVER.BIAS_LR_FACTOR": (-1.0,),
    "SOLVER.CLIP_GRAD_NORM": (0.0, -1.0, math.nan),
    "SOLVER.LR_SCHEDULER_NAME": ("poly",),
    "SOLVER.BASE_LR_END": (-0.1,),
    "SOLVER.STEPS": ((-1,), (5, -5)),
    "SOLVER.GAMMA": (0.0, -0.1),
    "SOLVER.WARMUP_ITERS": (-1,),
    "SOLVER.WARMUP_FACTOR": (-0.1, math.inf),
    "SOLVER.WARMUP_METHOD": ("burnin",),
    "SOLVER.CHECKPOINTS_TO_KEEP": (0, -1),
    "SOLVER.AMP.DTYPE": ("float32",),
    "TEST.BATCH_SIZE": (0,),
    "TEST.BEST_MODE": ("larger",),
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
    assert error_of(check_cfg, cfg, 1).startswith(f"{key}: ")


@pytest.mark.parametrize("text", ["'a','b'", "None,1"])
def test_steps_that_are_no_numbers_are_refused(read, text):
    assert "SOLVER.STEPS" in error_of(lambda: check_cfg(read("SEED: 0", "SOLVER.STEPS", text), 1))


@pytest.mark.parametrize(
    ("num_ranks", "accum_steps", "possible"),
    [(1, 1, True), (8, 8, True), (3, 1, False), (1, 3, False), (2, 64, False), (128, 1, False)],
)
def test_a_batch_must_be_divisible_among_ranks_and_micro_batches(num_ranks, accum_steps, possible):
    cfg = get_cfg()
    cfg.SOLVER.ACCUM_STEPS = accum_steps
    if possible:
        check_cfg(cfg, num_ranks)
    else:
        message = error_of(check_cfg, cfg, num_ranks)
        for word in ("SOLVER.BATCH_SIZE", "64", str(num_ranks), str(accum_steps)):
            assert word in message


def test_nesterov_needs_momentum():
    cfg = get_cfg()
    cfg.SOLVER.NESTEROV, cfg.SOLVER.MOMENTUM = True, 0.0
    assert "SOLVER.MOMENTUM" in error_of(check_cfg, cfg, 1)


def test_periods_may_be_zero_and_negative():
    for period in (0, -1):
        cfg = get_cfg()
        cfg.SOLVER.CHECKPOINT_PERIOD = cfg.TEST.EVAL_PERIOD = period
        check_cfg(cfg, 1)


def attributes_of(path):
    """The dotted names that a file reads, such as "cfg.SOLVER.BASE_LR"."""
    nodes = ast.walk(ast.parse(path.read_text()))
    loads = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    return {ast.unparse(node) for node in loads}


def test_every_setting_is_read_somewhere_and_every_one_read_exists():
    files = [path for path in ROOT.rglob("*.py") if path.name != "defaults.py"]
    files = [path for path in files if path.relative_to(ROOT).parts[0] != "tests"]
    read = set().union(*map(attributes_of, files))
    keys = dict(leaves(get_cfg()))
    names = {key: {f"cfg.{key}", key.replace("SOLVER.", "solver.", 1)} for key in keys}
    assert [key for key in keys if not names[key] & read] == []
    sections = {key.rpartition(".")[0] for key in keys}
    known = {f"cfg.{key}" for key in (*keys, *sections)}
    used = {name for name in read if re.fullmatch(r"cfg(\.[A-Z0-9_]+)+", name)}
    assert used <= known


def write_files(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_file_prevails_over_its_base_and_that_over_its_own(tmp_path):
    (tmp_path / "below").mkdir()
    write_files(tmp_path / "below", lowest="SEED: 1\nLOG_PERIOD: 1\nLOG_WINDOW: 1\n")
    write_files(tmp_path, base="_BASE_: below/lowest.yaml\nSEED: 2\nLOG_PERIOD: 2\n")
    write_files(tmp_path, top="SEED: 3\n_BASE_: base.yaml\n")
    cfg = get_cfg()
    merge_settings(cfg, str(tmp_path / "top.yaml"), [])
    assert (cfg.SEED, cfg.LOG_PERIOD, cfg.LOG_WINDOW) == (3, 2, 1)


def test_a_mistake_in_a_base_names_its_file(tmp_path):
    write_files(tmp_path, base="SEEED: 2\n", top="_BASE_: base.yaml\nSEED: 3\n")
    with pytest.raises(SettingsError, match=r"base\.yaml: SEEED.*SEED"):
        merge_settings(get_cfg(), str(tmp_path / "top.yaml"), [])


@pytest.mark.parametrize("base", ["top.yaml", "other.yaml", "./top.yaml"])
def test_bases_that_go_round_in_a_circle_are_refused(tmp_path, base):
    write_files(tmp_path, top=f"_BASE_: {base}\nSEED: 3\n", other="_BASE_: top.yaml\n")
    with pytest.raises(SettingsError, match="_BASE_.*leads back"):
        merge_settings(get_cfg(), str(tmp_path / "top.yaml"), [])


def test_a_base_that_is_not_there_is_refused(tmp_path):
    write_files(tmp_path, top="_BASE_: none.yaml\nSEED: 3\n")
    with pytest.raises(SettingsError, match=r"none\.yaml: there is no such"):
        merge_settings(get_cfg(), str(tmp_path / "top.yaml"), [])
