"""From images to a codebook: sampled, interrupted, refused."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from few_images import SIZE, prepared
from mmengine.config import Config
from PIL import Image
from step_counts import StepCounts, fake_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.registry import MODELS
from mapet_mm.structures import Codebook, CodebookError
from mapet_mm.structures.parts import Parts
from mapet_mm.tokenizers import features, fill, kmeans
from mapet_mm.tokenizers.features import draw_images, rows_at
from mapet_mm.tokenizers.fill import GroupLoader, ImageGroup
from mapet_mm.tokenizers.fit_and_extract import build_preprocessor, features_folder, run_fit_codebook
from mapet_mm.utils.errors import UserError


def test_the_codebook_records_what_it_was_made_from(fitted):
    recorded = Codebook.load(fitted.tokenizer.codebook).metadata
    assert recorded["encoder"] == "ModifiedResNet-1-1-1-1-width8"
    assert recorded["weights"] == "random, seed 0"
    assert (recorded["images"], recorded["rows"], recorded["k"], recorded["dim"]) == (12, 24, 6, 256)
    assert recorded["preprocessing"]["pipeline"][1]["scale"] == SIZE
    assert recorded["preprocessing"]["data_preprocessor"]["std"] == [70.0] * 3
    assert len(recorded["encoder_digest"]) == 64


def test_the_codebook_depends_on_neither_workers_nor_the_images_order(fitted, tmp_path):
    fitted.dataloader.num_workers = 1
    lines = (tmp_path / "data" / "train.txt").read_text().splitlines()
    (tmp_path / "data" / "train.txt").write_text("\n".join(reversed(lines)))
    _, again = run_fit_codebook(fitted, out=str(tmp_path / "other" / "codebook.safetensors"))
    assert again.digest == Codebook.load(fitted.tokenizer.codebook).digest


def test_images_are_drawn_by_the_seed_in_the_order_of_their_names():
    names = np.array([f"{number:02d}.png" for number in range(40)], object)
    indices = np.arange(40)[::-1]
    drawn, images = draw_images(names, indices, 10, seed=3)
    assert len(set(drawn)) == 10
    assert drawn == sorted(drawn)
    assert [names[39 - image] for image in images] == drawn
    assert draw_images(names, indices, 10, seed=4)[0] != drawn
    for num_images in (None, 40, 99):
        assert draw_images(names, indices, num_images, 3)[0] == names.tolist()


def test_images_give_features_at_positions_of_their_own(cfg, tmp_path):
    """Of one position of each of twelve copies of an image; the codebook is the mean of these features."""
    images = sorted((tmp_path / "data/train").rglob("*.png"))
    for copy in images[1:]:
        shutil.copyfile(images[0], copy)
    cfg.codebook.update(k=1, positions_per_image=1)
    _, codebook = run_fit_codebook(cfg)
    with torch.no_grad():
        (features,) = MODELS.build(cfg.tokenizer).features(prepared(images[0]))  # of 2 x 2 positions
    shares = torch.linalg.lstsq(features.T, codebook.centroids.T).solution.flatten()
    counts = (12 * shares).round()
    torch.testing.assert_close(12 * shares, counts, atol=0.02, rtol=0)
    assert counts.sum() == 12
    assert (counts > 0).sum() >= 3


def test_a_codebook_of_drawn_images_reads_no_others_and_is_the_same_in_any_process(cfg, read, monkeypatch):
    cfg.codebook.num_images = 8
    _, codebook = run_fit_codebook(cfg)
    assert len(read) == len(set(read)) == 8
    recorded = codebook.metadata
    assert (recorded["num_images"], recorded["images"], recorded["rows"]) == (8, 8, 16)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, again = run_fit_codebook(cfg, out=f"{cfg.tokenizer.codebook}.other")
    assert again.digest == codebook.digest
    cfg.codebook.num_images = None
    assert run_fit_codebook(cfg, overwrite=True)[1].digest != codebook.digest


def test_sampling_says_what_it_writes_and_stops_if_the_disk_has_less(cfg, read, monkeypatch, capsys):
    needed = 12 * 2 * 256 * 2  # images x positions x channels, in float16
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(UserError, match="--out"):
        run_fit_codebook(cfg)
    assert not read
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=needed))
    run_fit_codebook(cfg)
    assert f"sampled features: {needed / 1e9:.3g} GB to write" in capsys.readouterr().out


def unknown(_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize("disk_usage", [lambda _: SimpleNamespace(free=0), unknown])
def test_a_disk_that_does_not_say_how_much_is_free_is_written_to(cfg, disk_usage, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    run_fit_codebook(cfg)
    assert (
        "codebook.safetensors.features, whose disk does not say how much is free" in capsys.readouterr().out
    )


def test_rows_are_picked_out_and_rounded_before_they_leave_the_device():
    features = torch.randn(4, 9, 5)
    positions = torch.tensor([[0, 8], [3, 4], [1, 2]])
    expected = [[features[image, position] for position in row] for image, row in enumerate(positions)]
    rows = rows_at(features, positions)
    assert torch.equal(rows, torch.stack([torch.stack(row) for row in expected]).half())
    assert rows_at(torch.full((1, 1, 1), 7e4), torch.zeros(1, 1, dtype=torch.int64)).isinf()


class Copies(TorchDispatchMode):
    """Keeps the shape and type of whatever is copied from another device to the CPU."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = next((value for value in args if isinstance(value, torch.Tensor)), None)
        if given is not None and given.is_cuda and isinstance(result, torch.Tensor) and not result.is_cuda:
            self.seen.append((tuple(result.shape), result.dtype))
        return result


