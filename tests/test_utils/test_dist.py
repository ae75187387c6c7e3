"""Processes find each other, and the GPU of their number."""

import time

import pytest
import torch

from mapet_mm.utils import dist
from mapet_mm.utils.dist import (
    RANKS,
    choose_device,
    own_launcher,
    print_once,
    process_number,
    run_alone,
    say_share,
    saying_that_it_waits,
    start_processes,
)
from mapet_mm.utils.errors import UserError


@pytest.mark.parametrize(
    ("environment", "number"), [({"LOCAL_RANK": "5"}, 1), ({"SLURM_LOCALID": "2"}, 2), ({}, 0)]
)
def test_a_process_takes_the_gpu_of_its_number_on_its_machine(environment, number, monkeypatch):
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr("mapet_mm.utils.dist.require_usable_gpu", lambda local_rank: None)
    choose_device()
    assert taken == [number]


def test_processes_with_gpus_talk_over_nccl(monkeypatch):
    started = []
    monkeypatch.setattr("mapet_mm.utils.dist.get_device", lambda: "cuda")
    monkeypatch.setattr(
        "mapet_mm.utils.dist.init_dist", lambda *args, **kwargs: started.append((args, kwargs))
    )
    start_processes("slurm", 60)
    assert started == [(("slurm",), dict(backend="nccl", timeout=60))]


@pytest.mark.parametrize(("names", "launcher"), [*zip(RANKS, ("pytorch", "slurm", "mpi"), strict=True)])
def test_processes_join_by_what_started_them(names, launcher, monkeypatch):
    for name in sum(RANKS, ()):
        monkeypatch.delenv(name, raising=False)
    assert own_launcher() == "none"
    for name, value in zip(names, ("0", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert own_launcher() == "none"  # one task of Slurm
    monkeypatch.setenv(names[1], "2")
    assert own_launcher() == launcher


@pytest.mark.parametrize("names", RANKS)
def test_one_of_several_processes_speaks_whatever_started_them(names, monkeypatch, capsys):
    for name in sum(RANKS, ()):
        monkeypatch.delenv(name, raising=False)
    assert process_number() == (0, 1)
    for rank in range(3):
        for name, value in zip(names, (rank, 3), strict=True):
            monkeypatch.setenv(name, str(value))
        assert process_number() == (rank, 3)
        print_once("once")
    assert capsys.readouterr().out == "once\n"


@pytest.mark.parametrize("names", RANKS)
def test_a_command_that_runs_alone_leaves_another_jobs_variables_out_and_says_so(names, monkeypatch, capsys):
    for name in sum(RANKS, ()):
        monkeypatch.delenv(name, raising=False)
    run_alone()
    assert capsys.readouterr().err == ""
    for name, value in zip((*names, "LOCAL_RANK"), ("1", "4", "1"), strict=True):
        monkeypatch.setenv(name, value)
    run_alone()
    assert process_number() == (0, 1)
    assert own_launcher() == "none"
    assert dist.local_rank() == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert all(name in line for name in names)


def test_a_process_that_shares_work_says_that_the_environment_makes_it_one_of_several(monkeypatch, capsys):
    """The second of four, of which there is only this one, would show no result."""
    for name, value in dict(RANK="1", WORLD_SIZE="4").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    say_share()
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    say_share()
    assert "process 1 of 4" in capsys.readouterr().err


def test_a_process_that_waits_for_others_says_for_how_many_and_why(monkeypatch, capsys):
    monkeypatch.setattr(dist, "WAIT_SECONDS", 0.05)
    for name, value in dict(RANK="1", WORLD_SIZE="4").items():
        monkeypatch.setenv(name, value)
    with saying_that_it_waits():
        pass
    assert capsys.readouterr().err == ""
    with saying_that_it_waits():
        time.sleep(0.5)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("process 1 of 4, as RANK and WORLD_SIZE in the environment say, waits")


def test_a_shell_of_slurm_without_gpus_is_told_how_to_run_alone(monkeypatch):
    with pytest.raises(UserError, match="--launcher none"):
        start_processes("slurm")
