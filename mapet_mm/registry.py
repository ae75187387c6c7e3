"""Registries of the scope `mapet_mm`.

Each is a child of the corresponding MMEngine root registry, so `type='mapet_mm.X'` resolves in a config of
any OpenMMLab library: MMEngine imports `mapet_mm.registry` when it meets the scope, and `locations` tells it
which modules to import on the first look-up. Importing this module also registers the checkpoint prefix
`mapet://`.
"""

from typing import Any

from mmengine import registry as root
from mmengine.registry import Registry
from mmengine.runner.checkpoint import CheckpointLoader
from torch.serialization import add_safe_globals

from mapet_mm.dependencies import import_quietly
from mapet_mm.weight_files import SAFE_GLOBALS

SCOPE = "mapet_mm"

import_quietly("mmpretrain.datasets")  # before a module of this package or MMEngine does


def _child(of_mmengine: Registry, *locations: str) -> Registry:
    """A registry of this scope below one of MMEngine's, filled by importing the modules at `locations`."""
    return Registry(of_mmengine.name, parent=of_mmengine, scope=SCOPE, locations=list(locations))


MODELS = _child(root.MODELS, "mapet_mm.models", "mapet_mm.tokenizers")
DATASETS = _child(root.DATASETS, "mapet_mm.datasets")
DATA_SAMPLERS = _child(root.DATA_SAMPLERS, "mapet_mm.datasets")
TRANSFORMS = _child(root.TRANSFORMS, "mapet_mm.datasets")
FUNCTIONS = _child(root.FUNCTIONS, "mapet_mm.datasets")
HOOKS = _child(root.HOOKS, "mapet_mm.engine")
METRICS = _child(root.METRICS, "mapet_mm.evaluation.metrics")
OPTIM_WRAPPERS = _child(root.OPTIM_WRAPPERS, "mapet_mm.engine")
OPTIM_WRAPPER_CONSTRUCTORS = _child(root.OPTIM_WRAPPER_CONSTRUCTORS, "mapet_mm.engine")

# Allow the safe types in training checkpoints for everything that reads them with a model of this scope:
# MMEngine's list lacks most of NumPy's types, and MMEngine 0.10.7 has none.
add_safe_globals(SAFE_GLOBALS)


@CheckpointLoader.register_scheme(prefixes="mapet://")
def load_from_authors(filename: str, map_location: Any = None) -> dict[str, Any]:
    """The authors' weights of a name; MMEngine logs this function's name from its eleventh letter on."""
    from mapet_mm.interop.released import (
        load,  # imported late: it imports models, and they import this module
    )

    return load(filename, map_location)
