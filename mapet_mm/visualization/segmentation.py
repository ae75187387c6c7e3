"""Segmentation overlays: image, ground truth and prediction side by side, with a legend of the classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import mmcv
import numpy as np
from jaxtyping import Integer, UInt8
from matplotlib.colors import hsv_to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

IGNORED = 255
CELL_INCHES = 1.3


@dataclass(frozen=True)
class SegmentedImage:
    """An image `(H, W, 3)` uint8 with its ground truth and prediction, `(H, W)` class indices."""

    image: UInt8[np.ndarray, "height width 3"]
    truth: Integer[np.ndarray, "height width"]
    prediction: Integer[np.ndarray, "height width"]


def predict_images(
    config: str | os.PathLike, checkpoint: str | os.PathLike, count: int
) -> tuple[list[SegmentedImage], list[str]]:
    """Segment the first validation images of an MMSegmentation config, on the CPU.

    Args:
        config: a config with `val_dataloader` and `test_pipeline`.
        checkpoint: trained weights.
        count: number of images.

    Returns:
        The segmented images and the names of the classes.
    """
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    from mapet_mm.utils.logging import import_quietly

    import_quietly("mmseg.datasets")
    from mmseg.apis import inference_model, init_model
    from mmseg.registry import DATASETS

    loaded = Config.fromfile(config)
    # The checkpoint has all weights, so the backbone's initial weights need not be loaded.
    loaded.model.backbone.init_cfg = None
    init_default_scope(loaded.default_scope)
    dataset = DATASETS.build(loaded.val_dataloader.dataset)
    model = init_model(loaded, str(checkpoint), "cpu")
    images = []
    for place in range(min(count, len(dataset))):
        info = dataset.get_data_info(place)
        prediction = inference_model(model, info["img_path"]).pred_sem_seg.data[0].cpu().numpy()
        image = mmcv.imread(info["img_path"], channel_order="rgb")  # upright and of 8 bits, as for the model
        # As the metric sees it: the files may count the background as 0, or have other numbers.
        truth = dataset[place]["data_samples"].gt_sem_seg.data[0].numpy()
        images.append(SegmentedImage(image, truth, prediction))
    return images, list(dataset.metainfo["classes"])


def class_colours(num_classes: int) -> UInt8[np.ndarray, "classes 3"]:
    """Distinct colours by class index, spread over the hues; class 0, the background, is grey."""
    places = np.arange(num_classes - 1)
    # Two alternating brightnesses keep neighbouring hues apart.
    hsv = np.stack(
        [places / max(num_classes - 1, 1), np.full(len(places), 0.85), 0.95 - 0.25 * (places % 2)], axis=1
    )
    return np.vstack([[128, 128, 128], np.round(255 * hsv_to_rgb(hsv))]).astype(np.uint8)


def overlay(
    image: UInt8[np.ndarray, "height width 3"],
    labels: Integer[np.ndarray, "height width"],
    colours: UInt8[np.ndarray, "classes 3"],
    opacity: float = 0.65,
) -> UInt8[np.ndarray, "height width 3"]:
    """Blend the classes' colours over an image; pixels of class 0 and ignored pixels (255) are unchanged.

    Raises:
        ValueError: image and labels differ in size, or a label has no colour.
    """
    if image.shape[:2] != labels.shape:
        raise ValueError(
            f"image of {image.shape[:2]} pixels, labels of {labels.shape}: they must be one size"
        )
    shown = (labels != IGNORED) & (labels != 0)
    if shown.any() and labels[shown].max() >= len(colours):
        raise ValueError(f"label {labels[shown].max()} is past the {len(colours)} classes")
    blended = image.astype(np.float32)
    blended[shown] += opacity * (colours[labels[shown]] - blended[shown])
    return np.round(blended).astype(np.uint8)


def segmentation_figure(
    images: Sequence[SegmentedImage], classes: Sequence[str], title: str = "prediction"
) -> Figure:
    """Draw one row per image (image, ground truth, prediction), and a legend of the classes that occur.

    Args:
        images: what to draw.
        classes: names by class index; class 0 is the background.
        title: of the predictions.
    """
    colours = class_colours(len(classes))
    size = (3 * CELL_INCHES + 0.2, len(images) * CELL_INCHES + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    cells = figure.subplots(len(images), 3, squeeze=False)
    for line, one in zip(cells, images, strict=True):
        truth, prediction = (overlay(one.image, labels, colours) for labels in (one.truth, one.prediction))
        for axes, picture in zip(line, (one.image, truth, prediction), strict=True):
            axes.imshow(picture, interpolation="nearest")
            axes.set_axis_off()
    for axes, text in zip(cells[0], ("image", "ground truth", title), strict=True):
        axes.set_title(text, fontsize=10)
    seen = sorted(
        {int(label) for one in images for label in np.unique([one.truth, one.prediction])} - {0, IGNORED}
    )
    handles = [Patch(color=colours[label] / 255, label=classes[label]) for label in seen]
    if handles:
        style = {"ncols": 4, "fontsize": 8, "frameon": False, "handlelength": 1.2, "columnspacing": 1.2}
        figure.legend(handles=handles, loc="outside lower center", **style)
    return figure
