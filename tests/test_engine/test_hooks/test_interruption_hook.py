"""A run that is told to end saves where it stands, and the same command goes on with the next batch."""

import atexit
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from trainings import EPOCHS, HOOKS, StopAfter, build, same

from mapet_mm.engine.hooks.interruption_hook import InterruptionHook
from mapet_mm.engine.runners.resume import find_checkpoint
from mapet_mm.registry import HOOKS as TYPES
from mapet_mm.utils.errors import STOPPED

BY_EPOCH = dict(checkpoint=dict(type="CheckpointHook", interval=1))


def hooks(minutes=None, **others) -> dict:
    return {**HOOKS, "interruption": dict(type="mapet_mm.InterruptionHook", minutes=minutes), **others}


class Tell(Hook):
    """Sends this process a signal after a step, and its loader's workers, too."""

    def __init__(self, step: int, number: int, workers: bool = False, times: int = 1) -> None:
        self.step, self.number, self.workers, self.times = step, number, workers, times

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        if runner.iter + 1 == self.step:
            for worker in torch.multiprocessing.active_children() if self.workers else ():
                os.kill(worker.pid, self.number)
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    build(folder, hooks=hooks(**BY_EPOCH)).train()
    return folder


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_end_goes_on_as_if_nothing_had_been(number, whole, tmp_path):
    before = signal.getsignal(number)
    told = build(tmp_path, hooks=hooks(**BY_EPOCH))
    told.register_hook(Tell(4, number))
    with pytest.raises(SystemExit) as ended:
        told.train()
    assert ended.value.code == STOPPED == 75
    assert signal.getsignal(number) is before
    latest = tmp_path / "latest.pth"
    assert find_checkpoint(Config(dict(work_dir=str(tmp_path)))) == str(latest)
    build(tmp_path, resume=True, hooks=hooks(**BY_EPOCH)).train()
    assert same(weights(whole / f"epoch_{EPOCHS}.pth"), weights(tmp_path / f"epoch_{EPOCHS}.pth"))
    assert not latest.exists()


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    told = build(tmp_path, hooks=hooks())
    told.register_hook(Tell(4, signal.SIGINT, times=2))
    with pytest.raises(KeyboardInterrupt):
        told.train()
    assert not (tmp_path / "latest.pth").exists()


def test_workers_of_a_loader_outlive_a_signal_to_all_processes(tmp_path):
    """Slurm's SIGTERM reaches them as well, and the run needs their images for two steps more."""
    told = build(tmp_path, workers=2, hooks=hooks(interruption=dict(type="mapet_mm.Late", minutes=None)))
    told.register_hook(Tell(3, signal.SIGTERM, workers=True))
    with pytest.raises(SystemExit):
        told.train()
    assert told.iter + 1 == 5


def test_workers_end_with_a_run_whose_error_keeps_its_loader(tmp_path, monkeypatch):
    """When Python ends, it tells them once to end, and waits."""
    at_exit, others = [], torch.multiprocessing.active_children()
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    run = build(tmp_path, workers=2, hooks=hooks())
    run.register_hook(StopAfter(2))
    with pytest.raises(KeyboardInterrupt) as error:
        run.train()
    assert error.tb
    for call, *arguments in at_exit:
        call(*arguments)
    workers = [one for one in torch.multiprocessing.active_children() if one not in others]
    for worker in workers:
        worker.terminate()
        worker.join(10)
    assert [worker.exitcode for worker in workers] == [0, 0]


@TYPES.register_module()
class Late(InterruptionHook):
    def after_train_iter(self, runner, *args, **kwargs) -> None:
        if not self.signal_received or runner.iter + 1 >= 5:
            time.sleep(0.2)
            super().after_train_iter(runner)


class Fork(Hook):
    """Notes what a signal does to a process forked off the run, as by a pool of a metric's."""

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        if runner.iter == 3:
            if (child := os.fork()) == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
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
