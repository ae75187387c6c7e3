"""Work shared through a folder: each task once if all goes well, none lost whatever goes wrong."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from mapet_mm.utils import shared_work as sharing
from mapet_mm.utils.dist import is_first_process
from mapet_mm.utils.shared_work import SharedTasks, process_number


class Board:
    """Tasks and who did them, as a store would show them."""

    def __init__(self, folder, count):
        self.folder, self.count, self.results = folder, count, []

    def tasks(self) -> SharedTasks:
        return SharedTasks(self.folder / "claims", range(self.count), self.done)

    def done(self, tasks) -> set[int]:
        return {task for task, _ in self.results}.intersection(tasks)


def work(board, name, seconds, stop_after=None):
    tasks = board.tasks()
    for number, task in enumerate(tasks):
        if number == stop_after:
            return  # died with a claim
        end = time.monotonic() + seconds
        while time.monotonic() < end and not tasks.is_lost(task):
            time.sleep(0.002)
        if not tasks.is_lost(task):
            board.results.append((task, name))


def run(board, *workers):
    threads = [threading.Thread(target=work, args=(board, name, *how)) for name, *how in workers]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - start


def test_equal_workers_do_each_task_once(tmp_path):
    board = Board(tmp_path, 30)
    run(board, ("a", 0.005), ("b", 0.005), ("c", 0.005))
    assert sorted({task for task, _ in board.results}) == list(range(30))
    assert len(board.results) <= 30 + 3  # at the end, one may do again what another has not finished
    assert len({name for _, name in board.results}) == 3


def test_a_slow_worker_costs_little_more_than_its_share(tmp_path, monkeypatch):
    """Ideal: 60 tasks of 20 ms at a rate of 1 + 1/10."""
    monkeypatch.setattr(sharing, "LOOK_SECONDS", 0.01)
    board = Board(tmp_path, 60)
    seconds = run(board, ("fast", 0.02), ("slow", 0.2))
    assert len({task for task, _ in board.results}) == 60
    assert seconds < 1.3 * 60 * 0.02 / 1.1  # 15 % and the threads' own time


def test_what_a_dead_worker_claimed_is_done_by_others(tmp_path):
    board = Board(tmp_path, 10)
    run(board, ("dead", 0.001, 3))
    assert len(board.results) == 3
    run(board, ("alive", 0.001))
    assert sorted(task for task, _ in board.results) == list(range(10))


def test_who_comes_later_finds_nothing_to_do_and_writes_nothing(tmp_path):
    board = Board(tmp_path, 5)
    run(board, ("a", 0))
    board.tasks().clear()
    assert list(board.tasks()) == []
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_machine_removed_over_nfs_is_the_end_of_the_work_and_no_error(
    tmp_path, monkeypatch
):
    board = Board(tmp_path, 2)
    tasks = board.tasks()

    def stale(*args, **kwargs):
        board.results = [(0, "other"), (1, "other")]
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "touch", stale)
    monkeypatch.setattr(Path, "glob", stale)
    assert list(tasks) == []
    tasks.clear()


def test_a_claim_that_no_disk_takes_is_an_error_and_no_claim_of_another(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(OSError, match="No space left"):
        list(Board(tmp_path, 2).tasks())


def test_a_task_that_cannot_be_done_is_tried_once_by_each(tmp_path):
    board = Board(tmp_path, 4)
    assert sorted(board.tasks()) == [0, 1, 2, 3]
    assert sorted(board.tasks()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
        ({"SLURM_PROCID": "0"}, (0, 1)),
        ({"RANK": "3"}, (0, 1)),  # left over in a shell: no launcher sets it alone
        ({"RANK": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
    ],
)
def test_processes_know_their_number_without_talking(monkeypatch, environment, number):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert process_number() == number
    assert is_first_process() == (number[0] == 0)
