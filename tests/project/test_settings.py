"""Settings from files and the command line: how they are read, merged and compared."""

import math
import re

import pytest
from plumbing.errors import SettingsError
from plumbing.settings import (
    changed_settings,
    differences,
    expand_path,
    leaves,
    merge_settings,
    merge_text,
)
from yacs.config import CfgNode


def get_cfg():
    """Defaults of every type that a setting may have."""
    cfg = CfgNode()
    cfg.OUTPUT_DIR = "output"
    cfg.SEED = 0
    cfg.LOG_PERIOD = 20
    cfg.TIMEOUT_SECONDS = 1800.0
    cfg.EXTRA = ()
    cfg.ANYTHING = None
    cfg.GRID = ((1, 2), (3, 4))
    cfg.MODEL = CfgNode()
    cfg.MODEL.WEIGHTS = ""
    cfg.MODEL.SYNC_BN = False
    cfg.DATASETS = CfgNode()
    cfg.DATASETS.TEST = ("digits_test",)
    cfg.SOLVER = CfgNode()
    cfg.SOLVER.MAX_ITER = 1000
    cfg.SOLVER.BASE_LR = 0.1
    cfg.SOLVER.BASE_LR_END = 0.0
    cfg.SOLVER.NESTEROV = False
    cfg.SOLVER.BETAS = (0.9, 0.999)
    cfg.SOLVER.STEPS = (600, 900)
    cfg.SOLVER.CLIP_GRAD_NORM = math.inf
    cfg.SOLVER.AMP = CfgNode()
    cfg.SOLVER.AMP.ENABLED = False
    return cfg


@pytest.fixture
def read(tmp_path):
    """read(text, *opts): the settings after a file with this text and these words."""

    def merged(text="OUTPUT_DIR: output", *opts):
        path = tmp_path / "cfg.yaml"
        path.write_text(text, encoding="utf-8")
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


def test_a_dotted_key_is_read_from_a_file_too(read):
    assert read("SOLVER.BASE_LR: 0.5").SOLVER.BASE_LR == 0.5


WORDS = [
    ("SOLVER.BASE_LR", "1", 1.0),
    ("SOLVER.BASE_LR", "1e-4", 1e-4),  # a string in YAML 1.1
    ("SOLVER.BASE_LR", "-.5", -0.5),
    ("SOLVER.CLIP_GRAD_NORM", "inf", math.inf),
    ("SOLVER.CLIP_GRAD_NORM", ".inf", math.inf),
    ("SOLVER.CLIP_GRAD_NORM", "-.Inf", -math.inf),
    ("TIMEOUT_SECONDS", "1e308", 1e308),
    ("SOLVER.MAX_ITER", "1e3", 1000),
    ("SOLVER.MAX_ITER", "1.0e+3", 1000),
    ("SOLVER.MAX_ITER", "90000.0", 90000),
    ("SOLVER.MAX_ITER", "1e18", 10**18),
    ("SOLVER.MAX_ITER", "0600", 600),
    ("SEED", "-1", -1),
    ("SEED", "0x10", 16),
    ("SEED", str(2**53 + 1), 2**53 + 1),
    ("SOLVER.NESTEROV", "true", True),
    ("SOLVER.NESTEROV", "True", True),
    ("SOLVER.NESTEROV", "yes", True),
    ("SOLVER.NESTEROV", "false", False),
    ("SOLVER.STEPS", "60,80", (60, 80)),
    ("SOLVER.STEPS", "60, 80", (60, 80)),
    ("SOLVER.STEPS", "[60, 80]", (60, 80)),
    ("SOLVER.STEPS", "(60, 1e2,)", (60, 100)),
    ("SOLVER.STEPS", "()", ()),
    ("SOLVER.STEPS", "[]", ()),
    ("SOLVER.BETAS", "(0.5, 1)", (0.5, 1.0)),
    ("DATASETS.TEST", "('a, b', 'c')", ("a, b", "c")),
    ("DATASETS.TEST", "a,2024_01_05", ("a", "2024_01_05")),
    ("DATASETS.TEST", "[a]", ("a",)),
    ("DATASETS.TEST", "[1, true]", ("1", "true")),
    ("EXTRA", "[1, 0.5, true, a]", (1, 0.5, True, "a")),
    ("GRID", "((5, 6), (7, 8))", ((5, 6), (7, 8))),
    ("ANYTHING", "5", 5),
    ("ANYTHING", "1.0", 1.0),
    ("ANYTHING", "word", "word"),
    ("ANYTHING", "[1, a]", (1, "a")),
    ("OUTPUT_DIR", "some/where", "some/where"),
]


