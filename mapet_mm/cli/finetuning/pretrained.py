"""The backbone of a RUN, and the weights that a fine-tuning of it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.config import Config
from torch import nn

from mapet_mm.cli.finetuning.options import FinetuneOptions
from mapet_mm.datasets.look import load_in_training
from mapet_mm.evaluation.models import RANDOM
from mapet_mm.evaluation.verdict import RESULT, START
from mapet_mm.models.backbones.timm_weights import read_source
from mapet_mm.registry import MODELS
from mapet_mm.utils.config import pretrained_entries
from mapet_mm.utils.errors import UserError, listed, reason_of
from mapet_mm.utils.run_folder import EXPORTS, PRETRAINING, Run
from mapet_mm.weight_files import read_weights

PREFIX = "backbone."
NEW = ("ln2.",)  # of MaPeTViT: norms the mean of the patches, which a pre-training does not


@dataclass(frozen=True)
class Pretrained:
    """A RUN as a backbone.

    Args:
        backbone: its config, without image size and weights.
        weights: `init_cfg` of what is compared, by its name in the table; None for random weights.
        side: of the pre-training's images, in pixels.
        patch: side of a patch, in pixels.
        width: of the features.
        depth: number of layers.
        mean: of the images' channels, 0 to 255.
        std: likewise.
        load_image: the pipeline's step that reads an image.
        out_indices: the layers whose maps a segmentation's head takes.
    """

    backbone: dict[str, Any]
    weights: dict[str, dict[str, Any] | None]
    side: int
    patch: int
    width: int
    depth: int
    mean: list[float]
    std: list[float]
    load_image: dict[str, Any]
    out_indices: list[int]


def read_run(args: FinetuneOptions) -> Pretrained:
    """What a RUN is fine-tuned from; its weights are loaded once, to see that they are the network's.

    Raises:
        UserError: the folder is no RUN, or has no whole epoch yet, or weights of another network; or too few
            layers for a segmentation's head.
    """
    run = Run(args.run)
    if not run.exists:
        raise UserError(f"{run} is no RUN: it has no {PRETRAINING}, which `mapet-mm pretrain` writes")
    cfg = run.config
    checkpoint = run.newest_checkpoint.absolute()
    if cfg.get(EXPORTS):
        network, _ = read_source(str(checkpoint))
        side = network.pop("img_size")
        backbone = dict(type="mapet_mm.TIMMViT", **network)
    else:
        backbone = run.plain_vit
        side = backbone.pop("img_size", 224)
    side = side if isinstance(side, int) else min(side)
    files = {RESULT: checkpoint}
    for _, entry in pretrained_entries(cfg.model.backbone):
        files[START] = (run / entry.checkpoint).absolute()
    weights: dict[str, dict[str, Any] | None] = {}
    for start, file in files.items():
        vit = _load(backbone, side, file)
        weights[start] = dict(type="Pretrained", checkpoint=str(file), prefix=PREFIX)
    weights[RANDOM] = None
    depth = len(vit.layers)
    out_indices = [depth - 1]
    if args.masks and args.decoder == "upernet":  # four layers, evenly spaced; of 12, 2, 5, 8 and 11
        if depth < 4:
            raise UserError(f"UperNet takes four layers, and this ViT has {depth}: add --head linear")
        out_indices = [depth * quarter // 4 - 1 for quarter in (1, 2, 3, 4)]
    # Of photographs, too: MMCV's own loader would cut 16 bits to the upper 8 in silence.
    load_image = load_in_training(cfg) or dict(type="mapet_mm.LoadPicture")
    patch = vit.patch_embed.projection if hasattr(vit, "patch_embed") else vit.timm_model.patch_embed.proj
    return Pretrained(
        backbone=backbone,
        weights=weights,
        side=side,
        patch=max(patch.kernel_size),
        width=vit.embed_dims,
        depth=depth,
        mean=[round(value, 3) for value in cfg.data_preprocessor.mean],
        std=[round(value, 3) for value in cfg.data_preprocessor.std],
        load_image=Config(load_image).to_dict(),
        out_indices=out_indices,
    )


def _load(backbone: Mapping[str, Any], side: int, file: Path) -> nn.Module:
    """The backbone with the weights of a checkpoint; UserError unless the file has all of them."""
    vit = MODELS.build(dict(backbone, img_size=side))
    saved = read_weights(file)
    weights = {name.removeprefix(PREFIX): v for name, v in saved.items() if name.startswith(PREFIX)}
    own = [name for name in vit.state_dict() if not name.startswith(NEW)]
    missing = [name for name in own if name not in weights]
    if missing:
        raise UserError(
            f"{file} lacks {len(missing)} of the backbone's {len(own)} weights, {listed(missing, 3)}: it "
            "is of another network"
        )
    try:
        vit.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # of another shape
        raise UserError(f"{file}: {reason_of(error)}") from error
    return vit
