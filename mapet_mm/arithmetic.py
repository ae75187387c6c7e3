"""The arithmetic of a model, and of a pre-training step at least: the floor under its time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mapet_mm.models.objectives import MIM, Objective, group_sizes, visibility
from mapet_mm.models.vit import MaPeTPretrainViT

# One product forward, two backward: by the inputs and by the weights.
PASSES = 3


def step_flops(
    objective: Objective,
    num_tokens: int,
    cutting_point: int,
    depth: int,
    dim: int,
    feedforward: int,
    patch_values: int,
    vocab_size: int,
) -> int:
    """Floating-point operations of the products of one image's training step, a multiply-add as two.

    Counted is what the method needs: attention over the keys that a row sees, no other; beyond the last layer
    the predictions only.

    Args:
        objective: the objective.
        num_tokens: `N`, patches and class token.
        cutting_point: `c`.
        depth: number of layers.
        dim: `D`.
        feedforward: width of the MLP.
        patch_values: values of a patch (3 x 16 x 16).
        vocab_size: `V`.
    """
    num_targets = num_tokens - cutting_point
    sees = visibility(objective, cutting_point, num_targets)
    rows, keys = sees.shape
    predictions = group_sizes(objective.predicting_group, cutting_point, num_targets)[0]

    def layer(queries: int, visible: int) -> int:
        # Query and output projection and the MLP for the rows; key and value for the keys; scores and sums.
        return 2 * (dim * (2 * queries * (dim + feedforward) + 2 * keys * dim) + 2 * visible * dim)

    forward = (depth - 1) * layer(rows, int(sees.sum()))
    forward += layer(predictions, int(sees[-predictions:].sum()))
    forward += 2 * predictions * dim * vocab_size
    # Images need no gradient: the patch embedding has one product less.
    return PASSES * forward + (PASSES - 1) * 2 * (num_tokens - 1) * patch_values * dim


def plain_step_flops(num_tokens: int, num_masked: int, depth: int, **sizes: int) -> int:
    """The same for a plain ViT that predicts `num_masked` of its tokens: BEiT."""
    return step_flops(MIM, num_tokens, num_tokens - num_masked, depth, **sizes)


def backbone_step_flops(backbone: MaPeTPretrainViT, vocab_size: int) -> int:
    """`step_flops` of a two-stream backbone, at its size of image."""
    height, width = backbone.patch_embed.projection.kernel_size
    return step_flops(
        backbone.objective,
        backbone.num_tokens,
        backbone.cutting_point,
        depth=len(backbone.layers),
        dim=backbone.embed_dims,
        feedforward=backbone.arch_settings["feedforward_channels"],
        patch_values=3 * height * width,
        vocab_size=vocab_size,
    )


class Complexity(NamedTuple):
    """What a recipe's model costs, a multiply-add as one operation, as OpenMMLab's metafiles count.

    Args:
        parameters: of the whole model, without a tokenizer that runs in it.
        forward: operations of one image's features; of a segmentor, of its prediction.
        step: operations of one image's pre-training step (:func:`step_flops`), for the two-stream backbones.
    """

    parameters: int
    forward: int
    step: int | None


@torch.no_grad()
def complexity(cfg: Config, size: tuple[int, int]) -> Complexity:
    """Count the operations of a recipe's model, without weights and without computing.

    Unlike MMEngine's counter, this one counts what the fused attention kernel multiplies.

    Args:
        cfg: a recipe of MMPretrain or MMSegmentation, with a model of images.
        size: (height, width) of the image in pixels.
    """
    model = _without_weights(cfg).eval()
    images = torch.empty(1, 3, *size, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(images, mode="tensor") if hasattr(model, "decode_head") else model.extract_feat(images)
    two_stream = isinstance(getattr(model, "backbone", None), MaPeTPretrainViT)
    return Complexity(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        forward=counter.get_total_flops() // 2,
        step=backbone_step_flops(model.backbone, model.head.vocab_size) // 2 if two_stream else None,
    )


def _without_weights(cfg: Config) -> nn.Module:
    """The model on the meta device; a tokenizer in it would be downloaded, so it is left out."""
    settings = cfg.model.copy()
    if settings.get("target_generator"):
        settings.target_generator = None
    if "data_preprocessor" in cfg:
        settings.setdefault("data_preprocessor", cfg.data_preprocessor)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        try:
            with torch.device("meta"):
                return MODELS.build(settings)
        except RuntimeError:  # MMPretrain's CAE reads numbers from tensors while it is built
            return MODELS.build(settings).to("meta")