def same(value, expected):
    """Whether two values and the types of their parts are equal."""
    return repr(value) == repr(expected)


@pytest.mark.parametrize(("key", "text", "expected"), WORDS)
def test_words_become_the_type_of_the_default(read, key, text, expected):
    assert same(dict(leaves(read("SEED: 0", key, text)))[key], expected)


@pytest.mark.parametrize(("key", "text", "expected"), WORDS)
def test_values_of_a_file_become_the_type_of_the_default(read, key, text, expected):
    assert same(dict(leaves(read(f"{key}: {text}")))[key], expected)


def test_a_list_of_several_lines_is_a_tuple_too(read):
    assert read("SOLVER:\n  STEPS:\n  - 60\n  - 80").SOLVER.STEPS == (60, 80)
    assert read("GRID:\n- [5, 6]\n- [7, 8]").GRID == ((5, 6), (7, 8))


@pytest.mark.parametrize(
    "text", ["2024_01_05", "2024-01-05", "1e3", "1.10", "0x10", "007", "no", "true", "12:30:00"]
)
def test_a_string_is_kept_as_it_is_written(read, text):
    for cfg in (read("SEED: 0", "OUTPUT_DIR", text), read(f"OUTPUT_DIR: {text}")):
        assert text == cfg.OUTPUT_DIR


def test_a_string_may_be_empty_or_contain_an_equals_sign(read):
    assert read("SEED: 0", "OUTPUT_DIR", "a=b").OUTPUT_DIR == "a=b"
    assert read("SEED: 0", "OUTPUT_DIR", "").OUTPUT_DIR == ""
    assert read("OUTPUT_DIR: ''").OUTPUT_DIR == ""


def test_a_file_from_windows_is_read(read):
    assert read("\ufeffSEED: 5\r\nLOG_PERIOD: 3\r\n").SEED == 5


def test_the_settings_that_a_checkpoint_holds_are_read_as_text():
    saved = get_cfg()
    saved.SEED = 7
    saved.OUTPUT_DIR = "2024_01_05"
    saved.EXTRA = (1, 0.5)
    cfg = get_cfg()
    merge_text(cfg, saved.dump(), "model.pth")
    assert same(dict(leaves(cfg)), dict(leaves(saved)))
    assert error_of(merge_text, cfg, "SEEED: 1", "model.pth").startswith("model.pth: SEEED: ")


