"""From images to a token store: interrupted, continued, extended, refused."""

import os
import runpy
import shutil
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from few_images import by_hand
from mmengine.config import Config
from PIL import Image
from pretended_gpu import pretended_gpu
from sklearn.datasets import load_sample_image

from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import Codebook, CodebookError, TokenStore, TokenStoreError
from mapet_mm.tokenizers import extraction as extraction_module
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.tokenizers.run import (
    build_tokenizer,
    run_extract_tokens,
    run_fit_codebook,
    run_verify_tokens,
)

ROOT = Path(__file__).parents[2]


def test_every_image_of_every_split_gets_its_own_tokens(cfg, tmp_path):
    path, codebook = run_fit_codebook(cfg)
    store, extraction = run_extract_tokens(cfg)
    assert extraction.images == len(store) == 17
    assert store.missing().size == 0
    assert store.tokenizer == Codebook.load(path).digest == codebook.digest
    assert (store.grid, store.vocab_size, store.data_root) == ((2, 2), 6, str(tmp_path / "data"))
    for name in ("train/0/000.png", "train/2/011.png", "val/1/004.png"):
        assert (store[name] == by_hand(cfg, tmp_path / "data" / name)).all()
    assert len(np.unique([store[name] for name in store.names])) > 1


def test_a_gpu_gives_the_hosts_codebook_and_tokens(cfg, tmp_path):
    run_fit_codebook(cfg)
    store, _ = run_extract_tokens(cfg)
    on_gpu = deepcopy(cfg)
    on_gpu.tokenizer.codebook = str(tmp_path / "gpu" / "codebook.safetensors")
    on_gpu.token_store = str(tmp_path / "gpu" / "tokens")
    with pretended_gpu():
        path, _ = run_fit_codebook(on_gpu)
        assert build_tokenizer(on_gpu)[0].encoder.layer1[0].conv1.weight.is_cuda
        store_of_gpu, _ = run_extract_tokens(on_gpu)
    assert torch.equal(Codebook.load(path).centroids, Codebook.load(cfg.tokenizer.codebook).centroids)
    assert all((store_of_gpu[name] == store[name]).all() for name in store.names)


def test_an_interrupted_extraction_reads_only_what_is_left(cfg, monkeypatch):
    run_fit_codebook(cfg)
    write, seen = TokenStore.write, []

    def stop_at_third(self, rows, grids, skipped):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(list(rows))
        write(self, rows, grids, skipped)

    with monkeypatch.context() as patch:
        patch.setattr(TokenStore, "write", stop_at_third)
        with pytest.raises(KeyboardInterrupt):
            run_extract_tokens(cfg)
    partial = TokenStore.open(cfg.token_store)
    assert partial.missing().tolist() == sorted(set(range(17)) - {row for rows in seen for row in rows})
    kept = {name: partial[name] for row, name in enumerate(partial.names) if partial.written()[row]}
    assert len(kept) == 8

    read = []
    getitem = NamedImages.__getitem__
    monkeypatch.setattr(
        NamedImages, "__getitem__", lambda self, i: (read.append(self.name(i)), getitem(self, i))[1]
    )
    store, extraction = run_extract_tokens(cfg)
    assert extraction.images == len(read) == 9
    assert not set(read) & set(kept)
    assert store.missing().size == 0
    assert all((store[name] == grid).all() for name, grid in kept.items())
    assert str(run_extract_tokens(cfg)[1]) == "all images had their tokens"


