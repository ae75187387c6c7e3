"""The command lines of fit_codebook, extract_tokens and merge_token_stores, by one process and by two."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from config_building import ROOT, run_tool
from digits_tokenizer import kclip_config, write_few_digits
from few_images import few_images_config
from forked_processes import run_together
from mmengine.config import Config
from PIL import Image

from mapet_mm.structures import Codebook, TokenStore
from mapet_mm.tokenizers.fit_and_extract import run_extract_tokens, run_fit_codebook
from mapet_mm.utils.commands import TOOLS


def test_the_tools_say_what_was_written_and_what_comes_next(tmp_path, monkeypatch, capsys):
    cfg, config = few_images_config(tmp_path), str(tmp_path / "tokenizer.py")
    cfg.dump(config)
    run_tool(monkeypatch, "fit_codebook.py", config)
    out = capsys.readouterr().out
    assert f"wrote {cfg.tokenizer.codebook}: 6 centroids of 256 channels" in out
    assert f"next: mapet-mm extract-tokens {config}" in out
    assert "distinct" not in out
    run_tool(monkeypatch, "extract_tokens.py", config, "--cfg-options", "dataloader.num_workers=1")
    out = capsys.readouterr().out
    assert f"wrote {cfg.token_store}: 2 x 2 tokens of 17 images, 6 ids" in out
    assert "next: mapet-mm train" in out
    run_tool(monkeypatch, "extract_tokens.py", config, "--verify", "5")
    assert "all files are whole, 0 of 20 tokens of 5 images differ" in capsys.readouterr().out
    run_tool(monkeypatch, "fit_codebook.py", config)
    assert capsys.readouterr().out.startswith(f"nothing to do: {cfg.tokenizer.codebook} is there")
    out = str(tmp_path / "other")
    run_tool(monkeypatch, "extract_tokens.py", config, "--out", out, "--on-error", "skip")
    assert len(TokenStore.open(out)) == 17


def test_the_command_that_comes_next_works_as_it_is_printed(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "My Drive, it's [1]"
    folder.mkdir()
    few_images_config(folder).dump(str(folder / "tokenizer.py"))
    codebook = folder / "seed=1,k=6.safetensors"
    changed = ["--cfg-options", "codebook.seed=1", f"token_store={folder / 'other tokens'}"]
    run_tool(monkeypatch, "fit_codebook.py", folder / "tokenizer.py", "--out", codebook, *changed)
    (line,) = re.findall("^next: (.*)$", capsys.readouterr().out, re.MULTILINE)
    _, name, *words = shlex.split(line)
    run_tool(monkeypatch, TOOLS[name][0], *words)
    assert TokenStore.open(folder / "other tokens").tokenizer == Codebook.load(codebook).digest
    capsys.readouterr()

    following = folder / "pre training.py"
    loads = dict(type="LoadTokenGrid", store=str(folder / "other tokens"))
    Config(dict(train_dataloader=dict(dataset=dict(pipeline=[loads])))).dump(following)
    run_tool(monkeypatch, TOOLS[name][0], *words, f"next_config={following}")
    (line,) = re.findall("^next: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert shlex.split(line) == ["mapet-mm", "train", str(following)]


def test_a_codebook_of_images_that_look_alike_is_reported(tmp_path, monkeypatch, capsys):
    cfg, config = few_images_config(tmp_path), str(tmp_path / "tokenizer.py")
    for path in (tmp_path / "data" / "train").rglob("*.png"):
        Image.new("RGB", (50, 40), (120, 120, 120)).save(path)
    cfg.codebook.positions_per_image = 1
    cfg.dump(config)
    run_tool(monkeypatch, "fit_codebook.py", config)
    assert "1 of 6 centroids are distinct" in capsys.readouterr().out


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


def same(one: str | Path, other: str | Path) -> bool:
    one, other = TokenStore.open(one), TokenStore.open(other)
    named = list(one.names) == list(other.names)
    return named and all(np.array_equal(one[name], other[name]) for name in one.names)


def test_two_processes_make_the_same_codebook_and_store(folder, single):
    cfg = config(folder, "double", **{"dataloader.num_workers": 1})
    said = run_together(2, "fit_codebook.py", folder / "double.py", folder=folder)
    assert said.count("wrote") == 1
    assert f"digest {TokenStore.open(single.token_store).tokenizer[:12]}" in said
    said = run_together(2, "extract_tokens.py", folder / "double.py", folder=folder)
    assert said.count("120 images, 12 ids") == 1
    assert same(cfg.token_store, single.token_store)


def test_processes_of_a_tokenizer_that_talks_to_others_do_not_wait_for_each_other(folder):
    """MMPretrain's VQ-KD reduces over all processes of a group; extraction makes no group."""
    cfg = Config.fromfile(ROOT / "configs" / "micro" / "vqkd.py")
    for dataset in cfg.dataset:
        dataset.update(data_root=str(folder / "digits"), indices=40)
    cfg.merge_from_dict({"data_root": str(folder / "digits"), "token_store": str(folder / "vqkd")})
    cfg.dataloader = dict(num_workers=0)
    cfg.dump(str(folder / "vqkd.py"))
    said = run_together(2, "extract_tokens.py", folder / "vqkd.py", folder=folder)
    assert "6 x 6 tokens of 80 images" in said  # wrote, or kept if the other process did all
    alone, _ = run_extract_tokens(Config({**cfg, "token_store": str(folder / "vqkd_alone")}))
    assert same(folder / "vqkd", alone.path)


def test_parts_merge_into_the_store_of_all(folder, single, monkeypatch, capsys):
    parts = []
    for part, name in enumerate(("train", "val")):
        cfg = config(folder, name, **{"tokenizer.codebook": single.tokenizer.codebook})
        cfg.dataset = [cfg.dataset[part]]
        run_extract_tokens(cfg)
        parts.append(cfg.token_store)
    run_tool(monkeypatch, "merge_token_stores.py", *parts, "--out", folder / "merged")
    assert f"wrote {folder / 'merged'}: 120 images of 2 token stores" in capsys.readouterr().out
    assert same(folder / "merged", single.token_store)
    with pytest.raises(SystemExit, match="merged` exists"):
        run_tool(monkeypatch, "merge_token_stores.py", *parts, "--out", folder / "merged")
