"""Fixtures of the tests that train."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_training import CONFIG


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """Four images of each of two classes, dark and bright."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for label, low in enumerate((0, 128)):
        (folder / str(label)).mkdir()
        for index in range(4):
            pixels = rng.integers(low, low + 128, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / str(label) / f"{label}{index}.png")
    return folder


@pytest.fixture
def config(tmp_path, images) -> Path:
    """The config, under a name of its own: MMEngine keeps loggers by the name of the experiment."""
    path = tmp_path / f"{tmp_path.name}.py"
    path.write_text(CONFIG.replace("DATA", str(images)))
    return path


@pytest.fixture
def one_thread():
    """The model is far too small for more, and threads that wait for each other are slow on busy machines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
