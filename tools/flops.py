"""Operations of a model: counted by PyTorch, and the minimum of a two-stream training step by formula."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from mmengine.config import Config
from mmengine.dataset import default_collate
from mmengine.registry import DATASETS, MODELS, DefaultScope
from mmengine.utils import to_2tuple
from mmpretrain.models.selfsup import BEiT
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mapet_mm.models.backbones.vit import MaPeTPretrainViT
from mapet_mm.models.selfsup.visible_mim import VisibleMIM
from mapet_mm.models.utils.objectives import MIM, Objective, visibility

# One matrix product forward, two backward: for the gradients of the inputs and of the weights.
PASSES = 3


def model_step_flops(model: nn.Module) -> int | None:
    """FLOPs of the matrix products in one image's training step; a multiply-add counts as two.

    Of MaPeT, PIM, MIM, VisibleMIM and BEiT at the size of their images; None for other models. BEiT is MIM's
    arithmetic: a plain ViT over all tokens that predicts the masked ones. Counts only what the method needs:
    attention over the keys that a row sees, keys and values of the rows that are keys, and in the last layer
    only the rows that predict: the targets, and with a context loss the context.
    """
    backbone = getattr(model, "backbone", None)
    if isinstance(backbone, MaPeTPretrainViT):
        objective = backbone.objective
        num_tokens = backbone.num_tokens
        num_context = backbone.cutting_point
    elif isinstance(model, BEiT):
        objective = MIM
        num_tokens = 1 + prod(backbone.patch_resolution)
        num_context = num_tokens - (model.head.max_masked or num_tokens - 1)
    else:
        return None
    num_targets = num_tokens - num_context
    has_context_loss = getattr(model, "context_loss", 0) > 0

    if isinstance(model, VisibleMIM):
        forward = _visible_only_flops(model, num_context, num_targets)
    else:
        forward = _two_stream_flops(backbone, objective, num_context, num_targets, has_context_loss)
    num_predictions = num_targets
    if has_context_loss:
        num_predictions += num_context - 1  # the class token has no visual token
    forward += 2 * num_predictions * backbone.embed_dims * model.head.vocab_size

    # Images need no gradient, so the patch embedding has one product less.
    patch_values = backbone.patch_embed.projection.weight[0].numel()
    embedding = 2 * (num_tokens - 1) * patch_values * backbone.embed_dims
    return PASSES * forward + (PASSES - 1) * embedding


def _two_stream_flops(
    backbone: nn.Module, objective: Objective, num_context: int, num_targets: int, has_context_loss: bool
) -> int:
    """FLOPs of the layers' forward pass for an objective."""
    sees = visibility(objective, num_context, num_targets)
    num_rows, num_keys = sees.shape
    widths = (backbone.embed_dims, backbone.arch_settings["feedforward_channels"])

    # All layers but the last compute every row, the last one those that predict.
    forward = (len(backbone.layers) - 1) * _layer_flops(*widths, num_rows, num_keys, int(sees.sum()))
    last_rows = num_targets
    last_pairs = int(sees[-num_targets:].sum())
    if has_context_loss:
        last_rows += num_context
        last_pairs += int(sees[:num_context].sum())
    return forward + _layer_flops(*widths, last_rows, num_keys, last_pairs)


def _visible_only_flops(model: VisibleMIM, num_context: int, num_targets: int) -> int:
    """FLOPs of the forward pass of an encoder of the context and its predictor."""
    backbone = model.backbone
    widths = (backbone.embed_dims, backbone.arch_settings["feedforward_channels"])
    encoder_layer = _layer_flops(*widths, num_context, num_context, num_context**2)
    forward = len(backbone.layers) * encoder_layer
    for layer in model.neck.layers:
        widths = (backbone.embed_dims, layer.ffn.feedforward_channels)
        forward += _layer_flops(*widths, num_targets, num_context, num_targets * num_context)
    return forward


def _layer_flops(dim: int, feedforward: int, num_rows: int, num_keys: int, num_pairs: int) -> int:
    """FLOPs of a Transformer layer's forward pass.

    Query and output projections and the MLP for the rows, keys and values for the keys, scores and weighted
    sums for the pairs of a row and a key that it sees.
    """
    of_rows = 2 * num_rows * (dim + feedforward)
    of_keys = 2 * num_keys * dim
    return 2 * dim * (of_rows + of_keys + 2 * num_pairs)


def training_flops(cfg: Config, processes: int = 1) -> int:
    """FLOPs of a recipe's whole training: PyTorch's count of a step on the first image, per image.

    Unlike `model_step_flops`, this includes scores that are computed and masked. It is the same on every
    machine, and needs the images and, for a pre-training, their tokens. Validation is not counted. The number
    of processes counts for a length in iterations.
    """
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        dataset = DATASETS.build(cfg.train_dataloader.dataset)
        model = MODELS.build({"data_preprocessor": cfg.get("data_preprocessor"), **cfg.model}).train()
    # The kernels of attention on the CPU are not counted, the plain products are.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        # Twice the image, for BatchNorm; stacked, as MMPretrain's loaders do.
        batch = model.data_preprocessor(default_collate([dataset[0], dataset[0]]), training=True)
        model.parse_losses(model(**batch, mode="loss"))[0].backward()
    batch_size = cfg.train_dataloader.batch_size * processes
    images = cfg.train_cfg.get("max_epochs", 0) * len(dataset)
    return counter.get_total_flops() // 2 * (images or cfg.train_cfg.max_iters * batch_size)


class Complexity(NamedTuple):
    """Cost of the model of a recipe. A multiply-add is one operation, as in OpenMMLab's metafiles."""

    parameters: int  # of the whole model, without an online tokenizer
    forward: int  # for the features of one image; for a segmentor, for its prediction
    step: int | None  # `model_step_flops`; None for images of another size than the recipe's


@torch.no_grad()
def complexity(cfg: Config, size: tuple[int, int] | None = None) -> Complexity:
    """Count the operations of the model of a recipe, without running it.

    The image's (height, width) in pixels is by default the one that the backbone is made for.
    """
    settings = cfg.model.copy()
    if settings.get("target_generator"):  # a tokenizer's weights would be downloaded
        settings.target_generator = None
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(settings).to("meta").eval()
    own = tuple(to_2tuple(getattr(model.backbone, "img_size", 224)))
    images = torch.empty(1, 3, *(size or own), device="meta")
    with FlopCounterMode(display=False) as counter:
        model(images, mode="tensor") if hasattr(model, "decode_head") else model.extract_feat(images)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    step = model_step_flops(model) if size in (None, own) else None
    return Complexity(parameters, counter.get_total_flops() // 2, None if step is None else step // 2)
