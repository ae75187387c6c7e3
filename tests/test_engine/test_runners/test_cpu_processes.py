"""Recipes with SyncBN train in several CPU processes, with a word."""

import pytest
import torch
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from mapet_mm.utils.dist import choose_device, start_processes


@pytest.fixture
def process_group(tmp_path):
    """One gloo process: SyncBN refuses the CPU as soon as there is a group."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_sync_bn_is_batch_norm_with_the_same_weights_and_a_word(process_group, capture_log):
    images = torch.randn(4, 3, 5, 5)
    plain = nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6))
    expected = plain(images)
    plain[1].reset_running_stats()
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        nn.parallel.DistributedDataParallel(synchronised)
    wrapper = dict(type="mapet_mm.CPUDistributedDataParallel", module=synchronised, device_ids=[0])
    model = MODEL_WRAPPERS.build(wrapper)
    torch.testing.assert_close(model(images), expected)
    assert "SyncBN needs CUDA devices and is BatchNorm" in capture_log()


def test_a_model_without_it_is_only_wrapped(process_group, capture_log):
    norm = nn.BatchNorm2d(3)
    model = MODEL_WRAPPERS.build(dict(type="mapet_mm.CPUDistributedDataParallel", module=nn.Sequential(norm)))
    assert model.module[0] is norm
    assert capture_log() == ""


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
