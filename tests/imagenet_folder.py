"""A folder in ImageNet's layout with one photograph in each split, and a token store of its grids."""

from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data as photographs

from mapet_mm.structures import TokenStore

PHOTOGRAPH = photographs.chelsea()  # 300 x 451


def write_imagenet(root: Path) -> None:
    """Write `{train,val}/cat.png`, their lists, and `tokens`: 14 x 14 grids with the ids 0..195, 196..391.

    The lists `{train,val}_broken.txt` have an image more, which cannot be decoded: the store skipped it.
    """
    for split in ("train", "val"):
        (root / split).mkdir()
        Image.fromarray(PHOTOGRAPH).save(root / split / "cat.png")
        (root / "meta").mkdir(exist_ok=True)
        (root / "meta" / f"{split}.txt").write_text("cat.png 281\n")
        (root / split / "broken.png").write_text("no image")
        (root / "meta" / f"{split}_broken.txt").write_text("broken.png 281\ncat.png 281\n")
    names = ["train/cat.png", "val/cat.png", "train/broken.png", "val/broken.png"]
    store = TokenStore.create(
        root / "tokens", names, (14, 14), vocab_size=8192, tokenizer="test", data_root=str(root)
    )
    skipped = dict.fromkeys((2, 3), "UnidentifiedImageError")
    store.write([0, 1], np.arange(2 * 196).reshape(2, 14, 14), skipped)
