"""Checkpoints of models and optimizers whose tensors are divided between the ranks."""

import errno
import logging
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from conftest import shell
from plumbing import comm
from plumbing.buffers import averaged_buffers
from plumbing.checkpoint import (
    BestCheckpointer,
    Checkpointer,
    PeriodicCheckpointer,
    export_model,
    load_file,
)
from plumbing.checkpoint.sharded import SavedShards
from plumbing.errors import NonFiniteError, SettingsError
from plumbing.gradients import gradient_sync
from ranks import run_on_ranks
from torch import nn

LAST = "model_0000002"


def small_model(seed=0):
    """A model with a batch norm, and with layers that two or four ranks cannot divide evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3))


def divided(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (comm.get_world_size(),))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    return model


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), 0.1, foreach=True)


def train(model, optimizer, iterations):
    for iteration in iterations:
        torch.manual_seed(100 * iteration + comm.get_rank())
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_state(model, optimizer):
    """All tensors of a model and an optimizer by name, whole, the same on all ranks."""
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        state.update({f"optimizer.{index}.{key}": value for key, value in values.items()})
    full = {}
    for name, value in state.items():
        # Each rank has its own statistics of the batch norm.
        if "running" not in name:
            full[name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return full


def assert_equal(state, other):
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


def load_into(folder, model, resume=True):
    """The state of a model and an optimizer that have loaded the newest checkpoint of a folder."""
    optimizer = optimizer_of(model)
    Checkpointer(model, folder, optimizer=optimizer).resume_or_load("")
    return whole_state(model, optimizer)


def folder_of(test):
    return os.path.join(os.environ["TEST_FOLDER"], test)


def names_in(folder):
    """The names in a folder; the tokens of folders are left out."""
    names = []
    for path in Path(folder).iterdir():
        name, _, suffix = path.name.partition(".")
        names.append(f"{name}.shards" if suffix.endswith(".shards") else path.name)
    return sorted(names)


def in_turn(function):
    """Call a function on rank 0 while the others wait."""
    comm.synchronize()
    result = function() if comm.is_main_process() else None
    comm.synchronize()
    return result


# What the ranks do


def saves():
    """Train three iterations; save; two more, and the same two after a resume."""
    folder = folder_of("saved")
    model = divided(small_model())
    optimizer = optimizer_of(model)
    periodic = PeriodicCheckpointer(Checkpointer(model, folder, optimizer=optimizer), 1, 5)
    train(model, optimizer, range(3))
    # Afterwards the parameters of the root are whole until the next save divides them again.
    model.eval()(torch.zeros(2, 6))
    model.train()
    periodic.step(2)
    saved = whole_state(model, optimizer)
    num_bytes = 0
    for value in model.parameters():
        num_bytes += value.to_local().nbytes
    train(model, optimizer, (3, 4))

    again = divided(small_model(seed=1))
    optimizer_again = optimizer_of(again)
    Checkpointer(again, folder, optimizer=optimizer_again).resume_or_load("")
    assert_equal(whole_state(again, optimizer_again), saved)
    train(again, optimizer_again, (3, 4))
    assert_equal(whole_state(again, optimizer_again), whole_state(model, optimizer))
    return saved, num_bytes


def loads_from_two_ranks():
    return load_into(os.path.join(os.environ["SAVED"], "saved"), divided(small_model(seed=1)))


def loads_a_plain_file():
    return load_into(os.environ["PLAIN"], divided(small_model(seed=1)))


def keeps_the_newest():
    folder = folder_of("retention")
    model = divided(small_model())
    checkpointer = Checkpointer(model, folder, optimizer=optimizer_of(model))
    periodic = PeriodicCheckpointer(checkpointer, 1, 4, max_to_keep=2)
    best = BestCheckpointer(checkpointer, "accuracy")
    for iteration in range(4):
        periodic.step(iteration)
        best.step(iteration, {"accuracy": iteration})
    return in_turn(lambda: names_in(folder))


def refuses_a_weight_that_is_not_finite():
    folder = folder_of("not finite")
    model = divided(small_model())
    checkpointer = Checkpointer(model, folder)
    if comm.get_rank() == 1:
        model[3].weight.to_local().data[0, 0] = math.nan
    with pytest.raises(NonFiniteError) as caught:
        checkpointer.save("x")
    return str(caught.value), in_turn(lambda: os.path.exists(folder))


def dies_in_the_middle_of_a_save():
    """What the folder holds after a failure of rank 1, and what is resumed from it."""
    folder = folder_of("torn")
    model = divided(small_model())
    checkpointer = Checkpointer(model, folder)
    checkpointer.save("model_0000000", iteration=0)
    before = whole_state(model, optimizer_of(model))
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.MonkeyPatch.context() as patch:
        if comm.get_rank() == 1:
            patch.setattr(torch, "save", disk_is_full)
        with pytest.raises(OSError, match="No space left") as caught:
            checkpointer.save("model_0000000", iteration=0)
    error = caught.value.errno
    # A kill leaves a folder that no file knows.
    torn = os.path.join(folder, "model_0000001.00000000.shards")
    in_turn(lambda: os.makedirs(torn))
    again = divided(small_model(seed=1))
    checkpointer = Checkpointer(again, folder)
    iteration = checkpointer.resume_or_load("")["iteration"]
    assert_equal(whole_state(again, optimizer_of(again)), before)
    checkpointer.save("model_0000002", iteration=2)
    return error, iteration, in_turn(lambda: names_in(folder))


def disk_is_full(data, file, *args, **kwargs):
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError:
        raise RuntimeError("as torch does, on top of it") from None


def passes_over_damaged_folders():
    """The iterations that are resumed while ever more of the checkpoints are damaged."""
    folder = folder_of("damaged")
    model = divided(small_model())
    checkpointer = Checkpointer(model, folder)
    for iteration in range(4):
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
    resumed = []
    for damage, number in ((nothing, 4), (flip_a_byte, 3), (cut, 2), (remove, 1)):
        in_turn(lambda damage=damage, number=number: damage(folder, number))
        checkpointer = Checkpointer(divided(small_model()), folder)
        resumed.append(checkpointer.resume_or_load("")["iteration"])
    in_turn(lambda: remove(folder, 0))
    with pytest.raises(SettingsError) as caught:
        Checkpointer(divided(small_model()), folder).resume_or_load("")
    return resumed, str(caught.value)


def part_of(folder, iteration):
    return next(Path(folder).glob(f"model_{iteration:07d}.*.shards/__1_0.distcp"))


def nothing(folder, iteration):
    pass


def flip_a_byte(folder, iteration):
    data = bytearray(part_of(folder, iteration).read_bytes())
    data[len(data) // 2] ^= 1
    part_of(folder, iteration).write_bytes(data)


def cut(folder, iteration):
    os.truncate(part_of(folder, iteration), 10)


def remove(folder, iteration):
    shutil.rmtree(part_of(folder, iteration).parent)


def shares_a_buffer():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Linear(1, 1)
    mesh = init_device_mesh("cpu", (comm.get_world_size(),))
    model.register_buffer("shared", distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    with averaged_buffers(model) as all_buffers:
        return all_buffers, model.shared.full_tensor().tolist()


def adds_up_the_gradients_of_micro_batches():
    """The gradients of two micro-batches, of which the first one is not averaged."""
    model = divided(small_model())
    parameters = dict(model.named_parameters())
    for index in range(2):
        # As long as nothing was averaged, no rank has its part of a gradient.
        assert all(parameter.grad is None for parameter in parameters.values())
        with gradient_sync(model, enabled=index == 1):
            torch.manual_seed(10 * index + comm.get_rank())
            model(torch.randn(8, 6)).square().mean().backward()
    return {name: parameter.grad.full_tensor() for name, parameter in parameters.items()}


# Tests

TWO_RANKS = (
    saves,
    keeps_the_newest,
    refuses_a_weight_that_is_not_finite,
    dies_in_the_middle_of_a_save,
    passes_over_damaged_folders,
    shares_a_buffer,
    adds_up_the_gradients_of_micro_batches,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("two ranks")


@pytest.fixture(scope="module")
def two(place):
    """{name of a check: [what rank 0 returned, what rank 1 returned]}"""
    ranks = run_on_ranks(*TWO_RANKS, TEST_FOLDER=str(place))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.fixture
def saved(two, place, tmp_path):
    """A copy of the folder in which two ranks have saved, which a test may change."""
    return Path(shutil.copytree(place / "saved", tmp_path / "saved"))


def test_each_rank_has_its_part_and_a_resume_goes_on_to_the_bit(two):
    (state, first), (_, second) = two["saves"]
    num_bytes = sum(parameter.nbytes for parameter in small_model().parameters())
    assert first + second == num_bytes
    # Layers of 10 and 3 rows.
    assert max(first, second) < 0.56 * num_bytes
    assert len(state) == 7 + 3 * 6


def test_any_number_of_ranks_loads_what_two_ranks_have_saved(two, place):
    (state, _), _ = two["saves"]
    for rank in run_on_ranks(loads_from_two_ranks, num_ranks=4, SAVED=str(place)):
        assert_equal(rank["loads_from_two_ranks"], state)
    assert_equal(load_into(str(place / "saved"), small_model(seed=1)), state)


def test_a_divided_model_loads_what_one_process_has_saved(tmp_path):
    model = small_model()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(3))
    Checkpointer(model, str(tmp_path), optimizer=optimizer).save(LAST, iteration=2)
    (rank, _) = run_on_ranks(loads_a_plain_file, PLAIN=str(tmp_path))
    assert_equal(rank["loads_a_plain_file"], whole_state(model, optimizer))


def test_the_file_has_no_data_of_divided_tensors_and_each_part_is_written_once(saved):
    file = torch.load(saved / f"{LAST}.pth")
    assert file["model"]["0.weight"].is_meta
    assert not file["model"]["1.running_mean"].is_meta
    parts = [path.name for path in saved.glob(f"{LAST}.*.shards/*")]
    assert sorted(parts) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert sorted(file["sharded"]["files"]) == sorted(parts)


def test_folders_are_kept_linked_and_deleted_with_their_files(two, place):
    assert two["keeps_the_newest"][0] == [
        "last_checkpoint",
        "model_0000002.pth",
        "model_0000002.shards",
        "model_0000003.pth",
        "model_0000003.shards",
        "model_best.json",
        "model_best.pth",
        "model_best.shards",
        "model_final.pth",
        "model_final.shards",
    ]
    for path in (place / "retention").glob("*.pth"):
        assert not load_file(str(path))["model"]["0.weight"].is_meta


def test_a_weight_that_is_not_finite_in_one_part_is_an_error_on_all_ranks(two):
    first, second = two["refuses_a_weight_that_is_not_finite"]
    assert first[0] == second[0]
    assert "not finite: 3.weight" in first[0]
    assert first[1] is False


def test_a_save_that_dies_on_one_rank_leaves_the_checkpoint_before_and_what_is_torn_is_removed(two):
    for error, iteration, _ in two["dies_in_the_middle_of_a_save"]:
        assert error == errno.ENOSPC
        assert iteration == 0
    assert two["dies_in_the_middle_of_a_save"][0][2] == [
        "last_checkpoint",
        "model_0000000.pth",
        "model_0000000.shards",
        "model_0000002.pth",
        "model_0000002.shards",
    ]


def test_a_damaged_folder_is_noticed_and_the_newest_whole_checkpoint_is_resumed(two):
    first, second = two["passes_over_damaged_folders"]
    assert first == second
    resumed, error = first
    assert resumed == [3, 2, 1, 0]
    assert error.startswith("--resume: no good checkpoint in")


def test_a_divided_buffer_is_left_alone(two):
    assert two["shares_a_buffer"] == [({}, [0, 1, 2, 3])] * 2


def test_gradients_of_micro_batches_are_averaged_once_and_are_those_of_plain_models(two):
    expected = {}
    for rank in range(2):
        model = small_model()
        for index in range(2):
            torch.manual_seed(10 * index + rank)
            model(torch.randn(8, 6)).square().mean().backward()
        for name, parameter in model.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad / 2
    for gradients in two["adds_up_the_gradients_of_micro_batches"]:
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name])


def test_a_kill_between_the_folder_and_the_file_leaves_the_checkpoint_of_this_name(saved):
    # As model_best.pth is replaced again and again.
    (folder,) = saved.glob(f"{LAST}.*.shards")
    shutil.copytree(folder, saved / f"{LAST}.00000000.shards")
    state = load_into(str(saved), small_model(seed=1))
    assert state["optimizer.0.step"] == 3
    model = small_model()
    Checkpointer(model, str(saved)).save("other")
    assert list(saved.glob("*.shards")) == [folder]


def test_a_file_that_was_copied_or_renamed_without_its_folder_says_what_is_missing(
    saved, tmp_path, caplog
):
    path = saved / f"{LAST}.pth"
    renamed = path.rename(saved / "renamed.pth")
    assert isinstance(load_file(str(renamed))["model"]["0.weight"], torch.Tensor)
    alone = Path(shutil.copy(renamed, tmp_path / "alone.pth"))
    with pytest.raises(SettingsError, match=r"alone.pth is not whole: the folder .* is missing"):
        load_file(str(alone))
    with pytest.raises(SettingsError, match="is not whole"):
        Checkpointer(small_model()).load(str(alone), [])
    # The settings can still be read.
    assert load_file(str(alone), check_tensors=False)["iteration"] == 2


def test_the_whole_model_is_exported_into_a_file_of_its_own(two, saved, tmp_path):
    (state, _), _ = two["saves"]
    target = tmp_path / "exported.pth"
    export_model(str(saved / f"{LAST}.pth"), str(target))
    shutil.rmtree(saved)
    exported = torch.load(target)
    assert set(exported) == {"model", "iteration"}
    for name in ("0.weight", "3.bias"):
        assert torch.equal(exported["model"][name], state[f"model.{name}"])
    small_model().load_state_dict(exported["model"])


def test_a_file_with_the_whole_model_in_it_is_resumed_and_its_model_needs_no_folder(
    two, saved, tmp_path
):
    (state, _), _ = two["saves"]
    path = saved / f"{LAST}.pth"
    export_model(str(path))
    content = load_file(str(path))
    assert torch.equal(torch.load(path)["model"]["0.weight"], state["model.0.weight"])
    assert isinstance(content["optimizer"]["state"][0]["exp_avg"], SavedShards)
    assert_equal(load_into(str(saved), small_model(seed=1)), state)
    written = path.stat().st_mtime_ns
    export_model(str(path))
    assert path.stat().st_mtime_ns == written

    alone = shutil.copy(path, tmp_path / "alone.pth")
    model = small_model(seed=1)
    Checkpointer(model).load(alone, [])
    assert torch.equal(model[0].weight, state["model.0.weight"])
    # The state of the optimizer is in the folder.
    shutil.rmtree(next(saved.glob("*.shards")))
    with pytest.raises(SettingsError, match="no good checkpoint"):
        load_into(str(saved), small_model())


class Code:
    def __reduce__(self):
        return os.mkdir, ("made by code",)


def test_code_in_the_metadata_of_a_folder_is_refused_and_does_not_run(saved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = saved / f"{LAST}.pth"
    (metadata,) = saved.glob("*.shards/.metadata")
    metadata.write_bytes(pickle.dumps(Code()))
    from plumbing.checkpoint.shard_files import ShardReader

    with pytest.raises(SettingsError, match=r"\.metadata holds code or unknown types"):
        ShardReader(str(metadata.parent)).read_metadata()
    assert not Path("made by code").exists()
    with pytest.raises(SettingsError, match="damaged"):
        load_file(str(path))


def test_torch_s_own_reader_reads_a_folder(two, saved):
    import torch.distributed.checkpoint as dcp

    (state, _), _ = two["saves"]
    (folder,) = saved.glob("*.shards")
    tensors = {"model.0.weight": torch.zeros(10, 6)}
    dcp.load(tensors, checkpoint_id=folder)
    assert torch.equal(tensors["model.0.weight"], state["model.0.weight"])


def test_a_run_without_divided_tensors_does_not_import_what_they_need(tmp_path):
    done = shell(
        "-c",
        "import sys, torch\n"
        "from plumbing.checkpoint import Checkpointer\n"
        f"checkpointer = Checkpointer(torch.nn.Linear(1, 1), {str(tmp_path)!r})\n"
        "checkpointer.save('model_0000001', iteration=1)\n"
        "checkpointer.resume_or_load('')\n"
        "print('torch.distributed.tensor' in sys.modules)\n"
        "print('torch.distributed.checkpoint' in sys.modules)\n",
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_names_of_torch_are_still_there():
    """The folder of a checkpoint is recognised by them."""
    from plumbing.checkpoint import shard_files
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    assert callable(DTensor.full_tensor)
    assert callable(FSDPModule.set_requires_gradient_sync)
    for module, name in shard_files._ALLOWED:
        assert hasattr(__import__(module, fromlist=[name]), name), name


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, logger="plumbing.checkpoint")
