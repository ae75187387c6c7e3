"""From images to a codebook: sampled, interrupted, refused."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from few_images import SIZE
from PIL import Image

from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import Codebook, CodebookError, kmeans
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.tokenizers.run import features_folder, run_fit_codebook
from mapet_mm.tokenizers.sampling import sample_positions


def test_the_codebook_records_what_it_was_made_from(cfg):
    _, codebook = run_fit_codebook(cfg)
    recorded = codebook.metadata
    assert recorded["encoder"] == "ModifiedResNet-1-1-1-1-width8"
    assert recorded["weights"] == "random, seed 0"
    assert (recorded["images"], recorded["rows"], recorded["k"], recorded["dim"]) == (12, 24, 6, 256)
    assert recorded["preprocessing"]["pipeline"][1]["scale"] == SIZE
    assert recorded["preprocessing"]["data_preprocessor"]["std"] == [70.0] * 3
    assert len(recorded["encoder_digest"]) == 64


def test_the_sample_depends_on_neither_workers_nor_order(cfg, tmp_path):
    _, codebook = run_fit_codebook(cfg)
    cfg.dataloader = dict(num_workers=1, group_size=4)
    lines = (tmp_path / "data" / "train.txt").read_text().splitlines()
    (tmp_path / "data" / "train.txt").write_text("\n".join(reversed(lines)))
    _, again = run_fit_codebook(cfg, out=str(tmp_path / "other" / "codebook.safetensors"))
    assert again.digest == codebook.digest


def test_sampled_positions_are_distinct_seeded_and_spread_over_the_grid():
    names = [f"{index}.png" for index in range(400)]
    drawn = np.array([sample_positions(name, 16, 4, seed=0) for name in names])
    assert all(len(set(row)) == 4 for row in drawn.tolist())
    assert (drawn == [sample_positions(name, 16, 4, seed=0) for name in names]).all()
    assert (drawn != [sample_positions(name, 16, 4, seed=1) for name in names]).any()
    counts = np.bincount(drawn.ravel(), minlength=16)
    assert counts.min() > 60  # 100 expected everywhere
    assert counts.max() < 140


def test_a_killed_sampling_goes_on_with_the_shards_that_are_left(cfg, monkeypatch):
    monkeypatch.setattr("mapet_mm.tokenizers.feature_shards.IMAGES_PER_SHARD", 4)
    encoded = []
    features = MODELS.get("KCLIP").features

    def counted(self, images):
        if len(encoded) == 2:
            raise KeyboardInterrupt
        encoded.append(len(images))
        return features(self, images)

    with monkeypatch.context() as patch:
        patch.setattr(MODELS.get("KCLIP"), "features", counted)
        with pytest.raises(KeyboardInterrupt):
            run_fit_codebook(cfg)
    kept = list(features_folder(Path(cfg.tokenizer.codebook)).rglob("features-*.safetensors"))
    assert kept
    before = {file: file.stat().st_mtime_ns for file in kept}
    _, codebook = run_fit_codebook(cfg)
    assert {file: file.stat().st_mtime_ns for file in kept} == before
    _, undisturbed = run_fit_codebook(cfg, out=f"{cfg.tokenizer.codebook}.other")
    assert codebook.digest == undisturbed.digest


def test_a_truncated_shard_is_named(cfg):
    run_fit_codebook(cfg)
    (shard,) = features_folder(Path(cfg.tokenizer.codebook)).rglob("features-*.safetensors")
    os.truncate(shard, 100)
    with pytest.raises(
        ValueError, match=rf"{shard.name}` is damaged .*: remove it and run tools/fit_codebook"
    ):
        run_fit_codebook(cfg, overwrite=True)
    shard.unlink()
    run_fit_codebook(cfg, overwrite=True)


def test_features_of_other_preprocessing_are_not_used_again(cfg):
    """With another mean the same images give other features, and the codebook says which."""
    _, codebook = run_fit_codebook(cfg)
    cfg.data_preprocessor.mean = [90.0] * 3
    _, other = run_fit_codebook(cfg, overwrite=True)
    assert other.digest != codebook.digest
    assert other.metadata["preprocessing"]["data_preprocessor"]["mean"] == [90.0] * 3
    cfg.data_preprocessor.mean = [120.0] * 3
    assert run_fit_codebook(cfg, overwrite=True)[1].digest == codebook.digest


def replace(path: Path) -> None:
    """Write another image under the same name, which is seen as newer than what was made before."""
    time.sleep(0.02)  # a file system's clock may stand still for 10 ms
    noise = np.random.default_rng(list(path.name.encode())).integers(0, 128, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


def test_images_that_were_replaced_are_sampled_anew(cfg, tmp_path, monkeypatch):
    """Before: another codebook of the same images was the old images'."""
    _, codebook = run_fit_codebook(cfg)
    replaced = sorted((tmp_path / "data" / "train" / "1").iterdir())
    for path in replaced:
        replace(path)
    read, getitem = [], NamedImages.__getitem__
    monkeypatch.setattr(
        NamedImages, "__getitem__", lambda self, i: (read.append(Path(self.path(i))), getitem(self, i))[1]
    )
    _, again = run_fit_codebook(cfg, overwrite=True)
    assert (len(replaced), sorted(read)) == (4, replaced)
    _, fresh = run_fit_codebook(cfg, out=str(tmp_path / "other" / "codebook.safetensors"))
    assert again.digest == fresh.digest != codebook.digest
    read.clear()
    assert run_fit_codebook(cfg, overwrite=True)[1].digest == fresh.digest
    assert read == []


