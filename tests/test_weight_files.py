"""Weights are read from whatever people keep them in, and nothing that a file names is run."""

import argparse
import contextlib
import functools
import io
import os
import pickle
import struct
import subprocess
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from safetensors.torch import save
from torch import nn

from mapet_mm.weight_files import (
    SAFE_GLOBALS,
    WeightFileError,
    only_safe_globals,
    read_weights,
    write_weights,
)

WEIGHTS = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}


class Calls:
    """Pickled as a call: whoever unpickles it, makes it."""

    def __init__(self, function: Callable, *args: object):
        self.call = function, args

    def __reduce__(self):
        return self.call


def opening(canary: Path) -> str:
    return f"open({str(canary)!r}, 'w').close()"


# Each leaves a file behind when it is run.
OBJECTS = {
    "eval": lambda canary: Calls(eval, opening(canary)),
    "exec": lambda canary: Calls(exec, opening(canary)),
    "os.system": lambda canary: Calls(os.system, f"touch {canary}"),
    "subprocess.call": lambda canary: Calls(subprocess.call, ["touch", str(canary)]),
    "functools.partial": lambda canary: Calls(functools.partial(eval, opening(canary))),
    "a class of torch": lambda canary: Calls(torch.PyTorchFileWriter, str(canary)),
    "a path's method": lambda canary: Calls(Path.touch, canary),
    "an array's method": lambda canary: Calls(np.ndarray.tofile, np.ones(1), str(canary)),
}


