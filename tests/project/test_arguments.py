"""The command line of train.py."""

import pytest
from plumbing.arguments import parse_args


def parse(text):
    return parse_args("Train.", text.split())


@pytest.mark.parametrize(
    "text",
    [
        "--config c.yaml --resume --eval-only SEED -1 SOLVER.BASE_LR 0.1",
        "SEED -1 SOLVER.BASE_LR 0.1 --eval-only --resume --config c.yaml",
        "SEED -1 --resume --config c.yaml SOLVER.BASE_LR 0.1 --eval-only",
    ],
)
def test_flags_stand_in_any_order(text):
    args = parse(text)
    assert (args.config, args.resume, args.eval_only) == ("c.yaml", True, True)
    assert args.opts == ["SEED", "-1", "SOLVER.BASE_LR", "0.1"]


def test_flags_are_off_and_settings_none_unless_given():
    args = parse("--config c.yaml")
    assert (args.resume, args.eval_only, args.opts) == (False, False, [])


@pytest.mark.parametrize(
    "text", ["", "SEED 1", "--config", "--config c.yaml --unknown", "--config c.yaml --resum"]
)
def test_a_missing_file_or_an_unknown_flag_ends_the_program(text, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(text)
    assert caught.value.code == 2
    assert "--config" in capsys.readouterr().err
