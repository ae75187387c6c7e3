"""Starts of a pre-training from timm and Hugging Face: their weights, and what is known of them."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from mapet_mm.evaluation.libraries import LIBRARIES
from mapet_mm.interop.convert import hf_to_timm
from mapet_mm.interop.description import ContinuedViT, Preparation
from mapet_mm.interop.names import MASK_TOKEN, MODEL_TYPES, TIMM_NETWORK
from mapet_mm.interop.networks import hf_network, timm_network
from mapet_mm.utils.errors import UserError
from mapet_mm.weight_files import read_weights

# Images are as large as the start takes them, up to 16 x 16 patches; else of 224 pixels or less.
LARGEST_GRID = 16
SIDE = 224
# Names of weights that features do not need.
UNREAD = ("pooler", "mask_token")


def of_timm(name: str, asked: int | None = None) -> tuple[ContinuedViT, dict[str, Tensor]]:
    """A model of timm, and its weights at the training's image size."""
    import timm

    model, images, _ = LIBRARIES["timm"].load(name, True, None)
    if type(model).__name__ not in ("VisionTransformer", "Eva"):
        raise ValueError(f"a {type(model).__name__}")
    if model.attn_pool is not None:
        raise ValueError(f"`global_pool={model.global_pool!r}`, whose weights the pre-training does not have")
    side = training_side(images, model.patch_embed.patch_size[0], asked)
    # Position embeddings are of one size; angles are of any.
    if model.pos_embed is not None and tuple(model.patch_embed.img_size) != (side, side):
        model.set_input_size(img_size=side)
    model.reset_classifier(0)
    with TemporaryDirectory() as folder:
        timm.models.save_for_hf(model, folder, safe_serialization=True)
        config = json.loads(Path(folder, "config.json").read_text())
    vit = ContinuedViT(
        timm=config,
        hf=hf_network(model, side),
        hf_preprocessor=images.at(side).in_hugging_face(),
        images=images.at(side),
        norm_eps=None,
        sizes=dict(
            patch_size=model.patch_embed.patch_size[0],
            embed_dims=model.embed_dim,
            num_extra_tokens=model.num_prefix_tokens,
        ),
    )
    return vit, {TIMM_NETWORK + key: value for key, value in model.state_dict().items()}


def of_hugging_face(name: str, asked: int | None = None) -> tuple[ContinuedViT, dict[str, Tensor]]:
    """A model of Hugging Face, and its weights at the training's image size."""
    import transformers

    model, images, missing = LIBRARIES["hf"].load(name, True, None)
    lacking = [key for key in missing if not any(part in key for part in UNREAD)]
    if lacking:
        raise ValueError(f"its files lack {len(lacking)} weights, `{lacking[0]}` first")
    settings = model.config.to_dict()
    architecture, arguments = timm_network(settings)
    side = training_side(images, settings["patch_size"], asked)
    with TemporaryDirectory() as folder:  # in the files, names stay the same from version to version
        model.float().save_pretrained(folder, max_shard_size="1TB")
        config = json.loads(Path(folder, "config.json").read_text())
        weights = read_weights(folder)
    processor = json.loads(transformers.AutoImageProcessor.from_pretrained(name).to_json_string())
    if images.img_size != (side, side):
        processor = images.at(side).in_hugging_face()
    if "embeddings.position_embeddings" in weights and settings["image_size"] != side:
        grid = side // settings["patch_size"]
        tokens = torch.zeros(1, 1 + grid * grid, settings["hidden_size"])
        with torch.no_grad():
            resized = model.embeddings.interpolate_pos_encoding(tokens, side, side)
        weights["embeddings.position_embeddings"] = resized
        config["image_size"] = side
        arguments["img_size"] = side

    eps = settings["layer_norm_eps"]
    vit = ContinuedViT(
        timm=dict(
            architecture=architecture,
            num_classes=0,
            num_features=arguments["embed_dim"],
            model_args=arguments,
            pretrained_cfg=images.at(side).in_timm(),
        ),
        hf=config,
        hf_preprocessor=processor,
        images=images.at(side),
        norm_eps=None if eps == MODEL_TYPES[settings["model_type"]].eps else eps,
        sizes=dict(
            patch_size=settings["patch_size"],
            embed_dims=settings["hidden_size"],
            num_extra_tokens=1 + settings.get("num_register_tokens", 0),
        ),
    )
    of_timm = hf_to_timm(weights, settings)
    converted = {TIMM_NETWORK + key: value for key, value in of_timm.items()}
    mask_token = weights.get("embeddings.mask_token")
    if mask_token is not None and mask_token.any():
        converted[MASK_TOKEN] = mask_token.reshape(1, 1, -1)
    return vit, converted


def grid_of(side: int, patch: int) -> int:
    """Patches per side of an image; UserError for one that they do not fill, or of fewer than two."""
    if side % patch or side < 2 * patch:
        raise UserError(
            f"--image-size {side} is no multiple of the patches' {patch} pixels, or less than two of them"
        )
    return side // patch


def training_side(images: Preparation, patch: int, asked: int | None = None) -> int:
    """Side of the training's images in pixels; UserError if patches do not fill the one that is asked for."""
    if asked:
        return patch * grid_of(asked, patch)
    height, width = images.img_size
    fits = height == width and height % patch == 0
    if fits and height // patch <= LARGEST_GRID:
        return height
    return min(SIDE, LARGEST_GRID * patch, height, width) // patch * patch
