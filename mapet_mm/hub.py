"""This project's recipes in MMPretrain's model hub: import this, then `mmpretrain.get_model("mapet_...")`."""

from pathlib import Path

from mmpretrain.apis.model import ModelHub

INDEX = Path(__file__).parents[1] / "model-index.yml"

if not INDEX.is_file():
    raise ImportError(
        f"mapet_mm.hub: {INDEX} does not exist; recipes come with a clone of the project, "
        "installed by `pip install -e .`"
    )
ModelHub.register_model_index(INDEX)