# What Python's pickler would not write, by hand.
def named(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def dotted(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def call(function: bytes, *args: bytes) -> bytes:
    return function + pickle.MARK + b"".join(args) + pickle.TUPLE + pickle.REDUCE


def pickled(*parts: bytes, protocol: int = 2) -> bytes:
    return pickle.PROTO + bytes([protocol]) + b"".join(parts) + pickle.STOP


def dotted_name_of_torch(canary: Path) -> bytes:
    get = dotted("torch._utils", "_rebuild_tensor.__builtins__.get")
    return pickled(call(call(get, text("eval")), text(opening(canary))), protocol=4)


def class_of_torch(canary: Path) -> bytes:
    return pickled(call(named("torch", "PyTorchFileWriter"), text(str(canary))))


def attributes_of_attributes(canary: Path) -> bytes:
    attribute = functools.partial(call, named("builtins", "getattr"))
    get = attribute(attribute(named("torch._utils", "_rebuild_tensor"), text("__builtins__")), text("get"))
    return pickled(call(call(get, text("eval")), text(opening(canary))))


def attributes_called_by_torch_itself(canary: Path) -> bytes:
    """Calls what it finds through a function of torch's own list, which calls what it is given."""
    attribute = functools.partial(call, named("builtins", "getattr"))
    get = attribute(attribute(named("torch._utils", "_rebuild_tensor"), text("__builtins__")), text("get"))
    kind, none = (attribute(of, text("__class__")) for of in (named("_codecs", "encode"), pickle.NONE))
    calls = functools.partial(call, named("torch._tensor", "_rebuild_from_type_v2"))
    found = calls(get, kind, text("eval") + pickle.TUPLE1, pickle.NONE)
    return pickled(calls(found, none, text(opening(canary)) + pickle.TUPLE1, pickle.NONE))


def state_that_plants_a_setter_of_state(canary: Path) -> bytes:
    planted = pickle.EMPTY_DICT + text("__setstate__") + named("builtins", "eval") + pickle.SETITEM
    made = named("argparse", "Namespace") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    return pickled(made, planted, pickle.BUILD, text(opening(canary)), pickle.BUILD)


def name_of_python_2(canary: Path) -> bytes:
    return pickled(call(named("__builtin__", "eval"), text(opening(canary))))


def instance_of_protocol_0(canary: Path) -> bytes:
    return (
        pickle.MARK + pickle.STRING + f"{opening(canary)!r}\n".encode() + b"ibuiltins\neval\n" + pickle.STOP
    )


PICKLES = [
    dotted_name_of_torch,
    class_of_torch,
    attributes_of_attributes,
    attributes_called_by_torch_itself,
    state_that_plants_a_setter_of_state,
    name_of_python_2,
    instance_of_protocol_0,
]


def zipped(content: bytes, path: Path) -> None:
    """A checkpoint of that pickle, as `torch.save` lays it out."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3")


def weights_or_refusal(path: Path) -> dict | str:
    """What `read_weights` gives; or its one line."""
    try:
        return read_weights(path)
    except WeightFileError as error:
        message = str(error)
    assert "\n" not in message
    assert str(path) in message
    return message


def assert_runs(load: Callable[[], object], canary: Path) -> None:
    """The attack is a real one: an unpickler without restrictions falls for it."""
    assert not canary.exists(), "the checkpoint ran code"
    with contextlib.suppress(Exception):  # what the call returns may be of no use to the loader
        load()
    assert canary.exists()
    canary.unlink()


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("attack", OBJECTS)
def test_an_object_beside_the_weights_is_not_run(attack, new_format, tmp_path):
    path, canary = tmp_path / "file.pth", tmp_path / "canary"
    content = {"state_dict": WEIGHTS, "meta": OBJECTS[attack](canary)}
    torch.save(content, path, _use_new_zipfile_serialization=new_format)
    read = weights_or_refusal(path)
    if new_format and attack in ("eval", "exec", "subprocess.call", "a class of torch"):
        torch.testing.assert_close(read, WEIGHTS)
    else:  # calls what the file made, or is of a module that torch never lets through
        assert "is no checkpoint (" in read
    assert_runs(lambda: torch.load(path, weights_only=False), canary)


@pytest.mark.parametrize("attack", PICKLES)
def test_a_pickle_made_by_hand_is_not_run(attack, tmp_path):
    path, canary = tmp_path / "file.pth", tmp_path / "canary"
    zipped(attack(canary), path)
    assert "file.pth" in weights_or_refusal(path)
    path.write_bytes(attack(canary))
    assert "is no checkpoint (" in weights_or_refusal(path)
    assert_runs(lambda: pickle.loads(attack(canary)), canary)


@pytest.mark.parametrize("protocol", range(6))
def test_no_pickle_protocol_is_run(protocol, tmp_path):
    path, canary = tmp_path / "file.pth", tmp_path / "canary"
    content = pickle.dumps(OBJECTS["eval"](canary), protocol=protocol)
    zipped(content, path)
    weights_or_refusal(path)
    path.write_bytes(content)
    weights_or_refusal(path)
    assert_runs(lambda: pickle.loads(content), canary)


def test_the_tar_format_of_old_is_refused_unread(tmp_path):
    path, canary = tmp_path / "model.tar", tmp_path / "canary"
    content = pickle.dumps(OBJECTS["eval"](canary))
    with tarfile.open(path, "w") as file:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    assert "with files saved in the legacy .tar format)" in weights_or_refusal(path)
    assert_runs(lambda: torch.load(path, weights_only=False), canary)


def test_only_storages_are_looked_up_by_persistent_ids(tmp_path):
    identity = pickle.MARK + text("module") + named("builtins", "eval") + text("1") + pickle.TUPLE
    zipped(pickled(identity, pickle.BINPERSID), tmp_path / "file.pth")
    assert "Only persistent_load of storage is allowed" in weights_or_refusal(tmp_path / "file.pth")


def test_attributes_that_a_file_gives_to_its_dict_are_not_called(tmp_path):
    content = OrderedDict(state_dict=OrderedDict(WEIGHTS))
    content.get = content["state_dict"].get = content["state_dict"].keys = torch.Size
    torch.save(content, tmp_path / "file.pth")
    torch.testing.assert_close(read_weights(tmp_path / "file.pth"), WEIGHTS)


def test_the_authors_checkpoint_is_read_beside_its_arguments_and_log_buffers(tmp_path):
    """Their .tar holds an argparse namespace; MMEngine's hold log buffers with NumPy's arrays and numbers."""
    buffer = HistoryBuffer(np.ones(3), np.ones(3))
    content = dict(
        epoch=3, state_dict=WEIGHTS, args=argparse.Namespace(lr=1.0), hub=buffer, best=np.float32(1)
    )
    for new_format in (True, False):
        torch.save(content, tmp_path / "model.tar", _use_new_zipfile_serialization=new_format)
        torch.testing.assert_close(read_weights(tmp_path / "model.tar"), WEIGHTS)


def test_what_stands_among_the_weights_and_is_no_tensor_is_named(tmp_path):
    torch.save({"a": torch.ones(1), "b": argparse.Namespace()}, tmp_path / "file.pth")
    with pytest.raises(WeightFileError, match=r"file.pth: `b` is a argparse.Namespace, where a tensor"):
        read_weights(tmp_path / "file.pth")


def load_by_safe_globals(content: bytes) -> object:
    with only_safe_globals():
        return torch.load(io.BytesIO(content), weights_only=True)


def saved(content: object) -> bytes:
    torch.save(content, buffer := io.BytesIO())
    return buffer.getvalue()


def test_the_safe_globals_are_enough_for_what_mmengine_logs():
    buffer = HistoryBuffer([1.0, 2.0], [1, 1])
    numbers = [np.float32(0.5), np.float64(0.5), np.int64(2), np.bool_(True), np.arange(3, dtype=np.uint8)]
    content = dict(hub=buffer, numbers=numbers, args=argparse.Namespace(lr=0.1))
    read = load_by_safe_globals(saved(content))
    assert read["hub"].statistics("mean") == 1.5
    assert all(
        np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(read["numbers"], numbers, strict=True)
    )
    assert read["args"] == argparse.Namespace(lr=0.1)


def test_numbers_written_by_numpy_1_are_safe_too(tmp_path):
    content = pickle.dumps(np.float64(0.5), protocol=2).replace(b"numpy._core.", b"numpy.core.")
    zipped(content, tmp_path / "file.pth")
    assert load_by_safe_globals((tmp_path / "file.pth").read_bytes()) == 0.5


@pytest.mark.parametrize("attack", PICKLES)
def test_the_safe_globals_run_nothing(attack, tmp_path):
    zipped(attack(tmp_path / "canary"), tmp_path / "file.pth")
    with pytest.raises(pickle.UnpicklingError), only_safe_globals():
        torch.load(tmp_path / "file.pth", weights_only=True)
    assert_runs(lambda: pickle.loads(attack(tmp_path / "canary")), tmp_path / "canary")


def test_what_the_process_allowed_is_allowed_again_after_a_file_is_read(tmp_path):
    torch.save(WEIGHTS, tmp_path / "file.pth")
    with torch.serialization.safe_globals([Calls, getattr]):
        before = set(torch.serialization.get_safe_globals())
        read_weights(tmp_path / "file.pth")
        with only_safe_globals():
            assert set(torch.serialization.get_safe_globals()) == set(SAFE_GLOBALS)
            torch.serialization.add_safe_globals([Path])  # as torch does itself when DTensor is imported
        assert set(torch.serialization.get_safe_globals()) == before | {Path}
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(before - {Calls, getattr}))


@pytest.mark.parametrize("name", ["file.pth", "file.pt", "file.safetensors", "model.tar", "file"])
def test_the_content_decides_what_a_file_is_not_its_name(name, tmp_path):
    for content in (saved({"model": WEIGHTS}), save(WEIGHTS)):
        (tmp_path / name).write_bytes(content)
        torch.testing.assert_close(read_weights(str(tmp_path / name)), WEIGHTS)


def test_a_folder_is_read_by_its_safetensors_file(tmp_path):
    with pytest.raises(WeightFileError, match=f"{tmp_path}/model.safetensors does not exist"):
        read_weights(tmp_path)
    write_weights(tmp_path / "model.safetensors", WEIGHTS)
    torch.testing.assert_close(read_weights(tmp_path), WEIGHTS)


def torch_script() -> bytes:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "does not exist"),
        (b"", r"is no checkpoint \(it is empty\)"),
        (b"not a checkpoint", "is no checkpoint"),
        (b"<!DOCTYPE html><html>404</html>", "is a web page: the download failed"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS's pointer .* `git lfs pull`"),
        (b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "is no checkpoint"),
        (save(WEIGHTS)[:-1], "is no checkpoint"),
        (torch_script(), "is no checkpoint .*torchscript"),
        (saved([1, 2]), "holds no weights, but a list"),
        (saved({"state_dict": {"epoch": 3}}), "holds no weights: no tensors"),
    ],
)
def test_files_without_weights_are_one_clear_line(content, match, tmp_path):
    for name in ("file.pth", "file.safetensors"):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightFileError, match=f"{name} {match}|{name} .*{match}") as error:
            read_weights(tmp_path / name)
        assert "\n" not in str(error.value)


def test_a_truncated_checkpoint_is_one_clear_line(tmp_path):
    path = tmp_path / "file.pth"
    write_weights(path, {"backbone.cls_token": torch.zeros(1, 1, 300)})
    whole = path.read_bytes()
    for size in range(0, len(whole), 100):
        path.write_bytes(whole[:size])
        assert "file.pth is no checkpoint (" in weights_or_refusal(path)


def test_tensors_that_share_memory_are_written_apart(tmp_path):
    both = {"a": (a := torch.arange(4.0)), "b": a, "c": a.view(2, 2).T}
    write_weights(tmp_path / "file.safetensors", both)
    torch.testing.assert_close(read_weights(tmp_path / "file.safetensors"), both)
