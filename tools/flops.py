"""Operations of a model: counted by PyTorch, and the minimum of a two-stream training step by formula."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, MODELS, DefaultScope
from mmengine.utils import to_2tuple
from mmpretrain.models.selfsup import BEiT
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mapet_mm.models.backbones.vit import MaPeTPretrainViT
from mapet_mm.models.utils.objectives import MIM, visibility

# One matrix product forward, two backward: for the gradients of the inputs and of the weights.
PASSES = 3


def model_step_flops(model: nn.Module) -> int | None:
    """FLOPs of the matrix products in one image's training step; a multiply-add counts as two.

    Of MaPeT, PIM, MIM and BEiT at the size of their images; None for other models. BEiT is MIM's arithmetic:
    a plain ViT over all tokens that predicts the masked ones. Counts only what the method needs: attention
    over the keys that a row sees, keys and values of the rows that are keys, and in the last layer only the
    rows that predict.
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
    sees = visibility(objective, num_context, num_targets)
    num_rows, num_keys = sees.shape
    dim = backbone.embed_dims
    feedforward = backbone.arch_settings["feedforward_channels"]

    def layer(queries: int, pairs: int) -> int:
        # Query and output projections and the MLP for the rows; keys and values for the keys; scores and
        # weighted sums of the pairs that see each other.
        return 2 * (dim * (2 * queries * (dim + feedforward) + 2 * num_keys * dim) + 2 * pairs * dim)

    # Layers without the query stream, layers with it, the last one for the predictions alone, and the head.
    num_without_queries = getattr(backbone, "query_from_layer", 0)
    num_with_queries = len(backbone.layers) - 1 - num_without_queries
    forward = num_without_queries * layer(num_keys, int(sees[:num_keys].sum()))
    forward += num_with_queries * layer(num_rows, int(sees.sum()))
    forward += layer(num_targets, int(sees[-num_targets:].sum()))
    forward += 2 * num_targets * dim * model.head.vocab_size

    # Images need no gradient, so the patch embedding has one product less.
    patch_values = backbone.patch_embed.projection.weight[0].numel()
    return PASSES * forward + (PASSES - 1) * 2 * (num_tokens - 1) * patch_values * dim


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
        # Twice the image, for BatchNorm.
        batch = model.data_preprocessor(pseudo_collate([dataset[0], dataset[0]]), training=True)
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
