"""Shared fixtures, and shapes checked: jaxtyping's annotations of the models are enforced by beartype."""

from pathlib import Path

import jaxtyping
import pytest
import torch
from jaxtyping import install_import_hook
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope

install_import_hook("mapet_mm.models", "beartype.beartype")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _default_scope():
    """MMPretrain's types are found without a prefix, whatever runner an earlier test has built."""
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


@pytest.fixture
def capture_log(tmp_path):
    """Run with an MMEngine logger of the test's own; calling the fixture returns what was logged so far."""
    log_file = tmp_path / "log.txt"
    MMLogger.get_instance(f"test-{tmp_path.name}", log_file=str(log_file))
    return log_file.read_text


@pytest.fixture
def unchecked_types():
    """As outside the tests, where annotations are not enforced: a compiler would trace the checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
