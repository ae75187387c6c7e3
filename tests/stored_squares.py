"""Small images in files, tokens for them by hand, and a pre-training's config that decodes them."""

from pathlib import Path

import numpy as np
from mmengine.config import Config
from PIL import Image

from mapet_mm.structures import TokenStore

SIZE, GRID = 16, (4, 4)
LOAD = dict(type="LoadImageFromFile")
CROP = dict(
    type="RandomResizedCrop",
    scale=SIZE,
    crop_ratio_range=(1.0, 1.0),
    aspect_ratio_range=(1.0, 1.0),
    max_attempts=0,
    backend="pillow",
    interpolation="bicubic",
)
JITTER = dict(type="ColorJitter", brightness=0.4, contrast=0.4, saturation=0.4)
PACK = dict(type="PackInputs", algorithm_keys=["token_grid"])


def write_images(root: Path, names: list[str]) -> None:
    """An image of its own, of any shape, for each name."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(list(name.encode()))
        height, width = rng.integers(14, 24, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(path)


def named(split: str, count: int) -> list[str]:
    return sorted(f"{split}/{index % 3}/{index:04d}.png" for index in range(count))


def grids_of(rows: np.ndarray) -> np.ndarray:
    """Tokens that follow from the row."""
    return np.stack([np.random.default_rng(row).integers(8, size=GRID) for row in rows.tolist()])


def make_store(folder: Path, names: list[str], skipped: tuple[int, ...] = ()) -> TokenStore:
    """A store in `tokens` of the images in `data`, with tokens for all but some."""
    write_images(folder / "data", names)
    store = TokenStore.create(folder / "tokens", names, GRID, 8, "digest", folder / "data")
    fill(store, skipped)
    return store


def fill(store: TokenStore, skipped: tuple[int, ...] = ()) -> None:
    rows = np.setdiff1d(store.missing(), skipped)
    store.write(rows, grids_of(rows), dict.fromkeys(skipped, "broken"))


def decoded(folder: Path, split: str = "train", steps: tuple = (JITTER,)) -> dict:
    """Config of the dataset that reads the files."""
    load_tokens = dict(type="mapet_mm.LoadTokenGrid", store=str(folder / "tokens"))
    return dict(
        type="mmpretrain.CustomDataset",
        data_root=str(folder / "data"),
        data_prefix=split,
        with_label=False,
        pipeline=[LOAD, CROP, *steps, load_tokens, PACK],
    )


def stored(folder: Path, prefix: str = "train/", pipeline: tuple = (JITTER, PACK), **options) -> dict:
    """Config of the dataset that reads the squares."""
    return dict(
        type="mapet_mm.StoredImages",
        store=str(folder / "tokens"),
        size=SIZE,
        prefix=prefix,
        pipeline=list(pipeline),
        **options,
    )


def config(dataset: dict) -> Config:
    """A pre-training's config, as far as tools/store_images.py reads it."""
    cfg = dict(default_scope="mmpretrain", train_dataloader=dict(dataset=dataset))
    return Config(cfg)
