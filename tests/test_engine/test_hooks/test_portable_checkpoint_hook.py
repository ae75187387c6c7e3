"""Checkpoints are whole, hold tensors and plain values alone, and belong to the folder that they lie in."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.hooks import CheckpointHook, Hook
from trainings import HOOKS, IMAGES, build

from mapet_mm.engine.hooks import portable_checkpoint_hook
from mapet_mm.engine.hooks.portable_checkpoint_hook import PortableCheckpointHook


class Listed(Hook):
    """Notes the checkpoints that are there when another one is about to be written."""

    def __init__(self) -> None:
        self.there: list[list[str]] = []

    def before_save_checkpoint(self, runner, checkpoint) -> None:
        self.there.append(sorted(path.name for path in Path(runner.work_dir).glob("iter_*.pth")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Listed]:
    """A run that keeps one checkpoint, in a folder where a killed run left half of one."""
    folder = tmp_path_factory.mktemp("run")
    (folder / ".iter_3.pth.0123.partial").write_bytes(b"half")
    one = dict(type="CheckpointHook", by_epoch=False, interval=1, max_keep_ckpts=1)
    run = build(folder, hooks={**HOOKS, "checkpoint": one})
    run.register_hook(listed := Listed())
    run.train()
    return folder, listed


def test_the_only_checkpoint_is_there_until_the_next_one_is(trained):
    assert trained[1].there[:3] == [[], ["iter_1.pth"], ["iter_2.pth"]]


def test_what_a_killed_run_left_half_written_is_removed(trained):
    assert not list(trained[0].glob(".*partial"))


def test_a_checkpoint_is_read_safely_and_does_not_grow(trained):
    content = torch.load(trained[0] / "iter_9.pth", weights_only=True)
    assert content["meta"]["iter"] == 9
    assert content["meta"]["num_images"] == IMAGES
    assert content["message_hub"]["log_scalars"] == {}
    assert not any(key.startswith("train/") for key in content["message_hub"]["resumed_keys"])


def test_what_is_logged_does_not_grow_with_the_steps(tmp_path, monkeypatch):
    """MMEngine copies all of it in each step: 0.8 ms a scalar after 187,500."""
    monkeypatch.setattr(portable_checkpoint_hook, "MAX_LOGGED_STEPS", 4)
    run = build(tmp_path)
    run.train()
    assert run.iter > 8
    assert {len(buffer.data[0]) for buffer in run.message_hub.log_scalars.values()} == {4}


def test_a_write_that_fails_leaves_the_checkpoint_of_before(tmp_path, monkeypatch):
    """A full disk, in the middle of the first file that is written anew."""
    (tmp_path / "iter_9.pth").write_bytes(b"before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mapet_mm.utils.atomic_files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        build(tmp_path, interval=9).train()
    assert (tmp_path / "iter_9.pth").read_bytes() == b"before"
    assert not list(tmp_path.glob(".*partial"))


def test_numpy_values_are_plain_and_equal(tmp_path):
    content = {
        "message_hub": {
            "runtime_info": {"score": np.float32(0.5), "n": np.int64(3), "s": np.str_("a")},
            "resumed_keys": {},
        },
        "meta": {"palette": np.arange(3, dtype=np.uint8), "where": Path("x"), "pair": (np.bool_(True), 1)},
        "param_schedulers": [{"_last_value": [np.float64(1e-3)]}],
    }
    runner = SimpleNamespace(cfg={}, train_dataloader=SimpleNamespace(dataset=range(7)))
    PortableCheckpointHook(recipe={"model": "0123"}).before_save_checkpoint(runner, content)
    torch.save(content, tmp_path / "plain.pth")
    assert torch.load(tmp_path / "plain.pth", weights_only=True) == {
        "message_hub": {
            "runtime_info": {"score": 0.5, "n": 3, "s": "a"},
            "log_scalars": {},
            "resumed_keys": {},
        },
        "meta": {
            "palette": [0, 1, 2],
            "where": "x",
            "pair": (True, 1),
            "recipe": {"model": "0123"},
            "num_images": 7,
        },
        "param_schedulers": [{"_last_value": [1e-3]}],
    }


@pytest.mark.parametrize("options", [{"backend_args": {"backend": "petrel"}}, {"out_dir": "s3://bucket"}])
def test_checkpoints_that_go_elsewhere_are_left_to_their_own_storage(options, tmp_path):
    hook = CheckpointHook(**{"out_dir": str(tmp_path), **options})
    before = hook.backend_args
    runner = SimpleNamespace(hooks=[hook], work_dir=str(tmp_path))
    PortableCheckpointHook().before_train(runner)
    assert hook.backend_args == before


def test_a_copied_run_uses_its_own_best_checkpoint(tmp_path):
    """MMEngine would remove the original's once there is a better one. The model is inside another, as in a
    test with augmentation."""
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(1, 1)})
    (tmp_path / "best_epoch_1.pth").touch()
    information = {"best_ckpt": "/original/best_epoch_1.pth", "best_score": 1.0}
    checkpoint = {"state_dict": model["module"].state_dict(), "message_hub": {"runtime_info": information}}
    runner = SimpleNamespace(hooks=[], work_dir=str(tmp_path), model=model)
    PortableCheckpointHook().after_load_checkpoint(runner, checkpoint)
    assert information == {"best_ckpt": str(tmp_path / "best_epoch_1.pth"), "best_score": 1.0}