# Errors


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("SOLVER.BASE_LR", "high", "a number, such as 0.1"),
        ("SOLVER.BASE_LR", "", "a number, such as 0.1"),
        ("SOLVER.BASE_LR", "true", "a number, such as 0.1"),
        ("SOLVER.BASE_LR", "0,1", "a number, such as 0.1"),
        ("SOLVER.CLIP_GRAD_NORM", "high", "a number, such as 0.1"),
        ("SOLVER.MAX_ITER", "10.5", "an integer, such as 1000"),
        ("SOLVER.MAX_ITER", "many", "an integer, such as 1000"),
        ("SOLVER.MAX_ITER", "true", "an integer, such as 1000"),
        ("SOLVER.MAX_ITER", "1,000", "an integer, such as 1000"),
        ("SOLVER.MAX_ITER", ".inf", "an integer, such as 1000"),
        ("SOLVER.MAX_ITER", ".nan", "an integer, such as 1000"),
        ("SOLVER.MAX_ITER", "2024-01-05", "an integer, such as 1000"),
        ("SOLVER.NESTEROV", "1", "True or False"),
        ("SOLVER.NESTEROV", "maybe", "True or False"),
        ("SOLVER.STEPS", "60", "a list of integers, such as [600,900]"),
        ("SOLVER.STEPS", "(60", "a list of integers, such as [600,900]"),
        ("SOLVER.STEPS", "[60, 1.5]", "a list of integers, such as [600,900]"),
        ("SOLVER.BETAS", "[a, b]", "a list of numbers, such as [0.9,0.999]"),
        ("SOLVER.BETAS", "[0.9, None]", "a list of numbers, such as [0.9,0.999]"),
        ("DATASETS.TEST", "digits_test", "a list, such as [digits_test]"),
        ("GRID", "[1, 2]", "a list"),
        ("EXTRA", "word", "a list"),
        ("MODEL.WEIGHTS", "None", "a string, such as ''"),
    ],
)
def test_a_value_of_a_wrong_type_is_one_line_with_key_value_and_an_example(read, key, value, kind):
    message = error_of(read, "SEED: 0", key, value)
    assert message.startswith(f"command line: {key}: {value or repr(value)} is not {kind}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SOLVER: {MAX_ITER: 10.5}", "SOLVER.MAX_ITER: 10.5 is not an integer"),
        ("SOLVER: {MAX_ITER: null}", "SOLVER.MAX_ITER: None is not an integer"),
        ("SOLVER: {MAX_ITER: }", "SOLVER.MAX_ITER: None is not an integer"),
        ("SOLVER: {MAX_ITER: [1]}", "SOLVER.MAX_ITER: ['1'] is not an integer"),
        ("SOLVER: {STEPS: ~}", "SOLVER.STEPS: None is not a list"),
        ("OUTPUT_DIR: ~", "OUTPUT_DIR: None is not a string"),
        ("OUTPUT_DIR: [a]", "OUTPUT_DIR: ['a'] is not a string"),
        ("OUTPUT_DIR: {}", "OUTPUT_DIR: {} is not a string"),
        ("EXTRA: &a [1, *a]", "EXTRA: ... is not a list"),
        ("ANYTHING: &a [*a]", "ANYTHING: "),
        ("SOLVER: {STEPS: &a [1, *a]}", "SOLVER.STEPS: ... is not a list of integers"),
    ],
)
def test_a_wrong_value_in_a_file_is_one_line_that_begins_with_the_file(
    read, tmp_path, text, message
):
    error = error_of(read, text)
    assert error.startswith(f"{tmp_path / 'cfg.yaml'}: {message.split(' ... ')[0]}")
    assert message.split(" ... ")[-1] in error


