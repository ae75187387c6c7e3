"""Images that cannot be decoded, while sampling and while tokenising."""

import pytest
from few_images import by_hand

from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import TokenStore
from mapet_mm.tokenizers.from_config import run_extract_tokens, run_fit_codebook
from mapet_mm.tokenizers.images import UnreadableImagesError


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
    with pytest.raises(ValueError, match="pipeline gives images of 40 x 50 px, the tokenizer takes 64 x 64"):
        run_extract_tokens(cfg)
