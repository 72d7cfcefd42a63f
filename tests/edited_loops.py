"""Five ways in which people edit train.py by hand, for the tests of the recipes."""

EDITS = ("renamed", "extra_loss", "log_line", "comments", "moved_phase")


def edited(source, edit):
    """The text of train.py after an edit.

    Raises:
        ValueError: train.py no longer has the lines that the edit changes.
    """
    for old, new in CHANGES[edit]:
        if old not in source:
            raise ValueError(f"{edit}: train.py has no {old!r}")
        source = source.replace(old, new)
    return source


CHANGES = {
    # A variable gets the name that somebody is used to.
    "renamed": [
        ("loss_dict", "outputs"),
        ("grad_norm = clip", "norm = clip"),
        ('"grad_norm", grad_norm', '"grad_norm", norm'),
    ],
    # A penalty on the weights is added to the losses.
    "extra_loss": [
        (
            "                        loss_dict = model(data)\n",
            "                        loss_dict = model(data)\n"
            "                        penalty = sum(p.square().sum() for p in parameters)\n"
            '                        loss_dict["loss_penalty"] = 1e-6 * penalty\n',
        )
    ],
    # One more number is logged, and the learning rate under another name.
    "log_line": [
        (
            '            storage.put_scalar("lr", optimizer.param_groups[0]["lr"], '
            "smoothing_hint=False)\n",
            '            learning_rate = optimizer.param_groups[0]["lr"]\n'
            '            storage.put_scalar("lr", learning_rate, smoothing_hint=False)\n'
            '            storage.put_scalar("num_parameters", len(parameters))\n',
        )
    ],
    # Every phase gets a comment.
    "comments": [
        (
            "            storage.iter = iteration\n",
            "            # One iteration begins.\n            storage.iter = iteration\n",
        ),
        (
            "            scaler.unscale_(optimizer)\n",
            "            # Clip the gradients, then take a step.\n"
            "            scaler.unscale_(optimizer)\n",
        ),
        (
            "            evaluation_due = is_due(",
            "            # The rest happens seldom.\n            evaluation_due = is_due(",
        ),
    ],
    # The gradients are cleared before the forward pass, and not after the step.
    "moved_phase": [
        ("            optimizer.zero_grad()\n", ""),
        (
            "            for index, data in enumerate(micro_batches):",
            "            optimizer.zero_grad()\n"
            "            for index, data in enumerate(micro_batches):",
        ),
    ],
}
