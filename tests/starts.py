"""Small pre-trained ViTs of timm and Hugging Face with random weights, saved as these libraries save them."""

from dataclasses import asdict
from pathlib import Path

import pytest
import timm
import torch
import transformers
from mmengine.config import Config

from mapet_mm.interop.description import ContinuedViT, Preparation
from mapet_mm.interop.export import write_export
from mapet_mm.models import MaPeTPretrainTIMM, MaPeTPretrainViT
from mapet_mm.weight_files import write_weights

SIDE = 32
SMALL = dict(img_size=SIDE, patch_size=8, embed_dim=24, depth=2, num_heads=3)
# timm's architecture, arguments of a small one, and Hugging Face's type of it.
OF_TIMM = {
    "vit": ("vit_small_patch16_224", SMALL, "vit"),
    "dinov2": ("vit_small_patch14_dinov2", SMALL, "dinov2"),
    "dinov2 with registers": ("vit_small_patch14_reg4_dinov2", SMALL, "dinov2_with_registers"),
    "dinov2 giant, swiglu": ("vit_giant_patch14_dinov2", SMALL, "dinov2"),
    "dinov3": ("vit_small_patch16_dinov3", SMALL, "dinov3_vit"),
    "dinov3, bias": ("vit_small_patch16_dinov3_qkvb", SMALL, "dinov3_vit"),
    "dinov3 plus, swiglu": ("vit_small_plus_patch16_dinov3", SMALL, "dinov3_vit"),
    "eva02, swiglu": ("eva02_tiny_patch14_224", SMALL, None),
    "clip": ("vit_base_patch16_clip_224", SMALL, None),
}
SIZES = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=SIDE, patch_size=8)
OF_HUGGING_FACE = {
    "vit": ("ViTConfig", dict(intermediate_size=48)),
    "dinov2": ("Dinov2Config", dict(mlp_ratio=2)),
    "dinov2, swiglu": ("Dinov2Config", dict(mlp_ratio=2, use_swiglu_ffn=True)),
    "registers": ("Dinov2WithRegistersConfig", dict(mlp_ratio=2)),
    "dinov3": ("DINOv3ViTConfig", dict(intermediate_size=48, num_register_tokens=4)),
    "dinov3, gated": (
        "DINOv3ViTConfig",
        dict(
            intermediate_size=40,
            num_register_tokens=4,
            use_gated_mlp=True,
            hidden_act="silu",
            query_bias=False,
            value_bias=False,
        ),
    ),
}


def randomise(network: torch.nn.Module) -> torch.nn.Module:
    """Weights none of which is zero, one or small, so that each counts."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return network.eval()


def save_timm(kind: str, folder: Path, **options: object) -> torch.nn.Module:
    """Save a small model of timm, whose images are cropped, and return it."""
    architecture, arguments, _ = OF_TIMM[kind]
    arguments = {**arguments, **options}
    images = dict(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25), crop_pct=0.875, interpolation="bilinear")
    overlay = dict(images, input_size=(3, arguments["img_size"], arguments["img_size"]), crop_mode="center")
    network = randomise(timm.create_model(architecture, pretrained_cfg_overlay=overlay, **arguments))
    timm.models.save_for_hf(network, str(folder), safe_serialization=True)
    return network


def save_hugging_face(kind: str, folder: Path, **options: object) -> torch.nn.Module:
    """Save a small model of Hugging Face and its image processor, and return the model."""
    name, sizes = OF_HUGGING_FACE[kind]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, name)(**{**SIZES, **sizes, **options})
    network = randomise(transformers.AutoModel.from_config(config))
    network.save_pretrained(folder)
    size = dict(height=SIDE, width=SIDE)
    processor = transformers.ViTImageProcessor(size=size)
    if kind != "vit":
        processor = transformers.BitImageProcessor(size=dict(shortest_edge=40), crop_size=size)
    processor.save_pretrained(folder)
    return network


def save_run(kind: str, run: Path, **options: object) -> MaPeTPretrainTIMM:
    """Write what a RUN that continued a small ViT of timm has of it, and return the training's backbone.

    The norms add 1e-3 to the variance, as those of no library, so that nobody takes them for granted.
    """
    name, arguments, _ = OF_TIMM[kind]
    sizes = {**arguments, **options}
    vit = randomise(MaPeTPretrainTIMM(name, cutting_point=8, norm_eps=1e-3, **sizes))
    side = sizes["img_size"]
    config = dict(
        architecture=name, num_classes=0, model_args=sizes, pretrained_cfg=dict(input_size=[3, side, side])
    )
    known = ContinuedViT(
        timm=config,
        hf=None,
        hf_preprocessor={},
        images=Preparation((side, side), (0.5,) * 3, (0.5,) * 3, side, "bicubic"),
        norm_eps=1e-3,
        sizes=dict(patch_size=sizes["patch_size"], embed_dims=sizes["embed_dim"], num_extra_tokens=1),
    )
    exports = asdict(known)
    network = dict(type="mapet_mm.MaPeTPretrainTIMM", model_name=name, cutting_point=8, **sizes)
    init_cfg = dict(type="Pretrained", checkpoint="init.pth", prefix="backbone.")
    preprocessor = dict(mean=[120.0, 118.0, 104.0], std=[58.0, 57.0, 56.0], to_rgb=True)
    weights = {f"backbone.{key}": value for key, value in vit.state_dict().items()}
    weights["head.projection.bias"] = torch.zeros(3)
    trained = dict(work_dir="training", train_cfg=dict(max_epochs=10), exports=exports)
    trained["model"] = dict(type="mapet_mm.MaPeT", backbone=dict(network, init_cfg=init_cfg))
    Config(dict(trained, data_preprocessor=preprocessor)).dump(run / "pretrain.py")
    older = {key: torch.zeros_like(value) for key, value in weights.items()}
    start = {key: value / 2 for key, value in weights.items()}
    write_weights(run / "init.pth", start, dict(exports=exports))
    write_weights(run / "training/epoch_9.pth", older, dict(exports=exports))
    write_weights(run / "training/epoch_10.pth", weights, dict(exports=exports))
    write_export(run / "timm", "timm", weights, dict(exports=exports))
    return vit


def save_own_run(run: Path, depth: int = 2) -> MaPeTPretrainViT:
    """Write what a RUN of MaPeT's own ViT has of it, and return the training's backbone."""
    arch = dict(embed_dims=24, num_layers=depth, num_heads=3, feedforward_channels=24)
    network = dict(arch=arch, img_size=SIDE, patch_size=8, cutting_point=3)
    vit = randomise(MaPeTPretrainViT(**network))
    weights = {f"backbone.{key}": value for key, value in vit.state_dict().items()}
    write_weights(run / "training/epoch_2.pth", weights)
    trained = dict(work_dir="training", train_cfg=dict(max_epochs=2))
    trained["model"] = dict(type="mapet_mm.MaPeT", backbone=dict(type="mapet_mm.MaPeTPretrainViT", **network))
    trained["data_preprocessor"] = dict(mean=[120.0, 118.0, 104.0], std=[58.0, 57.0, 56.0], to_rgb=True)
    Config(trained).dump(run / "pretrain.py")
    return vit
