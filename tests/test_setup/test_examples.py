"""The examples in docstrings run, and print what they say."""

import doctest
from types import ModuleType

import pytest
from mmengine.logging import MMLogger

from mapet_mm.structures import codebook, token_store
from mapet_mm.tokenizers import kmeans


@pytest.mark.parametrize("module", [codebook, token_store, kmeans])
def test_examples_run(module: ModuleType, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    MMLogger.get_current_instance()  # made inside an example, it would print there
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
