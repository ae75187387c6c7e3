"""This project's recipes in MMPretrain's model hub: import this, then `mmpretrain.get_model("mapet_...")`.

`pretrained=True` loads the authors' weights if the index names them (`mapet_mm.interop.released`).
"""

from pathlib import Path

import mapet_mm.registry  # noqa: F401  (first: it imports MMPretrain without its debug line)

# isort: split
from mmpretrain.apis.model import ModelHub

INDEX = Path(__file__).parent / ".mim/model-index.yml"

ModelHub.register_model_index(INDEX, config_prefix=INDEX.parent)  # of the metafiles that it imports
