"""The backbone of a RUN, and the weights that a fine-tuning of it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.config import Config
from torch import nn

from mapet_mm.evaluation.models import RANDOM
from mapet_mm.evaluation.verdict import RESULT, START
from mapet_mm.models.backbones.timm_weights import read_source
from mapet_mm.registry import MODELS
from mapet_mm.utils.config import pretrained_entries, read_config
from mapet_mm.utils.errors import UserError, listed, reason_of
from mapet_mm.utils.run_folder import EXPORTS, PRETRAINING, TOKENIZER, Run
from mapet_mm.weight_files import read_weights

PREFIX = "backbone."
SIZES = ("arch", "patch_size", "in_channels", "layer_scale_init_value", "with_cls_token")  # of MaPeTViT
NEW = ("ln2.",)  # of MaPeTViT: norms the mean of the patches, which a pre-training does not
PLAIN_LOADING = dict(type="LoadImageFromFile")


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


def read_run(run: Run) -> Pretrained:
    """What a RUN is fine-tuned from; its weights are loaded once, to see that they are the network's.

    Raises:
        UserError: the folder is no RUN, or has no whole epoch yet, or weights of another network.
    """
    if not run.exists:
        raise UserError(f"{run} is no RUN: it has no {PRETRAINING}, which `mapet-mm pretrain` writes")
    cfg = run.config
    checkpoint = run.newest_checkpoint.absolute()
    if cfg.get(EXPORTS):
        network, _ = read_source(str(checkpoint))
        side = network.pop("img_size")
        backbone = dict(type="mapet_mm.TIMMViT", **network)
    else:
        trained = cfg.model.backbone
        side = trained.get("img_size", 224)
        sizes = {name: trained[name] for name in SIZES if name in trained}
        backbone = dict(type="mapet_mm.MaPeTViT", **Config(sizes).to_dict())
    side = side if isinstance(side, int) else min(side)
    weights = {RESULT: _weights_of(checkpoint)}
    starts = [entry.checkpoint for _, entry in pretrained_entries(cfg.model.backbone)]
    if starts:
        weights[START] = _weights_of((run / starts[0]).absolute())
    weights[RANDOM] = None
    for init_cfg in filter(None, weights.values()):
        vit = _require_weights(backbone, side, init_cfg)
    patch = vit.patch_embed.projection if hasattr(vit, "patch_embed") else vit.timm_model.patch_embed.proj
    preprocessor = cfg.data_preprocessor
    return Pretrained(
        backbone=backbone,
        weights=weights,
        side=side,
        patch=max(patch.kernel_size),
        width=vit.embed_dims,
        depth=len(vit.layers),
        mean=[round(value, 3) for value in preprocessor.mean],
        std=[round(value, 3) for value in preprocessor.std],
        load_image=_loading_step(run),
    )


def _weights_of(checkpoint: Path) -> dict[str, Any]:
    """The `init_cfg` of a pre-training's checkpoint."""
    return dict(type="Pretrained", checkpoint=str(checkpoint), prefix=PREFIX)


def _require_weights(backbone: Mapping[str, Any], side: int, init_cfg: Mapping[str, Any]) -> nn.Module:
    """Build the backbone, and load its weights to try; UserError unless the file has all of them."""
    vit = MODELS.build(dict(backbone, img_size=side))
    file = init_cfg["checkpoint"]
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


def _loading_step(run: Run) -> dict[str, Any]:
    """The step by which RUN reads an image."""
    if not (run / TOKENIZER).is_file():
        return PLAIN_LOADING
    dataset, *_ = read_config(run / TOKENIZER).dataset
    return Config(dataset.pipeline[0]).to_dict()
