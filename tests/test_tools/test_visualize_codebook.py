"""tools/visualize_codebook.py: the page."""

import re
from pathlib import Path

import numpy as np
import pytest
from config_building import run_tool
from digits_tokenizer import kclip_config, write_few_digits
from mmengine.config import Config

from mapet_mm.tokenizers import TokenStore
from mapet_mm.tokenizers.fit_and_extract import run_extract_tokens, run_fit_codebook


@pytest.fixture(scope="module")
def cfg(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("codebook")
    write_few_digits(folder / "digits", 40)
    cfg = kclip_config(folder / "digits", folder)
    run_fit_codebook(cfg)
    run_extract_tokens(cfg)
    cfg.dump(str(folder / "config.py"))
    return cfg


def visualize(monkeypatch, cfg: Config, *options: str) -> None:
    config = Path(cfg.token_store).parent / "config.py"
    run_tool(monkeypatch, "visualize_codebook.py", config, *options)


def test_page_has_statistics_and_a_picture_of_each_token(cfg, tmp_path, monkeypatch, capsys):
    options = ["--count", "9", "--patches", "3", "--out", str(tmp_path)]
    visualize(monkeypatch, cfg, *options)
    grids = np.concatenate([grids for _, grids in TokenStore.open(cfg.token_store).chunks()])
    counts = np.bincount(grids.ravel(), minlength=12)
    page = (tmp_path / "index.html").read_text()
    titles = [int(token) for token in re.findall(r"<h2>Token (\d+)</h2>", page)]
    assert titles == np.argsort(-counts, kind="stable")[:9].tolist()
    assert len(re.findall("<img ", page)) == 10
    assert f"<td>{counts.sum():,}</td>" in page
    assert re.search(rf"{counts[titles[0]]:,} patches, .* Class purity [\d.]+ %", page)
    assert "perplexity" in capsys.readouterr().out


def test_a_token_that_is_not_there_is_refused_before_anything_is_written(cfg, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"token 12: .* 0 to 11"):
        visualize(monkeypatch, cfg, "--out", str(tmp_path / "out"), "--tokens", "12")
    assert not (tmp_path / "out").exists()
