"""How many workers a loader can have on this machine."""

import tempfile
from types import SimpleNamespace

import pytest
import torch
from mmpretrain.structures import DataSample
from torch.utils.data import DataLoader

from mapet_mm.utils import loader_workers
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.loader_workers import bytes_of_batch, tensor_bytes, usable_workers

DOCKER = 64 * 2**20


@pytest.fixture
def shared_memory(monkeypatch):
    """Sets how many bytes of shared memory are free."""

    def set_free(free: int) -> None:
        monkeypatch.setattr(loader_workers.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))

    return set_free


@pytest.mark.parametrize(
    ("free", "processes", "usable"),
    [
        (2**34, 1, 4),  # a machine's
        (DOCKER, 1, 2),  # 64 squares of 224 px are 9.6 MB: five batches and one in use, of six that fit
        (DOCKER, 2, 1),
        (2 * DOCKER, 1, 4),
        (2**20, 1, 0),
    ],
)
def test_workers_are_as_many_as_shared_memory_has_batches_for(
    free, processes, usable, shared_memory, monkeypatch, capsys
):
    shared_memory(free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert usable_workers(4, lambda: 64 * 3 * 224**2) == usable
    said = capsys.readouterr().err
    assert ("--shm-size" in said) == (usable < 4)
    assert f"{usable} load images" in said or usable == 4


def test_a_training_in_a_small_container_has_fewer_workers_or_none(shared_memory, tmp_path):
    from mapet_mm.engine.runners.build_runner import QuietRunner

    images = [dict(inputs=torch.zeros(3, 1000, 1000, dtype=torch.uint8))] * 4
    config = dict(
        dataset=images,
        batch_size=4,
        num_workers=4,
        persistent_workers=True,
        timeout=60,
        sampler=dict(type="DefaultSampler", shuffle=False),
    )
    shared_memory(DOCKER)
    assert QuietRunner.build_dataloader(config).num_workers == 2
    shared_memory(2**20)
    loader = QuietRunner.build_dataloader(config)
    assert loader.num_workers == 0
    assert len(next(iter(loader))["inputs"]) == 4
    shared_memory(2**40)
    assert QuietRunner.build_dataloader(config).num_workers == 4


def test_a_batch_is_as_large_as_its_tensors_are_wherever_they_lie():
    sample = DataSample().set_gt_label(torch.zeros(2, dtype=torch.int64))
    batch = [dict(inputs=[torch.zeros(3, 8, 8, dtype=torch.uint8)], data_samples=(sample, "name"))]
    assert tensor_bytes(batch) == 3 * 8 * 8 + 2 * 8
    loader = DataLoader([torch.zeros(10)] * 3, batch_size=2)
    assert bytes_of_batch(loader) == 2 * 10 * 4


def test_a_temporary_folder_whose_path_is_too_long_for_sockets_is_one_line(monkeypatch, tmp_path):
    """Else batches never arrive, and the training hangs until its loader's time is over."""
    long = tmp_path / ("scratch_of_the_job" * 5)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(loader_workers, "get_temp_dir", lambda: f"{long}/pymp-12345678")
    with pytest.raises(UserError, match="TMPDIR is too long"):
        usable_workers(1, lambda: 0)
    assert usable_workers(0, lambda: 0) == 0
