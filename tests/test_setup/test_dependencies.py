"""What `import mapet_mm` says of fake OpenMMLab libraries: none, two copies of them, old ones."""

import os
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from mapet_mm.dependencies import EXTRAS, LIBRARIES, check_openmmlab

ROOT = Path(__file__).parents[2]
ONEDL = {
    "mmengine": "onedl-mmengine 0.10.12",
    "mmcv": "onedl-mmcv 2.3.6",
    "mmpretrain": "onedl-mmpretrain 1.3.6",
    "mmseg": "onedl-mmsegmentation 1.4.2",
}


def install(site: Path, module: str, *distributions: str) -> None:
    """Make an empty package and the metadata of the distributions that claim it."""
    (site / module).mkdir(parents=True)
    (site / module / "__init__.py").touch()
    for distribution in distributions:
        name, version = distribution.split()
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """Returns what the check says of a site that has been filled."""

    def refusal() -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(tmp_path)])
            patch.setattr("mapet_mm.dependencies.find_spec", PathFinder.find_spec)
            with pytest.raises(ImportError) as raised:
                check_openmmlab()
        return str(raised.value)

    return refusal


def import_package(site: Path) -> tuple[int, str]:
    """Import mapet_mm in an interpreter without site-packages; return its exit status and its last line."""
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", "-c", "import mapet_mm; print(mapet_mm.__version__)"]
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, timeout=60)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


def test_without_openmmlab_one_line_says_what_to_install(tmp_path):
    status, line = import_package(tmp_path)
    assert status == 1
    assert line.startswith("ImportError: mapet_mm needs OpenMMLab, and mmengine, mmcv, mmpretrain cannot be")
    assert 'pip install "mapet_mm[onedl]"' in line


def test_one_missing_library_is_named_alone(tmp_path, refusal):
    install(tmp_path, "mmengine", ONEDL["mmengine"])
    install(tmp_path, "mmpretrain", ONEDL["mmpretrain"])
    assert "and mmcv cannot be imported" in refusal()


@pytest.mark.parametrize("modules", [list(ONEDL), ["mmengine", "mmcv", "mmpretrain"]])
def test_maintained_set_imports_with_and_without_segmentation(tmp_path, modules):
    for module in modules:
        install(tmp_path, module, ONEDL[module])
    assert import_package(tmp_path) == (0, "0.1.0")


def test_original_set_and_a_source_checkout_without_metadata_import(tmp_path):
    install(tmp_path, "mmengine", "mmengine 0.11.0rc3")
    install(tmp_path, "mmcv", "mmcv 2.10.0")
    install(tmp_path, "mmpretrain")
    assert import_package(tmp_path) == (0, "0.1.0")


def test_two_copies_of_libraries_give_the_command_that_repairs_them(tmp_path, refusal):
    install(tmp_path, "mmengine", ONEDL["mmengine"], "mmengine 0.10.7")
    install(tmp_path, "mmcv", ONEDL["mmcv"], "mmcv-lite 2.1.0")
    install(tmp_path, "mmpretrain", ONEDL["mmpretrain"])
    line = refusal()
    assert "onedl-mmengine and mmengine; onedl-mmcv and mmcv-lite are installed together" in line
    assert line.endswith(
        "pip uninstall -y onedl-mmengine mmengine onedl-mmcv mmcv-lite "
        "&& pip install onedl-mmengine onedl-mmcv"
    )


def test_old_version_gives_the_command_that_upgrades_it(tmp_path, refusal):
    install(tmp_path, "mmengine", "onedl-mmengine 0.10.9")
    install(tmp_path, "mmcv", ONEDL["mmcv"])
    install(tmp_path, "mmpretrain", ONEDL["mmpretrain"])
    line = refusal()
    assert "needs onedl-mmengine >= 0.10.12, found 0.10.9" in line
    assert line.endswith('pip install "onedl-mmengine>=0.10.12"')


def test_lower_bounds_are_those_of_the_extras():
    text = (ROOT / "pyproject.toml").read_text()
    for library in LIBRARIES:
        for distribution, lowest in library.distributions.items():
            if distribution != "mmcv-lite":
                assert re.search(rf'"{re.escape(distribution)}>={re.escape(lowest)}"', text), distribution


@pytest.mark.parametrize(
    ("module", "requirement"),
    [
        ("faiss", "faiss-cpu"),
        ("sklearn", "scikit-learn"),
        ("scipy", "scikit-learn"),
        ("matplotlib", "matplotlib"),
    ],
)
def test_the_extra_that_an_error_names_brings_the_missing_module(module, requirement):
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf'^{EXTRAS[module]} = \["{requirement}>=[\d.]+"\]$', text, re.MULTILINE)