def test_only_the_drawn_rows_are_copied_from_a_gpu_and_not_before_they_are_written():
    with fake_gpu(), Copies() as copies:
        features = torch.empty(32, 196, 64)
        rows = rows_at(features, torch.zeros(30, 4, dtype=torch.int64, device="cpu"))
        assert copies.seen == []
        rows.cpu()
    assert copies.seen == [((30, 4, 64), torch.float16)]


@pytest.mark.parametrize("kind", ["mmpretrain.SelfSupDataPreprocessor", "mmpretrain.ClsDataPreprocessor"])
def test_the_host_waits_for_no_gpu_between_groups_of_images(kind, monkeypatch):
    """The host prepares the next group while the GPU computes; it waits where a part is written."""
    pinned = []

    def loader_of(groups, batch_sampler, pin_memory, **_):
        pinned.append(pin_memory)
        images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8, device="cpu")
        return [ImageGroup(part, indices, images, {}) for part, indices in batch_sampler]

    monkeypatch.setattr(fill, "DataLoader", loader_of)
    with fake_gpu():
        with torch.device("cpu"):
            preprocessor = build_preprocessor(dict(type=kind, mean=[120.0] * 3, std=[70.0] * 3, to_rgb=True))
        loader = GroupLoader([], 64, preprocessor.to("cuda"), group_size=2, num_workers=0)
        loader.pixel_range.is_known = True  # as after a first group
        encoder = torch.nn.Conv2d(3, 8, 32, 32)
        with torch.device("cpu"), StepCounts() as counts:
            for group in loader.load([(0, [0, 1]), (0, [2])]):
                grid = encoder(group.inputs).flatten(2).transpose(1, 2)  # 2 4 8
                rows = rows_at(grid, torch.zeros(len(group.indices), 2, dtype=torch.int64))
    assert pinned == [True]
    assert (rows.device.type, rows.shape) == ("cuda", (1, 2, 8))
    assert counts.waits.total() == 0


def test_a_cpu_that_computes_in_half_precision_is_said_to_be_slow(cfg, capsys):
    cfg.tokenizer.precision = "bfloat16"
    _, codebook = run_fit_codebook(cfg)
    assert codebook.metadata["precision"] == "bfloat16"
    assert "bfloat16" in capsys.readouterr().err
    cfg.tokenizer.precision = "float32"
    run_fit_codebook(cfg, overwrite=True)
    assert "float32" not in capsys.readouterr().err


def test_a_killed_fit_goes_on_with_what_is_left(cfg, read, monkeypatch):
    """Killed while the third part is written, and before k-means begins."""
    monkeypatch.setattr(features, "IMAGES_PER_PART", 4)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        updates, update = [], Parts.update
        patch.setattr(
            Parts,
            "update",
            lambda *changes: killed() if len(updates) == 2 else updates.append(update(*changes)),
        )
        with pytest.raises(KeyboardInterrupt):
            run_fit_codebook(cfg)
    first = set(read)
    read.clear()
    with monkeypatch.context() as patch:
        patch.setattr(kmeans, "say_cost", killed)
        with pytest.raises(KeyboardInterrupt):
            run_fit_codebook(cfg)
    assert 0 < len(read) < 12
    assert set(read) | first == set(range(12))
    read.clear()
    _, codebook = run_fit_codebook(cfg)
    assert not read
    _, undisturbed = run_fit_codebook(cfg, out=f"{cfg.tokenizer.codebook}.other")
    assert codebook.digest == undisturbed.digest


