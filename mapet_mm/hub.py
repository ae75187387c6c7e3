"""This project's recipes in MMPretrain's model hub: import this, then `mmpretrain.get_model("mapet_...")`.

`pretrained=True` brings the authors' weights where the index names them (:mod:`mapet_mm.released`).
"""

from pathlib import Path

from mmpretrain.apis.model import ModelHub

INDEX = Path(__file__).parent / ".mim/model-index.yml"

ModelHub.register_model_index(INDEX, config_prefix=INDEX.parent)  # of the metafiles that it imports
