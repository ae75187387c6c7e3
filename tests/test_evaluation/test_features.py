"""Features in the cache: the model's, computed once, by any number of processes."""

import os
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from clustered_features import DIM, LAYERS, MemoryFeatures, make_features
from frozen_features import take
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mapet_mm.evaluation import extraction
from mapet_mm.evaluation import features as module
from mapet_mm.evaluation.checkpoints import load_checkpoint
from mapet_mm.evaluation.image_sets import read_image_sets
from mapet_mm.evaluation.images import ImageSetError
from mapet_mm.utils.atomic_files import partial_path
from mapet_mm.utils.errors import UserError


def test_features_are_the_models(config, root):
    """Class token, patch mean and tokens of every layer, of each image in the dataset's order."""
    bank = take(config, root / "cache")
    checkpoint = load_checkpoint(config, str(root / "weights.pth"))
    images = read_image_sets(config)["train"]
    assert (len(bank), bank.layers, bank.grid) == (24, ["1", "2", "output"], (4, 4))
    assert (bank.poolings, bank.dim) == (["class token", "mean"], 16)
    assert bank.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    inputs = checkpoint.backbone.normalise([images.dataset[index]["inputs"] for index in range(24)])
    with torch.no_grad():
        tokens, output = checkpoint.backbone(inputs), checkpoint.backbone.model(inputs)[-1]
    close = dict(atol=2e-3, rtol=2e-3)  # float16 on disk
    for place in range(3):
        class_token = tokens.class_token[:, place]
        torch.testing.assert_close(bank.pooled("class token", place), class_token, **close)
        torch.testing.assert_close(bank.pooled("mean", place), tokens.patches[place].mean(1), **close)
    both = torch.cat([output[:, 0], output[:, 1:].mean(1)], 1)
    torch.testing.assert_close(bank.pooled("both"), both, **close)
    torch.testing.assert_close(bank.tokens([2, 9]).flatten(1, 2), output[[2, 9], 1:], **close)


@pytest.mark.parametrize("in_files", [False, True])
def test_reading_some_images_equals_reading_all(tmp_path, monkeypatch, in_files):
    """Whichever blocks they lie in."""
    monkeypatch.setattr(module, "BLOCK", 16)
    bank = make_features("train", 50, 0)
    values = {kind: value.half().float() for kind, value in bank.values.items()}
    bank.values = values
    if in_files:
        files = [str(number) for number in range(50)]
        images = SimpleNamespace(name="train", labels=bank.labels, files=files, leave_out=lambda _: None)
        known = dict(layers=bank.layers, poolings=bank.poolings, dim=DIM, grid=(3, 3))
        (tmp_path / "parts").mkdir()
        bank = module.Features(tmp_path, images, **known)
        for name, rows in zip([*bank.layers, "tokens"], [*values["pooled"], values["tokens"]], strict=True):
            for block, some in enumerate(rows.split(16)):
                bank.parts[name].update(block, range(len(some)), some.numpy(), {})
    some = torch.tensor([3, 15, 16, 49])
    for layer in range(LAYERS):
        assert torch.equal(bank.pooled("both", layer), values["pooled"][layer])
        assert torch.equal(bank.pooled("mean", layer, some), values["pooled"][layer, some, DIM:])
        assert torch.equal(torch.cat([v for _, v in bank.blocks("pooled", layer)]), values["pooled"][layer])
    assert torch.equal(bank.tokens(some.tolist()), values["tokens"][some].unflatten(1, (3, 3)))
    assert [rows.stop for rows, _ in bank.blocks("tokens")] == [16, 32, 48, 50]


