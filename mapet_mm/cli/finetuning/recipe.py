"""Write the configs of a fine-tuning: one to read, and one of a few lines for each other start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from mapet_mm.cli.finetuning.labels import LabelledImages
from mapet_mm.cli.finetuning.options import FinetuneOptions
from mapet_mm.cli.finetuning.pretrained import Pretrained
from mapet_mm.datasets.pictures import look_at_path, size_of, spread
from mapet_mm.evaluation.models import RANDOM
from mapet_mm.evaluation.verdict import RESULT, START
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.config import as_python

CONFIG = "finetune.py"
# Configs and folders of the trainings, by what they start from.
CONFIGS = {RESULT: CONFIG, START: "from_start.py", RANDOM: "from_random.py"}
FOLDERS = {RESULT: "from_pretraining", START: "from_start", RANDOM: "from_random"}
FEW_LABELS = 1000  # of fewer, no two images are mixed
LARGEST_SIDE = 512  # of the squares that a segmentation is trained on
MOST_VALIDATIONS = 10
WARM_UP = 10  # one of so many epochs


@dataclass(frozen=True)
class Schedule:
    """Images of a step, at most, and the highest learning rate for them; it goes with their square root."""

    batch_size: int
    least: int  # steps of an epoch, if there are images enough
    rate: float
    layer_decay: float = 0.75
    weight_decay: float = 0.05


SCHEDULES = {  # of classifiers and segmentors, wholly trained and frozen
    ("images", False): Schedule(batch_size=64, least=10, rate=3e-4),
    ("images", True): Schedule(batch_size=64, least=10, rate=1e-3, layer_decay=1.0, weight_decay=1e-3),
    ("masks", False): Schedule(batch_size=8, least=4, rate=2e-4),
    ("masks", True): Schedule(batch_size=8, least=4, rate=1e-3, layer_decay=1.0, weight_decay=1e-3),
}


def write_recipe(args: FinetuneOptions, labels: LabelledImages, pretrained: Pretrained) -> None:
    """Write the lists of images and the configs; configs that exist are kept."""
    for file, lines in labels.lists.items():
        replace_file(args.out / file, "\n".join(lines).encode())
    for start in args.compared(pretrained.weights):
        path = args.out / CONFIGS[start]
        if not path.exists():
            replace_file(path, _text(args, labels, pretrained, start).encode())


def _text(args: FinetuneOptions, labels: LabelledImages, pretrained: Pretrained, start: str) -> str:
    """The config of a training."""
    if start == RESULT:
        return _config(args, labels, pretrained)
    if start == START:
        file = pretrained.weights[START]["checkpoint"]
        return (
            "# The same training from what the pre-training started from.\n"
            f'_base_ = "{CONFIG}"\n\n'
            f"model = dict(backbone=dict(init_cfg=dict(checkpoint={as_python(file)})))\n"
        )
    return (
        "# The same training from random weights, whose first layers learn at the full rate, too.\n"
        f'_base_ = "{CONFIG}"\n\n'
        "model = dict(backbone=dict(init_cfg=None))\n"
        "optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=1.0))\n"
    )


def _config(args: FinetuneOptions, labels: LabelledImages, pretrained: Pretrained) -> str:
    """The config of the training from the pre-training's weights."""
    kind = "images" if labels.masks is None else "masks"
    num_train = len(labels.split.trained)
    schedule = SCHEDULES[kind, args.frozen]
    of_step = min(schedule.batch_size, max(2, num_train // schedule.least))
    batch_size = max(2, of_step // args.processes)  # BatchNorm takes no batch of one image
    of_step = batch_size * args.processes
    warm_up = min(math.ceil(args.epochs / WARM_UP), args.epochs - 1)
    how_trained = "drop_path_rate=0.1"
    if args.frozen:
        how_trained = f"frozen_stages={pretrained.depth}"
    values = dict(
        vars(pretrained),
        images=str(labels.folder.absolute()),
        classes=labels.classes,
        init_cfg=pretrained.weights[RESULT],
        num_train=num_train,
        how_trained=how_trained,
        batch_size=batch_size,
        workers=args.workers,
        layer_decay=schedule.layer_decay,
        lr=float(f"{schedule.rate * math.sqrt(of_step / schedule.batch_size):.2g}"),
        weight_decay=schedule.weight_decay,
        epochs=args.epochs,
        warm_up=warm_up,
        interval=max(1, args.epochs // MOST_VALIDATIONS),
        seed=args.seed,
    )
    if kind == "images":
        template = "classifier.py.jinja"
        values.update(
            resized=round(pretrained.side * 8 / 7), mixes=num_train >= FEW_LABELS and not args.frozen
        )
    else:
        template = "segmentor.py.jinja"
        values.update(_of_masks(args, labels, pretrained))
    environment = Environment(
        loader=PackageLoader("mapet_mm.cli", "finetuning"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["python"] = as_python
    return environment.get_template(template).render(values)


def _of_masks(args: FinetuneOptions, labels: LabelledImages, pretrained: Pretrained) -> dict[str, Any]:
    """What the config of a segmentor has besides."""
    paths = [str(labels.folder / name) for name in labels.split.trained]
    looked_at = spread(paths)
    short_side = int(np.median([min(size_of(path, look_at_path(path))) for path in looked_at]))
    multiple = 2 * pretrained.patch
    side = min(LARGEST_SIDE, short_side) // multiple * multiple
    return dict(
        masks=str(labels.masks.folder.absolute()),
        masked_images=labels.masks.parts,
        steps=labels.masks.classes.steps,
        reduces_zero=labels.masks.classes.reduces_zero,
        side=max(side, 2 * multiple),
        head=args.decoder,
        norm="SyncBN" if args.processes > 1 else "BN",  # the same statistics in all processes
    )
