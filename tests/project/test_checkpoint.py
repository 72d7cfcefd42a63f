"""Checkpoints: whole or absent, found again after a crash, loaded without running their code."""

import enum
import errno
import logging
import math
import os
import pickle
import re
import shutil
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import shell
from plumbing import comm
from plumbing.checkpoint import BestCheckpointer, Checkpointer, PeriodicCheckpointer, load_file
from plumbing.checkpoint.archive import save_file
from plumbing.checkpoint.model_state import not_finite
from plumbing.errors import NonFiniteError, SettingsError, last_checkpoint
from ranks import run_on_ranks
from torch import nn


class State:
    """A checkpointable that holds one value."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def constant(value, model=None):
    model = nn.Linear(2, 1) if model is None else model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(model):
    (value,) = {value for parameter in model.parameters() for value in parameter.view(-1).tolist()}
    return value


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


@pytest.fixture
def warnings(caplog):
    """Call it for the warnings so far."""
    caplog.set_level(logging.WARNING, logger="plumbing.checkpoint")
    return lambda: caplog.messages


# Saving


def test_a_file_is_a_dict_of_plain_types_with_the_keys_of_the_bare_model(folder):
    Checkpointer(constant(1), folder, other=State(5)).save("model_0000009", iteration=9)
    saved = torch.load(os.path.join(folder, "model_0000009.pth"))
    assert list(saved["model"]) == ["weight", "bias"]
    assert saved["other"] == {"value": 5}
    assert saved["iteration"] == 9
    assert {type(saved), type(saved["model"]), type(saved["other"])} == {dict}


def test_everything_that_was_saved_comes_back(folder):
    Checkpointer(constant(1), folder, other=State(5)).save("x", iteration=9, note="text")
    model, other = constant(0), State(0)
    extra = Checkpointer(model, folder, other=other).resume_or_load("")
    assert (value_of(model), other.value) == (1, 5)
    assert (extra["iteration"], extra["note"]) == (9, "text")


def test_numbers_of_numpy_and_paths_come_back_as_plain_types(folder):
    extra = {
        "float": np.float64(0.5),
        "int": np.int32(3),
        "flag": np.bool_(True),
        "array": np.arange(3),
        "path": Path("some/where"),
        "nested": {"list": [np.float32(0.25), (Path("x"), np.int64(1))]},
    }
    Checkpointer(constant(1), folder, other=State(np.float64(7))).save("x", **extra)
    other = State(0)
    loaded = Checkpointer(constant(1), folder, other=other).resume_or_load("")
    assert loaded.pop("array").tolist() == [0, 1, 2]
    assert {key: loaded[key] for key in extra if key != "array"} == {
        "float": 0.5,
        "int": 3,
        "flag": True,
        "path": "some/where",
        "nested": {"list": [0.25, ("x", 1)]},
    }
    assert (type(other.value), type(loaded["int"])) == (float, int)


def test_without_a_folder_nothing_is_saved(folder, monkeypatch):
    monkeypatch.chdir(folder)
    Checkpointer(constant(1)).save("x")
    Checkpointer(constant(1), folder, save_to_disk=False).save("x")
    assert names_in(folder) == []


def test_the_folder_is_made(folder):
    Checkpointer(constant(1), os.path.join(folder, "new", "one")).save("x")
    assert names_in(os.path.join(folder, "new", "one")) == ["last_checkpoint", "x.pth"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_save_that_dies_half_way_leaves_the_old_file_and_no_other(folder, monkeypatch, error):
    checkpointer = Checkpointer(constant(1), folder)
    checkpointer.save("old", iteration=1)
    before = {name: Path(folder, name).read_bytes() for name in names_in(folder)}

    def die(data, file):
        file.write(b"half of a file")
        raise error

    monkeypatch.setattr(torch, "save", die)
    for name in ("old", "new"):
        with pytest.raises(error):
            checkpointer.save(name, iteration=2)
        assert {name: Path(folder, name).read_bytes() for name in names_in(folder)} == before


def test_the_file_is_durable_before_it_gets_its_name_and_named_before_it_is_tagged(
    folder, monkeypatch
):
    done, fsync, replace = [], os.fsync, os.replace

    def record_fsync(descriptor):
        done.append("fsync")
        fsync(descriptor)

    def record_replace(source, target):
        done.append(os.path.basename(target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    Checkpointer(constant(1), folder).save("x")
    assert done == ["fsync", "x.pth", "fsync", "fsync", "last_checkpoint", "fsync"]


def test_what_is_no_checkpointable_is_refused():
    checkpointer = Checkpointer(constant(1), other=State(1))
    with pytest.raises(KeyError, match="other"):
        checkpointer.add_checkpointable("other", State(2))
    with pytest.raises(TypeError, match="number"):
        checkpointer.add_checkpointable("number", 5)


def test_the_file_that_was_tagged_last_is_known(folder):
    checkpointer = Checkpointer(constant(1), folder)
    assert not checkpointer.has_checkpoint()
    assert checkpointer.get_checkpoint_file() == ""
    assert checkpointer.get_all_checkpoint_files() == []
    checkpointer.save("b")
    checkpointer.save("a")
    checkpointer.save("c", tag_checkpoint=False)
    Path(folder, "notes.txt").touch()
    assert checkpointer.has_checkpoint()
    assert checkpointer.get_checkpoint_file() == os.path.join(folder, "a.pth")
    assert [os.path.basename(path) for path in checkpointer.get_all_checkpoint_files()] == [
        "a.pth",
        "b.pth",
        "c.pth",
    ]
    checkpointer.tag_last_checkpoint("b.pth")
    assert checkpointer.get_checkpoint_file() == os.path.join(folder, "b.pth")


# Resuming


def test_a_resume_ignores_the_weights_it_is_given(folder):
    Checkpointer(constant(1), folder).save("x")
    assert Checkpointer(model := constant(0), folder).resume_or_load("not/there.pth") == {}
    assert value_of(model) == 1


def test_a_resume_from_nothing_says_so_and_starts_from_the_weights(tmp_path, warnings):
    weights = str(tmp_path / "weights.pth")
    torch.save(constant(3).state_dict(), weights)
    checkpointer = Checkpointer(constant(0), str(tmp_path / "new"))
    assert checkpointer.resume_or_load(weights) == {}
    assert value_of(checkpointer.model) == 3
    assert any("scratch" in message for message in warnings())


def test_weights_of_a_training_give_the_model_and_nothing_else(tmp_path):
    Checkpointer(constant(1), str(tmp_path / "old"), other=State(1)).save("x", iteration=99)
    model, other = constant(0), State(0)
    checkpointer = Checkpointer(model, str(tmp_path / "new"), other=other)
    assert checkpointer.resume_or_load(str(tmp_path / "old/x.pth"), resume=False) == {}
    assert (value_of(model), other.value) == (1, 0)


def test_a_checkpointable_that_comes_after_the_resume_gets_its_state(folder):
    Checkpointer(constant(1), folder, late=State(7)).save("x", iteration=3)
    checkpointer = Checkpointer(constant(0), folder)
    checkpointer.resume_or_load("")
    checkpointer.add_checkpointable("late", late := State(0))
    assert late.value == 7
    checkpointer.add_checkpointable("new", new := State(0))
    assert new.value == 0


def test_a_checkpointable_that_the_file_lacks_starts_anew_with_a_warning(folder, warnings):
    Checkpointer(constant(1), folder).save("x")
    Checkpointer(constant(0), folder, other=(other := State(5))).resume_or_load("")
    assert other.value == 5
    assert any("other" in message for message in warnings())


def flip(data, position, bits=0xFF):
    return data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :]


DAMAGES = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "without its end": lambda data: data[:-1],
    "a flipped byte of a tensor": lambda data: flip(data, data.index(b"\0\0\x80?\0\0\x80?")),
    "a flipped byte of a name": lambda data: flip(data, data.index(b"data.pkl")),
    "a flipped byte of the directory": lambda data: flip(data, data.index(b"PK\1\2") + 10),
    "random bytes": lambda data: np.random.RandomState(0).bytes(len(data)),
    "zeros": lambda data: bytes(len(data)),
    "text": lambda data: b"<html>404</html>",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_resume_passes_over_a_damaged_file_to_the_newest_good_one(folder, damage, warnings):
    for i in (9, 19, 29):
        Checkpointer(constant(i), folder).save(f"model_{i:07d}", iteration=i)
    newest = Path(folder, "model_0000029.pth")
    Checkpointer(constant(1), folder).save("model_0000029", iteration=29)
    newest.write_bytes(damage(newest.read_bytes()))
    model = constant(0)
    assert Checkpointer(model, folder).resume_or_load("") == {"iteration": 19}
    assert value_of(model) == 19
    assert any("model_0000029" in message for message in warnings())


@pytest.mark.parametrize("pointer", [b"", b"\n", None, b"model_0000099.pth", b"\xff\xfe", b"."])
def test_a_resume_finds_the_newest_file_without_a_good_pointer(folder, pointer):
    for iteration in (9_999_999, 10_000_009, 19):
        Checkpointer(constant(1), folder).save(f"model_{iteration:07d}", iteration=iteration)
    Checkpointer(constant(1), folder).save("model_best", tag_checkpoint=False, iteration=5)
    Path(folder, "last_checkpoint").unlink()
    if pointer is not None:
        Path(folder, "last_checkpoint").write_bytes(pointer)
    assert Checkpointer(constant(0), folder).resume_or_load("") == {"iteration": 10_000_009}


def test_a_damaged_final_file_falls_back_to_a_numbered_one(folder):
    periodic = PeriodicCheckpointer(Checkpointer(constant(1), folder), 5, 10)
    periodic.step(4)
    periodic.step(9)
    Path(folder, "model_final.pth").unlink()
    Path(folder, "model_final.pth").write_bytes(b"")
    assert Checkpointer(constant(0), folder).resume_or_load("") == {"iteration": 9}


def test_a_final_file_is_found_without_a_pointer(folder):
    PeriodicCheckpointer(Checkpointer(constant(1), folder), 0, 10).step(9)
    Path(folder, "last_checkpoint").unlink()
    assert Checkpointer(constant(0), folder).resume_or_load("") == {"iteration": 9}


def test_a_resume_where_all_files_are_damaged_is_an_error(folder):
    for name in ("model_0000009", "model_0000019"):
        Checkpointer(constant(1), folder).save(name)
        Path(folder, f"{name}.pth").write_bytes(b"damaged")
    model = constant(0)
    with pytest.raises(SettingsError, match="resume.*good") as caught:
        Checkpointer(model, folder).resume_or_load("")
    assert "\n" not in str(caught.value)
    assert value_of(model) == 0


def wrongly_loaded(folder, flips_of):
    """Save a file and load it with each of these (position, bits) flipped: what went wrong."""
    Checkpointer(constant(1), folder).save("x", iteration=9)
    path, wrong = Path(folder, "x.pth"), []
    whole = path.read_bytes()
    for position, bits in flips_of(whole):
        path.write_bytes(flip(whole, position, bits))
        model = constant(0)
        try:
            extra = Checkpointer(model, folder).load(str(path))
        except SettingsError:
            continue
        except Exception as error:
            wrong.append((position, repr(error)))
        else:
            values = torch.cat([parameter.flatten() for parameter in model.parameters()])
            if extra != {"iteration": 9} or values.tolist() != [1, 1, 1]:
                wrong.append((position, extra, values))
    return wrong


def test_whichever_byte_is_flipped_a_file_is_damaged_or_as_it_was_saved(folder):
    assert wrongly_loaded(folder, lambda data: [(i, 0xFF) for i in range(0, len(data), 5)]) == []


def test_a_flipped_attribute_of_a_tensor_in_the_archive_is_damage(folder):
    def flips_of(data):
        records = [match.start() for match in re.finditer(b"PK\x01\x02", data)]
        return [(record + 38, 0x10) for record in records]

    assert wrongly_loaded(folder, flips_of) == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_path_that_is_not_there_or_is_damaged_is_an_error(tmp_path, resume):
    (tmp_path / "damaged.pth").write_bytes(b"damaged")
    for name in ("damaged.pth", "missing.pth", ""):
        checkpointer = Checkpointer(constant(0), str(tmp_path / "new"))
        with pytest.raises(SettingsError, match=f"{tmp_path}.*{name}") as caught:
            checkpointer.resume_or_load(f"{tmp_path}/{name}", resume=resume)
        assert "\n" not in str(caught.value)


def test_a_flipped_byte_in_weights_from_elsewhere_is_damage(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(constant(1).state_dict(), path)
    data = path.read_bytes()
    path.write_bytes(flip(data, data.index(b"\0\0\x80?\0\0\x80?")))
    with pytest.raises(SettingsError, match="weights.pth"):
        Checkpointer(constant(0)).load(str(path))


def test_weights_that_torch_before_1_6_saved_are_loaded(tmp_path):
    path = str(tmp_path / "weights.pth")
    torch.save(constant(1).state_dict(), path, _use_new_zipfile_serialization=False)
    checkpointer = Checkpointer(constant(0))
    checkpointer.load(path)
    assert all((value == 1).all() for value in checkpointer.model.state_dict().values())


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_code_in_a_file_is_refused_and_never_runs(tmp_path):
    victim, path = str(tmp_path / "victim"), str(tmp_path / "model_0000009.pth")
    torch.save({"model": {}, "iteration": Malicious(victim)}, path)
    pickled = tmp_path / "plain.pth"
    pickled.write_bytes(pickle.dumps({"model": Malicious(victim)}))
    for load in (
        lambda: Checkpointer(constant(0)).load(path),
        lambda: Checkpointer(constant(0)).load(str(pickled)),
        lambda: Checkpointer(constant(0), str(tmp_path)).resume_or_load(""),
    ):
        with pytest.raises((SettingsError, RuntimeError)):
            load()
    assert not os.path.exists(victim)
    torch.load(path, weights_only=False)
    assert os.path.exists(victim)


class Net(nn.Module):
    def __init__(self, width=2, second="second", shared=False):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.add_module(second, nn.Linear(2, 2))
        if shared:
            self.tied = self.first


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"second": "third"}, ["third", "second", "weight", "bias"]),
        ({"width": 3}, ["first.weight", r"\(2, 2\)", r"\(3, 2\)", "first.bias"]),
    ],
)
def test_a_resume_into_another_model_is_an_error_in_one_line(folder, other, words):
    Checkpointer(Net(), folder).save("x")
    with pytest.raises(SettingsError) as caught:
        Checkpointer(Net(**other), folder).resume_or_load("")
    for word in (*words, "x.pth"):
        assert word.replace("\\", "") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_fit_in_part_are_loaded_in_part_with_a_grouped_warning(folder, warnings):
    Checkpointer(constant(1, Net()), folder).save("x")
    model = constant(0, Net(width=3, second="third"))
    Checkpointer(model).load(os.path.join(folder, "x.pth"))
    assert value_of(model) == 0
    (message,) = warnings()
    assert "third." in message
    assert message.count("third") == message.count("second") == 1
    for word in ("first.weight", "(2, 2)", "(3, 2)"):
        assert word in message


def test_what_fits_is_loaded(folder, warnings):
    Checkpointer(constant(1, Net()), folder).save("x")
    model = constant(0, Net(width=3))
    Checkpointer(model).load(os.path.join(folder, "x.pth"))
    assert value_of(model.second) == 1
    assert value_of(model.first) == 0
    Checkpointer(Net()).load(os.path.join(folder, "x.pth"))
    assert len(warnings()) == 1


def test_a_shared_parameter_is_not_missing_if_one_of_its_names_is_there(folder, warnings):
    Checkpointer(constant(1, Net()), folder).save("x")
    model = constant(0, Net(shared=True))
    Checkpointer(model).load(os.path.join(folder, "x.pth"))
    assert value_of(model.tied) == 1
    assert warnings() == []


def test_chosen_checkpointables_are_loaded(folder):
    Checkpointer(constant(1), folder, a=State(1), b=State(1)).save("x")
    a, b = State(0), State(0)
    rest = Checkpointer(constant(0), folder, a=a, b=b).load(os.path.join(folder, "x.pth"), ["b"])
    assert (a.value, b.value, rest["a"]) == (0, 1, {"value": 1})


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "net."])
@pytest.mark.parametrize("wrap", [nn.Module.cpu, nn.DataParallel], ids=["bare", "parallel"])
@pytest.mark.parametrize("alone", [True, False], ids=["state", "checkpoint"])
def test_a_state_dict_is_loaded_with_or_without_wrappers(tmp_path, prefix, wrap, alone):
    state = {prefix + key: value for key, value in constant(1).state_dict().items()}
    torch.save(state if alone else {"model": state}, tmp_path / "x.pth")
    model = constant(0)
    Checkpointer(wrap(model)).load(str(tmp_path / "x.pth"))
    assert value_of(model) == 1


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ({}, "holds nothing, and"),
        ({"head.w": torch.zeros(1), "body.w": torch.zeros(1)}, "holds head.w, body.w, and"),
    ],
)
@pytest.mark.parametrize(
    ("resume", "advice"),
    [(False, "rename the entries"), (True, "restore the settings of the run")],
)
def test_a_file_of_which_nothing_fits_is_refused(folder, state, shown, resume, advice):
    path = os.path.join(folder, "model_0000003.pth")
    torch.save({"model": state, "iteration": 3}, path)
    words = f"model_0000003.pth has nothing.*{shown} the model has weight, bias: {advice}"
    with pytest.raises(SettingsError, match=words):
        Checkpointer(constant(0), folder if resume else "").resume_or_load(path, resume=resume)
    Checkpointer(nn.ReLU()).load(path)  # which has no weights


def test_a_state_that_is_empty_is_told_unless_it_should_be(folder, warnings):
    class Off(State):
        def state_dict(self):
            return {}

    path = os.path.join(folder, "x.pth")
    Checkpointer(constant(1), folder, on=Off(1), off=Off(1)).save("x")
    Checkpointer(constant(0), folder, on=State(0), off=Off(0)).load(path)
    assert warnings() == [f"{path} holds no on, which starts anew"]


def test_a_wrapped_model_is_saved_bare(folder):
    class Compiled(nn.Module):
        def __init__(self, model):
            super().__init__()
            self._orig_mod = model

    model = constant(1)
    for wrapped in (nn.DataParallel(model), Compiled(model), nn.DataParallel(Compiled(model))):
        checkpointer = Checkpointer(wrapped, folder)
        assert checkpointer.model is model
        checkpointer.save("x")
        saved = torch.load(os.path.join(folder, "x.pth"))
        assert list(saved["model"]) == ["weight", "bias"]


def test_a_model_whose_sizes_are_not_known_yet_takes_those_of_the_file(folder):
    known, unknown = nn.Sequential(nn.LazyLinear(3)), nn.Sequential(nn.LazyLinear(3))
    known(torch.zeros(1, 4))
    Checkpointer(known, folder).save("x")
    Checkpointer(unknown, folder).resume_or_load("")
    assert torch.equal(known[0].weight, unknown[0].weight)


def test_a_model_with_a_child_called_module_is_resumed(folder):
    Checkpointer(nn.ModuleDict({"module": constant(1)}), folder).save("x")
    model = nn.ModuleDict({"module": constant(0)})
    Checkpointer(model, folder).resume_or_load("")
    assert value_of(model) == 1


# PeriodicCheckpointer


def test_numbered_files_are_named_by_the_iteration_that_ended_and_the_final_one_follows(folder):
    periodic = PeriodicCheckpointer(Checkpointer(constant(1), folder), 4, 10)
    for iteration in range(10):
        periodic.step(iteration, note=iteration)
    assert names_in(folder) == [
        "last_checkpoint",
        "model_0000003.pth",
        "model_0000007.pth",
        "model_final.pth",
    ]
    assert Path(folder, "last_checkpoint").read_text() == "model_final.pth"
    saved = torch.load(os.path.join(folder, "model_0000007.pth"))
    assert (saved["iteration"], saved["note"]) == (7, 7)
    assert torch.load(os.path.join(folder, "model_final.pth"))["iteration"] == 9


@pytest.mark.parametrize(
    ("period", "max_iter", "expected"),
    [
        (0, 5, ["model_final"]),
        (-1, 5, []),
        (5, 5, ["model_0000004", "model_final"]),
        (2, None, ["model_0000001", "model_0000003"]),
        (9, 5, ["model_final"]),
    ],
)
def test_a_period_of_0_saves_at_the_end_and_a_negative_one_never(
    folder, period, max_iter, expected
):
    periodic = PeriodicCheckpointer(Checkpointer(constant(1), folder), period, max_iter)
    for iteration in range(5):
        periodic.step(iteration)
    assert [name[:-4] for name in names_in(folder) if name != "last_checkpoint"] == expected


def test_a_forced_step_saves_a_numbered_file_once_whatever_the_period(folder):
    for period in (-1, 0, 5, 100):
        periodic = PeriodicCheckpointer(Checkpointer(constant(1), folder), period, 50)
        periodic.step(4, force=True)
        assert names_in(folder) == ["last_checkpoint", "model_0000004.pth"]
        Path(folder, "model_0000004.pth").unlink()


def test_a_file_can_be_saved_at_any_time_under_another_prefix(folder):
    periodic = PeriodicCheckpointer(Checkpointer(constant(1), folder), 1, file_prefix="ema")
    periodic.save("now", iteration=3)
    periodic.step(4)
    assert names_in(folder) == ["ema_0000004.pth", "last_checkpoint", "now.pth"]


def numbered(folder, prefix="model_0"):
    return [int(name[6:13]) for name in names_in(folder) if name.startswith(prefix)]


def test_old_files_are_counted_on_the_disk_also_those_of_the_run_before(folder):
    for start in (0, 30):
        periodic = PeriodicCheckpointer(Checkpointer(constant(1), folder), 10, 60, max_to_keep=2)
        for iteration in range(start, start + 30):
            periodic.step(iteration)
    assert numbered(folder) == [49, 59]
    assert "model_final.pth" in names_in(folder)


def test_only_exact_names_are_deleted(folder):
    names = [
        "model_0000010.pth.bak",
        "model_0000010.pth.old.pth",
        "model_best.pth",
        "model_00010.pth",
        "model_0000010_ema.pth",
        "my_model_0000010.pth",
        "model_0000010a.pth",
        "ema_0000010.pth",
        "modelx_0000010.pth",
    ]
    for name in (*names, "model_0000010.pth", "model_0000011.pth"):
        Path(folder, name).touch()
    checkpointer = Checkpointer(constant(1), folder)
    PeriodicCheckpointer(checkpointer, 1, max_to_keep=1).step(20)
    assert names_in(folder) == sorted([*names, "last_checkpoint", "model_0000020.pth"])
    PeriodicCheckpointer(checkpointer, 1, max_to_keep=1, file_prefix="model.").step(30)
    assert "modelx_0000010.pth" in names_in(folder)


def test_files_left_from_before_a_resume_go_first_and_the_newest_never(folder):
    for iteration in (9, 19, 89, 99):
        Path(folder, f"model_{iteration:07d}.pth").touch()
    for max_to_keep, expected in ((3, [9, 19, 29]), (2, [29, 39]), (1, [9])):
        iteration = expected[-1]
        periodic = PeriodicCheckpointer(
            Checkpointer(constant(1), folder), 10, max_to_keep=max_to_keep
        )
        periodic.step(iteration)
        assert numbered(folder) == expected


def test_files_over_ten_million_are_newer_than_those_below(folder):
    Path(folder, "model_9999999.pth").touch()
    periodic = PeriodicCheckpointer(Checkpointer(constant(1), folder), 1, max_to_keep=1)
    periodic.step(10_000_000)
    assert names_in(folder) == ["last_checkpoint", "model_10000000.pth"]


def test_another_rank_deletes_nothing(folder):
    Path(folder, "model_0000003.pth").touch()
    other = Checkpointer(constant(1), folder, save_to_disk=False)
    PeriodicCheckpointer(other, 1, 10, max_to_keep=1).step(9)
    assert names_in(folder) == ["model_0000003.pth"]


def test_a_negative_number_of_files_is_refused(folder):
    with pytest.raises(ValueError, match="max_to_keep"):
        PeriodicCheckpointer(Checkpointer(constant(1), folder), 1, max_to_keep=-1)


# BestCheckpointer


@pytest.mark.parametrize(
    ("mode", "values", "saved"),
    [("max", (1, 3, 2, 3, 4), [0, 1, 4]), ("min", (3, 4, 1, 1, -1), [0, 2, 4])],
)
def test_the_best_is_strictly_better_than_all_before(folder, mode, values, saved):
    best = BestCheckpointer(Checkpointer(constant(1), folder), "t/acc", mode)
    for iteration, value in enumerate(values):
        best.step(iteration, {"t/acc": float(value), "other": 9.0})
        newest = max(i for i in saved if i <= iteration)
        contents = torch.load(os.path.join(folder, "model_best.pth"))
        assert contents["iteration"] == newest
        assert contents["t/acc"] == values[newest]


def test_a_value_that_is_not_finite_is_never_the_best(folder):
    best = BestCheckpointer(Checkpointer(constant(1), folder), "acc")
    for value in (math.nan, math.inf, -math.inf):
        best.step(0, {"acc": value})
    assert names_in(folder) == []
    best.step(1, {"acc": 0.5})
    assert torch.load(os.path.join(folder, "model_best.pth"))["acc"] == 0.5


def test_a_missing_metric_is_a_warning_and_no_metric_is_none(folder, warnings):
    checkpointer = Checkpointer(constant(1), folder)
    BestCheckpointer(checkpointer, "").step(0, {"acc": 0.5})
    assert warnings() == []
    BestCheckpointer(checkpointer, "accuracy").step(0, {"acc": 0.5})
    assert names_in(folder) == []
    (message,) = warnings()
    assert "accuracy" in message
    assert "acc" in message.replace("accuracy", "")


def test_the_best_value_outlives_the_run(folder):
    BestCheckpointer(Checkpointer(constant(1), folder), "acc").step(3, {"acc": 0.75})
    best = BestCheckpointer(Checkpointer(constant(2), folder), "acc")
    best.step(5, {"acc": 0.5})
    assert torch.load(os.path.join(folder, "model_best.pth"))["iteration"] == 3
    best.step(7, {"acc": 0.8})
    assert torch.load(os.path.join(folder, "model_best.pth"))["iteration"] == 7


def test_the_value_of_another_metric_does_not_count(folder):
    BestCheckpointer(Checkpointer(constant(1), folder), "acc").step(3, {"acc": 0.75})
    other = BestCheckpointer(Checkpointer(constant(1), folder), "error", "min")
    other.step(5, {"error": 9.0})
    assert torch.load(os.path.join(folder, "model_best.pth"))["error"] == 9.0


def test_an_unreadable_record_of_the_best_is_passed_over(folder):
    Path(folder, "model_best.json").write_text('{"acc": 0.7')
    BestCheckpointer(Checkpointer(constant(1), folder), "acc").step(3, {"acc": 0.1})
    assert torch.load(os.path.join(folder, "model_best.pth"))["acc"] == 0.1


def test_the_best_file_is_what_a_resume_starts_from_only_if_there_is_no_other(folder):
    checkpointer = Checkpointer(constant(1), folder)
    checkpointer.save("model_0000001", iteration=1)
    BestCheckpointer(checkpointer, "acc").step(3, {"acc": 0.75})
    assert checkpointer.get_checkpoint_file() == os.path.join(folder, "model_0000001.pth")
    assert Checkpointer(constant(0), folder).resume_or_load("") == {"iteration": 1}
    for name in ("last_checkpoint", "model_0000001.pth"):
        Path(folder, name).unlink()
    assert Checkpointer(constant(0), folder).resume_or_load("") == {"acc": 0.75, "iteration": 3}
    Path(folder, "model_best.pth").write_bytes(b"damaged")
    with pytest.raises(SettingsError, match="no good checkpoint"):
        Checkpointer(constant(0), folder).resume_or_load("")


@pytest.mark.parametrize("record", [None, '{"acc": 0.7', '{"loss": 1}'])
def test_the_best_value_outlives_its_record(folder, record):
    BestCheckpointer(Checkpointer(constant(1), folder), "acc", seed=7).step(3, {"acc": 0.75})
    Path(folder, "model_best.json").unlink()
    if record is not None:
        Path(folder, "model_best.json").write_text(record)
    best = BestCheckpointer(Checkpointer(constant(2), folder), "acc", seed=7)
    best.step(5, {"acc": 0.5})
    checkpoint = torch.load(os.path.join(folder, "model_best.pth"))
    assert (checkpoint["iteration"], checkpoint["seed"]) == (3, 7)


def test_a_mode_that_does_not_exist_is_refused(folder):
    with pytest.raises(KeyError):
        BestCheckpointer(Checkpointer(constant(1), folder), "acc", "largest")


def test_a_missing_metric_is_one_warning_in_a_run_and_no_results_are_no_error(folder, warnings):
    best = BestCheckpointer(Checkpointer(constant(1), folder), "accuracy")
    for results in (None, {"acc": 0.5}, {}):
        best.step(0, results)
    assert len(warnings()) == 1


def test_a_kill_between_the_two_files_of_the_best_lets_the_repeated_evaluation_win(folder):
    checkpointer = Checkpointer(constant(1), folder)
    BestCheckpointer(checkpointer, "acc").step(3, {"acc": 0.5})
    record = Path(folder, "model_best.json").read_bytes()
    BestCheckpointer(checkpointer, "acc").step(5, {"acc": 0.75})
    Path(folder, "model_best.json").write_bytes(record)
    BestCheckpointer(checkpointer, "acc").step(5, {"acc": 0.75})
    assert b"0.75" in Path(folder, "model_best.json").read_bytes()


# Settings, and what cannot be saved


def test_every_file_holds_the_settings(folder):
    checkpointer = Checkpointer(constant(1), folder, config="SEED: 1\n")
    PeriodicCheckpointer(checkpointer, 5, 10).step(9)
    BestCheckpointer(checkpointer, "acc").step(9, {"acc": 0.5})
    for name in ("model_0000009.pth", "model_final.pth", "model_best.pth"):
        assert load_file(os.path.join(folder, name))["config"] == "SEED: 1\n"


def test_a_subclass_of_a_plain_type_comes_back_as_the_plain_type(folder):
    class Mode(enum.IntEnum):
        FAST = 3

    class Name(str, enum.Enum):
        LONG = "long"

    Checkpointer(constant(1), folder).save("x", mode=Mode.FAST, name_of_it=Name.LONG)
    assert Checkpointer(constant(1), folder).resume_or_load("") == {"mode": 3, "name_of_it": "long"}


def test_a_type_that_cannot_be_saved_is_named_with_its_place_and_nothing_is_written(folder):
    checkpointer = Checkpointer(constant(1), folder, other=State({"inner": [1, nn.ReLU()]}))
    with pytest.raises(TypeError, match=r"other\.value\.inner\.1, a ReLU"):
        checkpointer.save("x")
    assert names_in(folder) == []


def test_the_names_of_the_parts_of_a_file_cannot_be_taken_twice(folder):
    checkpointer = Checkpointer(constant(1), folder, other=State(1))
    for name in ("model", "config", "other"):
        with pytest.raises(KeyError, match=name):
            checkpointer.add_checkpointable(name, State(1))
        with pytest.raises(KeyError, match=name):
            checkpointer.save("x", **{name: 1})


@pytest.mark.parametrize("name", ["0.weight", "1.running_var", "wave", "sparse"])
def test_weights_and_statistics_that_are_not_finite_are_not_saved(folder, name):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.full((2,), -math.inf))
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    checkpointer = Checkpointer(model, folder)
    checkpointer.save("good")
    tensor = model.state_dict()[name]
    (tensor._values() if tensor.is_sparse else tensor.view(-1))[0] = math.inf
    with pytest.raises(NonFiniteError, match=rf"not finite: {name}; last good.*good\.pth"):
        checkpointer.save("bad")
    assert names_in(folder) == ["good.pth", "last_checkpoint"]


def test_weights_of_another_module_that_are_not_finite_are_not_saved_either(folder):
    critic = nn.Linear(2, 2)
    critic.register_buffer("mask", torch.full((2,), -math.inf))
    checkpointer = Checkpointer(nn.Linear(2, 2), folder, critic=critic)
    checkpointer.save("good")
    with torch.no_grad():
        critic.bias[0] = math.nan
    with pytest.raises(NonFiniteError, match=r"not finite: critic.bias; last good.*good\.pth"):
        checkpointer.save("bad")
    assert names_in(folder) == ["good.pth", "last_checkpoint"]


def test_a_module_that_a_file_does_not_hold_keeps_its_weights_with_a_warning(folder, warnings):
    model = nn.Linear(2, 2)
    Checkpointer(model, folder).save("early")
    teacher = nn.Linear(2, 2)
    before = teacher.weight.clone()
    Checkpointer(model, folder, teacher=teacher).resume_or_load("", resume=True)
    assert torch.equal(teacher.weight, before)
    (warning,) = warnings()
    assert warning.endswith("early.pth holds no teacher, whose weights stay as they were built")


def test_large_numbers_and_layers_without_a_shape_yet_are_no_fault(folder):
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16())
    checkpointer = Checkpointer(model)
    with torch.no_grad():
        model[1].weight.fill_(1e300)
    assert not_finite(model.state_dict()) == []
    with torch.no_grad():
        model[2].bias.fill_(math.nan)
    assert not_finite(model.state_dict()) == ["2.bias"]
    checkpointer.save("without a folder nothing is looked at")


# Objects that come and go


def test_an_object_without_both_methods_is_refused_when_it_is_added(folder):
    class OnlySaves:
        def state_dict(self):
            return {}

    with pytest.raises(TypeError, match="ema, a OnlySaves, has no load_state_dict"):
        Checkpointer(constant(1), folder, ema=OnlySaves())


def test_the_file_with_the_state_of_an_object_that_is_gone_is_named_and_never_deleted(
    folder, warnings
):
    saved = {"ema": State(5), "off": State(0)}
    Checkpointer(constant(1), folder, **saved).save("model_0000003", iteration=3)
    checkpointer = Checkpointer(constant(0), folder, off=State(1))
    checkpointer.resume_or_load("")
    (message,) = warnings()
    assert "model_0000003.pth holds ema, but no object" in message
    periodic = PeriodicCheckpointer(checkpointer, 1, max_to_keep=1)
    for iteration in (4, 5, 6):
        periodic.step(iteration)
    kept = "model_0000003_with_ema.pth"
    assert names_in(folder) == ["last_checkpoint", kept, "model_0000006.pth"]
    assert kept in warnings()[1]
    assert len(warnings()) == 2
    # As the warning says, one can go back to it.
    Path(folder, "last_checkpoint").write_text(kept)
    again = Checkpointer(constant(0), folder, ema=(ema := State(0)), off=State(1))
    assert again.resume_or_load("") == {"iteration": 3}
    assert ema.value == 5


def test_an_object_that_takes_its_state_after_the_resume_leaves_no_second_file(folder):
    Checkpointer(constant(1), folder, late=State(7)).save("model_0000003", iteration=3)
    checkpointer = Checkpointer(constant(0), folder)
    checkpointer.resume_or_load("")
    checkpointer.add_checkpointable("late", State(0))
    checkpointer.save("model_0000004", iteration=4)
    assert names_in(folder) == ["last_checkpoint", "model_0000003.pth", "model_0000004.pth"]


def test_an_evaluation_takes_the_model_alone_without_a_warning_and_without_the_rest(
    folder, warnings
):
    Checkpointer(constant(1), folder, ema=State(5)).save("model_0000003", iteration=3)
    assert Checkpointer(constant(0), folder).resume_or_load("") == {"iteration": 3}
    assert warnings() == []


def test_an_object_that_comes_after_the_resume_and_is_not_in_the_file_is_a_warning(
    folder, warnings
):
    Checkpointer(constant(1), folder).save("x")
    checkpointer = Checkpointer(constant(0), folder)
    checkpointer.add_checkpointable("early", State(0))
    assert warnings() == []
    checkpointer.resume_or_load("")
    checkpointer.add_checkpointable("late", State(0))
    assert [message.split(" holds ")[1] for message in warnings()] == [
        "no early, which starts anew",
        "no late, which starts anew",
    ]


def test_an_object_that_fails_on_its_state_is_one_line_with_the_place(folder):
    class Picky(State):
        def load_state_dict(self, state):
            raise KeyError("first\nsecond")

    Checkpointer(constant(1), folder, other=State(1)).save("x")
    with pytest.raises(SettingsError, match=r"x.pth: the state of other .*KeyError.*line \d+") as e:
        Checkpointer(constant(1), folder, other=Picky(1)).resume_or_load("")
    assert "\n" not in str(e.value)


def test_what_an_object_keeps_of_its_state_is_no_part_of_the_file(folder):
    Checkpointer(constant(1), folder, other=State(torch.arange(3.0))).save("x", extra=torch.ones(2))
    other = State(None)
    extra = Checkpointer(constant(0), folder, other=other).resume_or_load("")
    with open(os.path.join(folder, "x.pth"), "r+b") as file:  # in place: a map would change, too
        file.write(bytes(os.path.getsize(os.path.join(folder, "x.pth"))))
    assert other.value.tolist() == [0, 1, 2]
    assert extra["extra"].tolist() == [1, 1]


def test_states_of_each_rank_come_back_in_a_single_process_as_well(folder):
    Checkpointer(constant(1), folder, per_rank={"cursor": State(4)}).save("x")
    cursor = State(0)
    assert Checkpointer(constant(0), folder, per_rank={"cursor": cursor}).resume_or_load("") == {}
    assert cursor.value == 4


def test_states_of_a_different_number_of_ranks_are_refused_in_one_line(folder):
    Checkpointer(constant(1), folder, per_rank={"cursor": State(4)}).save("x")
    content = load_file(os.path.join(folder, "x.pth"))
    content["per_rank"]["cursor"] *= 3
    save_file(os.path.join(folder, "x.pth"), content)
    with pytest.raises(SettingsError, match="cursor of 3 ranks, and there are 1: start 3 proc"):
        Checkpointer(constant(0), folder, per_rank={"cursor": State(0)}).resume_or_load("")


# Files on difficult disks


@pytest.mark.parametrize("name", ["EINVAL", "ENOTSUP", "EIO", "EBADF", "EACCES"])
@pytest.mark.parametrize("function", ["open", "fsync"])
def test_a_folder_that_cannot_be_flushed_is_passed_over(folder, monkeypatch, name, function):
    original = getattr(os, function)

    def refuse(what, *args, **kwargs):
        is_folder = os.path.isdir(what) if function == "open" else stat.S_ISDIR(os.fstat(what)[0])
        if is_folder:
            raise OSError(getattr(errno, name), "refused")
        return original(what, *args, **kwargs)

    monkeypatch.setattr(os, function, refuse)
    Checkpointer(constant(1), folder).save("x")
    monkeypatch.undo()
    assert names_in(folder) == ["last_checkpoint", "x.pth"]


def test_a_folder_that_is_lost_while_it_is_flushed_is_an_error(folder, monkeypatch):
    fsync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor)[0]):
            raise OSError(errno.ENOSPC, "refused")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="refused"):
        Checkpointer(constant(1), folder).save("x")


def test_a_file_system_that_cannot_map_files_can_be_resumed_from(folder, monkeypatch):
    Checkpointer(constant(1), folder, other=State(5)).save("x", iteration=9)

    def refuse(path, *_):
        raise RuntimeError(f"unable to mmap 1000 bytes from file <{path}>: No such device (19)")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", refuse)
    checkpointer = Checkpointer(constant(0), folder, other=(other := State(0)))
    assert checkpointer.resume_or_load("") == {"iteration": 9}
    assert (value_of(checkpointer.model), other.value) == (1, 5)


MEMORY = """
import resource, sys
import torch
from torch import nn
from plumbing.checkpoint import Checkpointer

