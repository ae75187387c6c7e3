"""Blocks of shared work: each process its own, then whatever others left; the processes may be any number."""

import errno
import fcntl
import os
import warnings

import filelock
import pytest

from mapet_mm.cli.stages import claim
from mapet_mm.engine.runners.launch import claimed_work_dir
from mapet_mm.tokenizers import TokenStore, extend_store
from mapet_mm.utils.dist import process_number
from mapet_mm.utils.shared_work import my_blocks, shared_lock


def run_as(monkeypatch, rank: int, size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def test_processes_that_run_side_by_side_share_the_blocks(monkeypatch):
    done, taken, workers = set(), {0: [], 1: [], 2: []}, {}
    for rank in taken:
        run_as(monkeypatch, rank, 3)
        workers[rank] = my_blocks(8, done.__contains__)
        taken[rank].append(next(workers[rank]))  # reads the rank
        done.add(taken[rank][-1])
    while workers:
        for rank, worker in list(workers.items()):
            block = next(worker, None)
            if block is None:
                del workers[rank]
            else:
                taken[rank].append(block)
                done.add(block)
    assert sorted(taken[0] + taken[1] + taken[2]) == list(range(8))
    assert sorted(taken[0][:3]) == [0, 3, 6]


def test_processes_that_are_started_by_hand_share_the_blocks():
    """Both count as the only one; a block is done twice only if both draw it at the same moment."""
    done, taken = set(), []
    workers = [my_blocks(1000, done.__contains__) for _ in range(2)]
    while drawn := [block for worker in workers if (block := next(worker, None)) is not None]:
        taken += drawn
        done.update(drawn)
    assert done == set(range(1000))
    assert len(taken) < 1050


@pytest.mark.parametrize("dead", [0, 1])
def test_one_process_does_the_blocks_of_a_dead_one(dead, monkeypatch):
    run_as(monkeypatch, 1 - dead, 2)
    done = {dead}  # all that the other wrote before it died
    for block in my_blocks(6, done.__contains__):
        assert block not in done
        done.add(block)
    assert done == set(range(6))


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}, (1, 3)),
        ({"SLURM_PROCID": "0"}, (0, 1)),  # inside `sbatch`, outside `srun`
    ],
)
def test_a_process_knows_its_number(environment, number, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert process_number() == number


def test_a_lock_keeps_others_out_and_waits_as_long_as_it_is_told(tmp_path):
    with shared_lock(tmp_path / "lock"), pytest.raises(filelock.Timeout), shared_lock(tmp_path / "lock", 0):
        pass
    with shared_lock(tmp_path / "lock", 0):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_written_to_and_said_once(number, tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = TokenStore.create(tmp_path / "store", ["a", "b"], grid=1, vocab_size=8, tokenizer="x")
        store.write([0], [[[3]]])
        store.write([1], [[[4]]])
        assert len(extend_store(tmp_path / "store", ["c"])) == 3
        with claimed_work_dir(str(tmp_path / "work")), claim(tmp_path / "run", "pretrain"):
            assert store["b"].item() == 4
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" is on a file system without locks")[0] for line in lines] == [
        f"note: {tmp_path / name}" for name in ("store", "work", "run")
    ]
    assert all(os.strerror(number) in line for line in lines)
