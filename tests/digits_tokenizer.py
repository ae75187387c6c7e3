"""The digits' k-CLIP config on a few of the digits, with a small codebook."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
from dataset_converters import digits
from mmengine.config import Config

ROOT = Path(__file__).parents[1]


@contextmanager
def few_digits(per_split: int) -> Iterator[None]:
    """Within this context the digits are written with so many images in each split, and the short list's."""
    whole = digits.split_source()
    train = np.union1d(whole.few, whole.train[:per_split])
    with patch.object(digits, "split_source", lambda: digits.Split(train, whole.val[:per_split], whole.few)):
        yield


def write_few_digits(folder: Path, per_split: int) -> None:
    """The digits dataset with only so many images in the lists of each split."""
    with few_digits(per_split):
        digits.write_digits(folder)
    for split in ("train", "val"):
        meta = folder / "meta" / f"{split}.txt"
        meta.write_text("\n".join(meta.read_text().splitlines()[:per_split]) + "\n")


def kclip_config(images: Path, out: Path, **options) -> Config:
    """A config of 12 tokens that writes its codebook and token store into `out`."""
    cfg = Config.fromfile(ROOT / "configs" / "micro" / "kclip.py")
    roots = ("data_root", "dataset.0.data_root", "dataset.1.data_root", "codebook.dataset.data_root")
    cfg.merge_from_dict(
        {
            **dict.fromkeys(roots, str(images)),
            "codebook.k": 12,
            "codebook.nredo": 1,
            "tokenizer.codebook": str(out / "codebook.safetensors"),
            "token_store": str(out / "tokens"),
            "dataloader.num_workers": 0,
            **options,
        }
    )
    return cfg
