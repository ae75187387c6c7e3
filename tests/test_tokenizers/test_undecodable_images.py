"""Images that cannot be decoded or encoded, and storage that gives errors, while sampling and tokenising."""

import errno
import os
from pathlib import Path

import pytest
import torch
from few_images import by_hand
from mmcv.transforms import LoadImageFromFile
from mmengine.config import Config
from PIL import Image
from torch import nn

from mapet_mm.datasets import reading
from mapet_mm.registry import MODELS
from mapet_mm.structures import Codebook, TokenStore
from mapet_mm.tokenizers.fit_and_extract import run_extract_tokens, run_fit_codebook, run_verify_tokens
from mapet_mm.tokenizers.images import UnreadableImagesError
from mapet_mm.utils.errors import UserError

BROKEN = "train/1/004.png"


@pytest.fixture
def broken(fitted: Config, tmp_path: Path) -> Path:
    path = tmp_path / "data" / BROKEN
    path.with_suffix(".whole").write_bytes(path.read_bytes())
    path.write_bytes(b"no image")
    return path


def repair(path: Path) -> None:
    path.with_suffix(".whole").rename(path)


@pytest.mark.parametrize("damage", ["garbage", "truncated", "gone"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_undecodable_image_is_named_after_all_others_are_written(fitted, broken, damage, num_workers):
    fitted.dataloader.num_workers = num_workers
    if damage == "truncated":
        broken.write_bytes(broken.with_suffix(".whole").read_bytes()[:30])
    elif damage == "gone":
        broken.unlink()
    with pytest.raises(UnreadableImagesError, match=f"`{broken}` could not be decoded"):
        run_extract_tokens(fitted)
    store = TokenStore.open(fitted.token_store)
    assert [store.names[row] for row in store.missing()] == [BROKEN]
    repair(broken)
    assert run_extract_tokens(fitted)[1].images == 1
    assert (store[BROKEN] == by_hand(fitted, broken)).all()


def test_an_undecodable_image_is_left_out_if_asked_and_tried_again_if_asked(fitted, broken):
    fitted.update(on_error="skip", max_skipped=0.06)
    store, extraction = run_extract_tokens(fitted)
    assert (extraction.images, list(store.skipped), store.missing().size) == (16, [BROKEN], 0)
    listing = store.path / "skipped.txt"
    assert f"left 1 of 17 images out that could not be decoded or encoded, see {listing}" in str(extraction)
    assert listing.read_text().startswith(f"{broken}\t")
    assert "of 16 images" in run_verify_tokens(fitted, 17)[1]
    repair(broken)
    assert run_extract_tokens(fitted)[1].images == 0
    store, extraction = run_extract_tokens(fitted, retry_skipped=True)
    assert (extraction.images, store.skipped, extraction.note) == (1, {}, "")
    assert not listing.exists()
    assert (store[BROKEN] == by_hand(fitted, broken)).all()


@pytest.mark.parametrize("run", [run_extract_tokens, lambda cfg: run_fit_codebook(cfg, overwrite=True)])
def test_too_many_images_left_out_stop_the_command(fitted, broken, run):
    fitted.on_error = "skip"
    with pytest.raises(UserError, match=r"left 1 of 1[27] images out .* more than 5%.*--max-skipped 1"):
        run(fitted)
    fitted.max_skipped = 1
    run(fitted)


def test_the_same_commands_go_on_once_the_images_are_repaired(fitted, broken, read):
    """And read nothing else again."""
    complete = Codebook.load(fitted.tokenizer.codebook).digest
    fitted.on_error = "skip"
    for run in (lambda: run_fit_codebook(fitted, overwrite=True), lambda: run_extract_tokens(fitted)):
        for _ in range(2):
            with pytest.raises(UserError, match="repair them and run the same command again"):
                run()
    repair(broken)
    read.clear()
    assert run_fit_codebook(fitted, overwrite=True)[1].digest == complete
    store, extraction = run_extract_tokens(fitted)
    assert (extraction.images, store.skipped, store.missing().size) == (1, {}, 0)
    assert (store[BROKEN] == by_hand(fitted, broken)).all()
    assert read == [4, 4]


def test_a_sample_leaves_an_image_out_if_asked_and_does_not_pass_for_a_whole_one(fitted, broken):
    complete = Codebook.load(fitted.tokenizer.codebook).digest
    for _ in range(2):
        with pytest.raises(UnreadableImagesError, match=r"4.png` could not be decoded .*--on-error skip"):
            run_fit_codebook(fitted, overwrite=True)
    fitted.update(on_error="skip", max_skipped=1)
    _, without = run_fit_codebook(fitted, overwrite=True)
    assert (without.metadata["images"], without.metadata["rows"]) == (11, 22)
    fitted.on_error = "raise"
    with pytest.raises(UnreadableImagesError):
        run_fit_codebook(fitted, overwrite=True)
    repair(broken)
    assert run_fit_codebook(fitted, overwrite=True)[1].digest == complete


class BadStorage(LoadImageFromFile):
    """Gives an error for one image, a number of times."""

    left = 0

    def transform(self, results: dict) -> dict:
        if results["img_path"].endswith(BROKEN) and BadStorage.left:
            BadStorage.left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), results["img_path"])
        return super().transform(results)


@pytest.mark.parametrize(("errors", "stops"), [(3, False), (4, True)])
def test_an_error_of_the_storage_is_tried_again_and_leaves_no_image_out(fitted, monkeypatch, errors, stops):
    monkeypatch.setattr(reading, "RETRIES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(BadStorage, "left", errors)
    fitted.update(on_error="skip", max_skipped=1)
    for dataset in fitted.dataset:
        dataset.pipeline[0].type = BadStorage
    if stops:
        with pytest.raises(UserError, match=f"{BROKEN}` cannot be read .*Input/output error"):
            run_extract_tokens(fitted)
    store, _ = run_extract_tokens(fitted)
    assert (store.skipped, store.missing().size) == ({}, 0)


@MODELS.register_module()
class Standardised(nn.Module):
    """An encoder that divides by each image's spread, which is 0 of an image of one colour."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.scale = nn.Conv2d(3, 16, 32, 32), scale

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        spread = images.std((1, 2, 3), keepdim=True) / self.scale
        return self.layer((images - images.mean((1, 2, 3), keepdim=True)) / spread)


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_an_image_whose_features_are_not_finite_is_named_or_left_out(cfg, tmp_path, scale):
    """One of a single colour; or all of them, whose features are larger than float16 holds."""
    Image.new("RGB", (50, 40), (255, 255, 255)).save(tmp_path / "data" / BROKEN)
    cfg.tokenizer = dict(
        type="mapet_mm.GridKMeans",
        encoder=dict(type=Standardised, scale=scale),
        image_size=64,
        random_seed=0,
        codebook=cfg.tokenizer.codebook,
    )
    named = "004.png` .* gives it NaN" if scale == 1 else "000.png` .* 65504.* and 11 more"
    with pytest.raises(UnreadableImagesError, match=named):
        run_fit_codebook(cfg)
    if scale > 1:
        return
    cfg.update(on_error="skip", max_skipped=1)
    assert run_fit_codebook(cfg)[1].metadata["images"] == 11
    cfg.on_error = "raise"
    with pytest.raises(UnreadableImagesError, match="gives NaN or infinity for it"):
        run_extract_tokens(cfg)
    cfg.on_error = "skip"
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, store.skipped) == (0, {BROKEN: "the network gives NaN or infinity for it"})
