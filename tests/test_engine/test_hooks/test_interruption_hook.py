"""A run that is told to end saves where it stands, and the same command goes on with the next batch."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jittered_training import EPOCHS, HOOKS, StopAfter, build, final, same
from mmengine.config import Config
from mmengine.hooks import Hook
from torch.utils.data._utils.worker import _worker_loop

from mapet_mm.engine.hooks.interruption_hook import InterruptionHook
from mapet_mm.engine.runners.resume import find_checkpoint, later_checkpoints
from mapet_mm.utils.errors import STOPPED

pytestmark = pytest.mark.usefixtures("one_thread")
BY_EPOCH = dict(checkpoint=dict(type="CheckpointHook", interval=1))


def hooks(minutes=None, **others) -> dict:
    return {**HOOKS, "interruption": dict(type="mapet_mm.InterruptionHook", minutes=minutes), **others}


class Tell(Hook):
    """Sends this process a signal after a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        if runner.iter + 1 == self.step:
            os.kill(os.getpid(), self.number)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.parametrize(
    ("number", "step"), [(signal.SIGUSR1, 4), pytest.param(signal.SIGTERM, 6, marks=pytest.mark.slow)]
)
def test_a_run_that_is_told_to_end_goes_on_as_if_nothing_had_been(number, step, tmp_path):
    """In the middle of an epoch and at its end; checkpoints are written by epoch otherwise."""
    before = signal.getsignal(number)
    build(tmp_path / "whole", hooks=hooks(**BY_EPOCH)).train()
    told = build(tmp_path / "parts", hooks=hooks(**BY_EPOCH))
    told.register_hook(Tell(step, number))
    with pytest.raises(SystemExit) as ended:
        told.train()
    assert ended.value.code == STOPPED == 75
    assert signal.getsignal(number) is before
    cfg = Config(dict(work_dir=str(tmp_path / "parts")))
    latest = tmp_path / "parts/latest.pth"
    assert find_checkpoint(cfg) == str(latest)
    assert later_checkpoints(cfg, str(latest)) == []
    build(tmp_path / "parts", resume=True, hooks=hooks(**BY_EPOCH)).train()
    name = f"epoch_{EPOCHS}.pth"
    assert same(weights(tmp_path / "whole" / name), weights(tmp_path / "parts" / name))
    assert not latest.exists()


class Fork(Hook):
    """What a signal does to a process forked off the run after a step, as by a pool of a metric's."""

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        if runner.iter == 3:
            if (child := os.fork()) == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            self.code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_forked_off_the_run_ends_at_a_signal_as_without_the_hook(tmp_path):
    """Else `with Pool(...)` never ends, which waits for those that it has told to."""
    run = build(tmp_path / "run", hooks=hooks())
    run.register_hook(forking := Fork())
    run.train()
    assert forking.code == -signal.SIGTERM
    assert not (tmp_path / "run/latest.pth").exists()


@pytest.mark.parametrize("target", [_worker_loop, print])
def test_a_loaders_worker_outlives_a_signal_before_it_has_started(target, monkeypatch):
    hook, ended = InterruptionHook(), []
    hook.process, hook.loop = os.getppid(), None
    monkeypatch.setattr(signal, "raise_signal", ended.append)
    monkeypatch.setattr("multiprocessing.current_process", lambda: SimpleNamespace(_target=target))
    hook._tell(signal.SIGTERM, None)
    assert ended == ([] if target is _worker_loop else [signal.SIGTERM])
    assert hook.told is None


def test_a_run_in_a_thread_has_no_signals_and_its_clock(tmp_path):
    """Python takes signals in the main thread alone."""
    before = signal.getsignal(signal.SIGUSR1)
    killed = build(tmp_path / "run", hooks=hooks(minutes=0, **BY_EPOCH))
    killed.register_hook(StopAfter(5))
    ended = []

    def train() -> None:
        try:
            killed.train()
        except KeyboardInterrupt:
            ended.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert ended == [before]
    assert (tmp_path / "run/latest.pth").exists()


def test_after_an_error_a_signal_does_what_it_did_before(tmp_path):
    seen, plain = [], signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before := lambda number, _: seen.append(number))
    try:
        for folder in ("one", "two"):
            failed = build(tmp_path / folder, hooks=hooks())
            failed.register_hook(StopAfter(1))
            with pytest.raises(KeyboardInterrupt):
                failed.train()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is before
    finally:
        signal.signal(signal.SIGUSR1, plain)


