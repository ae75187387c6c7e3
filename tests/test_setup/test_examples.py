"""The examples in docstrings run, and print what they say."""

import doctest
import importlib
import inspect
import re
import sys
import tarfile
from types import ModuleType

import numpy as np
import pytest
from config_building import ROOT
from mmengine.logging import MMLogger
from PIL import Image
from stored_squares import config, decoded, make_store

from mapet_mm import datasets, models, tokenizers
from mapet_mm.structures import codebook, token_store
from mapet_mm.tokenizers import kmeans
from mapet_mm.tokenizers.squares import SquareLoader, store_images


@pytest.mark.parametrize("module", [codebook, token_store, kmeans])
def test_examples_run(module: ModuleType, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    MMLogger.get_current_instance()  # made inside an example, it would print there
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def public_classes() -> set[type]:
    """The classes that users name of models, tokenizers and datasets: at the top, and in docs/api."""
    shown = re.findall(
        r"^::: (\S+)\n +options:\n +members: \[([\w, ]+)\]",
        "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md")),
        re.MULTILINE,
    )
    values = [value for package in (models, tokenizers, datasets) for value in vars(package).values()]
    for module, names in shown:
        if module.split(".")[1] in ("models", "tokenizers", "structures", "datasets"):
            values += [getattr(importlib.import_module(module), name) for name in names.split(", ")]
    return {
        value
        for value in values
        if inspect.isclass(value)
        and value.__module__.startswith("mapet_mm.")
        and not issubclass(value, Exception)
    }


def doctest_of(public: type, **names: object) -> doctest.DocTest:
    names = vars(sys.modules[public.__module__]) | names
    (found,) = doctest.DocTestFinder(recurse=False).find(public, public.__name__, globs=names)
    return found


def test_each_public_class_has_an_example():
    public = public_classes()
    assert len(public) > 30
    assert [one.__name__ for one in public if not doctest_of(one).examples] == []


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder of a user's: images with tokens and squares of 16 pixels, and a tar file with one image."""
    folder = tmp_path_factory.mktemp("project")
    make_store(folder, ["train/0/0000.png"])
    store_images(SquareLoader.from_config(config(decoded(folder))))
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(folder / "cat.png")
    (folder / "shards").mkdir()
    with tarfile.open(folder / "shards/0.tar", "w") as file:
        file.add(folder / "cat.png", "cat.png")
    return folder


IN_DATASETS = sorted(
    (one for one in public_classes() if ".datasets." in one.__module__), key=lambda one: one.__name__
)


@pytest.mark.parametrize("public", IN_DATASETS, ids=lambda public: public.__name__)
def test_the_examples_of_datasets_give_what_they_say(public, project, monkeypatch):
    monkeypatch.chdir(project)
    MMLogger.get_current_instance()
    assert doctest.DocTestRunner().run(doctest_of(public)).failed == 0
