"""The folder that `mapet-mm pretrain` makes."""

from pathlib import Path

from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import UserError

RUN_CONFIG = "pretrain.py"
# Entry of a training's config, and of the metadata of its checkpoints and of its start: the files that timm
# ("timm") and Hugging Face ("hf", "hf_preprocessor"; null if it has no such network) read beside the weights.
EXPORTS = "exports"


def newest_checkpoint(run: Path) -> Path:
    """The last checkpoint in the folder of a `mapet-mm pretrain`; UserError if there is none yet."""
    work_dir = run / read_config(run / RUN_CONFIG).work_dir
    found = [path for path in work_dir.glob("epoch_*.pth") if path.stem.partition("_")[2].isdigit()]
    if not found:
        raise UserError(f"{work_dir} has no epoch_N.pth yet: continue the pre-training")
    return max(found, key=lambda path: int(path.stem.partition("_")[2]))
