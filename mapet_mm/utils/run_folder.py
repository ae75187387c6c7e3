"""The folder that `mapet-mm pretrain` makes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import UserError

RUN_CONFIG = "pretrain.py"
# Entry of a training's config, and of the metadata of its checkpoints and of its start: the files that timm
# ("timm") and Hugging Face ("hf", "hf_preprocessor"; null if it has no such network) read beside the weights.
EXPORTS = "exports"


def newest_checkpoint(run: Path) -> Path:
    """The last checkpoint in the folder of a `mapet-mm pretrain`; UserError if there is none yet."""
    found = _checkpoints_of(run)
    if not found:
        work_dir = read_config(run / RUN_CONFIG).work_dir
        raise UserError(f"{run / work_dir} has no epoch_N.pth yet: continue the pre-training")
    return found[-1]


def _checkpoints_of(run: Path) -> list[Path]:
    """The checkpoints of a RUN, the last one at the end."""
    found = (run / read_config(run / RUN_CONFIG).work_dir).glob("epoch_*.pth")
    epochs = {path: path.stem.partition("_")[2] for path in found}
    numbered = [path for path, epoch in epochs.items() if epoch.isdigit()]
    return sorted(numbered, key=lambda path: int(epochs[path]))


def newer_checkpoint(run: Path, export: Path) -> Path | None:
    """The newest checkpoint of a RUN whose training goes on after an export was made; None otherwise."""
    if not (run / RUN_CONFIG).is_file():
        return None
    last_epoch = read_config(run / RUN_CONFIG).train_cfg.get("max_epochs")
    found = _checkpoints_of(run)
    # Only of a training under way: in a copy of a finished RUN, times say nothing.
    if not found or found[-1].name == f"epoch_{last_epoch}.pth":
        return None
    return found[-1] if found[-1].stat().st_mtime > export.stat().st_mtime else None


def backbone_entry(run: Path) -> str:
    """The entry of an OpenMMLab config that makes a RUN whose training has ended the backbone of a model."""
    cfg = read_config(run / RUN_CONFIG)
    if cfg.get(EXPORTS):
        backbone = dict(type="mapet_mm.TIMMViT", model_name=str(run))
    else:
        trained = cfg.model.backbone
        sizes = ("arch", "img_size", "patch_size", "layer_scale_init_value")
        checkpoint = run / cfg.work_dir / f"epoch_{cfg.train_cfg.max_epochs}.pth"
        backbone = dict(
            type="mapet_mm.MaPeTViT",
            **{name: trained[name] for name in sizes if name in trained},
            out_type="featmap",
            init_cfg=dict(type="Pretrained", checkpoint=str(checkpoint), prefix="backbone."),
        )
    return f"backbone={_as_python(backbone)}"


def _as_python(value: Any) -> str:
    """A value as configs have it."""
    if isinstance(value, Mapping):
        return f"dict({', '.join(f'{name}={_as_python(each)}' for name, each in value.items())})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