def test_a_part_that_another_process_writes_meanwhile_is_left_to_it(cfg, read, monkeypatch):
    """As the last part of a slow process, which a faster one takes over."""
    _, whole = run_fit_codebook(cfg, out=f"{cfg.tokenizer.codebook}.other")
    (theirs,) = features_folder(Path(f"{cfg.tokenizer.codebook}.other")).rglob("parts/*.safetensors")
    encode = GridKMeans.features

    def with_the_other(self, images):
        mine = features_folder(Path(cfg.tokenizer.codebook)) / theirs.relative_to(theirs.parents[2])
        mine.write_bytes(theirs.read_bytes())
        return encode(self, images)

    read.clear()
    monkeypatch.setattr(GridKMeans, "features", with_the_other)
    _, codebook = run_fit_codebook(cfg)
    assert 0 < len(read) < 12
    assert codebook.digest == whole.digest


def test_features_of_other_preprocessing_are_not_used_again(cfg, read):
    _, codebook = run_fit_codebook(cfg)
    cfg.data_preprocessor.mean = [90.0] * 3
    _, other = run_fit_codebook(cfg, overwrite=True)
    assert other.digest != codebook.digest
    assert other.metadata["preprocessing"]["data_preprocessor"]["mean"] == [90.0] * 3
    cfg.data_preprocessor.mean = [120.0] * 3
    read.clear()
    assert run_fit_codebook(cfg, overwrite=True)[1].digest == codebook.digest
    assert not read


def other_images(cfg: Config) -> None:
    root = cfg.codebook.dataset.data_root
    shutil.copytree(root, f"{root}2")
    cfg.codebook.dataset.data_root = f"{root}2"
    for path in Path(f"{root}2").rglob("*.png"):
        Image.open(path).rotate(180).save(path)


def earlier_version(cfg: Config) -> None:
    """A codebook that does not say what its images hold."""
    book = Codebook.load(cfg.tokenizer.codebook)
    del book.metadata["files"]
    book.save(cfg.tokenizer.codebook)
    root = cfg.codebook.dataset.data_root
    cfg.codebook.dataset.data_root = f"{root}2"
    shutil.move(root, f"{root}2")


def as_written_out(cfg: Config) -> None:
    """The same settings in other words."""
    root = Path(cfg.codebook.dataset.data_root)
    cfg.codebook.max_points_per_centroid = 512
    cfg.codebook.dataset.data_root = str(root / ".." / root.name)


def option(name: str, value: Any = None) -> Callable[[Config], None]:
    """Change an option of the codebook, or leave it out."""
    return lambda cfg: cfg.codebook.pop(name) if value is None else cfg.codebook.update({name: value})


CHANGES = [
    (option("k", 5), "k: 6, now 5"),
    (option("niter"), "niter: 5, now 20"),
    (option("nredo"), "nredo: 2, now 5"),
    (option("max_points_per_centroid", 100), "max_points_per_centroid: 512, now 100"),
    (option("seed", 1), "seed: 0, now 1"),
    (option("positions_per_image"), "positions_per_image: 2, now 4"),
    (option("num_images", 6), "num_images: None, now 6"),
    (lambda cfg: cfg.tokenizer.update(precision="bfloat16"), "precision: float32, now bfloat16"),
    (other_images, "codebook `.*` was made of another image `.*png` than .*data2"),
    (earlier_version, "data_root: .*data, now .*data2"),
    (lambda cfg: cfg.tokenizer.pretrained.update(seed=1), "encoder_digest"),
    (lambda cfg: cfg.tokenizer.clip_model.update(width=16), "width8, now .*width16"),
    (lambda cfg: cfg.data_preprocessor.update(mean=[90.0] * 3), r"mean\.0: 120\.0, now 90\.0"),
]


@pytest.mark.parametrize(("change", "noun"), CHANGES)
def test_a_codebook_of_other_settings_images_or_encoder_is_not_taken_nor_overwritten(cfg, change, noun):
    path, _ = run_fit_codebook(cfg)
    change(cfg)
    before = path.read_bytes()
    with pytest.raises(CodebookError, match=f"{noun}.*--overwrite"):
        run_fit_codebook(cfg)
    assert path.read_bytes() == before


@pytest.mark.parametrize("change", [lambda cfg: None, as_written_out])
def test_a_codebook_of_the_same_settings_is_taken(cfg, read, change):
    _, codebook = run_fit_codebook(cfg)
    change(cfg)
    read.clear()
    assert run_fit_codebook(cfg)[1].digest == codebook.digest
    assert not read


def test_an_existing_codebook_is_overwritten_if_asked(fitted):
    fitted.codebook.k = 5
    assert run_fit_codebook(fitted, overwrite=True)[1].k == 5


def test_too_few_rows_are_refused_before_anything_is_sampled(cfg):
    cfg.codebook.k = 25
    with pytest.raises(CodebookError, match="24 rows, k = 25"):
        run_fit_codebook(cfg)
    assert not features_folder(Path(cfg.tokenizer.codebook)).exists()
