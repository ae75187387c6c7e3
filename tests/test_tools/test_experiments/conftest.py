"""Shared by the tests of tables: the repository's root as working folder, and impatient runners."""

from pathlib import Path

import pytest
from config_building import ROOT
from fake_project import write_project


@pytest.fixture(autouse=True, scope="module")
def _impatient():
    """Runs that take no time are looked at more often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.local.POLL_SECONDS", 0.02)
        yield


@pytest.fixture
def repository(monkeypatch):
    """Tables name configs from the repository's root, where the tools run."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project with a small table of which nothing is done, and this process in it."""
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
