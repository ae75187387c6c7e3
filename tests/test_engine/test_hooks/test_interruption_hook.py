"""A run that is told to end saves where it stands, and the same command goes on with the next batch."""

import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from torch.utils.data import DataLoader
from trainings import EPOCHS, HOOKS, StopAfter, build, same

from mapet_mm.engine.hooks import interruption_hook
from mapet_mm.engine.hooks.interruption_hook import InterruptionHook
from mapet_mm.engine.runners.resume import find_checkpoint
from mapet_mm.registry import HOOKS as TYPES
from mapet_mm.utils.errors import STOPPED
from mapet_mm.utils.loader_workers import outlive_signals
from mapet_mm.utils.signals import SIGNALS

pytestmark = pytest.mark.usefixtures("signals_given_back")
BY_EPOCH = dict(checkpoint=dict(type="CheckpointHook", interval=1))


def hooks(minutes=None, **others) -> dict:
    return {**HOOKS, "interruption": dict(type="mapet_mm.InterruptionHook", minutes=minutes), **others}


class Workers:
    """Those that loaders have started since this was made."""

    def __init__(self) -> None:
        self.others = torch.multiprocessing.active_children()  # of earlier tests

    def __iter__(self) -> Iterator[torch.multiprocessing.Process]:
        return (child for child in torch.multiprocessing.active_children() if child not in self.others)


class Tell(Hook):
    """Has another process send this one a signal after a step, and its loaders' workers, too."""

    def __init__(self, step: int, number: int, workers: bool = False) -> None:
        self.step, self.number = step, number
        self.workers = Workers() if workers else ()

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        if runner.iter + 1 == self.step:
            self.told = [*(worker.pid for worker in self.workers), os.getpid()]
            subprocess.run(["kill", f"-{int(self.number)}", *map(str, self.told)], check=True)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    build(folder, hooks=hooks(**BY_EPOCH)).train()
    return folder


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_that_is_told_to_end_goes_on_as_if_nothing_had_been(number, whole, tmp_path):
    told = build(tmp_path, hooks=hooks(**BY_EPOCH))
    told.register_hook(Tell(4, number))
    with pytest.raises(SystemExit) as ended:
        told.train()
    assert ended.value.code == STOPPED == 75
    latest = tmp_path / "latest.pth"
    assert find_checkpoint(Config(dict(work_dir=str(tmp_path)))) == str(latest)
    before = signal.getsignal(number)
    build(tmp_path, resume=True, hooks=hooks(**BY_EPOCH)).train()
    assert signal.getsignal(number) is before
    assert same(weights(whole / f"epoch_{EPOCHS}.pth"), weights(tmp_path / f"epoch_{EPOCHS}.pth"))
    assert not latest.exists()


class Hang(Hook):
    """A step that never ends, during which two signals come, so many seconds apart."""

    def __init__(self, monkeypatch, seconds: float) -> None:
        self.monkeypatch, self.seconds = monkeypatch, seconds

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        if runner.iter + 1 == 4:
            signal.raise_signal(signal.SIGTERM)
            now = time.monotonic()
            self.monkeypatch.setattr(interruption_hook.time, "monotonic", lambda: now + self.seconds)
            signal.raise_signal(signal.SIGINT)


def test_a_further_signal_after_ten_seconds_ends_a_step_that_hangs(tmp_path, monkeypatch):
    told = build(tmp_path, hooks=hooks())
    told.register_hook(Hang(monkeypatch, seconds=11))
    with pytest.raises(KeyboardInterrupt):
        told.train()
    assert not (tmp_path / "latest.pth").exists()


def test_a_signal_that_is_passed_on_within_ten_seconds_is_the_same(tmp_path, monkeypatch):
    told = build(tmp_path, hooks=hooks())
    told.register_hook(Hang(monkeypatch, seconds=9))
    with pytest.raises(SystemExit):
        told.train()
    assert torch.load(tmp_path / "latest.pth", weights_only=True)["meta"]["iter"] == 4