def test_checkpoints_by_the_clock_lie_within_epochs(tmp_path):
    """A run that is killed loses what came after the last one; epochs' checkpoints count as before."""
    killed = build(tmp_path / "parts", hooks=hooks(minutes=0, **BY_EPOCH))
    killed.register_hook(StopAfter(5))
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    folder = tmp_path / "parts"
    assert torch.load(folder / "latest.pth", weights_only=True)["meta"]["iter"] in (4, 5)
    cfg = Config(dict(work_dir=str(folder)))
    assert find_checkpoint(cfg) == str(folder / "latest.pth")
    (folder / "latest.pth").write_bytes(b"PK\x03\x04 cut short")
    assert find_checkpoint(cfg) == str(folder / "epoch_1.pth")
    assert later_checkpoints(cfg, str(folder / "epoch_1.pth")) == []


def test_half_an_hour_has_not_passed_in_nine_steps(tmp_path):
    build(tmp_path / "run", hooks=hooks(minutes=30)).train()
    assert not (tmp_path / "run/latest.pth").exists()


def test_a_checkpoint_of_the_same_step_is_not_written_twice(tmp_path):
    told = build(tmp_path / "run", hooks=hooks())
    told.register_hook(Tell(4, signal.SIGUSR1))
    with pytest.raises(SystemExit):
        told.train()
    assert not (tmp_path / "run/latest.pth").exists()
    assert (tmp_path / "run/last_checkpoint").read_text().endswith("iter_4.pth")


def test_workers_of_a_loader_outlive_a_signal_to_all_processes(tmp_path, monkeypatch):
    """Slurm's SIGTERM reaches them as well; the run needs their images, however long its step takes."""
    monkeypatch.setattr("mapet_mm.engine.hooks.interruption_hook.WORKER_SECONDS", 1)

    class TellAll(Tell):
        def after_train_iter(self, runner, *args, **kwargs) -> None:
            if runner.iter + 1 == self.step:
                for worker in torch.multiprocessing.active_children():
                    os.kill(worker.pid, self.number)
                os.kill(os.getpid(), self.number)
                time.sleep(1.3)

    build(tmp_path / "whole").train()
    told = build(tmp_path / "parts", workers=2, hooks=hooks(interruption=dict(type=Late, minutes=None)))
    told.register_hook(TellAll(3, signal.SIGTERM))
    with pytest.raises(SystemExit):
        told.train()
    assert told.iter + 1 == 5
    told.train_dataloader._iterator._shutdown_workers()
    assert not torch.multiprocessing.active_children()
    build(tmp_path / "parts", resume=True, hooks=hooks()).train()
    assert same(final(tmp_path / "whole"), final(tmp_path / "parts"))


class Late(InterruptionHook):
    """Ends two steps after it was told."""

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        if not self.told or runner.iter + 1 >= 5:
            super().after_train_iter(runner)


# --- whole files -----------------------------------------------------------------------------------------


class Listed(Hook):
    """The checkpoints that are there when another one is about to be written."""

    def __init__(self) -> None:
        self.there: list[list[str]] = []

    def before_save_checkpoint(self, runner, checkpoint) -> None:
        self.there.append(sorted(path.name for path in Path(runner.work_dir).glob("iter_*.pth")))


def test_the_only_checkpoint_is_there_until_the_next_one_is(tmp_path):
    one = dict(type="CheckpointHook", by_epoch=False, interval=1, max_keep_ckpts=1)
    run = build(tmp_path / "run", hooks=hooks(checkpoint=one))
    listed = Listed()
    run.register_hook(listed)
    run.train()
    assert listed.there[:3] == [[], ["iter_1.pth"], ["iter_2.pth"]]


def test_what_a_killed_run_left_half_written_is_removed_and_never_read(tmp_path):
    (tmp_path / "run").mkdir()
    left = tmp_path / "run/.iter_3.pth.0123.partial"
    left.write_bytes(b"half")
    build(tmp_path / "run").train()
    assert not left.exists()


def test_a_write_that_fails_leaves_the_checkpoint_of_before(tmp_path, monkeypatch):
    """A full disk, in the middle of the first file that is written anew."""
    build(tmp_path / "run").train()
    before = (tmp_path / "run/iter_9.pth").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mapet_mm.utils.atomic_files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        build(tmp_path / "run", interval=9, hooks=hooks()).train()
    assert (tmp_path / "run/iter_9.pth").read_bytes() == before
    assert not list((tmp_path / "run").glob(".*partial"))
