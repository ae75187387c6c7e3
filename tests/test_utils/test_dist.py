"""Processes find each other, and the GPU of their number."""

import pytest
import torch

from mapet_mm.utils.dist import (
    RANKS,
    choose_device,
    own_launcher,
    print_once,
    process_number,
    start_processes,
)


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
