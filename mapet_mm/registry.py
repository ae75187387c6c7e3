"""Registries of the scope `mapet_mm`.

Each is a child of the corresponding MMEngine root registry, so `type='mapet_mm.X'` resolves in a config of
any OpenMMLab library: MMEngine imports `mapet_mm.registry` when it meets the scope, and `locations` tells it
which modules to import on the first look-up. Importing this module also registers the checkpoint prefix
`mapet://`.
"""

from typing import Any

from mmengine.registry import DATASETS as MMENGINE_DATASETS
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import METRICS as MMENGINE_METRICS
from mmengine.registry import MODEL_WRAPPERS as MMENGINE_MODEL_WRAPPERS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS as MMENGINE_OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.registry import OPTIM_WRAPPERS as MMENGINE_OPTIM_WRAPPERS
from mmengine.registry import STRATEGIES as MMENGINE_STRATEGIES
from mmengine.registry import TRANSFORMS as MMENGINE_TRANSFORMS
from mmengine.registry import Registry
from mmengine.runner.checkpoint import CheckpointLoader
from torch.serialization import add_safe_globals

from mapet_mm.weight_files import SAFE_GLOBALS

SCOPE = "mapet_mm"

MODELS = Registry(
    "model",
    parent=MMENGINE_MODELS,
    scope=SCOPE,
    locations=["mapet_mm.models", "mapet_mm.tokenizers", "mapet_mm.datasets"],
)
DATASETS = Registry("dataset", parent=MMENGINE_DATASETS, scope=SCOPE, locations=["mapet_mm.datasets"])
TRANSFORMS = Registry("transform", parent=MMENGINE_TRANSFORMS, scope=SCOPE, locations=["mapet_mm.datasets"])
HOOKS = Registry(
    "hook", parent=MMENGINE_HOOKS, scope=SCOPE, locations=["mapet_mm.engine", "mapet_mm.evaluation.hook"]
)
METRICS = Registry("metric", parent=MMENGINE_METRICS, scope=SCOPE, locations=["mapet_mm.engine"])
MODEL_WRAPPERS = Registry(
    "model_wrapper", parent=MMENGINE_MODEL_WRAPPERS, scope=SCOPE, locations=["mapet_mm.engine"]
)
OPTIM_WRAPPERS = Registry(
    "optimizer wrapper",
    parent=MMENGINE_OPTIM_WRAPPERS,
    scope=SCOPE,
    locations=["mapet_mm.engine"],
)
OPTIM_WRAPPER_CONSTRUCTORS = Registry(
    "optimizer wrapper constructor",
    parent=MMENGINE_OPTIM_WRAPPER_CONSTRUCTORS,
    scope=SCOPE,
    locations=["mapet_mm.engine"],
)
# Not in mapet_mm.engine, because few runs need its imports.
STRATEGIES = Registry(
    "strategy", parent=MMENGINE_STRATEGIES, scope=SCOPE, locations=["mapet_mm.engine.sharding"]
)

# Allow the safe types in training checkpoints for everything that reads them with a model of this scope:
# MMEngine's list lacks most of NumPy's types. It already has `getattr`.
add_safe_globals(
    [one for one in SAFE_GLOBALS if not (isinstance(one, tuple) and one[1] == "builtins.getattr")]
)


@CheckpointLoader.register_scheme(prefixes="mapet://")
def _load_released(filename: str, map_location: Any = None) -> dict[str, Any]:
    from mapet_mm.released import load  # imported late: it imports models, and they import this module

    return load(filename, map_location)
