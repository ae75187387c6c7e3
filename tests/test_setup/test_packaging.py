"""What is built from the sources: the files of the wheel, and the versions that other files state."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from config_building import ROOT

from mapet_mm import __version__

# What the build reads.
SOURCES = ("mapet_mm", "configs", "tools", "pyproject.toml", "README.md", "LICENSE", "model-index.yml")
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> dict[str, zipfile.ZipInfo]:
    """The files of a wheel that is built from a copy of the sources, by name."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True)
        else:
            shutil.copy(source, folder)
    subprocess.run([sys.executable, "-c", BUILD, "dist"], cwd=folder, check=True, capture_output=True)
    (built,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return {entry.filename: entry for entry in archive.infolist()}


def test_a_wheel_has_type_marker_templates_and_licence(wheel):
    assert wheel["mapet_mm/py.typed"].file_size == 0
    for template in (ROOT / "mapet_mm").rglob("*.jinja"):
        assert wheel[str(template.relative_to(ROOT))].file_size == template.stat().st_size
    assert f"mapet_mm-{__version__}.dist-info/licenses/LICENSE" in wheel


def test_a_wheel_has_configs_and_tools_as_files_not_as_links(wheel):
    for name in ("configs/micro/kclip.py", "tools/train.py", "model-index.yml"):
        assert wheel[f"mapet_mm/.mim/{name}"].file_size == (ROOT / name).stat().st_size
    recipes = [path for path in (ROOT / "configs").rglob("*.py") if "__pycache__" not in path.parts]
    assert {f"mapet_mm/.mim/{path.relative_to(ROOT)}" for path in recipes} <= wheel.keys()
    assert not any(name.startswith(("tests/", "research/")) for name in wheel)


def test_the_citation_names_the_version_of_the_package():
    citation = yaml.safe_load(Path(ROOT, "CITATION.cff").read_text())
    assert citation["version"] == __version__


def test_beside_a_clone_python_finds_the_package_and_not_the_clones_folder(tmp_path):
    (tmp_path / "mapet_mm/docs").mkdir(parents=True)
    words = [sys.executable, "-c", "import mapet_mm; print(mapet_mm.pretrain.__name__)"]
    found = subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "pretrain"
