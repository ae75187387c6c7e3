"""A small classifier, its config, its images, and their features in a cache."""

from collections.abc import Sequence
from pathlib import Path

import torch
from mmengine.config import Config

from mapet_mm.evaluation.checkpoints import Model, load_checkpoint
from mapet_mm.evaluation.extraction import take_features
from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import read_image_sets
from mapet_mm.evaluation.images import ImageSet
from mapet_mm.evaluation.protocol import Evaluated, Protocol
from mapet_mm.evaluation.run import Job, OpenFeatures, check_space, figures_of
from mapet_mm.evaluation.tables import Row

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)
PIPELINE = [dict(type="LoadImageFromFile"), dict(type="PackInputs")]
PROTOCOLS = [
    dict(type="NearestNeighbours", k=3),
    dict(type="LinearProbes", epochs=1, least_steps=1, batch_size=8, rates=[0.1, 1.0]),
    dict(type="LowShot", shots=[1, 0.5], draws=2),
    dict(type="AttentiveProbe", epochs=1, least_steps=1, batch_size=8),
]


def take(
    config: Config, cache: Path, kinds=("layers", "tokens"), name: str = "train", data: str | None = None
) -> Features:
    checkpoint = load_checkpoint(config, str(Path(config.filename).parent / "weights.pth"))
    return take_features(checkpoint, read_image_sets(config, data)[name], cache, kinds)


def rows_of(
    model: Model, images: dict[str, ImageSet], protocols: Sequence[Protocol], cache: Path
) -> list[Row]:
    """The rows of some protocols on some images."""
    evaluated = Evaluated(OpenFeatures(model, images, cache), images, model.backbone.device)
    job = Job(model, "", evaluated, protocols)
    check_space([job], cache)
    return [row for rows in figures_of(job) for row in rows]


def save(weights: dict, root: Path) -> None:
    torch.save({"state_dict": weights}, root / "weights.pth")
