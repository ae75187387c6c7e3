"""Runners for several processes, with or without GPUs."""

import os
import re

import pytest
import torch
from forked_processes import run_python
from trainings import read_checkpoint

from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import load_config
from mapet_mm.utils.dist import number_slurm_task, require_gpu_of_its_own
from mapet_mm.utils.errors import UserError

SYNC_BN = dict(type="LinearNeck", in_channels=16, out_channels=16, norm_cfg=dict(type="SyncBN"))
TOGETHER = """
import sys
from pathlib import Path
import mapet_mm.engine.runners.launch  # once, for both
from forked_processes import run_together
print(run_together(2, "train.py", *sys.argv[2:], folder=Path(sys.argv[1])))
"""


def test_two_processes_train_together_on_cpu(config, tmp_path):
    """gloo: half the iterations each, one set of weights. SyncBN computes on GPUs alone, and `mim` passes on
    `--local-rank`."""
    work = tmp_path / "work"
    config.write_text(f"{config.read_text()}\nmodel['neck'] = {SYNC_BN}\n")
    words = ["--work-dir", work, "--launcher", "pytorch", "--local-rank=0"]
    words += ["--cfg-options", "train_cfg.max_epochs=1"]
    said = run_python("-c", TOGETHER, tmp_path, config, *words)
    assert said.count("next: mapet-mm test") == 1, "every process reports, not the first alone"
    assert read_checkpoint(work, 1)["meta"]["iter"] == 2
    (log,) = work.glob("*/*.log")
    assert re.search(r"GPU number: 2\s", log.read_text())
    assert "System environment" not in said
    assert "SyncBN needs GPUs" in log.read_text()


def test_cpu_processes_start_gloo_and_keep_the_configs_wrapper_options(config, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.get_device", lambda: "cpu")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *a, **k: started.append((a, k)))
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.Runner.from_cfg", lambda cfg: cfg)
    options = {"model_wrapper_cfg.static_graph": True, "env_cfg.dist_cfg.timeout": 60}
    cfg = build_runner(load_config(str(config), options, str(tmp_path)), "pytorch")
    assert started[0][0] == ("gloo",)
    assert started[0][1]["timeout"].total_seconds() == 60
    assert cfg.model_wrapper_cfg == dict(
        type="MMDistributedDataParallel",
        broadcast_buffers=False,
        find_unused_parameters=False,
        gradient_as_bucket_view=True,
        static_graph=True,
        device_ids=None,
    )


@pytest.mark.parametrize(("options", "seconds"), [({}, 1800), ({"env_cfg.dist_cfg.timeout": 60}, 60)])
def test_processes_on_gpus_wait_as_long_as_those_on_cpus(config, monkeypatch, options, seconds):
    """PyTorch's own limit for GPUs, ten minutes, ended them while the first one validated."""
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.get_device", lambda: "cuda")
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.Runner.from_cfg", lambda cfg: cfg)
    cfg = build_runner(load_config(str(config), options), "pytorch")
    assert cfg.env_cfg.dist_cfg.timeout == seconds


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"model_wrapper_cfg.gradient_as_bucket_view": False}, False),
        ({"model_wrapper_cfg.type": "MMFullyShardedDataParallel"}, None),
    ],
)
def test_gradients_on_gpus_lie_in_the_buffers_that_are_sent(config, monkeypatch, options, expected):
    """Unless the config says otherwise, or wraps the model in another class."""
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.get_device", lambda: "cuda")
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.Runner.from_cfg", lambda cfg: cfg)
    cfg = build_runner(load_config(str(config), options), "pytorch")
    assert cfg.model_wrapper_cfg.get("gradient_as_bucket_view") is expected
    assert "device_ids" not in cfg.model_wrapper_cfg  # MMEngine's, of the process


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
def test_a_launcher_that_needs_gpus_is_refused_without_them(launcher, config, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.get_device", lambda: "cpu")
    with pytest.raises(UserError, match=f"{launcher} needs CUDA devices"):
        build_runner(load_config(str(config)), launcher)


@pytest.mark.parametrize(("gpus", "number"), [(1, "0"), (8, "5")])
def test_a_slurm_task_takes_a_gpu_that_it_sees(monkeypatch, gpus, number):
    """Whatever its number is among the tasks of the machine."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setenv("SLURM_LOCALID", "5")
    number_slurm_task()
    assert os.environ["SLURM_LOCALID"] == number


@pytest.mark.parametrize(
    ("number", "gpus", "is_refused"), [(0, 1, False), (7, 8, False), (8, 8, True), (1, 0, False)]
)
def test_more_processes_than_gpus_are_one_line(monkeypatch, number, gpus, is_refused):
    """PyTorch's own is "invalid device ordinal", from deep inside, in half of the processes."""
    monkeypatch.setenv("LOCAL_RANK", str(number))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    if not is_refused:
        require_gpu_of_its_own()
        return
    with pytest.raises(UserError, match="more processes than GPUs: 8 visible, and this is process 9"):
        require_gpu_of_its_own()