torch.set_num_threads(1)


def make(layers, width):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


folder, what = sys.argv[1:]
if what == "save":
    model, optimizer = make(30, 1024)
    for parameter in model.parameters():
        moments = {name: torch.rand_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.ones(()), **moments}
    Checkpointer(*make(1, 8)[:1], folder + "/small", optimizer=make(1, 8)[1]).save("x")
    checkpointer = Checkpointer(model, folder, optimizer=optimizer)
    before = peak()
    checkpointer.save("x", iteration=9)
else:
    small, of_small = make(1, 8)
    small(torch.ones(1, 8)).sum().backward()
    of_small.step()
    Checkpointer(small, folder + "/small", optimizer=of_small).save("x")
    small, of_small = make(1, 8)
    Checkpointer(small, folder + "/small", optimizer=of_small).resume_or_load("")
    before = peak()
    if what == "evaluate":
        model = make(30, 1024)[0]
        Checkpointer(model, folder).resume_or_load("")
        size = sum(parameter.nbytes for parameter in model.parameters())
        print((peak() - before) * 1024 / size)
        sys.exit()
    model, optimizer = make(30, 1024)
    Checkpointer(model, folder, optimizer=optimizer).resume_or_load("")
size = 3 * sum(parameter.nbytes for parameter in model.parameters())
print((peak() - before) * 1024 / size)
"""


def test_a_save_takes_a_tenth_of_the_state_in_memory_and_a_resume_a_tenth_more_than_it(tmp_path):
    # 360 MB, as a small state would drown in what the interpreter itself takes.
    save = float(shell("-c", MEMORY, tmp_path, "save").stdout)
    resume = float(shell("-c", MEMORY, tmp_path, "resume").stdout)
    evaluation = float(shell("-c", MEMORY, tmp_path, "evaluate").stdout)
    (tmp_path / "x.pth").unlink()
    assert save <= 0.10
    assert 0.9 <= resume <= 1.10
    # Each module gives back its part of the file when it has been loaded.
    assert evaluation <= 1.10


def test_a_load_leaves_no_hook_behind_also_if_it_fails(folder):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Checkpointer(model, folder).save("x")
    fits = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Checkpointer(fits).load(f"{folder}/x.pth")
    fails = nn.Linear(3, 3)
    with pytest.raises(SettingsError, match="nothing for this model"):
        Checkpointer(fails).load(f"{folder}/x.pth")
    for module in (*fits.modules(), fails):
        assert not module._load_state_dict_post_hooks


def test_the_settings_in_a_file_can_be_read_without_its_tensors(folder):
    Checkpointer(constant(1), folder, config="SEED: 1\n").save("x")
    path = Path(folder, "x.pth")
    data = path.read_bytes()
    path.write_bytes(flip(data, data.index(b"\0\0\x80?\0\0\x80?")))
    assert load_file(str(path), check_tensors=False)["config"] == "SEED: 1\n"
    with pytest.raises(SettingsError, match="damaged"):
        load_file(str(path))


def test_a_resume_reads_its_file_once(folder, monkeypatch):
    PeriodicCheckpointer(Checkpointer(constant(1), folder), 5, 10).step(9)
    checked = []
    testzip = zipfile.ZipFile.testzip
    monkeypatch.setattr(
        zipfile.ZipFile, "testzip", lambda self: (checked.append(self), testzip(self))[1]
    )
    checkpointer = Checkpointer(constant(0), folder)
    checkpointer.resume_or_load("")
    BestCheckpointer(checkpointer, "acc")
    assert len(checked) == 1


# Final files


def test_the_final_file_comes_first_and_a_numbered_one_is_its_second_name(folder, monkeypatch):
    made = []
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda *paths: (made.append(os.path.basename(paths[1])), replace(*paths))
    )
    PeriodicCheckpointer(Checkpointer(constant(1), folder), 5, 10).step(9)
    assert made == ["model_final.pth", "last_checkpoint", "model_0000009.pth"]
    assert os.path.samefile(Path(folder, made[0]), Path(folder, made[2]))


def test_where_links_are_refused_a_numbered_file_is_a_copy(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "refused")

    monkeypatch.setattr(os, "link", refuse)
    PeriodicCheckpointer(Checkpointer(constant(1), folder), 5, 10).step(9)
    final, numbered = (Path(folder, f"model_{name}.pth") for name in ("final", "0000009"))
    assert not os.path.samefile(final, numbered)
    assert final.read_bytes() == numbered.read_bytes()


def test_writing_one_of_two_names_anew_leaves_the_other_as_it_was(folder):
    checkpointer = Checkpointer(constant(1), folder)
    PeriodicCheckpointer(checkpointer, 5, 10).step(9)
    before = Path(folder, "model_0000009.pth").read_bytes()
    checkpointer.save("model_final", iteration=19)
    assert Path(folder, "model_0000009.pth").read_bytes() == before
    checkpointer.link(os.path.join(folder, "model_final.pth"), "model_0000019")
    checkpointer.link(os.path.join(folder, "model_final.pth"), "model_0000019")
    assert not any(name.endswith(".tmp") for name in names_in(folder))


@pytest.mark.parametrize("tagged", ["model_final.pth", "model_0000009.pth"])
def test_a_step_right_after_the_resume_of_the_last_iteration_writes_no_file_again(folder, tagged):
    PeriodicCheckpointer(Checkpointer(constant(1), folder), 5, 10).step(9)
    Path(folder, "last_checkpoint").write_text(tagged)
    before = {name: os.stat(Path(folder, name)) for name in names_in(folder) if "model" in name}
    checkpointer = Checkpointer(constant(0), folder)
    checkpointer.resume_or_load("")
    PeriodicCheckpointer(checkpointer, 5, 10).step(9)
    for name, old in before.items():
        new = os.stat(Path(folder, name))
        assert (new.st_ino, new.st_mtime_ns) == (old.st_ino, old.st_mtime_ns)


def test_a_step_right_after_the_resume_of_the_last_iteration_makes_a_missing_final_file(folder):
    checkpointer = Checkpointer(constant(1), folder)
    checkpointer.save("model_0000009", iteration=9)
    Path(folder, "model_final.pth").write_bytes(b"damaged")
    checkpointer = Checkpointer(constant(0), folder)
    checkpointer.resume_or_load("")
    PeriodicCheckpointer(checkpointer, 5, 10).step(9)
    assert load_file(os.path.join(folder, "model_final.pth"))["iteration"] == 9
    assert checkpointer.get_checkpoint_file().endswith("model_final.pth")


def test_a_final_file_of_a_shorter_run_is_older_than_the_files_after_it(folder):
    checkpointer = Checkpointer(constant(1), folder)
    for name, iteration in (("model_final", 9), ("model_0000005", 5), ("model_0000014", 14)):
        checkpointer.save(name, iteration=iteration)
    Path(folder, "last_checkpoint").unlink()
    assert Checkpointer(constant(0), folder).resume_or_load("") == {"iteration": 14}
    Path(folder, "model_0000014.pth").unlink()
    assert Checkpointer(constant(0), folder).resume_or_load("") == {"iteration": 9}


@pytest.mark.parametrize("max_to_keep", [None, 0])
def test_all_files_are_kept_by_none_and_by_0(folder, max_to_keep):
    periodic = PeriodicCheckpointer(Checkpointer(constant(1), folder), 1, max_to_keep=max_to_keep)
    for iteration in range(4):
        periodic.step(iteration)
    assert numbered(folder) == [0, 1, 2, 3]


def test_files_of_the_keep_period_stay_beside_the_newest_ones(folder):
    checkpointer = Checkpointer(constant(1), folder)
    periodic = PeriodicCheckpointer(checkpointer, 1, max_to_keep=2, keep_period=4)
    for iteration in range(11):
        periodic.step(iteration)
    assert numbered(folder) == [3, 7, 9, 10]


# On two ranks


class Gathers(State):
    """A checkpointable whose methods communicate, as those of a sharded optimizer do."""

    def state_dict(self):
        return {"value": comm.all_gather(self.value)}

    def load_state_dict(self, state):
        comm.synchronize()
        self.value = state["value"][comm.get_rank()]


def resumes_what_gathers():
    folder = os.path.join(os.environ["TEST_FOLDER"], "gathers")
    model = nn.Linear(1, 1)
    Checkpointer(model, folder, other=Gathers(comm.get_rank())).save("x")
    comm.synchronize()
    other = Gathers(-1)
    Checkpointer(model, folder, other=other).resume_or_load("")
    return other.value


def resumes_states_of_each_rank():
    folder = os.path.join(os.environ["TEST_FOLDER"], "per_rank")
    cursor = State(10 * comm.get_rank())
    Checkpointer(nn.Linear(1, 1), folder, per_rank={"cursor": cursor}).save("x")
    comm.synchronize()
    cursor = State(-1)
    Checkpointer(nn.Linear(1, 1), folder, per_rank={"cursor": cursor}).resume_or_load("")
    return cursor.value


def resumes_buffers_of_other_modules():
    folder = os.path.join(os.environ["TEST_FOLDER"], "buffers")
    model, average = (nn.Sequential(nn.BatchNorm1d(1)) for _ in range(2))
    average = torch.optim.swa_utils.AveragedModel(average)
    average.module[0].running_mean.fill_(10.0 + comm.get_rank())
    Checkpointer(model, folder, average=average).save("x")
    comm.synchronize()
    saved = load_file(os.path.join(folder, "x.pth"))["average"]["module.0.running_mean"]
    average = torch.optim.swa_utils.AveragedModel(model)
    Checkpointer(model, folder, average=average).resume_or_load("")
    return saved.item(), average.module[0].running_mean.item()


def refuses_sharded_tensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    folder = os.path.join(os.environ["TEST_FOLDER"], "sharded")
    os.makedirs(folder, exist_ok=True)
    mesh = init_device_mesh("cpu", (2,))
    other = State(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    checkpointer = Checkpointer(nn.Linear(4, 2), folder, per_rank={"other": other})
    with pytest.raises(SettingsError) as caught:
        checkpointer.save("x")
    comm.synchronize()
    return str(caught.value), names_in(folder)


def refuses_weights_that_are_not_finite_on_one_rank():
    folder = os.path.join(os.environ["TEST_FOLDER"], "not finite")
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(model, folder)
    if comm.get_rank() == 1:
        with torch.no_grad():
            model.bias.fill_(math.nan)
    with pytest.raises(NonFiniteError) as caught:
        checkpointer.save("x")
    return str(caught.value), os.path.exists(folder)


def own_folder(name):
    """A folder that the other rank does not see."""
    return os.path.join(os.environ["TEST_FOLDER"], name, str(comm.get_rank()))


def error_of_a_resume(folder):
    with pytest.raises(SettingsError) as caught:
        Checkpointer(nn.Linear(1, 1), folder).resume_or_load("")
    return str(caught.value)


def refuses_to_resume_without_a_shared_folder():
    """The errors if rank 1 sees no file, if rank 0 sees none, if they see different ones."""
    errors = []
    folder = own_folder("only rank 0")
    Checkpointer(nn.Linear(1, 1), folder).save("x")
    errors.append(error_of_a_resume(folder))
    folder = own_folder("only rank 1")
    Checkpointer(nn.Linear(1, 1), folder, save_to_disk=comm.get_rank() == 1).save("x")
    errors.append(error_of_a_resume(folder))
    folder = own_folder("different")
    model = constant(comm.get_rank(), nn.Linear(1, 1))
    Checkpointer(model, folder, save_to_disk=True).save("x", iteration=1)
    errors.append(error_of_a_resume(folder))
    with pytest.raises(SettingsError) as caught:
        Checkpointer(nn.Linear(1, 1)).load(os.path.join(folder, "x.pth"))
    return [*errors, str(caught.value)]


def resumes_equal_copies():
    """Each machine may have a copy of its own, as long as they are equal."""
    folder = own_folder("equal")
    Checkpointer(constant(3, nn.Linear(1, 1)), folder, save_to_disk=True).save("x", iteration=1)
    model = constant(0, nn.Linear(1, 1))
    return Checkpointer(model, folder).resume_or_load("")["iteration"], value_of(model)


def saves_and_resumes():
    """The buffers saved, those of this rank afterwards, and those that it resumed with."""
    folder = os.environ["TEST_FOLDER"]
    model, other = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    model.running_mean += comm.get_rank()
    checkpointer = Checkpointer(model, folder)
    PeriodicCheckpointer(checkpointer, 1, 10, max_to_keep=1).step(3)
    comm.synchronize()
    saved = torch.load(os.path.join(folder, "model_0000003.pth"))["model"]["running_mean"]
    Checkpointer(other, folder).resume_or_load("")
    single = nn.BatchNorm1d(1)
    Checkpointer(single).load(os.path.join(folder, "model_0000003.pth"))
    every = saved, model.running_mean, other.running_mean, single.running_mean
    return [values.item() for values in every]


def refuses_damaged_files():
    folder = os.environ["TEST_FOLDER"]
    comm.synchronize()
    if comm.is_main_process():
        Path(folder, "model_0000003.pth").write_bytes(b"")
    with pytest.raises(SettingsError) as caught:
        Checkpointer(nn.BatchNorm1d(1), folder).resume_or_load("")
    return str(caught.value)


def saves_the_best():
    folder = os.environ["TEST_FOLDER"]
    best = BestCheckpointer(Checkpointer(nn.BatchNorm1d(1), folder), "acc")
    best.step(5, {"acc": 0.5})
    comm.synchronize()
    again = BestCheckpointer(Checkpointer(nn.BatchNorm1d(1), folder), "acc")
    return best.best, again.best, names_in(folder)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """{name of a check: [what rank 0 returned, what rank 1 returned]}"""
    ranks = run_on_ranks(
        saves_and_resumes,
        refuses_damaged_files,
        saves_the_best,
        resumes_what_gathers,
        resumes_states_of_each_rank,
        resumes_buffers_of_other_modules,
        refuses_sharded_tensors,
        refuses_weights_that_are_not_finite_on_one_rank,
        refuses_to_resume_without_a_shared_folder,
        resumes_equal_copies,
        TEST_FOLDER=str(tmp_path_factory.mktemp("both")),
    )
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def test_the_mean_of_the_buffers_is_saved_and_each_rank_resumes_with_its_own(both):
    assert both["saves_and_resumes"] == [[0.5, 0.0, 0.0, 0.5], [0.5, 1.0, 1.0, 0.5]]


def test_damaged_files_are_an_error_on_every_rank(both):
    first, second = both["refuses_damaged_files"]
    assert first == second


def test_an_object_whose_state_dict_gathers_is_saved_and_resumed(both):
    assert both["resumes_what_gathers"] == [0, 1]


def test_each_rank_gets_its_own_state_of_the_objects_that_differ(both):
    assert both["resumes_states_of_each_rank"] == [0, 10]


def test_each_rank_gets_its_own_buffers_of_the_other_modules_too(both):
    assert both["resumes_buffers_of_other_modules"] == [(10.5, 10.0), (10.5, 11.0)]


def test_a_divided_tensor_in_the_state_of_each_rank_is_refused_before_anything_is_written(both):
    first, second = both["refuses_sharded_tensors"]
    assert first == second
    error, names = first
    assert names == []
    assert error.startswith("per_rank.other.value is divided between the ranks")
    assert "\n" not in error


def test_weights_that_are_not_finite_on_one_rank_are_an_error_on_all(both):
    first, second = both["refuses_weights_that_are_not_finite_on_one_rank"]
    assert first == second
    assert "not finite: bias" in first[0]
    assert first[1] is False


def test_ranks_that_do_not_see_the_same_file_are_refused_in_one_line_alike(both):
    first, second = both["refuses_to_resume_without_a_shared_folder"]
    shared = "OUTPUT_DIR must be a folder that all ranks share"
    # Each rank has its own folder here, so the path in the message is that of the rank.
    for error, words in zip(
        first,
        (
            rf"rank 1 cannot read what rank 0 reads: checkpoint .* does not exist: {shared}",
            rf"--resume: rank 1 sees checkpoints in .*, and rank 0 sees none: {shared}",
            rf"x.pth on rank 1 is not the file that rank 0 reads \(.* bytes, .*\): {shared}",
            r"x.pth on rank 1 is not .*: MODEL.WEIGHTS must be the same file on all machines",
        ),
    ):
        assert re.search(words, error)
        assert "\n" not in error
    assert [re.sub(r"/\d/|/\d,", "/", error) for error in first] == [
        re.sub(r"/\d/|/\d,", "/", error) for error in second
    ]


def test_equal_copies_of_a_file_are_as_good_as_one(both):
    assert both["resumes_equal_copies"] == [(1, 3), (1, 3)]


def test_every_rank_knows_the_best_value_and_one_writes(both):
    names = ["last_checkpoint", "model_0000003.pth", "model_best.json", "model_best.pth"]
    assert both["saves_the_best"] == [(0.5, 0.5, names)] * 2


def test_messages_name_the_file_that_a_resume_would_take(folder):
    checkpointer = Checkpointer(constant(1), folder)
    checkpointer.save("model_0000004", iteration=4)
    BestCheckpointer(checkpointer, "acc").step(5, {"acc": 0.5})
    assert last_checkpoint() == os.path.join(folder, "model_0000004.pth")


def test_a_disk_that_is_full_within_a_tensor_is_told_as_such(folder, monkeypatch):
    def full(data, file):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos")  # as torch does then

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left") as caught:
        Checkpointer(constant(1), folder).save("model_0000004")
    assert caught.value.filename.endswith("model_0000004.pth")
    assert names_in(folder) == []


def test_a_file_that_has_the_name_of_another_iteration_is_passed_over(folder, warnings):
    checkpointer = Checkpointer(constant(1), folder)
    checkpointer.save("model_0000004", iteration=4)
    shutil.copy(Path(folder, "model_0000004.pth"), Path(folder, "model_0000099.pth"))
    Path(folder, "last_checkpoint").unlink()
    assert Checkpointer(constant(0), folder).resume_or_load("") == {"iteration": 4}
    assert "model_0000099" in warnings()[0]


def test_only_files_that_a_save_has_begun_are_tidied_up(folder):
    Checkpointer(constant(1), folder).save("model_0000004", iteration=4)
    for name in ("model_0000009.pth.tmp", "mine.pth.tmp"):
        Path(folder, name).write_bytes(b"half")
    Path(folder, "model_x.pth.tmp").mkdir()
    checkpointer = Checkpointer(constant(0), folder)
    checkpointer.resume_or_load("")
    checkpointer.save("model_0000005", iteration=5)
    left = names_in(folder)
    assert "mine.pth.tmp" in left
    assert "model_0000009.pth.tmp" not in left


def test_a_best_file_that_is_damaged_is_told_and_saved_again(folder, warnings):
    checkpointer = Checkpointer(constant(1), folder)
    BestCheckpointer(checkpointer, "acc").step(3, {"acc": 0.75})
    os.truncate(Path(folder, "model_best.pth"), 100)
    BestCheckpointer(checkpointer, "acc").step(5, {"acc": 0.5})
    assert "best value so far is not known" in warnings()[0]
    assert torch.load(Path(folder, "model_best.pth"))["iteration"] == 5
