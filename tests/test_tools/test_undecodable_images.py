"""Images that cannot be decoded, while sampling and while tokenising."""

import time

import cv2
import numpy as np
import pytest
import torch
from few_images import by_hand
from mapet_mm.tokenizers.extraction import _Rows
from PIL import Image
from torch import nn

from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import TokenStore, TokenStoreError
from mapet_mm.tokenizers.images import UnreadableImagesError
from mapet_mm.tokenizers.run import run_extract_tokens, run_fit_codebook, run_verify_tokens
from mapet_mm.utils.shared_work import SharedTasks


@pytest.mark.parametrize(
    ("damage", "num_workers"), [("garbage", 0), ("truncated", 0), ("gone", 0), ("garbage", 1)]
)
def test_an_undecodable_image_is_named_after_all_others_are_written(cfg, tmp_path, damage, num_workers):
    run_fit_codebook(cfg)
    cfg.dataloader.num_workers = num_workers
    broken = tmp_path / "data" / "train" / "1" / "004.png"
    whole = broken.read_bytes()
    if damage == "gone":
        broken.unlink()
    else:
        broken.write_bytes(b"no image" if damage == "garbage" else whole[:30])
    with pytest.raises(UnreadableImagesError) as error:
        run_extract_tokens(cfg)
    assert str(broken) in str(error.value)
    assert "\n" not in str(error.value)
    store = TokenStore.open(cfg.token_store)
    assert [store.names[row] for row in store.missing()] == ["train/1/004.png"]
    broken.write_bytes(whole)
    assert run_extract_tokens(cfg)[1].images == 1
    assert (store["train/1/004.png"] == by_hand(cfg, broken)).all()


def test_an_undecodable_image_is_left_out_if_asked_and_costs_nobody_else(cfg, tmp_path):
    """In the sample and in the store, which is complete then; repaired, it is tried again if asked."""
    broken = tmp_path / "data" / "train" / "1" / "004.png"
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    cfg.on_error = "skip"
    _, codebook = run_fit_codebook(cfg)
    assert (codebook.metadata["images"], codebook.metadata["rows"]) == (11, 22)
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, extraction.skipped, store.sealed) == (16, 1, True)
    assert list(store.skipped) == ["train/1/004.png"]
    assert "UnidentifiedImage" in store.skipped["train/1/004.png"] or store.skipped["train/1/004.png"]
    assert "left 1 out that could not be decoded" in str(extraction)
    broken.write_bytes(whole)
    assert run_extract_tokens(cfg)[1].images == 0
    store, extraction = run_extract_tokens(cfg, retry_skipped=True)
    assert (extraction.images, extraction.skipped, store.sealed) == (1, 0, True)
    assert (store["train/1/004.png"] == by_hand(cfg, broken)).all()


def test_an_image_that_is_removed_instead_of_repaired_leaves_a_complete_store(cfg, tmp_path):
    """As the error says; put back, it gets its tokens."""
    run_fit_codebook(cfg)
    broken = tmp_path / "data" / "train" / "1" / "004.png"
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    with pytest.raises(UnreadableImagesError, match="repair or remove it"):
        run_extract_tokens(cfg)
    broken.unlink()
    listed = tmp_path / "data" / "train.txt"
    lines = listed.read_text()
    listed.write_text(lines.replace("1/004.png 1\n", ""))
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, extraction.skipped, extraction.others, store.sealed) == (0, 1, 0, True)
    assert store.skipped == {"train/1/004.png": "no longer there"}
    broken.write_bytes(whole)
    listed.write_text(lines)
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, extraction.skipped, store.sealed) == (1, 0, True)
    assert (store["train/1/004.png"] == by_hand(cfg, broken)).all()


@pytest.mark.parametrize("found", [True, False])
def test_images_that_another_config_will_tokenise_are_waited_for(cfg, monkeypatch, found):
    """Also where images are not found by their paths, so that nothing says whether one is gone."""
    run_fit_codebook(cfg)
    whole, _ = run_extract_tokens(cfg)
    cfg.token_store += "_shared"
    identity = (whole.grid, 6, whole.tokenizer, whole.data_root, whole.preprocessing)
    TokenStore.create(cfg.token_store, whole.names, *identity)
    every, cfg.dataset = cfg.dataset, cfg.dataset[0]
    if not found:
        monkeypatch.setattr("mapet_mm.tokenizers.extraction.fileio.exists", lambda path: False)
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, extraction.skipped, extraction.others, store.sealed) == (12, 0, 5, False)
    assert str(extraction).endswith("; 5 images of the store that the dataset lacks have no tokens yet")
    cfg.dataset = every
    assert (run_extract_tokens(cfg)[1].images, TokenStore.open(cfg.token_store).sealed) == (5, True)