class Elements(TorchDispatchMode):
    """Counts the elements of what PyTorch's operations give."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.total += sum(one.numel() for one in tree_leaves(found) if isinstance(one, torch.Tensor))
        return found


def test_the_work_of_reading_features_grows_with_their_number(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(MemoryFeatures, "read", lambda *_: torch.zeros(4, 2))
    counts = []
    for size in (200, 2000):
        known = dict(layers=["1"], poolings=["mean"], grid=(0, 0), labels=None)
        bank = MemoryFeatures(torch.zeros(1, size, 2), name="train", **known)
        with Elements() as counted:
            bank.pooled()
        counts.append(counted.total)
    assert counts[1] < 10.5 * counts[0]


def test_a_killed_run_goes_on_and_gives_the_same(config, root, monkeypatch):
    """Parts that exist are not computed again."""
    monkeypatch.setattr(module, "BLOCK", 7)  # four parts
    whole = take(config, root / "whole")
    written, update = [], module.LayerParts.update

    def update_and_die(parts, part, *rows):
        if len(written) == 6:
            raise KeyboardInterrupt
        update(parts, part, *rows)
        written.append(parts.file(part))

    with monkeypatch.context() as patch:
        patch.setattr(module.LayerParts, "update", update_and_die)
        with pytest.raises(KeyboardInterrupt):
            take(config, root / "killed")
    before = {path: path.stat().st_mtime_ns for path in written[:4]}  # three layers and the tokens
    killed = take(config, root / "killed")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    files = sorted((whole.folder / "parts").iterdir())
    assert len(files) == 4 * 4
    for file in files:
        assert file.read_bytes() == (killed.folder / "parts" / file.name).read_bytes()


def test_processes_share_the_blocks_and_do_what_others_left(config, root, monkeypatch):
    """The second of two begins with its own; each part is computed once."""
    monkeypatch.setattr(module, "BLOCK", 5)
    config.evaluation.train.num_workers = 2  # which read ahead
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    order, update = [], module.LayerParts.update

    def note(parts, part, *rows):
        order.append(part)
        update(parts, part, *rows)

    monkeypatch.setattr(module.LayerParts, "update", note)
    bank = take(config, root / "cache", ["pooled"])
    assert sorted(order[:2]) == [1, 3]
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert len(bank.pooled()) == 24


def test_another_kind_joins_and_a_complete_cache_is_only_read(config, root, monkeypatch):
    """Only the layers are written that somebody reads, and each once."""

    def files() -> dict[str, int]:
        found = (first.folder / "parts").iterdir()
        return {path.stem.partition("-")[2]: path.stat().st_mtime_ns for path in found}

    first = take(config, root / "cache", ["pooled"])
    (before,) = files().items()
    assert before[0] == "output"
    assert first.parts["output"].open(0).rows("features").shape == (24, 2 * 16)
    take(config, root / "cache", [2])  # last layers
    assert files().keys() == {"2", "output"}
    take(config, root / "cache")
    assert files().keys() == {"1", "2", "output", "tokens"}
    assert before in files().items()
    monkeypatch.setattr(extraction, "fill", None)
    for kinds in (["layers", "tokens"], ["pooled"], [3], [100]):
        assert len(take(config, root / "cache", kinds).pooled()) == 24


def test_what_a_killed_writer_left_goes_at_the_next_start(config, root):
    """After an hour: until then another process may be writing it."""
    bank = take(config, root / "cache", ["pooled"])
    bank.parts["output"].file(0).unlink()
    old, new = (partial_path(bank.parts["output"].file(0)) for _ in range(2))
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    take(config, root / "cache", ["pooled"])
    assert [path.exists() for path in (old, new)] == [False, True]


def test_images_are_loaded_by_several_processes_unless_somebody_says(config, monkeypatch):
    """Up to 8, and no more than a process's share of the cores; a config's number stays."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(12), raising=False)
    del config.evaluation.train.num_workers
    images = read_image_sets(config)
    assert (images["train"].num_workers, images["val"].num_workers) == (8, 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert read_image_sets(config)["train"].num_workers == 3
    assert {one.num_workers for one in read_image_sets(config, workers=2).values()} == {2}


def test_features_of_other_weights_images_or_settings_have_another_folder(config, root):
    def folder():
        folders.append(take(config, root / "cache", ["pooled"]).folder)

    folders = []
    folder()
    weights = torch.load(root / "weights.pth")["state_dict"]
    weights["backbone.layers.0.ln1.bias"] += 1
    torch.save(weights, root / "weights.pth")
    folder()
    config.data_preprocessor.std = [30.0] * 3
    folder()
    config.evaluation.train.dataset.pipeline.insert(1, dict(type="Resize", scale=20))
    folder()
    cv2.imwrite(str(root / "data/train/a/0.png"), np.zeros((16, 16, 3), np.uint8))
    folder()
    (root / "data/train/a/0.png").rename(root / "data/train/b/9.png")
    folder()
    assert len(set(folders)) == 6


def test_a_backbone_without_patches_has_no_tokens(config, root):
    config.model = dict(type="mapet_mm.OneHotTokens", vocab_size=256)
    config.data_preprocessor = dict(mean=None, std=None)
    checkpoint = load_checkpoint(config, None)
    bank = extraction.take_features(
        checkpoint, read_image_sets(config)["val"], root / "cache", ["pooled", "tokens"]
    )
    assert (bank.grid, bank.poolings, bank.dim) == ((0, 0), ["class token"], 3 * 16 * 16 * 256)
    assert [file.name for file in (bank.folder / "parts").iterdir()] == ["00000-output.safetensors"]


def test_a_pipeline_that_draws_at_random_is_refused(config, root):
    config.evaluation.train.dataset.pipeline.insert(1, dict(type="RandomFlip", prob=0.5))
    np.random.seed(0)  # one in 128 series of draws is all alike
    with pytest.raises(ImageSetError, match="draws at random"):
        take(config, root / "cache")


def test_features_beyond_float16_are_refused(config, root):
    weights = torch.load(root / "weights.pth")["state_dict"]
    weights["backbone.ln1.weight"] *= 1e6
    torch.save(weights, root / "weights.pth")
    with pytest.raises(UserError, match="float16"):
        take(config, root / "cache")
