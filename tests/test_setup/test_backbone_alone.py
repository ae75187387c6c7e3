"""What imports need and bring, in one fresh Python without the tokenizers' libraries."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        missing = name.split(".")[0] in ("faiss", "open_clip", "sklearn")
        return None if missing else PathFinder.find_spec(name, path, target)
    invalidate_caches = PathFinder.invalidate_caches
    find_distributions = PathFinder.find_distributions

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
try:
    import faiss
except ModuleNotFoundError:
    print("no faiss")

import mapet_mm, mmcv.cnn.bricks.transformer
import mapet_mm.engine
print("loaded:", *sys.modules)

from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, TRANSFORMS

arch = dict(embed_dims=24, num_layers=2, num_heads=2, feedforward_channels=48)
MODELS.build(dict(type="mapet_mm.MaPeTViT", arch=arch))
vit = MODELS.build(dict(type="mapet_mm.MaPeTPretrainViT", arch=arch, cutting_point=60))
print(type(vit).__name__)
print(MODELS.build(dict(type="mapet_mm.SimpleFeaturePyramid", in_channels=24)).num_outs)
for registry, name in (
    (MODELS, "MaPeT"),
    (MODELS, "TokenPredictionHead"),
    (MODELS, "PrecomputedTokens"),
    (MODELS, "TokenGridDataPreprocessor"),
    (TRANSFORMS, "LoadTokenGrid"),
    (HOOKS, "KNNProbeHook"),
    (OPTIM_WRAPPERS, "AutocastOptimWrapper"),
    (OPTIM_WRAPPER_CONSTRUCTORS, "LayerDecayOptimWrapperConstructor"),
):
    print(registry.get(f"mapet_mm.{name}").__name__)
import mapet_mm.convert, mapet_mm.engine.runners.launch, mapet_mm.interop.export
import mapet_mm.hub, mapet_mm.weight_files
from mapet_mm.utils.config import read_config

read_config(SEGMENTATION)
import mmseg.datasets
"""
SEGMENTATION = str(
    Path(__file__).parents[2] / "configs/segmentation/mapet_vit-base-p16_dpt_8xb2-amp-160k_ade20k-512x512.py"
)


@pytest.fixture(scope="module")
def imported() -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.replace("SEGMENTATION", repr(SEGMENTATION))],
        capture_output=True,
        text=True,
        check=False,
    )


def test_backbones_and_what_trains_them_need_no_tokenizers_library(imported):
    assert imported.returncode == 0, imported.stderr[-1000:]
    lines = imported.stdout.splitlines()
    assert lines[0] == "no faiss"
    assert "MaPeTPretrainViT" in lines
    assert lines[-1] == "LayerDecayOptimWrapperConstructor"


def test_nothing_is_said_of_data_sets_that_nothing_here_needs(imported):
    """The maintained MMPretrain and MMSegmentation print a debug line where OneDL is not installed."""
    assert imported.returncode == 0
    assert "OneDL" not in imported.stdout


def test_the_engine_imports_no_protocols(imported):
    """A training needs nearest neighbours, not segmentation and probes."""
    (line,) = [line for line in imported.stdout.splitlines() if line.startswith("loaded:")]
    loaded = line.split()
    assert "mapet_mm.evaluation.metrics.neighbours" in loaded
    assert "mapet_mm.evaluation.protocol" not in loaded
    assert not [name for name in loaded if name.startswith("mapet_mm.evaluation.protocols")]


def test_mmcv_does_not_warn_of_an_operator_that_nothing_here_needs(imported):
    assert imported.returncode == 0
    assert "MultiScaleDeformableAttention" not in imported.stderr