def test_a_half_filled_store_is_not_completed_with_other_preprocessing(cfg, monkeypatch):
    run_fit_codebook(cfg)
    whole, _ = run_extract_tokens(cfg)
    names = list(whole.names)
    cfg.token_store += "_half"
    preprocessing, root = whole.preprocessing, whole.data_root
    half = TokenStore.create(cfg.token_store, names, (2, 2), 6, whole.tokenizer, root, preprocessing)
    half.write(range(8), np.array([whole[name] for name in names[:8]]))
    for dataset in cfg.dataset:
        dataset.pipeline[1].interpolation = "bilinear"
    message = r"preprocessed in another way \(pipeline\.1\.interpolation: bicubic, now bilinear\): choose"
    with pytest.raises(TokenStoreError, match=message):
        run_extract_tokens(cfg)
    cfg.dataset[0].pipeline[1].interpolation = "bicubic"
    with pytest.raises(ValueError, match="have different pipelines: give them the same"):
        run_extract_tokens(cfg)
    cfg.dataset[1].pipeline[1].interpolation = "bicubic"
    cfg.data_preprocessor.std = [60.0] * 3
    # As a codebook that does not say how its images were prepared, which would be refused first.
    codebook = Codebook.load(cfg.tokenizer.codebook)
    del codebook.metadata["preprocessing"]
    codebook.save(cfg.tokenizer.codebook)
    with pytest.raises(TokenStoreError, match=r"\(data_preprocessor\.std\.0: 70\.0, now 60\.0\)"):
        run_extract_tokens(cfg)
    cfg.data_preprocessor.std = [70.0] * 3
    assert run_extract_tokens(cfg)[1].images == 9


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (dict(mean=[0.0] * 3), r"data_preprocessor\.mean\.0: 120\.0, now 0\.0"),
        (dict(std=[70.0, 70.0, 1.0]), r"data_preprocessor\.std\.2: 70\.0, now 1\.0"),
        (dict(to_rgb=False), r"data_preprocessor\.to_rgb: True, now False"),
    ],
)
def test_tokens_of_images_normalised_otherwise_than_the_codebooks_are_refused(cfg, change, difference):
    """Before: the tokens were made of other features than the centroids, and nobody said so."""
    run_fit_codebook(cfg)
    run_extract_tokens(Config({**cfg, "token_store": f"{cfg.token_store}_right"}))
    cfg.data_preprocessor.update(change)
    message = rf"was fitted on images prepared in another way \({difference}\): restore .* or fit a codebook"
    with pytest.raises(CodebookError, match=message):
        run_extract_tokens(cfg)
    assert not Path(cfg.token_store).exists()
    cfg.token_store += "_right"
    with pytest.raises(CodebookError, match=message):
        run_verify_tokens(cfg, 0)


def test_a_codebook_is_used_on_images_of_another_pipeline_and_by_another_spelling(cfg):
    """The codebook's images may be cut out in another way, and the config be written in another way."""
    cfg.codebook.dataset.pipeline[2].crop_size = (64, 64)
    run_fit_codebook(cfg)
    cfg.data_preprocessor = dict(
        type="mmpretrain.SelfSupDataPreprocessor", mean=(120, 120, 120), std=[70] * 3, to_rgb=True
    )
    assert run_extract_tokens(cfg)[1].images == 17


def test_the_same_names_of_another_folder_do_not_complete_a_store(cfg, tmp_path):
    run_fit_codebook(cfg)
    whole, _ = run_extract_tokens(cfg)
    names = list(whole.names)
    cfg.token_store += "_half"
    root, preprocessing = str(tmp_path / "data"), whole.preprocessing
    TokenStore.create(cfg.token_store, names, (2, 2), 6, whole.tokenizer, root, preprocessing)
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    os.symlink(tmp_path / "data", tmp_path / "link")
    for folder in ("other", "link"):
        for dataset in cfg.dataset:
            dataset.data_root = str(tmp_path / folder)
        if folder == "other":
            with pytest.raises(
                TokenStoreError, match=r"is of images in `.*/data`, the config's are in `.*/oth"
            ):
                run_extract_tokens(cfg)
    assert run_extract_tokens(cfg)[1].images == 17


def test_a_store_of_another_codebook_is_not_continued(cfg):
    run_fit_codebook(cfg)
    store, _ = run_extract_tokens(cfg)
    before = {file: file.read_bytes() for file in store.path.rglob("*.safetensors")}
    cfg.codebook.k = 5
    run_fit_codebook(cfg, overwrite=True)
    with pytest.raises(
        TokenStoreError, match=r"was made by tokenizer .*, but the config's tokenizer is .*: re-extract"
    ):
        run_extract_tokens(cfg)
    assert {file: file.read_bytes() for file in store.path.rglob("*.safetensors")} == before


def test_new_images_extend_a_store(cfg, tmp_path):
    run_fit_codebook(cfg)
    store, _ = run_extract_tokens(cfg)
    old = {name: store[name] for name in store.names}
    Image.new("RGB", (40, 40)).save(tmp_path / "data" / "val" / "0" / "new.png")
    with open(tmp_path / "data" / "val.txt", "a") as lines:
        lines.write("0/new.png 0\n")
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, len(store), store.sealed) == (1, 18, True)
    assert list(store.names) == [*sorted(old), "val/0/new.png"]
    assert all((store[name] == grid).all() for name, grid in old.items())
    assert (store["val/0/new.png"] == by_hand(cfg, tmp_path / "data" / "val/0/new.png")).all()


