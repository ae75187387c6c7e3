"""How the tools show an error: one line for what a user can put right, a traceback for a bug."""

import os
import subprocess
import sys

import pytest
from torch.utils.data import DataLoader

from mapet_mm.datasets.transforms.token_grid import RandomFlipTokenGrid
from mapet_mm.tokenizers import MissingTokensError, TokenStoreError
from mapet_mm.utils.errors import PATIENCE_SECONDS, TRACEBACK, UserError, one_line_errors


def raising(error: Exception):
    def main() -> None:
        raise error

    return one_line_errors(main)


class Failing:
    """A dataset that raises in whatever process reads it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("too many cooks"), "too many cooks"),
        (TokenStoreError("no store"), "no store"),
        (MissingTokensError("no `a.png`"), "no `a.png`"),
        (FileNotFoundError(2, "No such file or directory", "x"), "[Errno 2] No such file or directory: 'x'"),
        (ModuleNotFoundError("No module named 'tensorboard'"), "No module named 'tensorboard'"),
        (
            ModuleNotFoundError("No module named 'faiss'", name="faiss"),
            "No module named 'faiss': pip install \"mapet_mm[faiss-cpu]\"",
        ),
        (
            ModuleNotFoundError("No module named 'sklearn'", name="sklearn.linear_model"),
            "No module named 'sklearn': pip install \"mapet_mm[evaluation]\"",
        ),
    ],
)
def test_what_a_user_can_put_right_is_one_line(error, line):
    with pytest.raises(SystemExit) as ended:
        raising(error)()
    assert ended.value.code == f"error: {line}"


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RuntimeError("x"), AssertionError("x")])
def test_a_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        raising(error)()


def test_a_bug_names_its_process_among_several(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError):
        raising(RuntimeError("x"))()
    assert capsys.readouterr().err == "process 3 of 4 ends with an error:\n"


def test_a_check_of_the_package_is_one_line_whatever_it_raises():
    with pytest.raises(SystemExit, match=r"^error: RandomFlipTokenGrid's prob must be in 0..1, got 2$"):
        one_line_errors(lambda: RandomFlipTokenGrid(prob=2))()


def test_an_error_in_the_packages_code_that_it_did_not_raise_is_a_bug():
    with pytest.raises(TypeError):
        one_line_errors(lambda: RandomFlipTokenGrid(prob="often"))()


@pytest.mark.parametrize("error", [MissingTokensError("no `a.png`"), FileNotFoundError("no such image")])
def test_an_error_in_a_workers_process_is_the_same_line(error):
    main = one_line_errors(lambda: next(iter(DataLoader(Failing(error), num_workers=1))))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == f"error: {error}"


def test_a_bug_in_a_workers_process_keeps_its_traceback():
    with pytest.raises(ValueError, match="Original Traceback"):
        one_line_errors(lambda: next(iter(DataLoader(Failing(ValueError("x")), num_workers=1))))()


def test_a_variable_shows_every_traceback(monkeypatch):
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(UserError):
        raising(UserError("too many cooks"))()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_any_more_ends_a_tool_without_a_word(monkeypatch, unbuffered):
    """As in `mapet-mm --help | head -1`."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mapet_mm.cli.main", "--help"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_processes_of_torchrun_let_the_first_one_speak(monkeypatch):
    waited = []
    monkeypatch.setattr("mapet_mm.utils.errors.time.sleep", waited.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "0")
    for rank, expected in (("0", []), ("1", [PATIENCE_SECONDS])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit, match="too many cooks"):
            raising(UserError("too many cooks"))()
        assert waited == expected
