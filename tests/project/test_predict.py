"""predict.py: predictions of a trained model for files, or one line that says what is wrong."""

import re

import data
import predict
import pytest
import torch
from conftest import ROOT, shell, train_here
from defaults import get_cfg
from models import Tiny, train_with


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A run whose settings are not the defaults: the checkpoint alone has to tell them."""
    output = tmp_path_factory.mktemp("trained") / "run"
    train_here(output, "SOLVER.MAX_ITER 40 MODEL.WIDTH 12 TEST.EVAL_PERIOD 0 SOLVER.BATCH_SIZE 60")
    (output / "config.yaml").unlink()
    return output


def write_digit(path, index):
    """Write a digit of the test set as text; returns the image as data.py gives it."""
    digits = data.Digits(ROOT / get_cfg().DATASETS.PATH, "digits_test")
    image = digits[index]["images"]
    rows = (image[0] * 16).int().tolist()
    path.write_text("\n".join(" ".join(map(str, row)) for row in rows) + "\n")
    return image


def printed_by(*words):
    """Call predict.py's main program in this process; its lines."""
    import argparse

    args = argparse.Namespace(checkpoint=str(words[0]), files=list(map(str, words[1:])))
    predict.main(args)


@pytest.mark.parametrize("name", ["model_final.pth", "model_best.pth"])
def test_each_file_gets_the_digit_and_the_probability_that_the_model_gives(
    name, output, tmp_path, capsys
):
    files = [tmp_path / f"{index}.txt" for index in range(5)]
    images = torch.stack([write_digit(path, number) for number, path in enumerate(files)])
    printed_by(output / name, *files)
    probabilities, digits = predict.load_model(output / name)({"images": images}).softmax(1).max(1)
    expected = [
        f"{path}: {digit} (probability {probability:.3f})"
        for path, digit, probability in zip(files, digits.tolist(), probabilities.tolist())
    ]
    assert capsys.readouterr().out.splitlines() == expected


def test_the_example_of_the_project_is_predicted_from_the_shell(output):
    done = shell("predict.py", output / "model_final.pth", "assets/example.txt")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"assets/example.txt: \d \(probability [01]\.\d{3}\)\n", done.stdout)


def test_the_image_is_that_of_the_data_set(tmp_path):
    image = write_digit(tmp_path / "x.txt", 7)
    assert torch.equal(predict.read_image(tmp_path / "x.txt"), image)


WRONG = {
    "no such file": None,
    "no numbers": "a b c\n",
    "too few lines": "0 0 0 0 0 0 0 0\n",
    "ragged lines": "0 0\n0\n",
    "empty": "",
}


@pytest.mark.filterwarnings("ignore:loadtxt")
@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_file_that_is_no_image_is_one_line(text, tmp_path):
    path = tmp_path / "x.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(predict.SettingsError, match=re.escape(str(path))) as caught:
        predict.read_image(path)
    assert "\n" not in str(caught.value)


def test_a_mistake_in_the_shell_is_one_line(tmp_path):
    done = shell("predict.py", tmp_path / "none.pth", "assets/example.txt")
    assert done.returncode == 1
    assert re.fullmatch(r"error: checkpoint .*none.pth does not exist\n", done.stderr)


def test_weights_without_settings_are_one_line(tmp_path):
    torch.save({"model": Tiny().state_dict()}, tmp_path / "x.pth")
    with pytest.raises(predict.SettingsError, match="x.pth holds no settings: it was not saved by"):
        predict.load_model(str(tmp_path / "x.pth"))


def test_a_checkpoint_of_a_different_model_is_one_line_that_names_the_layers(tmp_path):
    train_with(Tiny, tmp_path / "run", "SOLVER.MAX_ITER 1")
    with pytest.raises(predict.SettingsError, match="does not fit model.py: .*features.0.weight"):
        predict.load_model(str(tmp_path / "run/model_final.pth"))
