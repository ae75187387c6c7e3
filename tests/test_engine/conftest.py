"""Fixtures of the tests that train."""

import io
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from config_building import run_tool
from PIL import Image
from trainings import CONFIG


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
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


class Trained(NamedTuple):
    """Config and work dir of a run by tools/train.py, and what it printed."""

    config: Path
    work: Path
    said: str


@pytest.fixture(scope="session")
def trained(tmp_path_factory, images) -> Trained:
    """A run of two epochs that keeps its best checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    config, work = folder / "trained.py", folder / "work"
    config.write_text(CONFIG.replace("DATA", str(images)))
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        run_tool(patch, "train.py", config, "--work-dir", work)
    return Trained(config, work, said.getvalue())


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """The work dir of the run, copied: `last_checkpoint` still names the original's files."""
    return Path(shutil.copytree(trained.work, tmp_path / "copy"))