def test_a_task_of_undecodable_images_alone_is_done_once_they_are_noted(cfg, tmp_path):
    """Four of the seventeen, which are one task's."""
    run_fit_codebook(cfg)
    cfg.on_error = "skip"
    names = sorted(path.relative_to(tmp_path / "data").as_posix() for path in tmp_path.glob("data/*/*/*.png"))
    for name in names[:4]:
        (tmp_path / "data" / name).write_bytes(b"no image")
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, extraction.skipped, store.sealed) == (13, 4, True)
    assert list(store.skipped) == names[:4]
    assert run_verify_tokens(cfg, 17)[1].images == 13  # what there is


def test_a_sample_that_skipped_images_does_not_pass_for_one_that_raises(cfg, tmp_path, capture_log):
    """Before: nobody was told again, and the repaired image was never sampled."""
    complete = run_fit_codebook(cfg, out=str(tmp_path / "complete" / "codebook.safetensors"))[1].digest
    broken = tmp_path / "data" / "train" / "1" / "004.png"
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    cfg.on_error = "skip"
    assert run_fit_codebook(cfg)[1].metadata["images"] == 11
    assert "22 rows of 256 channels into 6; left 1 out that could not be decoded" in capture_log()
    cfg.on_error = "raise"
    for _ in range(2):
        with pytest.raises(UnreadableImagesError, match=r"004\.png` could not be decoded"):
            run_fit_codebook(cfg, overwrite=True)
    cfg.on_error = "skip"
    assert run_fit_codebook(cfg, overwrite=True)[1].metadata["images"] == 11
    broken.write_bytes(whole)
    for on_error in ("skip", "raise"):
        cfg.on_error = on_error
        codebook = run_fit_codebook(cfg, overwrite=True)[1]
        assert (codebook.metadata["images"], codebook.digest) == (12, complete)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_image_that_is_broken_after_it_was_sampled_is_not_sampled(cfg, tmp_path, on_error):
    """Nor does another image of its shard, which is written anew, make it pass for unchanged."""
    run_fit_codebook(cfg)
    time.sleep(0.02)  # a file system's clock may stand still for 10 ms
    train = tmp_path / "data" / "train"
    (train / "1" / "004.png").write_bytes(b"no image")
    (train / "0" / "000.png").write_bytes((train / "0" / "003.png").read_bytes())
    cfg.on_error = on_error
    for _ in range(2):
        if on_error == "skip":
            assert run_fit_codebook(cfg, overwrite=True)[1].metadata["images"] == 11
        else:
            with pytest.raises(UnreadableImagesError, match=r"004\.png` could not be decoded"):
                run_fit_codebook(cfg, overwrite=True)


def test_a_step_that_gives_no_image_has_the_image_named(cfg):
    run_fit_codebook(cfg)
    cfg.dataset = [dict(cfg.dataset[0], pipeline=[lambda results: None, *cfg.dataset[0].pipeline[1:]])]
    with pytest.raises(
        UnreadableImagesError, match=r"000\.png` .* \(the pipeline's first step returned nothing"
    ):
        run_extract_tokens(cfg)


@pytest.mark.parametrize("seen", ["before it is read", "before it is encoded", "before it is written"])
def test_a_task_that_another_process_has_done_meanwhile_is_not_done_again(cfg, monkeypatch, seen):
    """A slow process's task is repeated by one that has nothing else to do."""
    run_fit_codebook(cfg)
    whole, _ = run_extract_tokens(cfg)
    names, grids = list(whole.names), np.array([whole[name] for name in whole.names])
    cfg.token_store += "_shared"
    known = (2, 2), 6, whole.tokenizer, whole.data_root, whole.preprocessing
    other = TokenStore.create(cfg.token_store, names, *known)
    written, encoded, asked = [], [], []
    write, encode = TokenStore.write, _Rows.encode

    def is_lost(tasks, task: int) -> bool:
        asked.append(task)
        if len(asked) == 1:
            write(other, range(17), grids)
        return seen == "before it is read" or (seen == "before it is encoded" and len(asked) > 1)

    monkeypatch.setattr(SharedTasks, "is_lost", is_lost)
    monkeypatch.setattr(TokenStore, "write", lambda *arguments: written.append(arguments))
    monkeypatch.setattr(_Rows, "encode", lambda self, group: (encoded.append(group), encode(self, group))[1])
    store, _ = run_extract_tokens(cfg)
    assert not written
    assert bool(encoded) == (seen == "before it is written")
    assert all((store[name] == grid).all() for name, grid in zip(names, grids, strict=True))