def test_a_run_that_goes_on_samples_no_image_again(cfg, tmp_path, monkeypatch):
    """On a cluster it may go on with another copy of the images, whose times are newer."""
    with monkeypatch.context() as patch:
        patch.setattr(kmeans, "_save_progress", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_fit_codebook(cfg)
    for path in (tmp_path / "data" / "train").glob("*/*.png"):
        path.write_bytes(path.read_bytes())
    read, getitem = [], NamedImages.__getitem__
    monkeypatch.setattr(NamedImages, "__getitem__", lambda self, i: (read.append(i), getitem(self, i))[1])
    run_fit_codebook(cfg)
    assert read == []


def test_the_clustering_of_images_that_were_replaced_is_not_continued(cfg, tmp_path, monkeypatch):
    """A killed run's centroids are those of the old features."""
    run_fit_codebook(cfg)
    save, saved = kmeans._save_progress, []

    def killed(*arguments):
        save(*arguments)
        saved.append(arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kmeans, "_save_progress", killed)
        with pytest.raises(KeyboardInterrupt):
            run_fit_codebook(cfg, overwrite=True)
    for path in (tmp_path / "data" / "train").glob("*/*.png"):
        replace(path)
    _, codebook = run_fit_codebook(cfg, overwrite=True)
    _, fresh = run_fit_codebook(cfg, out=str(tmp_path / "other" / "codebook.safetensors"))
    assert codebook.metadata["inertia_per_iteration"] == fresh.metadata["inertia_per_iteration"]
    assert codebook.digest == fresh.digest


def test_an_existing_codebook_is_not_overwritten_unasked(cfg):
    path, codebook = run_fit_codebook(cfg)
    cfg.codebook.k = 5
    with pytest.raises(CodebookError, match=r"codebook\.safetensors` exists: add --overwrite"):
        run_fit_codebook(cfg)
    assert Codebook.load(path).digest == codebook.digest
    assert run_fit_codebook(cfg, overwrite=True)[1].k == Codebook.load(path).k == 5


def test_too_few_rows_and_too_many_positions_are_refused(cfg):
    cfg.codebook.k = 25
    with pytest.raises(CodebookError, match="24 rows, k = 25"):
        run_fit_codebook(cfg)
    assert not features_folder(Path(cfg.tokenizer.codebook)).exists()  # nothing was sampled for nothing
    cfg.codebook.positions_per_image = 5
    with pytest.raises(ValueError, match=r"positions_per_image is 5, an image has 4 grid positions"):
        run_fit_codebook(cfg)
