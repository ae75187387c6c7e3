"""Codebook and token store by several processes, verified, and merged from parts."""

import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from digits_tokenizer import kclip_config, write_few_digits
from forked_processes import run_together
from mmengine.config import Config
from PIL import Image

from mapet_mm.structures import TokenStore, TokenStoreError
from mapet_mm.tokenizers.run import run_extract_tokens, run_fit_codebook, run_verify_tokens

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("processes")
    write_few_digits(path / "digits", 60)
    return path


def config(folder: Path, out: str, **options) -> Config:
    cfg = kclip_config(folder / "digits", folder / out, **options)
    cfg.dump(str(folder / f"{out}.py"))
    return cfg


@pytest.fixture(scope="module")
def single(folder) -> Config:
    cfg = config(folder, "single")
    run_fit_codebook(cfg)
    run_extract_tokens(cfg)
    return cfg


def files_of(path: Path) -> dict[str, bytes]:
    path = Path(path)
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_two_processes_make_the_same_codebook_and_store(folder, single):
    cfg = config(folder, "double", **{"dataloader.num_workers": 1})
    said = run_together(2, "fit_codebook.py", folder / "double.py", folder=folder)
    assert said.count("wrote") == 1
    digest = TokenStore.open(single.token_store).tokenizer
    assert f"digest {digest[:12]}" in said
    said = run_together(2, "extract_tokens.py", folder / "double.py", folder=folder)
    assert said.count("tokenised 120 images") == 1
    assert files_of(cfg.token_store) == files_of(single.token_store)


def test_a_good_store_is_verified(single):
    _, verification = run_verify_tokens(single, 50)
    assert verification == (50, 50 * 36, 0, 0)
    assert run_verify_tokens(single, 1000)[1].images == 120


def test_tokens_that_are_not_the_images_are_found(folder, single):
    cfg = config(folder, "wrong", **{"tokenizer.codebook": single.tokenizer.codebook})
    store, _ = run_extract_tokens(cfg)
    name = store.names[33]
    store.write([33], [(store[name].astype(int) + 1) % 12])
    store.seal()
    with pytest.raises(TokenStoreError, match=rf"36 of 36 tokens of image `.*{name}` differ from fresh ones"):
        run_verify_tokens(cfg, 120)
    file = Path(cfg.token_store) / "generation-0003" / "grids.safetensors"
    grids = bytearray(file.read_bytes())
    grids[-100] ^= 1
    file.write_bytes(grids)
    with pytest.raises(TokenStoreError, match=r"grids\.safetensors` has changed since it was written"):
        run_verify_tokens(cfg, 0)


def test_an_image_that_was_replaced_is_found_first(folder, single):
    """One of 120, by a random image of another size or the same, also with the time stamp of before."""
    cfg = config(folder, "replaced", **{"tokenizer.codebook": single.tokenizer.codebook})
    store, _ = run_extract_tokens(cfg)
    path, other = (Path(store.data_root, store.names[row]) for row in (70, 71))
    original, before = path.read_bytes(), path.stat()
    for side in (8, 16):
        noise = np.random.default_rng(0).integers(0, 256, (side, side), dtype=np.uint8)
        Image.fromarray(noise).save(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(TokenStoreError, match=rf"tokens of image `{path}` differ.*another name"):
            run_verify_tokens(cfg, 1)
    path.unlink()
    with pytest.raises(TokenStoreError, match=rf"image `{path}` could not be decoded \(FileNotFound"):
        run_verify_tokens(cfg, 1)
    path.write_bytes(original)
    other.write_bytes(other.read_bytes())  # as a copy of the dataset would
    store, verification = run_verify_tokens(cfg, 1)
    assert str(verification).endswith("2 image files are newer than the store: --verify 2 for all")
    assert str(run_verify_tokens(cfg, 2)[1]) == "0 of 72 tokens of 2 images differ from fresh ones"


def test_parts_merge_into_the_store_of_all(folder, single, monkeypatch, capsys):
    parts = []
    for part, name in enumerate(("train", "val")):
        cfg = config(folder, name, **{"tokenizer.codebook": single.tokenizer.codebook})
        cfg.dataset = [cfg.dataset[part]]
        run_extract_tokens(cfg)
        parts.append(cfg.token_store)
    arguments = ["merge_token_stores.py", *map(str, parts), "--out", str(folder / "merged")]
    monkeypatch.setattr(sys, "argv", arguments)
    merge = str(ROOT / "tools" / "merge_token_stores.py")
    runpy.run_path(merge, run_name="__main__")
    assert f"wrote {folder / 'merged'}: 120 images of 2 token stores" in capsys.readouterr().out
    assert files_of(folder / "merged") == files_of(single.token_store)
    with pytest.raises(SystemExit, match=rf"^error: `{folder / 'merged'}` exists: choose another"):
        runpy.run_path(merge, run_name="__main__")


def test_a_part_of_the_images_leaves_the_store_open(folder, single):
    cfg = config(folder, "part", **{"tokenizer.codebook": single.tokenizer.codebook})
    names = list(TokenStore.open(single.token_store).names)
    whole = TokenStore.open(single.token_store)
    identity = (whole.tokenizer, whole.data_root, whole.preprocessing)
    (folder / "digits" / "zzz.png").touch()  # of another dataset
    TokenStore.create(cfg.token_store, [*names, "zzz.png"], (6, 6), 12, *identity)
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, store.sealed, store.missing().tolist()) == (120, False, [120])
    assert all(np.array_equal(store[name], whole[name]) for name in names)


def test_processes_of_a_tokenizer_that_talks_to_others_do_not_wait_for_each_other(folder):
    """MMPretrain's VQ-KD reduces over all processes of a group; extraction makes no group."""
    cfg = Config.fromfile(ROOT / "configs" / "micro" / "vqkd.py")
    for dataset in cfg.dataset:
        dataset.update(data_root=str(folder / "digits"), indices=40)
    cfg.merge_from_dict({"data_root": str(folder / "digits"), "token_store": str(folder / "vqkd")})
    cfg.dataloader = dict(num_workers=0)
    cfg.dump(str(folder / "vqkd.py"))
    assert "wrote" in run_together(2, "extract_tokens.py", folder / "vqkd.py", folder=folder)
    alone, _ = run_extract_tokens(Config({**cfg, "token_store": str(folder / "vqkd_alone")}))
    assert files_of(folder / "vqkd") == files_of(alone.path)
