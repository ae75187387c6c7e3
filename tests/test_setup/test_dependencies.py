"""`import mapet_mm` beside fake OpenMMLab libraries: none, one set, two copies."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mapet_mm.dependencies import EXTRAS, LIBRARIES, forget_missing_backend

ROOT = Path(__file__).parents[2]


def install(site: Path, module: str, *distributions: str) -> None:
    """Make an empty package and the metadata of the distributions that claim it."""
    (site / module).mkdir(parents=True)
    (site / module / "__init__.py").touch()
    for name in distributions:
        folder = site / f"{name.replace('-', '_')}-2.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")


def import_package(site: Path) -> str:
    """Import mapet_mm in an interpreter without site-packages; return its last line."""
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", "-c", "import mapet_mm; print(mapet_mm.__version__)"]
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def test_without_openmmlab_one_line_names_what_to_install(tmp_path):
    line = import_package(tmp_path)
    assert line.startswith("ImportError: mapet_mm needs OpenMMLab, and mmengine, mmcv, mmpretrain cannot be")
    assert 'pip install "mapet_mm[onedl]"' in line
    install(tmp_path, "mmengine", "onedl-mmengine")
    assert "and mmcv, mmpretrain cannot be imported" in import_package(tmp_path)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("segmentation", [True, False])
def test_either_set_imports_with_and_without_segmentation(place, segmentation, tmp_path):
    for module, distributions in list(LIBRARIES.items())[: 4 if segmentation else 3]:
        install(tmp_path, module, distributions[place])
    assert import_package(tmp_path) == "0.1.0"


def test_a_source_checkout_without_metadata_imports(tmp_path):
    for module in LIBRARIES:
        install(tmp_path, module)
    assert import_package(tmp_path) == "0.1.0"


def test_two_copies_of_libraries_give_the_command_that_repairs_them(tmp_path):
    install(tmp_path, "mmengine", "onedl-mmengine", "mmengine")
    install(tmp_path, "mmcv", "onedl-mmcv", "mmcv-lite")
    install(tmp_path, "mmpretrain", "onedl-mmpretrain")
    line = import_package(tmp_path)
    assert "onedl-mmengine and mmengine; onedl-mmcv and mmcv-lite are installed together" in line
    assert line.endswith(
        "pip uninstall -y onedl-mmengine mmengine onedl-mmcv mmcv-lite "
        "&& pip install onedl-mmengine onedl-mmcv"
    )


def test_multimodal_models_that_cannot_be_imported_give_the_command_that_repairs_them(tmp_path):
    """MMPretrain imports them where pycocotools is installed; with transformers below 5 it can."""
    for module, (maintained, *_) in LIBRARIES.items():
        install(tmp_path, module, maintained)
    for module in ("pycocotools", "transformers"):
        install(tmp_path, module, module)
    (tmp_path / "mmpretrain/models.py").write_text("raise TypeError('NoneType takes no arguments')\n")
    assert import_package(tmp_path) == "0.1.0"
    metadata = tmp_path / "transformers-2.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("2.0", "5.23.0"))
    line = import_package(tmp_path)
    assert "NoneType takes no arguments" in line
    assert line.endswith('pip install "transformers<5"')
    (tmp_path / "mmpretrain/models.py").write_text("")  # a newer MMPretrain
    assert import_package(tmp_path) == "0.1.0"


@pytest.mark.parametrize(
    ("module", "requirement"),
    [
        ("faiss", "faiss-cpu"),
        ("sklearn", "scikit-learn"),
        ("scipy", "scikit-learn"),
        ("matplotlib", "matplotlib"),
        ("transformers", "transformers"),
        ("tifffile", "tifffile"),
        ("imagecodecs", "imagecodecs"),
        ("pydicom", "pydicom"),
    ],
)
def test_the_extra_that_an_error_names_brings_the_missing_module(module, requirement):
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf'^{EXTRAS[module]} = \[.*"{requirement}>=[\d.]+".*\]$', text, re.MULTILINE)


@pytest.mark.parametrize(
    ("backend", "left"),
    [("module://no_such_notebook.backend_inline", None), ("module://json.backend", "same"), ("agg", "same")],
)
def test_the_backend_of_a_notebook_in_another_environment_is_forgotten(monkeypatch, backend, left):
    """Matplotlib could not be imported with it."""
    monkeypatch.setenv("MPLBACKEND", backend)
    forget_missing_backend()
    assert os.environ.get("MPLBACKEND") == (left and backend)
    monkeypatch.delenv("MPLBACKEND", raising=False)
    forget_missing_backend()
