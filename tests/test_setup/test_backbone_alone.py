"""A backbone's user needs none of the tokenizers' libraries: all that they use, in a Python without them."""

import subprocess
import sys

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

from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, TRANSFORMS

arch = dict(embed_dims=24, num_layers=2, num_heads=2, feedforward_channels=48)
MODELS.build(dict(type="mapet_mm.MaPeTViT", arch=arch))
for kind in ("MaPeTPretrainViT", "MaPeTPretrainBEiT", "MaPeTPretrainEVA02"):
    print(type(MODELS.build(dict(type=f"mapet_mm.{kind}", arch=arch, cutting_point=60))).__name__)
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
"""


def test_backbones_and_what_trains_them_need_no_tokenizers_library():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "no faiss"
    assert "MaPeTPretrainEVA02" in lines
    assert lines[-1] == "LayerDecayOptimWrapperConstructor"
