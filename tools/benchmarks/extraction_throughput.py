"""Throughput of `extract_tokens` and of the encoder's bare forward pass, in interleaved rounds.

The bare pass starts from decoded images on the device; the extraction decodes JPEG files, runs the encoder,
finds the nearest centroids and writes the token store. The encoder has random weights, which cost as much as
trained ones. On CPU a smaller encoder and codebook are used, with the paper's ratio of nearest-centroid
search to encoder (about 2.5 % of the arithmetic), and the encoder leaves cores to the decoding.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from harness import DEVICE, ON_GPU, machine, parse_options, report, time_in_turns
from PIL import Image

from mapet_mm.engine.runners.freed_memory import keep_freed_memory
from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import KCLIP, Codebook
from mapet_mm.tokenizers.extraction import extract_tokens, open_or_create
from mapet_mm.tokenizers.image_groups import GROUP_SIZE, GroupLoader
from mapet_mm.tokenizers.images import NamedImages


def write_images(folder: Path, count: int) -> None:
    """Write JPEG files of ImageNet's mean size, 500 x 375."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir()
    for index in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        coarse.resize((500, 375)).save(folder / "images" / f"{index:05d}.jpg", quality=90)


def dataset(folder: Path, size: int) -> dict:
    """The images through the pipeline of configs/tokenizers."""
    resize = dict(type="ResizeEdge", scale=size, edge="short", backend="pillow", interpolation="bicubic")
    crop = dict(type="CenterCrop", crop_size=size)
    pipeline = [dict(type="LoadImageFromFile"), resize, crop, dict(type="PackInputs")]
    return dict(type="CustomDataset", data_root=str(folder), with_label=False, pipeline=pipeline)


def bare_seconds(tokenizer: KCLIP, images: int) -> float:
    """Seconds of the encoder without decoding or writing."""
    inputs = torch.randn(GROUP_SIZE, 3, tokenizer.image_size, tokenizer.image_size, device=DEVICE)
    groups = range(images // GROUP_SIZE)
    step = {"encoder": lambda: [tokenizer.features(inputs) for _ in groups]}
    return time_in_turns(step, rounds=1, warm_up=0)["encoder"][0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both in turn, and print medians and their ratio."""
    args = parse_options(
        __doc__,
        arguments,
        model="RN50x64" if ON_GPU else "RN50",
        k=8192 if ON_GPU else 1024,
        images=2048 if ON_GPU else 64,
        rounds=3,
        workers=14 if ON_GPU else 1,
        threads=1,
    )
    keep_freed_memory()  # as tools/extract_tokens.py does
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    images = args.images // GROUP_SIZE * GROUP_SIZE
    tokenizer = KCLIP(args.model, dict(type="random", seed=0)).to(DEVICE)
    tokenizer.codebook = Codebook(torch.randn(args.k, tokenizer.dim).relu())
    preprocessor = MODELS.build(
        dict(type="mmpretrain.SelfSupDataPreprocessor", mean=[120.0] * 3, std=[70.0] * 3, to_rgb=True)
    ).to(DEVICE)
    bare, whole, waited = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_images(folder, images)
        named = NamedImages({**dataset(folder, tokenizer.image_size), "_scope_": "mmpretrain"}, None)
        bare_seconds(tokenizer, GROUP_SIZE)
        for number in range(args.rounds):
            bare.append(images / bare_seconds(tokenizer, images))
            opened = open_or_create(folder / f"tokens_{number}", tokenizer, named, {})
            loader = GroupLoader(named, tokenizer.image_size, preprocessor, num_workers=args.workers)
            done = extract_tokens(tokenizer, loader, *opened)
            whole.append(done.images / done.seconds)
            waited.append(done.waited / done.seconds)
    rows = [
        ["encoder alone", f"{statistics.median(bare):.2f}", ""],
        ["extract_tokens", f"{statistics.median(whole):.2f}", f"{statistics.median(waited):.1%}"],
    ]
    what = f"{args.model}, {tokenizer.image_size} px, k = {args.k}, {images} images, {args.workers} workers"
    report(f"{what}; {machine()}", ["median of rounds", "images/s", "waiting for data"], rows)
    ratio = statistics.median(e / b for e, b in zip(whole, bare, strict=True))
    print(f"\n{ratio:.1%} of the bare forward pass")


if __name__ == "__main__":
    main()