def test_an_image_that_is_removed_after_it_stopped_the_sampling_costs_nothing_else(
    cfg, tmp_path, monkeypatch
):
    broken = tmp_path / "data" / "train" / "1" / "004.png"
    broken.write_bytes(b"no image")
    with pytest.raises(
        UnreadableImagesError, match=r"remove it, or leave such images out with --on-error skip"
    ):
        run_fit_codebook(cfg)
    lines = (tmp_path / "data" / "train.txt").read_text().replace("1/004.png 1\n", "")
    (tmp_path / "data" / "train.txt").write_text(lines)
    monkeypatch.setattr(MODELS.get("KCLIP"), "features", None)  # nothing is encoded again
    assert run_fit_codebook(cfg)[1].metadata["images"] == 11


@MODELS.register_module()
class Standardised(nn.Module):
    """An encoder that divides by each image's spread, which is 0 of an image of one colour."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.scale = nn.Conv2d(3, 16, 32, 32), scale

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        spread = images.std((1, 2, 3), keepdim=True) / self.scale
        return self.layer((images - images.mean((1, 2, 3), keepdim=True)) / spread)


@pytest.fixture
def white(cfg, tmp_path):
    """A config of such an encoder, and the one image of one colour."""
    cfg.tokenizer = dict(
        type="mapet_mm.GridKMeans",
        encoder=dict(type=Standardised),
        image_size=64,
        random_seed=0,
        codebook=cfg.tokenizer.codebook,
    )
    path = tmp_path / "data" / "train" / "1" / "004.png"
    Image.new("RGB", (50, 40), (255, 255, 255)).save(path)
    return path


def test_an_image_whose_features_are_not_finite_is_named_or_left_out(cfg, white):
    """Before: all its tokens were 0; and a codebook could not be fitted at all."""
    message = (
        f"image `{white}` could not be encoded (the network gives NaN or infinity for it): check it and the "
        "network, or leave such images out with --on-error skip, and run the same command again; the "
    )
    with pytest.raises(UnreadableImagesError) as error:
        run_fit_codebook(cfg)
    assert str(error.value).startswith(f"{message}features of the others are kept in")
    cfg.on_error = "skip"
    assert run_fit_codebook(cfg)[1].metadata["images"] == 11
    cfg.on_error = "raise"
    with pytest.raises(UnreadableImagesError) as error:
        run_extract_tokens(cfg)
    assert str(error.value) == f"{message}tokens of all others are in `{cfg.token_store}`"
    cfg.on_error = "skip"
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, extraction.skipped, store.sealed) == (0, 1, True)
    assert store.skipped == {"train/1/004.png": "the network gives NaN or infinity for it"}
    assert "left 1 out that could not be decoded or encoded" in str(extraction)
    assert run_verify_tokens(cfg, 17)[1].images == 16


def test_tokens_of_features_that_are_not_finite_are_not_confirmed(cfg, white):
    """Of a store of an earlier version: all tokens of the image are 0."""
    cfg.on_error = "skip"
    run_fit_codebook(cfg)
    whole, _ = run_extract_tokens(cfg)
    cfg.token_store += "_before"
    identity = (2, 2), 6, whole.tokenizer, whole.data_root, whole.preprocessing
    store = TokenStore.create(cfg.token_store, list(whole.names), *identity)
    grids = [np.zeros((2, 2), int) if name in whole.skipped else whole[name] for name in whole.names]
    store.write(range(17), np.array(grids))
    store.seal()
    with pytest.raises(TokenStoreError, match=r"004\.png` could not be encoded .* with --on-error skip$"):
        run_verify_tokens(cfg, 17)


def test_features_larger_than_float16_holds_are_said_to_be(cfg, white):
    """Before: only that the encoder's weights should be checked."""
    white.unlink()
    (white.parents[2] / "train.txt").write_text("0/000.png 0\n1/001.png 1\n2/002.png 2\n")
    cfg.tokenizer.encoder.scale = 1e6
    with pytest.raises(
        UnreadableImagesError, match=r"gives it features above 65504, the largest number of f"
    ):
        run_fit_codebook(cfg)


