"""The notebook of the page on one's own images runs, cell by cell, on a folder of photographs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from skimage import data

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/tutorials/own_images.ipynb"


@pytest.fixture
def photographs(tmp_path) -> None:
    """Thirty crops of each of two photographs, in a folder for each."""
    rng = np.random.default_rng(0)
    for name, photograph in (("cat", data.chelsea()), ("cup", data.coffee())):
        folder = tmp_path / "data/mine/images" / name
        folder.mkdir(parents=True)
        for index in range(30):
            top, left = rng.integers(0, 100, 2)
            Image.fromarray(photograph[top : top + 200, left : left + 240]).save(folder / f"{index}.jpg")


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(photographs, tmp_path, monkeypatch, capfd):
    """With one epoch instead of thirty, and without a network, hence random tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    assert sum("epochs=30" in source for source in sources) == 1
    names: dict[str, Any] = {}
    printed = []
    for source in sources:
        exec(source.replace("epochs=30", "epochs=1, workers=0"), names)
        printed.append(capfd.readouterr().out.splitlines())

    pretrained, report, neighbours, figures = printed
    assert "k-NN" in pretrained[-1]  # the verdict's sentence
    assert report == ["my_run/report.html"]
    assert Path("my_run/report.html").is_file()
    likeness, name = neighbours[-1].split()
    assert 0 < float(likeness) <= 1
    assert Path(name).is_file()
    assert names["features"].shape == (60, 192)
    assert not names["vit"].training
    shown = [f"{row.protocol}, {row.setting}: {row.value:.1f} {row.unit}" for row in names["rows"]]
    assert figures[-len(shown) :] == shown
    (knn,) = (row for row in names["rows"] if (row.protocol, row.setting) == ("k-NN", "both"))
    assert 0 <= knn.value <= 100
