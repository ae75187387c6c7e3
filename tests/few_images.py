"""A few random images, a small k-CLIP config for them, and their tokens by hand."""

from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config
from PIL import Image

from mapet_mm.registry import MODELS

SIZE = 64


def few_images_config(folder: Path) -> Config:
    """A k-CLIP config over 12 training and 5 validation images, which it writes into the folder."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        lines = []
        for index in range(count):
            path = folder / "data" / split / str(index % 3) / f"{index:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(path)
            lines.append(f"{path.relative_to(folder / 'data' / split)} {index % 3}\n")
        (folder / "data" / f"{split}.txt").write_text("".join(lines))
    pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="ResizeEdge", scale=SIZE, edge="short", backend="pillow", interpolation="bicubic"),
        dict(type="CenterCrop", crop_size=SIZE),
        dict(type="PackInputs"),
    ]
    shared = dict(type="CustomDataset", data_root=str(folder / "data"), pipeline=pipeline)
    train, val = (dict(shared, data_prefix=split, ann_file=f"{split}.txt") for split in ("train", "val"))
    return Config(
        dict(
            default_scope="mmpretrain",
            tokenizer=dict(
                type="mapet_mm.KCLIP",
                clip_model=dict(layers=[1, 1, 1, 1], width=8, image_size=SIZE),
                pretrained=dict(type="random", seed=0),
                codebook=str(folder / "out" / "codebook.safetensors"),
            ),
            data_preprocessor=dict(
                type="SelfSupDataPreprocessor", mean=[120.0] * 3, std=[70.0] * 3, to_rgb=True
            ),
            dataset=[train, val],
            dataloader=dict(num_workers=0, group_size=4),
            codebook=dict(dataset=train, positions_per_image=2, k=6, niter=5, nredo=2, seed=0),
            token_store=str(folder / "out" / "tokens"),
        )
    )


def prepared(path: Path) -> torch.Tensor:
    """The image as a batch of one, by hand."""
    image = Image.open(path).convert("RGB").resize((int(SIZE * 50 / 40), SIZE), Image.Resampling.BICUBIC)
    left = round((image.width - SIZE) / 2)
    pixels = np.asarray(image, dtype=np.float32)[:, left : left + SIZE]
    return torch.from_numpy((pixels - 120) / 70).permute(2, 0, 1)[None]


def by_hand(cfg: Config, path: Path) -> np.ndarray:
    """The image's tokens without loader, batches or store."""
    kclip = MODELS.build(cfg.tokenizer)
    return kclip(prepared(path)).reshape(kclip.grid).numpy()