def test_pixels_that_are_not_finite_are_named(cfg, tmp_path):
    """A tokenizer that gives token ids itself, as VQ-KD, would give id 0."""
    run_fit_codebook(cfg)

    def divide(results: dict) -> dict:
        with np.errstate(invalid="ignore"):
            return dict(results, img=255 * results["img"].astype(np.float32) / results["img"].max())

    for dataset in cfg.dataset:
        dataset.pipeline.insert(3, divide)
    Image.new("RGB", (50, 40)).save(tmp_path / "data" / "train" / "1" / "004.png")
    with pytest.raises(
        UnreadableImagesError,
        match=r"004\.png` could not be decoded \(NaN or infinity among its pixels\): rep",
    ):
        run_extract_tokens(cfg)


def test_images_of_two_bit_depths_are_refused_by_name(cfg, tmp_path):
    """Before: 16 bits were cut to 8, modulo 256, if an image of 8 bits was first in a group."""
    train = tmp_path / "data" / "train"
    pixels = np.random.default_rng(0).integers(0, 2**16, (40, 50, 3), dtype=np.uint16)
    cv2.imwrite(str(train / "0" / "006.png"), pixels)
    pipeline = cfg.codebook.dataset.pipeline
    pipeline[0].color_type, pipeline[1].backend = "unchanged", "cv2"
    with pytest.raises(ValueError, match="the pipeline gives image") as error:
        run_fit_codebook(cfg)
    assert str(error.value) == (
        f"the pipeline gives image `{train / '0' / '006.png'}` as torch.uint16, "
        f"`{train / '0' / '000.png'}` as torch.uint8: load all with one bit depth (LoadImageFromFile's "
        "color_type='color' makes them 8 bit)"
    )


@pytest.mark.parametrize("tool", [run_fit_codebook, run_extract_tokens])
def test_a_mistyped_policy_for_undecodable_images_is_refused(cfg, tool):
    """Before: the sample went on without them, and nobody said so."""
    if tool is run_extract_tokens:
        run_fit_codebook(cfg)
    cfg.on_error = "Skip"
    with pytest.raises(ValueError, match=r"on_error is 'Skip': one of raise, skip"):
        tool(cfg)


def test_fitting_names_the_undecodable_images_too(cfg, tmp_path):
    for name in ("0/000.png", "2/005.png"):
        (tmp_path / "data" / "train" / name).write_bytes(b"no image")
    with pytest.raises(
        UnreadableImagesError, match=r"000\.png` could not be decoded .* and 1 more \(`.*005\.png`\)"
    ):
        run_fit_codebook(cfg)


def test_a_mistake_in_the_pipeline_is_not_blamed_on_the_images(cfg):
    run_fit_codebook(cfg)
    for dataset in cfg.dataset:
        dataset.pipeline = [
            step for step in dataset.pipeline if step["type"] not in ("ResizeEdge", "CenterCrop")
        ]
    with pytest.raises(
        ValueError, match=r"pipeline gives image `.*000\.png` in 40 x 50 px, the tokenizer takes 64 x 64"
    ):
        run_extract_tokens(cfg)


@pytest.mark.parametrize(("color_type", "channels"), [("grayscale", 1), ("unchanged", 4)])
def test_images_with_other_than_three_channels_have_the_channels_named(cfg, tmp_path, color_type, channels):
    """Before: images of 64 x 64 px, where 64 x 64 are needed."""
    for path in (tmp_path / "data" / "train").glob("*/*.png"):
        Image.open(path).convert("RGBA").save(path)
    cfg.codebook.dataset.pipeline[0].color_type = color_type
    message = rf"pipeline gives image `.*` with {channels} channels?, the tokenizer takes 3: .*_type='color'"
    with pytest.raises(ValueError, match=message):
        run_fit_codebook(cfg)
