"""The operations of a model, and the minimum of a pre-training step, which bounds its time from below."""

from __future__ import annotations

import math
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
from mapet_mm.models.selfsup.cae import ProjectedCAE
from mapet_mm.models.utils.objectives import MIM, Objective, group_sizes, visibility

# One matrix product forward, two backward: for the gradients of the inputs and of the weights.
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
    query_from_layer: int = 0,
) -> int:
    """FLOPs of the matrix products in one image's training step; a multiply-add counts as two.

    Counts only what the method needs: attention over the keys that a row sees, and in the last layer only the
    rows that predict.

    Args:
        objective: the objective.
        num_tokens: `N`, patches and class token.
        cutting_point: `c`.
        depth: number of layers.
        dim: `D`.
        feedforward: width of the MLP.
        patch_values: number of values in a patch (3 x 16 x 16).
        vocab_size: `V`.
        query_from_layer: the first layer that runs the query stream.
    """
    num_targets = num_tokens - cutting_point
    sees = visibility(objective, cutting_point, num_targets)
    rows, keys = sees.shape
    predictions = group_sizes(objective.predicting_group, cutting_point, num_targets)[0]

    def layer(queries: int, visible: int) -> int:
        return _layer_flops(queries, keys, visible, dim, feedforward)

    forward = query_from_layer * layer(keys, int(sees[:keys].sum()))
    forward += (depth - 1 - query_from_layer) * layer(rows, int(sees.sum()))
    forward += layer(predictions, int(sees[-predictions:].sum()))
    forward += 2 * predictions * dim * vocab_size
    # Images need no gradient, so the patch embedding has one product less.
    return PASSES * forward + (PASSES - 1) * 2 * (num_tokens - 1) * patch_values * dim


def _layer_flops(queries: int, keys: int, pairs: int, dim: int, feedforward: int) -> int:
    """FLOPs of a layer's forward pass, where `pairs` of a query and a key see each other."""
    # Query and output projections and the MLP for the rows; keys and values for the keys; scores and weighted
    # sums.
    return 2 * (dim * (2 * queries * (dim + feedforward) + 2 * keys * dim) + 2 * pairs * dim)


def backbone_step_flops(backbone: MaPeTPretrainViT, vocab_size: int) -> int:
    """`step_flops` of a two-stream backbone, at the size of its images."""
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
        query_from_layer=backbone.query_from_layer,
    )


def training_flops(cfg: Config, processes: int = 1) -> int:
    """FLOPs of a whole training of any model: what PyTorch counts in a step on the first image, per image.

    Unlike `step_flops`, this includes scores that are computed and masked. It is the same on every machine,
    and needs the images and, for a pre-training, their tokens. Validation is not counted.

    Args:
        cfg: a recipe of MMPretrain or MMSegmentation.
        processes: number of processes that train, for a length in iterations.
    """
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        dataset = DATASETS.build(cfg.train_dataloader.dataset)
        model = MODELS.build(_settings(cfg)).train()
    # The kernels of attention on the CPU are not counted, the plain products are.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        # Twice the image, for BatchNorm.
        batch = model.data_preprocessor(pseudo_collate([dataset[0], dataset[0]]), training=True)
        model.parse_losses(model(**batch, mode="loss"))[0].backward()
    batch_size = cfg.train_dataloader.batch_size * processes
    images = cfg.train_cfg.get("max_epochs", 0) * len(dataset)
    return counter.get_total_flops() // 2 * (images or cfg.train_cfg.max_iters * batch_size)


def beit_step_flops(model: BEiT) -> int:
    """As `step_flops`, for BEiT: a plain ViT that predicts the masked ones of its tokens."""
    backbone = model.backbone
    num_tokens = 1 + math.prod(backbone.patch_resolution)
    masked = model.head.max_masked or num_tokens - 1
    return step_flops(
        MIM,
        num_tokens,
        num_tokens - masked,
        depth=len(backbone.layers),
        dim=backbone.embed_dims,
        feedforward=backbone.arch_settings["feedforward_channels"],
        patch_values=backbone.patch_embed.projection.weight[0].numel(),
        vocab_size=model.head.vocab_size,
    )


