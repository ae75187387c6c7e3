"""Weights are read from the usual kinds of files, and nothing that a file names is run."""

import argparse
import contextlib
import functools
import io
import os
import pickle
import socket
import struct
import subprocess
import threading
import time
import urllib.request
import zipfile
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from safetensors.torch import save

from mapet_mm import weight_files
from mapet_mm.structures import Codebook, TokenStore
from mapet_mm.utils.errors import UserError
from mapet_mm.weight_files import (
    SAFE_GLOBALS,
    WeightFileError,
    fetch,
    limited_silence,
    only_safe_globals,
    read_checkpoint,
    read_weights,
    require_answer,
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


def saved(content: object, **options) -> bytes:
    torch.save(content, buffer := io.BytesIO(), **options)
    return buffer.getvalue()


def a_call(canary: Path) -> bytes:
    return saved({"state_dict": WEIGHTS, "meta": Calls(os.system, f"touch {canary}")})


def a_call_in_the_old_format(canary: Path) -> bytes:
    content = {"state_dict": WEIGHTS, "meta": Calls(subprocess.call, ["touch", str(canary)])}
    return saved(content, _use_new_zipfile_serialization=False)


def attributes_of_attributes(canary: Path) -> bytes:
    """By hand, with the `getattr` that MMEngine allows: to the builtins of a function of torch."""

    def named(module: str, name: str) -> bytes:
        return pickle.GLOBAL + f"{module}\n{name}\n".encode()

    def text(value: str) -> bytes:
        return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()

    def call(function: bytes, *args: bytes) -> bytes:
        return function + pickle.MARK + b"".join(args) + pickle.TUPLE + pickle.REDUCE

    attribute = functools.partial(call, named("builtins", "getattr"))
    get = attribute(attribute(named("torch._utils", "_rebuild_tensor"), text("__builtins__")), text("get"))
    content = call(call(get, text("eval")), text(opening(canary)))
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as file:
        file.writestr("archive/data.pkl", pickle.PROTO + b"\x02" + content + pickle.STOP)
        file.writestr("archive/version", "3")
    return buffer.getvalue()


@pytest.mark.parametrize("attack", [a_call, a_call_in_the_old_format, attributes_of_attributes])
def test_an_object_that_runs_code_is_refused_in_one_line(attack, tmp_path):
    path, canary = tmp_path / "file.pth", tmp_path / "canary"
    path.write_bytes(attack(canary))
    with torch.serialization.safe_globals([getattr]), pytest.raises(WeightFileError) as error:
        read_weights(path)
    assert not canary.exists()
    assert str(error.value).startswith(f"{path} is not a checkpoint of tensors and plain values (")
    assert "\n" not in str(error.value)
    with contextlib.suppress(Exception):  # the attack is a real one
        torch.load(path, weights_only=False)
    assert canary.exists()


def test_the_lists_of_the_process_are_as_before_after_a_file_is_read(tmp_path):
    write_weights(tmp_path / "file.pth", WEIGHTS)
    with torch.serialization.safe_globals([Calls, getattr]):
        before = set(torch.serialization.get_safe_globals())
        read_weights(tmp_path / "file.pth")
        with only_safe_globals():
            assert set(torch.serialization.get_safe_globals()) == set(SAFE_GLOBALS)
            torch.serialization.add_safe_globals([Path])  # as torch does itself when DTensor is imported
        assert set(torch.serialization.get_safe_globals()) == before | {Path}


def test_the_authors_and_mmengines_checkpoints_are_read_beside_their_other_objects(tmp_path):
    """Arguments in the authors'; log buffers, and NumPy's numbers in them, in MMEngine's."""
    others = dict(
        epoch=3,
        args=argparse.Namespace(lr=1.0),
        hub=HistoryBuffer(np.ones(3), np.ones(3)),
        numbers=[np.float32(0.5), np.float64(0.5), np.int64(2), np.bool_(True), np.arange(3, dtype=np.uint8)],
        meta={"cfg": "x = 1", "epoch": 3},
    )
    for new_format in (True, False):
        content = saved(others | {"state_dict": WEIGHTS}, _use_new_zipfile_serialization=new_format)
        (tmp_path / "model.tar").write_bytes(content)
        weights, meta = read_checkpoint(tmp_path / "model.tar")
        torch.testing.assert_close(weights, WEIGHTS)
        assert meta == {"cfg": "x = 1", "epoch": 3}
        with only_safe_globals():
            read = torch.load(tmp_path / "model.tar", weights_only=True)
        assert (read["hub"].statistics("mean"), read["args"].lr) == (1.0, 1.0)
        assert [(type(a), a.dtype) for a in read["numbers"]] == [
            (type(b), b.dtype) for b in others["numbers"]
        ]


@pytest.mark.parametrize("name", ["file.pth", "file.safetensors", "model.tar", "file"])
def test_the_content_decides_the_format_not_the_name(name, tmp_path):
    for content in (saved(WEIGHTS), saved({"model": WEIGHTS}), save(WEIGHTS)):
        (tmp_path / name).write_bytes(content)
        torch.testing.assert_close(read_weights(str(tmp_path / name)), WEIGHTS)


def test_averaged_weights_beside_the_others_are_chosen_by_name(tmp_path):
    averaged = {name: value + 1 for name, value in WEIGHTS.items()}
    torch.save({"model": WEIGHTS, "model_ema": averaged}, tmp_path / "file.pth")
    with pytest.raises(WeightFileError, match="`model` and `model_ema`"):
        read_weights(tmp_path / "file.pth")
    torch.testing.assert_close(read_weights(tmp_path / "file.pth", "model_ema"), averaged)
    torch.testing.assert_close(read_weights(tmp_path / "file.pth", "model"), WEIGHTS)


def test_names_come_without_those_of_wrappers_unless_two_would_be_one(tmp_path):
    names = ["module.a.w", "_orig_mod.module.b.w", "c._orig_mod.w", "d.0._checkpoint_wrapped_module.e.w", "n"]
    weights = {name: torch.full((1,), float(index)) for index, name in enumerate(names)}
    plain = dict(zip(("a.w", "b.w", "c.w", "d.0.e.w", "n"), weights.values(), strict=True))
    for content in (saved(weights), saved({"state_dict": weights}), save(weights)):
        (tmp_path / "file").write_bytes(content)
        assert read_weights(tmp_path / "file") == plain
    twice = {"module.a": torch.zeros(1), "a": torch.ones(1)}
    torch.save(twice, tmp_path / "file")
    assert read_weights(tmp_path / "file") == twice


REFUSED = [
    (None, "does not exist"),
    (b"", "EOFError"),
    (b"<!DOCTYPE html><html>404</html>", "not a checkpoint"),
    (b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "not a checkpoint"),
    (save(WEIGHTS)[:-1], "not a checkpoint"),
    (saved(WEIGHTS)[:-1], "not a checkpoint"),
    (saved({"a": torch.ones(1), "b": Calls(getattr, HistoryBuffer, "update")}), "attribute 'update'"),
    (saved([1, 2]), "no tensors"),
    (saved({"teacher": {}, "epoch": 3}), "`teacher`, `epoch`"),
    (
        saved({"student": WEIGHTS, "teacher": WEIGHTS, "loss": {"a": torch.ones(1)}}),
        "under `student`, `teacher`",
    ),
    (saved({"student": WEIGHTS, "teacher": WEIGHTS, "loss": {"a": torch.ones(1)}}), "--key teacher"),
]


@pytest.mark.parametrize(("content", "noun"), REFUSED)
def test_files_without_weights_are_refused_in_one_line(content, noun, tmp_path):
    path = tmp_path / "file.pth"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WeightFileError, match=noun) as error:
        read_weights(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_what_is_written_is_read_from_a_file_or_its_folder(tmp_path):
    both = {"a": (a := torch.arange(4.0)), "b": a, "c": a.view(2, 2).T}  # share memory
    write_weights(tmp_path / "new" / "model.safetensors", both, {"epoch": 3})
    weights, meta = read_checkpoint(tmp_path / "new")
    torch.testing.assert_close(weights, both)
    assert meta["epoch"] == "3"
    with pytest.raises(WeightFileError, match=r"\.safetensors or \.pth"):
        write_weights(tmp_path / "file.npz", both)


def test_a_file_at_an_address_is_fetched_once_and_read_safely(tmp_path, monkeypatch):
    fetched, canary = [], tmp_path / "canary"
    contents = {"https://host/weights.pth": saved(WEIGHTS), "https://host/evil.pth": a_call(canary)}

    def download(address: str, file: Path) -> None:
        fetched.append(address)
        file.write_bytes(contents[address])

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(weight_files, "download", download)
    for _ in range(2):
        torch.testing.assert_close(read_weights("https://host/weights.pth"), WEIGHTS)
    with pytest.raises(WeightFileError, match="system"):
        read_weights("https://host/evil.pth")
    assert fetched == list(contents)
    assert not canary.exists()


def test_addresses_that_end_alike_have_files_of_their_own_under_their_own_names(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(weight_files, "download", lambda url, file: file.write_text(url))
    addresses = [f"https://host/{model}/resolve/main/pytorch_model.bin?x=1" for model in ("a", "b", "a")]
    files = [fetch(address) for address in addresses]
    assert [file.read_text() for file in files] == addresses
    assert {file.name for file in files} == {"pytorch_model.bin"}


@pytest.mark.parametrize("address", ["http://host/weights.pth", "s3://bucket/weights.pth"])
def test_weights_come_over_https_alone(address, monkeypatch):
    monkeypatch.setattr(weight_files, "download", lambda *_: pytest.fail("fetched"))
    with pytest.raises(WeightFileError, match="https"):
        read_weights(address)


class Publisher(BaseHTTPRequestHandler):
    """Serves weights whole, half of them, or says nothing for a second."""

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        if self.path == "/silent":
            time.sleep(1)
        return parsed

    def do_GET(self) -> None:
        content = save(WEIGHTS)
        self.send_response(200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.path == "/chunked":
            self.wfile.write(b"%x\r\n" % len(content))
        self.wfile.write(content if self.path == "/whole" else content[: len(content) // 2])
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def publisher(tmp_path, monkeypatch):
    """A publisher on this machine; its addresses have https:// as a certificate would allow."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Publisher)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urlopen = urllib.request.urlopen

    def without_tls(request: urllib.request.Request, timeout: float):
        request.full_url = request.full_url.replace("https://host", f"http://127.0.0.1:{server.server_port}")
        return urlopen(request, timeout=timeout)

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", without_tls)
    monkeypatch.setattr(weight_files, "SILENCE", 0.3)
    yield
    server.shutdown()
    server.server_close()


def test_a_file_is_said_to_be_fetched_and_comes_whole(publisher, capsys):
    torch.testing.assert_close(read_weights("https://host/whole"), WEIGHTS)
    assert "fetching https://host/whole\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("half", rf"broke off after {len(save(WEIGHTS)) // 2} of {len(save(WEIGHTS))} bytes: run the same"),
        ("chunked", r"could not fetch .*IncompleteRead.*check the network, or put the file at .*/chunked"),
        ("silent", r"could not fetch .*timed out.*check the network, or put the file at .*/silent"),
    ],
)
def test_a_download_that_breaks_off_or_is_silent_leaves_nothing_and_says_what_to_do(
    name, said, publisher, tmp_path
):
    for _ in range(2):
        with pytest.raises(WeightFileError, match=said):
            read_weights(f"https://host/{name}")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_libraries_give_up_a_silent_server_too(monkeypatch):
    monkeypatch.setattr(weight_files, "SILENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server, limited_silence(), pytest.raises(TimeoutError):
        urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}")
    assert socket.getdefaulttimeout() is None


def test_a_server_has_to_answer_whatever_it_says(publisher, capsys):
    require_answer("https://host/missing", "take the cache")  # 501: it serves no HEAD
    require_answer("https://nowhere.invalid/x", "take the cache")  # the library tells more
    with pytest.raises(WeightFileError, match=r"silent says nothing for 0\.3 s.*take the cache"):
        require_answer("https://host/silent", "take the cache")


def test_what_an_earlier_version_fetched_in_part_is_to_be_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(weight_files, "download", lambda _, file: file.write_bytes(save(WEIGHTS)[:-8]))
    with pytest.raises(WeightFileError, match=r"weights\.safetensors .*: remove it to fetch it again"):
        read_weights("https://host/weights.safetensors")


@pytest.mark.parametrize("what", ["codebook", "token store", "cached features"])
def test_no_other_file_that_is_read_runs_code(what, tmp_path):
    canary = tmp_path / "canary"
    if what == "codebook":
        path = tmp_path / "codebook.safetensors"
        read = partial(Codebook.load, path)
    elif what == "token store":
        store = TokenStore.create(tmp_path / "store", ["a"], (1, 1), 2, "tokenizer")
        store.write([0], np.zeros((1, 1, 1), np.uint16))
        (path,) = (tmp_path / "store" / "parts").iterdir()
        read = partial(TokenStore.open(tmp_path / "store").__getitem__, "a")
    else:
        path = tmp_path / "features.npy"
        np.save(path, np.array([Calls(os.system, f"touch {canary}")]), allow_pickle=True)
        read = partial(np.load, path)
    if what != "cached features":
        path.write_bytes(a_call(canary))
    with pytest.raises((UserError, ValueError)):
        read()
    assert not canary.exists()
