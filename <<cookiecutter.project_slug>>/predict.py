"""Predict the digits in files with a trained model.

    python predict.py output/model_final.pth assets/example.txt

A file holds one image as text: 8 lines of 8 numbers, from 0 for paper to 16 for ink.  The settings
that the model was trained with are in the checkpoint.
"""

import argparse
import sys
import textwrap

import numpy as np
import torch

from defaults import get_cfg
from model import build_model
from plumbing.checkpoint import load_file
from plumbing.errors import SettingsError
from plumbing.settings import merge_text


def load_model(path):
    """The model of a checkpoint, in evaluation mode, on the CPU."""
    checkpoint = load_file(path)
    if not checkpoint.get("config"):
        raise SettingsError(f"{path} holds no settings: it was not saved by train.py")
    cfg = get_cfg()
    merge_text(cfg, checkpoint["config"], path)
    model = build_model(cfg)
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        reason = textwrap.shorten(str(error).partition("\n")[2], 200)
        raise SettingsError(f"{path} does not fit model.py: {reason}") from None
    return model.eval()


def read_image(path):
    """One image as data.py makes them: float32 of shape (1, 8, 8) in [0, 1]."""
    try:
        image = torch.from_numpy(np.loadtxt(path, dtype=np.float32))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: is not an image as text: {error}") from None
    if image.shape != (8, 8):
        raise SettingsError(f"{path}: must be 8 lines of 8 numbers, and is {tuple(image.shape)}")
    return image[None] / 16


@torch.inference_mode()
def main(args):
    model = load_model(args.checkpoint)
    for path in args.files:
        logits = model({"images": read_image(path)[None]})
        probability, digit = logits.softmax(dim=1).max(dim=1)
        print(f"{path}: {digit.item()} (probability {probability.item():.3f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a .pth file of a run")
    parser.add_argument("files", nargs="+", help="images to predict")
    try:
        main(parser.parse_args())
    except SettingsError as error:
        sys.exit(f"error: {error}")