def cae_step_flops(model: ProjectedCAE) -> int:
    """As `step_flops`, for CAE: encoder, regressor and decoder, and the teacher's forward pass."""
    backbone, neck = model.backbone, model.neck
    masked = neck.mask_token_num
    visible = math.prod(backbone.patch_resolution) - masked
    dim, width = backbone.embed_dims, neck.embed_dim

    def encoder(patches: int) -> int:
        rows, feedforward = 1 + patches, backbone.arch_settings["feedforward_channels"]
        to_neck = 2 * patches * dim * width if width != dim else 0
        return len(backbone.layers) * _layer_flops(rows, rows, rows**2, dim, feedforward) + to_neck

    patches = masked + visible
    predictor = len(neck.regressors) * _layer_flops(masked, patches, masked * patches, width, 4 * width)
    predictor += len(neck.decoders) * _layer_flops(masked, masked, masked**2, width, 4 * width)
    predictor += 2 * masked * width * neck.vocab_size
    # The encoder embeds the visible patches, its teacher the masked ones.
    embedded = 2 * dim * backbone.patch_embed.projection.weight[0].numel()
    return (
        PASSES * (encoder(visible) + predictor)
        + encoder(masked)
        + ((PASSES - 1) * visible + masked) * embedded
    )


def model_step_flops(model: nn.Module) -> int | None:
    """`step_flops` of MaPeT, PIM, MIM, BEiT or CAE, at the size of its images; None for other models."""
    if isinstance(model, BEiT):
        return beit_step_flops(model)
    if isinstance(model, ProjectedCAE):
        return cae_step_flops(model)
    if isinstance(getattr(model, "backbone", None), MaPeTPretrainViT):
        return backbone_step_flops(model.backbone, model.head.vocab_size)
    return None


class Complexity(NamedTuple):
    """Cost of the model of a recipe. A multiply-add is one operation, as in OpenMMLab's metafiles.

    Args:
        parameters: of the whole model, without an online tokenizer.
        forward: operations for the features of one image; for a segmentor, for its prediction.
        step: operations of the pre-training step of one image (`model_step_flops`); None of other models, and
            for images of another size than the recipe's.
    """

    parameters: int
    forward: int
    step: int | None


@torch.no_grad()
def complexity(cfg: Config, size: tuple[int, int] | None = None) -> Complexity:
    """Count the operations of the model of a recipe, without running it.

    Unlike MMEngine's counter, this includes the products inside the fused attention kernel.

    Args:
        cfg: a recipe of MMPretrain or MMSegmentation, with a model of images.
        size: (height, width) of the image in pixels; None for the size that the backbone is made for.
    """
    model = _without_weights(cfg).eval()
    own = tuple(to_2tuple(getattr(model.backbone, "img_size", 224)))
    height, width = size or own
    images = torch.empty(1, 3, height, width, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(images, mode="tensor") if hasattr(model, "decode_head") else model.extract_feat(images)
    step = model_step_flops(model) if (height, width) == own else None  # which counts at the recipe's size
    return Complexity(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        forward=counter.get_total_flops() // 2,
        step=None if step is None else step // 2,
    )


def _without_weights(cfg: Config) -> nn.Module:
    """Build the model on the meta device, without its tokenizer, which would be downloaded."""
    settings = _settings(cfg)
    if settings.get("target_generator"):
        settings.target_generator = None
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        try:
            with torch.device("meta"):
                return MODELS.build(settings)
        except RuntimeError:  # MMPretrain's CAE reads numbers from tensors while it is built
            return MODELS.build(settings).to("meta")


def _settings(cfg: Config) -> Config:
    """The model's config, with the data preprocessor that a recipe has beside it."""
    settings = cfg.model.copy()
    if "data_preprocessor" in cfg:
        settings.setdefault("data_preprocessor", cfg.data_preprocessor)
    return settings
