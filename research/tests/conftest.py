"""Tables name configs from the repository's root, where their runs start."""

from pathlib import Path

import pytest
from mmengine.registry import DefaultScope

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def _default_scope():
    """MMPretrain's types are found without a prefix, whatever runner an earlier test has built."""
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield
