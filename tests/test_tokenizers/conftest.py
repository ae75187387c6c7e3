"""A tokenizer config over a few images, and its codebook."""

import shutil
from pathlib import Path

import faiss
import pytest
import torch
from few_images import few_images_config
from mmengine.config import Config

from mapet_mm.tokenizers.fit_and_extract import run_fit_codebook
from mapet_mm.tokenizers.images import NamedImages


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The images are too small to share."""
    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    faiss.omp_set_num_threads(before[1])


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return few_images_config(tmp_path)


@pytest.fixture(scope="session")
def codebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_fit_codebook(few_images_config(tmp_path_factory.mktemp("codebook")))[0]


@pytest.fixture
def fitted(cfg: Config, codebook: Path) -> Config:
    Path(cfg.tokenizer.codebook).parent.mkdir()
    shutil.copyfile(codebook, cfg.tokenizer.codebook)
    return cfg


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """Indices of the images that are read."""
    seen, getitem = [], NamedImages.__getitem__
    monkeypatch.setattr(NamedImages, "require_repeatable", lambda images: None)
    monkeypatch.setattr(NamedImages, "__getitem__", lambda self, i: (seen.append(i), getitem(self, i))[1])
    return seen
