"""How the tools show an error: one line for what a user can put right, a traceback for a bug."""

import errno
import os
import signal

import pytest
from torch.utils.data import DataLoader

from mapet_mm.tokenizers import MissingTokensError
from mapet_mm.utils.errors import UserError, one_line_errors


class Failing:
    """A dataset, or a tool's `main`, that raises in whatever process runs it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise self.error

    def main(self) -> None:
        raise self.error

    def main_with_worker(self) -> None:
        next(iter(DataLoader(self, num_workers=1)))


@pytest.mark.parametrize("main", ["main", "main_with_worker"])
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("too many cooks"), "too many cooks"),
        (MissingTokensError("no `a.png`"), "no `a.png`"),
        (FileNotFoundError("no such image"), "no such image"),
        (ModuleNotFoundError("No module named 'tensorboard'"), "No module named 'tensorboard'"),
    ],
)
def test_an_error_that_a_user_can_put_right_is_one_line(error, line, main):
    with pytest.raises(SystemExit) as ended:
        one_line_errors(getattr(Failing(error), main))()
    assert ended.value.code == f"error: {line}"


class KilledWorker:
    """A dataset whose worker dies, as for lack of memory."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_was_killed_is_one_line_with_its_most_likely_causes():
    def main() -> None:
        next(iter(DataLoader(KilledWorker(), num_workers=1)))

    with pytest.raises(SystemExit, match=r"^error: DataLoader worker .* killed by signal.*--shm-size"):
        one_line_errors(main)()


@pytest.mark.usefixtures("signals_given_back")
def test_ctrl_c_is_one_line_with_the_exit_code_of_shells(capsys):
    with pytest.raises(SystemExit) as ended:
        one_line_errors(Failing(KeyboardInterrupt()).main)()
    signal.raise_signal(signal.SIGINT)  # the job that started it passes it on
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\nstopped by Ctrl-C\n"


@pytest.mark.usefixtures("signals_given_back")
@pytest.mark.parametrize("error", [UserError("too many cooks"), KeyboardInterrupt()])
def test_of_torchruns_processes_the_first_to_end_says_why(error, monkeypatch, tmp_path, capsys):
    said = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}/error.json"))
        with pytest.raises(SystemExit) as ended:
            one_line_errors(Failing(error).main)()
        said.append((ended.value.code, capsys.readouterr().err))
    if isinstance(error, UserError):
        assert said == [("error: too many cooks", ""), (1, "")]
    else:
        assert said == [(130, "\nstopped by Ctrl-C\n"), (130, "")]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_what_to_do(number):
    error = OSError(number, os.strerror(number), "run/tokens")
    with pytest.raises(SystemExit, match="'run/tokens': make room on that disk, then run the same command"):
        one_line_errors(Failing(error).main)()


def test_a_missing_dataset_says_what_to_do():
    error = FileNotFoundError(2, "No such file or directory", "data/imagenet/train")
    with pytest.raises(SystemExit, match="data/imagenet/train is missing"):
        one_line_errors(Failing(error).main)()


def test_a_missing_package_is_named_with_its_extra():
    error = ModuleNotFoundError("No module named 'sklearn'", name="sklearn.linear_model")
    with pytest.raises(SystemExit, match=r"mapet_mm\[evaluation\]"):
        one_line_errors(Failing(error).main)()


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RuntimeError("x"), AssertionError("x")])
def test_a_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        one_line_errors(Failing(error).main)()


def test_a_variable_shows_every_traceback(monkeypatch):
    monkeypatch.setenv("MAPET_MM_TRACEBACK", "1")
    with pytest.raises(UserError):
        one_line_errors(Failing(UserError("too many cooks")).main)()
