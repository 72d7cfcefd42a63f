"""One plain file with the whole model, from a checkpoint whose tensors are divided."""

from .archive import read_file, save_file
from .sharded import has_shards, unbind_shards, whole

_OF_A_MODEL = ("model", "config", "iteration")


def export_model(path: str, target: str = "") -> None:
    """Write a checkpoint anew, with a model of whole tensors; one process does it.

    It takes the memory of one whole model in that process, and on the disk.

    Args:
        path: the file of any checkpoint.
        target: a new file for the model, its settings and the iteration.  "": the file itself is
            replaced, and a run can still be resumed from it, as long as it has its folder.

    Raises:
        SettingsError: the checkpoint is damaged.
    """
    file = read_file(path)
    if not target and not has_shards(file.content["model"]):
        return
    content = file.content
    if target:
        content = {key: content[key] for key in _OF_A_MODEL if key in content}
    if has_shards(content["model"]):
        file.shards.check()
    content["model"] = whole(content["model"])
    if has_shards(content):
        content = unbind_shards(content)
        content["sharded"] = file.shards.record
    save_file(target or path, content)
