"""Does continuing a ViT hurt? `mapet-mm pretrain --init` from small ViTs to images of another kind.

    python research/continuing.py garments photographs GARMENTS.pth --seeds 0 1 2
    python research/continuing.py --show

A run is the command itself: a checkpoint of images of one kind, and 6,000 images of another, which each seed
draws. It is measured with 4,000 images that nothing else sees, as trained, and with half of the change. What
is done stays, so the same command goes on after an interruption. Figures are kept in continuing.jsonl.

It reads what `converters/cifar10.py`, `fashion_mnist.py` and `camvid.py` write. Which checkpoints:
[the page](results/continuing.md).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from lab.records import precision_of
from scipy.stats import t

import mapet_mm
from mapet_mm.cli.change import changed
from mapet_mm.utils.run_folder import INIT, Run
from mapet_mm.weight_files import read_checkpoint, read_weights, write_weights

RECORDS = Path(__file__).with_name("continuing.jsonl")
EPOCHS = 10
TRAINED = 6000  # images, drawn by each seed
MEASURED = 4000
FLAT = dict(layer_decay=1.0)
# How the ViT is trained.
WAYS: dict[str, dict[str, Any]] = {
    "all, 3e-4, layer decay": dict(lr=3e-4, layer_decay=0.75),
    "all, 1.5e-3": dict(lr=1.5e-3, **FLAT),
    "all, 1.2e-3, layer decay": dict(lr=1.2e-3, layer_decay=0.75),
    "all, 6e-4, layer decay": dict(lr=6e-4, layer_decay=0.75),
    "attention, 1.5e-3": dict(train="attention", lr=1.5e-3, **FLAT),
    "attention, 6e-3": dict(train="attention", lr=6e-3, **FLAT),
    "lora, 1.5e-3": dict(train="lora", lr=1.5e-3, **FLAT),
    "lora, 6e-3": dict(train="lora", lr=6e-3, **FLAT),
}
SHARES = (0, 0.5, 1)  # of the change; 0 is the start

CLASSIFIED = {"photographs": "data/cifar10", "garments": "data/fashion_mnist"}
POOLS = {"photographs": "train_35000.txt", "garments": "train_20000.txt"}
CHOOSING = "held_out.txt"  # images to choose a rate by
METRICS = dict(knn="k-NN, both", few="logistic regression, both, 10 a class")

STREETS = "streets"
CROPS = "data/camvid_32"
MEASURED_RECORDING = "0006R0"  # the other two are trained on
STREET_CLASSES = [
    *("sky", "building", "pole", "road", "pavement", "tree"),
    *("sign", "fence", "car", "pedestrian", "bicyclist"),
]
STREET_METRICS = dict(segmentation="k-NN segmentation, patch tokens")
TITLES = dict(knn="k-NN, top-1", few="10 labels a class, top-1", segmentation="k-NN segmentation, mIoU")


def labelled_lines(kind: str, listed: str) -> list[str]:
    """Lines `path class`, with paths from the folder of the images of this kind."""
    root = Path(CLASSIFIED[kind])
    folder = "val" if listed == "val.txt" and (root / "val").is_dir() else "train"
    return [f"{folder}/{line}" for line in (root / "meta" / listed).read_text().splitlines()]


def drawn(lines: list[str], count: int, seed: int) -> list[str]:
    """Some of the lines."""
    rows = np.random.default_rng(seed).permutation(len(lines))[:count]
    return [lines[row] for row in sorted(rows)]


def link(images: list[str], root: Path, folder: Path) -> None:
    """A folder with links to these images."""
    for image in images:
        path = folder / image
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():
            path.symlink_to((root / image).absolute())


def classified_images(kind: str, folder: Path, seed: int, measured: str) -> tuple[Path, dict[str, Any]]:
    """Images to train on, and the evaluation of a model by their classes."""
    root = Path(CLASSIFIED[kind]).absolute()
    lines = dict(
        train=drawn(labelled_lines(kind, POOLS[kind]), TRAINED, seed),
        val=drawn(labelled_lines(kind, measured), MEASURED, 0),
    )
    images = folder / f"images-{seed}"
    link([line.split()[0] for line in lines["train"]], root, images)
    sets = {}
    for name, listed in lines.items():
        file = folder / f"{name}-{seed}-{measured}"
        file.write_text("\n".join(listed) + "\n")
        sets[name] = dict(
            dataset=dict(type="CustomDataset", data_root=str(root), ann_file=str(file.absolute()))
        )
    protocols = [dict(type="NearestNeighbours"), dict(type="LowShot", shots=[10])]
    return images, dict(**sets, protocols=protocols)


def street_images(folder: Path, seed: int) -> tuple[Path, dict[str, Any]]:
    """Squares of streets to train on, and the evaluation of a model by their masks."""
    crops = Path(CROPS).absolute()
    others = (crops / "meta" / f"without_{MEASURED_RECORDING}.txt").read_text().splitlines()
    measured = (crops / "meta" / f"{MEASURED_RECORDING}.txt").read_text().splitlines()
    images = folder / f"images-{seed}"
    link([f"{name}.png" for name in drawn(others, TRAINED, seed)], crops / "images", images)
    pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="mmseg.LoadAnnotations"),
        dict(type="mmseg.PackSegInputs"),
    ]
    sets = {}
    for name, listed in (("dense_train", drawn(others, 1000, seed)), ("dense_val", measured[:2000])):
        file = folder / f"{name}-{seed}.txt"
        file.write_text("\n".join(listed) + "\n")
        dataset = dict(
            type="mmseg.BaseSegDataset",
            data_root=str(crops),
            data_prefix=dict(img_path="images", seg_map_path="annotations"),
            img_suffix=".png",
            ann_file=str(file.absolute()),
            metainfo=dict(classes=STREET_CLASSES),
            pipeline=pipeline,
        )
        sets[name] = dict(dataset=dataset)
    return images, dict(**sets, protocols=[dict(type="SegmentationByNeighbours")])


def figures(run: Path, checkpoint: Path, config: Path, metrics: dict[str, str]) -> dict[str, float]:
    """What frozen features of these weights give."""
    rows = mapet_mm.evaluate(run, config, checkpoint=checkpoint, cache=run.parent / "features", workers=0)
    values = {row.name: row.value for row in rows}
    return {name: values[metric] for name, metric in metrics.items()}


def continue_once(args: argparse.Namespace, way: str, seed: int) -> None:
    """Train and measure once, and keep the figures."""
    folder = args.out / f"{args.start}-{args.images}"
    folder.mkdir(parents=True, exist_ok=True)
    if args.images == STREETS:
        metrics = STREET_METRICS
        images, evaluation = street_images(folder, seed)
    else:
        metrics = METRICS
        images, evaluation = classified_images(args.images, folder, seed, args.measured)
    start = folder / "start"
    if not start.exists():
        convert = [sys.executable, "tools/convert.py", "mm", "timm", args.checkpoint, str(start)]
        subprocess.run(convert, check=True)
    place = folder / f"{way}-{EPOCHS}-{seed}".replace(", ", "_").replace(" ", "-")
    config = Path(f"{place}.py")
    config.write_text(f"evaluation = {evaluation!r}\n")

    options = dict(epochs=EPOCHS, seed=seed, workers=0, no_verdict=True, **WAYS[way])
    mapet_mm.pretrain(images, place, init=f"timm:local-dir:{start.absolute()}", **options)

    run = Run(place)
    before = read_weights(run / INIT)
    trained, meta = read_checkpoint(run.checkpoint)
    values = {}
    for share in SHARES:
        weights = folder / f"share-{way}-{seed}.pth"
        write_weights(weights, changed(before, trained, share), meta)
        values[str(share)] = figures(place, weights, config, metrics)
        weights.unlink()
    said = dict(start=args.start, images=args.images, way=way, seed=seed, measured=args.measured)
    precision = precision_of(run.work_dir)
    with RECORDS.open("a") as file:
        file.write(json.dumps({**said, "precision": precision, "by_share": values}) + "\n")


def interval_text(values: list[float]) -> str:
    """The mean over seeds, and its 95 % interval by Student's t."""
    mean = np.mean(values)
    if len(values) == 1:
        return f"{mean:+.1f}"
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})"


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a row for each way and measure, with the changes against the start."""
    lines = [
        "| start | images | trained | measure | start (%) | change | half of it | seeds |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    groups = defaultdict(list)
    ways = list(WAYS)
    for record in sorted(records, key=lambda record: ways.index(record["way"])):
        groups[record["start"], record["images"], record["way"]].append(record["by_share"])
    for (start, images, way), found in groups.items():
        for measure, title in TITLES.items():
            if measure not in found[0]["0"]:
                continue
            changes = [
                interval_text([values[share][measure] - values["0"][measure] for values in found])
                for share in ("1", "0.5")
            ]
            before = np.mean([values["0"][measure] for values in found])
            cells = [start, images, way, title, f"{before:.1f}", *changes, str(len(found))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(records: list[dict[str, Any]]) -> list[str]:
    """A table for each list that measured and each width of the starts."""
    groups = defaultdict(list)
    for record in records:
        width = record["start"].partition(", ")[2]
        groups[record["measured"], width].append(record)
    return [table(found) for found in groups.values()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "start", nargs="?", help="what the checkpoint has seen: garments, or 'garments, 192 wide'"
    )
    parser.add_argument("images", nargs="?", choices=[*CLASSIFIED, STREETS], help="to continue on")
    parser.add_argument("checkpoint", nargs="?", help="of the start, a training's")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--measured", default="val.txt", help=f"list to measure with, {CHOOSING} to choose by"
    )
    parser.add_argument("--out", type=Path, default=Path("work_dirs/continuing"), help="folder of the runs")
    parser.add_argument("--show", action="store_true", help="print the table of what is kept")
    args = parser.parse_args()
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    if args.show:
        print("\n\n".join(tables(records)))
        return
    keys = ("start", "images", "way", "seed", "measured")
    done = {tuple(record[key] for key in keys) for record in records}
    for seed in args.seeds:
        for way in args.ways:
            if (args.start, args.images, way, seed, args.measured) not in done:
                continue_once(args, way, seed)


if __name__ == "__main__":
    main()
