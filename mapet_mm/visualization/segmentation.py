"""Segmentation results drawn by MMSegmentation's visualizer: image, ground truth and prediction."""

from __future__ import annotations

import os

import mmcv
import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from mmengine.config import Config
from mmengine.registry import init_default_scope

CELL_INCHES = 1.3


def segmentation_figure(
    config: str | os.PathLike, checkpoint: str | os.PathLike, count: int, title: str
) -> Figure:
    """Segment the first validation images of an MMSegmentation config on the CPU, and draw one row per image.

    Args:
        config: has `val_dataloader` and `test_pipeline`; class 0 is the background.
        checkpoint: trained weights.
        count: number of images.
        title: heading of the predictions.
    """
    from mmseg.apis import inference_model, init_model
    from mmseg.registry import DATASETS
    from mmseg.visualization import SegLocalVisualizer

    cfg = Config.fromfile(config)
    cfg.model.backbone.init_cfg = None  # the checkpoint has all weights
    init_default_scope(cfg.default_scope)
    dataset = DATASETS.build(cfg.val_dataloader.dataset)
    model = init_model(cfg, str(checkpoint), "cpu")
    classes = list(dataset.metainfo["classes"])
    palette = _palette(len(classes))
    visualizer = SegLocalVisualizer(alpha=0.6)
    visualizer.dataset_meta = {"classes": classes, "palette": palette}
    count = min(count, len(dataset))
    figure = Figure(figsize=(3 * CELL_INCHES + 0.2, count * CELL_INCHES + 1.0), layout="constrained")
    cells = figure.subplots(count, 3, squeeze=False)
    for index, line in enumerate(cells):
        path = dataset.get_data_info(index)["img_path"]
        image = mmcv.imread(path, channel_order="rgb")
        sample = inference_model(model, path)
        # As the metric sees it: the files may count the background as 0, or have other numbers.
        sample.gt_sem_seg = dataset[index]["data_samples"].gt_sem_seg
        pictures = [image]
        for shown in (dict(draw_pred=False), dict(draw_gt=False)):
            visualizer.add_datasample("", image, sample, with_labels=False, **shown)
            pictures.append(visualizer.get_image())
        for axes, picture in zip(line, pictures, strict=True):
            axes.imshow(picture, interpolation="nearest")
            axes.set_axis_off()
    for axes, text in zip(cells[0], ("image", "ground truth", title), strict=True):
        axes.set_title(text, fontsize=10)
    handles = [
        Patch(color=np.array(colour) / 255, label=name)
        for colour, name in zip(palette[1:], classes[1:], strict=True)  # without the background
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _palette(num_classes: int) -> list[list[int]]:
    """Black for the background, and evenly spaced hues for the other classes."""
    hues = np.arange(1, num_classes) / num_classes
    colours = colormaps["hsv"](hues, bytes=True)[:, :3]  # without alpha
    return [[0, 0, 0], *colours.tolist()]
