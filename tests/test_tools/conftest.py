"""What the tests of the tokenizer tools share."""

from pathlib import Path

import faiss
import pytest
import torch
from few_images import few_images_config
from mmengine.config import Config


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    """A tokenizer config over 17 images, in one thread: they are too small to share."""
    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    yield few_images_config(tmp_path)
    torch.set_num_threads(before[0])
    faiss.omp_set_num_threads(before[1])