def test_under_nohup_the_run_goes_on_when_its_terminal_closes(tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = build(tmp_path, hooks=hooks(**BY_EPOCH))
    run.register_hook(Tell(4, signal.SIGHUP))
    run.train()
    assert (tmp_path / f"epoch_{EPOCHS}.pth").exists()


@pytest.mark.parametrize("number", SIGNALS)
def test_workers_of_all_loaders_outlive_a_signal_to_all_processes(number, tmp_path):
    """Slurm's reaches them as well: those of validation idle, and the run needs images for two steps more."""
    late = dict(type="mapet_mm.Late", minutes=None)
    told = build(tmp_path, workers=2, val_images=2, val_workers=1, hooks=hooks(interruption=late))
    told.register_hook(tell := Tell(4, number, workers=True))
    with pytest.raises(SystemExit) as ended:
        told.train()
    assert ended.value.code == 75
    assert len(tell.told) == 4
    assert torch.load(tmp_path / "latest.pth", weights_only=True)["meta"]["iter"] == 6
    for worker in tell.workers:
        worker.terminate()  # else whoever collects the loader waits for each


def test_a_worker_ends_at_its_loaders_sigterm_alone():
    """Python sends it when it ends, to workers that an error has kept, and waits for them."""
    workers = Workers()
    iterator = iter(outlive_signals(DataLoader(range(4), num_workers=1, persistent_workers=True)))
    assert next(iterator) == 0
    (worker,) = workers
    for number in SIGNALS:
        subprocess.run(["kill", f"-{int(number)}", str(worker.pid)], check=True)
    assert [int(item) for item in iterator] == [1, 2, 3]
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0


class Kill(Hook):
    """Kills the training's worker, or all, as a machine without memory does."""

    priority = "VERY_HIGH"

    def __init__(self, when: str, step: int) -> None:
        self.when, self.step = when, step
        self.workers = Workers()

    def kill(self, when: str, runner) -> None:
        if (when, runner.iter + 1) == (self.when, self.step):
            for worker in self.workers:
                worker.kill()
            time.sleep(0.5)

    def before_train_iter(self, runner, *args, **kwargs) -> None:
        self.kill("before the step", runner)

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        self.kill("in the step", runner)

    def after_val_iter(self, runner, *args, **kwargs) -> None:
        self.kill("in the validation", runner)


@pytest.fixture
def pytorch_looks_after_workers():
    """A run that loses a worker stops PyTorch from it, which begins once in a process, and knows the dead."""
    next(iter(DataLoader(range(1), num_workers=1)))
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    gc.collect()
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.usefixtures("pytorch_looks_after_workers")
@pytest.mark.parametrize(
    ("when", "step", "saved"), [("before the step", 5, 4), ("in the step", 5, 5), ("in the validation", 7, 6)]
)
def test_a_worker_that_is_killed_loses_no_step(when, step, saved, whole, tmp_path):
    run = build(tmp_path, workers=1, val_images=2, val_workers=1, hooks=hooks(**BY_EPOCH))
    run.register_hook(Kill(when, step))
    with pytest.raises(SystemExit, match=rf"killed by signal.*--shm-size.*Saved after step {saved}"):
        run.train()
    assert torch.load(tmp_path / "latest.pth", weights_only=True)["meta"]["iter"] == saved
    build(tmp_path, resume=True, hooks=hooks(**BY_EPOCH)).train()
    assert same(weights(whole / f"epoch_{EPOCHS}.pth"), weights(tmp_path / f"epoch_{EPOCHS}.pth"))


@pytest.mark.usefixtures("pytorch_looks_after_workers")
def test_averaged_weights_are_not_saved_for_the_trained_ones(tmp_path):
    """EMAHook exchanges them while a validation lasts."""
    average = dict(type="EMAHook")
    run = build(tmp_path, val_images=2, val_workers=1, custom_hooks=[average], hooks=hooks(**BY_EPOCH))
    run.register_hook(Kill("in the validation", 4))
    with pytest.raises(SystemExit, match=r"--shm-size`\.$"):
        run.train()
    assert not (tmp_path / "latest.pth").exists()


@TYPES.register_module()
class Late(InterruptionHook):
    def after_train_iter(self, runner, *args, **kwargs) -> None:
        time.sleep(0.2)
        if not self.signal_received or runner.iter + 1 >= 6:
            super().after_train_iter(runner)


class Fork(Hook):
    """Notes what a signal does to a process forked off the run, as by a pool of a metric's."""

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        if runner.iter == 3:
            if (child := os.fork()) == 0:
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                finally:
                    os._exit(0)  # also if somebody's handler raises: no second process in the tests
            self.code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_forked_off_the_run_ends_at_a_signal_as_without_the_hook(tmp_path):
    """Else `with Pool(...)` never ends, which waits for the processes that it has told to."""
    run = build(tmp_path, hooks=hooks())
    run.register_hook(forking := Fork())
    run.train()
    assert forking.code == -signal.SIGTERM
    assert not (tmp_path / "latest.pth").exists()


def test_checkpoints_by_the_clock_lie_within_epochs_also_in_a_thread(tmp_path):
    """Python takes signals in the main thread alone; the clock runs in any."""
    killed = build(tmp_path, hooks=hooks(minutes=0, **BY_EPOCH))
    killed.register_hook(StopAfter(5))
    seen = []

    def train() -> None:
        with pytest.raises(KeyboardInterrupt):
            killed.train()
        seen.append(signal.getsignal(signal.SIGUSR1))

    before = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [before]
    assert torch.load(tmp_path / "latest.pth", weights_only=True)["meta"]["iter"] in (4, 5)
    cfg = Config(dict(work_dir=str(tmp_path)))
    assert find_checkpoint(cfg) == str(tmp_path / "latest.pth")
