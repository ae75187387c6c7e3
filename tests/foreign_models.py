"""Models of other libraries with random weights, saved as these libraries save them."""

from pathlib import Path

import timm
import torch
import transformers

SIDE = 28  # of the images, in patches of 7
VIT = dict(img_size=SIDE, patch_size=7, depth=2, embed_dim=24, num_heads=3, reg_tokens=2)
OF_HUGGING_FACE = {
    "vit": (transformers.ViTConfig, transformers.ViTModel),
    "dinov2": (transformers.Dinov2Config, transformers.Dinov2Model),
    "registers": (transformers.Dinov2WithRegistersConfig, transformers.Dinov2WithRegistersModel),
}


def save_hugging_face(kind: str, folder: Path) -> torch.nn.Module:
    """Save a model and its image processor, and return the model."""
    config, model = OF_HUGGING_FACE[kind]
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=SIDE, patch_size=7)
    network = model(config(**sizes, **(dict(intermediate_size=48) if kind == "vit" else dict(mlp_ratio=2))))
    network.eval().save_pretrained(folder)
    squashed, cropped = dict(height=SIDE, width=SIDE), dict(shortest_edge=32)
    processor = transformers.ViTImageProcessor(size=squashed)
    if kind != "vit":
        processor = transformers.BitImageProcessor(size=cropped, crop_size=squashed)
    processor.save_pretrained(folder)
    return network


def save_timm(folder: Path, **options) -> torch.nn.Module:
    """Save a ViT with registers, and return it."""
    network = timm.create_model("vit_tiny_patch16_224", **VIT, **options).eval()
    timm.models.save_for_hf(network, str(folder), model_args={**VIT, **options})
    return network
