"""The digits' k-CLIP config on a few of the digits, with a small codebook."""

from pathlib import Path

from dataset_converters.digits import write_digits
from mmengine.config import Config

ROOT = Path(__file__).parents[1]


def write_few_digits(folder: Path, per_split: int) -> None:
    """The digits dataset with only so many images in the lists of each split."""
    write_digits(folder)
    for split in ("train", "val"):
        meta = folder / "meta" / f"{split}.txt"
        meta.write_text("\n".join(meta.read_text().splitlines()[:per_split]) + "\n")


def kclip_config(digits: Path, out: Path, **options) -> Config:
    """A config of 12 tokens that writes its codebook and token store into `out`."""
    cfg = Config.fromfile(ROOT / "configs" / "micro" / "kclip.py")
    roots = ("data_root", "dataset.0.data_root", "dataset.1.data_root", "codebook.dataset.data_root")
    cfg.merge_from_dict(
        {
            **dict.fromkeys(roots, str(digits)),
            "codebook.k": 12,
            "codebook.nredo": 1,
            "tokenizer.codebook": str(out / "codebook.safetensors"),
            "token_store": str(out / "tokens"),
            "dataloader.num_workers": 0,
            **options,
        }
    )
    return cfg