def test_a_long_value_is_shortened_in_the_message(read):
    message = error_of(read, "SEED: 0", "SOLVER.MAX_ITER", "9\n" * 5000)
    assert len(message) < 200


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("SOLVER.BASE_LRR", "SOLVER.BASE_LR"),
        ("solver.base_lr", "SOLVER.BASE_LR"),
        ("Solver.Base_LR_end", "SOLVER.BASE_LR_END"),
        ("BASE_LR", "SOLVER.BASE_LR"),
        ("MODEL.BASE_LR", "SOLVER.BASE_LR"),
        ("max_iter", "SOLVER.MAX_ITER"),
        ("SOLVER.AMP.ENABLE", "SOLVER.AMP.ENABLED"),
        ("OUTPUTDIR", "OUTPUT_DIR"),
        ("MODEL.WEIGHT", "MODEL.WEIGHTS"),
        ("SEED.X", "SEED"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(read, tmp_path, key, near):
    hint = f"{key}: there is no such setting; did you mean {near}?"
    assert error_of(read, f"{key}: 1") == f"{tmp_path / 'cfg.yaml'}: {hint}"
    assert error_of(read, "SEED: 0", key, "1") == f"command line: {hint}"


@pytest.mark.parametrize("key", ["wandb.project", "x", "1", "EMA.DECAY_RATE_OF_MODEL"])
def test_an_unknown_key_that_is_near_to_none_gets_no_hint(read, key):
    assert error_of(read, f"{key}: 1").endswith(f"{key}: there is no such setting")


@pytest.mark.parametrize("text", ["SOLVER: 5", "SOLVER:", "SOLVER: {}", "SOLVER: []"])
def test_a_section_that_is_used_as_a_setting_is_an_error_that_lists_its_settings(read, text):
    for message in (error_of(read, text), error_of(read, "SEED: 0", "SOLVER", "5")):
        assert "SOLVER: is a section" in message
        assert "SOLVER.BASE_LR" in message


@pytest.mark.parametrize(
    ("opts", "word"),
    [
        (["SEED"], "SEED"),
        (["SEED", "1", "SOLVER.BASE_LR"], "SOLVER.BASE_LR"),
        (["SEED=1"], "SEED=1"),
        (["SOLVER.MAX_ITER", "5", "SEED=1", "x"], "SEED=1"),
    ],
)
def test_words_that_are_not_pairs_are_an_error(read, opts, word):
    assert error_of(read, "SEED: 0", *opts).startswith(f"command line: {word}: settings are pairs")


@pytest.mark.parametrize(
    "opts", [["OUTPUT_DIR", "--eval_only"], ["--eval_only"], ["--evalonly", "OUTPUT_DIR", "x"]]
)
def test_a_mistyped_flag_is_neither_a_value_nor_a_key(read, opts):
    assert error_of(read, "SEED: 0", *opts).startswith("command line: --eval")


@pytest.mark.parametrize(
    "text",
    ["", "# nothing\n", "[1, 2]", "5", "some words", "{}", "SEED: [1", "SEED:\t5", "a: b: c", "\0"]
    + [
        "SEED: 1\n---\nSEED: 2",
        "? [a]\n: 1",
        "OUTPUT_DIR: &a {b: *a}",
        "OUTPUT_DIR: " + "[" * 3000,
    ],
)
def test_a_file_that_holds_no_settings_is_an_error_that_names_it(read, tmp_path, text):
    assert error_of(read, text).startswith(f"{tmp_path / 'cfg.yaml'}: ")


@pytest.mark.parametrize(
    "text", ["SEED: 1\nSEED: 2", "SOLVER: {BASE_LR: 1}\nSOLVER.BASE_LR: 2", "SOLVER:\n\nSOLVER: 1"]
)
def test_a_key_that_is_there_twice_is_refused(read, text):
    assert re.search("SEED|SOLVER", error_of(read, text))


@pytest.mark.parametrize("data", [b"\xff\xfe\x00SEED", b"OUTPUT_DIR: \xe9t\xe9", b"\x89PNG"])
def test_a_file_that_is_not_text_in_utf_8_is_an_error_that_names_it(tmp_path, data):
    path = tmp_path / "cfg.yaml"
    path.write_bytes(data)
    assert "UTF-8" in error_of(merge_settings, get_cfg(), str(path), [])


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


# Files that are built on others


def write_files(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_file_prevails_over_its_base_and_that_over_its_own(tmp_path):
    (tmp_path / "below").mkdir()
    write_files(tmp_path / "below", lowest="SEED: 1\nLOG_PERIOD: 1\nTIMEOUT_SECONDS: 1\n")
    write_files(tmp_path, base="_BASE_: below/lowest.yaml\nSEED: 2\nLOG_PERIOD: 2\n")
    write_files(tmp_path, top="SEED: 3\n_BASE_: base.yaml\n")
    cfg = get_cfg()
    merge_settings(cfg, str(tmp_path / "top.yaml"), [])
    assert (cfg.SEED, cfg.LOG_PERIOD, cfg.TIMEOUT_SECONDS) == (3, 2, 1.0)


def test_a_base_and_the_file_itself_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_files(tmp_path, base="SEED: 2\n", top="_BASE_: $HOME/base.yaml\n")
    write_files(tmp_path, most="_BASE_: ~/top.yaml\n")
    cfg = get_cfg()
    merge_settings(cfg, "~/most.yaml", [])
    assert cfg.SEED == 2


def test_a_mistake_in_a_base_names_its_file(tmp_path):
    write_files(tmp_path, base="SEEED: 2\n", top="_BASE_: base.yaml\nSEED: 3\n")
    with pytest.raises(SettingsError, match=r"base\.yaml: SEEED.*SEED"):
        merge_settings(get_cfg(), str(tmp_path / "top.yaml"), [])


@pytest.mark.parametrize("base", ["top.yaml", "other.yaml", "./top.yaml"])
def test_bases_that_go_round_in_a_circle_are_refused(tmp_path, base):
    write_files(tmp_path, top=f"_BASE_: {base}\nSEED: 3\n", other="_BASE_: top.yaml\n")
    with pytest.raises(SettingsError, match="_BASE_.*leads back"):
        merge_settings(get_cfg(), str(tmp_path / "top.yaml"), [])


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("none.yaml", r"none\.yaml: there is no such"),
        ("[a.yaml, b.yaml]", "_BASE_: .* is not the path of one file"),
        ("s3://bucket/cfg.yaml", "_BASE_: s3://bucket/cfg.yaml is a URL"),
        (".", "is a folder"),
    ],
)
def test_a_base_that_cannot_be_read_is_refused(tmp_path, base, message):
    write_files(tmp_path, top=f"_BASE_: {base}\nSEED: 3\n")
    with pytest.raises(SettingsError, match=message):
        merge_settings(get_cfg(), str(tmp_path / "top.yaml"), [])