@pytest.mark.parametrize("change", ["create", "extend_store"])
def test_a_store_that_another_process_makes_or_extends_meanwhile_is_taken(cfg, tmp_path, monkeypatch, change):
    """And where nobody did, why it cannot be made is said."""
    run_fit_codebook(cfg)
    if change == "extend_store":
        run_extract_tokens(cfg)
        Image.new("RGB", (40, 40)).save(tmp_path / "data" / "val" / "0" / "new.png")
        with open(tmp_path / "data" / "val.txt", "a") as lines:
            lines.write("0/new.png 0\n")
    owner = TokenStore if change == "create" else extraction_module
    original = getattr(owner, change)

    def refuse(*arguments, **options):
        raise TokenStoreError("the disk is full")

    def later_than_another(*arguments, **options):
        original(*arguments, **options)
        refuse()

    monkeypatch.setattr(owner, change, refuse)
    with pytest.raises(TokenStoreError, match="the disk is full"):
        run_extract_tokens(cfg)
    monkeypatch.setattr(owner, change, later_than_another)
    store, extraction = run_extract_tokens(cfg)
    assert store.missing().size == 0
    assert extraction.images == (17 if change == "create" else 1)


def test_a_store_of_another_grid_is_refused(cfg, tmp_path):
    _, codebook = run_fit_codebook(cfg)
    TokenStore.create(
        cfg.token_store, ["train/0/000.png"], (4, 4), 6, codebook.digest, str(tmp_path / "data")
    )
    with pytest.raises(TokenStoreError, match=r"has grids of \(4, 4\), the tokenizer gives \(2, 2\): choose"):
        run_extract_tokens(cfg)


def test_new_images_of_another_folder_are_refused(cfg, tmp_path):
    run_fit_codebook(cfg)
    run_extract_tokens(cfg)
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    os.rename(tmp_path / "other" / "train" / "0" / "000.png", tmp_path / "other" / "train" / "0" / "a.png")
    lines = (tmp_path / "other" / "train.txt").read_text().replace("0/000.png", "0/a.png")
    (tmp_path / "other" / "train.txt").write_text(lines)
    for dataset in cfg.dataset:
        dataset.data_root = str(tmp_path / "other")
    with pytest.raises(TokenStoreError, match=r"is of images in `.*/data`, the config's are in `.*/other`"):
        run_extract_tokens(cfg)


def test_an_image_in_two_splits_is_tokenised_once(cfg):
    run_fit_codebook(cfg)
    cfg.dataset = [cfg.dataset[0], cfg.dataset[0]]
    assert run_extract_tokens(cfg)[1].images == 12


def test_the_papers_preprocessing_is_clips_own_on_a_photograph(tmp_path):
    Image.fromarray(load_sample_image("china.jpg")).save(tmp_path / "a.png")
    cfg = Config.fromfile(ROOT / "configs" / "tokenizers" / "kclip_rn50x64-448px_k8192_in1k.py")
    images = NamedImages(
        dict(type="CustomDataset", data_root=str(tmp_path), with_label=False, pipeline=cfg.pipeline), None
    )
    preprocessor = MODELS.build(cfg.data_preprocessor)
    mine = preprocessor(dict(inputs=images[0][1][None], data_samples=None))["inputs"][0]
    clips = open_clip.image_transform(448, is_train=False)(Image.open(tmp_path / "a.png"))
    assert mine.shape == (3, 448, 448)
    # Less than one of 255 grey levels apart: 1 / 255 / 0.26 = 0.015.
    assert (mine - clips).abs().max() < 1e-4


def run_tool(monkeypatch, tool: str, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", [tool, *args])
    runpy.run_path(str(ROOT / "tools" / tool), run_name="__main__")


def test_the_command_lines_say_what_was_written_and_what_comes_next(cfg, tmp_path, monkeypatch, capsys):
    config = str(tmp_path / "tokenizer.py")
    cfg.dump(config)
    run_tool(monkeypatch, "fit_codebook.py", config)
    out, err = capsys.readouterr()
    assert f"wrote {cfg.tokenizer.codebook}: 6 centroids of 256 channels" in out
    assert f"next: python tools/extract_tokens.py {config}" in out
    assert "12/12" in err
    run_tool(monkeypatch, "extract_tokens.py", config, "--cfg-options", "dataloader.num_workers=1")
    out, err = capsys.readouterr()
    assert f"wrote {cfg.token_store}: 2 x 2 tokens of 17 images, 6 ids" in out
    assert "tokenised 17 images in" in out
    assert "next: python tools/train.py" in out
    assert "17/17" in err
    with pytest.raises(SystemExit) as stop:
        run_tool(monkeypatch, "fit_codebook.py", config)
    assert stop.value.code.startswith(f"error: codebook `{cfg.tokenizer.codebook}` exists: add --overwrite")


@pytest.mark.parametrize(
    "config", [*sorted(ROOT.glob("configs/tokenizers/*.py")), ROOT / "configs/micro/kclip.py"]
)
def test_every_tokenizer_config_names_a_next_config_that_reads_its_store(config):
    cfg = Config.fromfile(config)
    following = Config.fromfile(ROOT / cfg.next_config)
    stores = {step.store for step in following.train_dataloader.dataset.pipeline if "store" in step}
    assert stores == {cfg.token_store}