# Paths


def test_home_and_environment_variables_in_a_path_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    for path, expected in {
        "~/runs": "/home/me/runs",
        "$HOME/runs": "/home/me/runs",
        "${DATA}/x": "/data/x",
        "runs/~old": "runs/~old",
        "": "",
    }.items():
        assert expand_path(path, "OUTPUT_DIR") == expected


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("s3://bucket/run", "is a URL"),
        ("https://host/model.pth", "is a URL"),
        ("~nobody-of-this-name/run", "no home folder ~nobody-of-this-name"),
        ("$NOT_SET_HERE/run", r"variable \$NOT_SET_HERE is not set"),
        ("${NOT_SET_HERE}/run", "NOT_SET_HERE.* is not set"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused_in_one_line(path, reason):
    message = error_of(expand_path, path, "OUTPUT_DIR")
    assert message.startswith(f"OUTPUT_DIR: {path}")
    assert re.search(reason, message)


# Comparing


def test_the_differences_to_the_defaults_are_those_that_were_changed(read):
    assert differences(get_cfg(), get_cfg()) == {}
    cfg = read("SEED: 5", "SOLVER.STEPS", "[1]", "SOLVER.BASE_LR", "0.1")
    assert differences(cfg, get_cfg()) == {"SEED": 5, "SOLVER.STEPS": (1,)}


def test_settings_that_are_kept_are_the_same_when_they_are_read_again(tmp_path):
    cfg = get_cfg()
    cfg.OUTPUT_DIR = "1e3"
    cfg.EXTRA = (1, "a")
    cfg.SOLVER.BASE_LR = math.nan
    path = tmp_path / "config.yaml"
    path.write_text(cfg.dump())
    assert changed_settings(cfg, str(path)) == []
    again = get_cfg()
    merge_settings(again, str(path), [])
    assert same(dict(leaves(again)), dict(leaves(cfg)))


def test_each_setting_that_differs_from_those_of_a_run_is_given_with_both_values(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("OLD: 3\n" + get_cfg().dump().replace("LOG_PERIOD: 20\n", ""))
    cfg = get_cfg()
    cfg.SEED = 2
    cfg.SOLVER.STEPS = (1,)
    assert sorted(changed_settings(cfg, str(path))) == [
        ("LOG_PERIOD", "not a setting", "20"),
        ("OLD", "'3'", "not a setting"),
        ("SEED", "0", "2"),
        ("SOLVER.STEPS", "(600, 900)", "(1,)"),
    ]


def test_settings_of_a_run_that_are_missing_or_damaged_do_not_end_it(tmp_path, caplog):
    assert changed_settings(get_cfg(), str(tmp_path / "none.yaml")) == []
    assert caplog.messages == []
    path = tmp_path / "config.yaml"
    path.write_text("[")
    assert changed_settings(get_cfg(), str(path)) == []
    assert "config.yaml" in caplog.text
