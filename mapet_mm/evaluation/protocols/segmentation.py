"""Segmentation by frozen patch tokens, with nothing trained or with a logistic regression: CAPI's protocols.

Patch tokens are scaled to mean 0 and standard deviation 1. A test patch takes, pixel by pixel, the most
frequent label of its k nearest training patches; or it takes one class from a logistic regression. k, the
distance and the strength of the regularisation are chosen on a tenth of the training images, which then go
back into training. Predictions are brought to the size of each image's labels and measured by
MMSegmentation's `IoUMetric`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mapet_mm.datasets.label_files import check_label_files
from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import ImageSet, check_class_names
from mapet_mm.evaluation.pixel_labels import Areas, classes_of, pixel_labels
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Protocol, Row, at_edge
from mapet_mm.evaluation.protocols.regression import STRENGTHS, require_scikit_learn
from mapet_mm.evaluation.protocols.segmentation_task import SegmentationTask, best_setting
from mapet_mm.utils.dist import print_once

DENSE = ("dense_train", "dense_val")


class Segmentation(Protocol):
    """Base of both protocols, which share the prepared images of a checkpoint."""

    name: ClassVar[str]
    grid: ClassVar[str]  # the option with the numbers that settings end with

    def needs(self, images: Mapping[str, ImageSet]) -> Mapping[str, Sequence[str]]:
        """Patch tokens of images with pixel labels."""
        return {name: ["tokens"] for name in DENSE}

    def unfit(self, images: Mapping[str, ImageSet], features: Mapping[str, Features]) -> str | None:
        """Label files that are no class indices, or sets that number them differently."""
        require_scikit_learn()
        check_class_names(images["dense_train"], images["dense_val"])
        for name in DENSE:
            if images[name].class_names:
                check_label_files(images[name].dataset, classes_of(images[name]))
        return None

    def segment(self, task: SegmentationTask) -> tuple[dict[str, Areas], ...]:
        """Areas by setting on the held-out training images and on the test images."""
        raise NotImplementedError

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """mIoU with the setting that held-out training images chose; no rows without pixel labels."""
        if not can_segment(evaluated):
            print_once(f"no {self.name}: it takes pixel labels, names of classes and patch tokens")
            return []
        chosen_on, tested = self.segment(shared_task(evaluated))
        setting = best_setting(chosen_on)
        best = tested[setting]
        grid = getattr(self, self.grid)
        chosen = float(setting.rpartition("=")[2])
        note = setting + at_edge(min(grid, key=lambda value: abs(value - chosen)), grid)
        row = Row(self.name, "patch tokens", best.miou, "mIoU, %", interval=best.interval, note=note)
        details = [
            *self.details("test images", tested),
            *self.details("held-out training images", chosen_on),
        ]
        for name, iou in zip(evaluated.images["dense_train"].class_names, best.ious.tolist(), strict=True):
            details.append(Row(self.name, f"class: {name}", iou, "IoU, %", detail=True))
        return [row, *(detail for detail in details if not math.isnan(detail.value))]

    def details(self, where: str, found: Mapping[str, Areas]) -> list[Row]:
        """A row of the JSON file for each setting."""
        return [
            Row(self.name, f"{where}: {setting}", areas.miou, "mIoU, %", detail=True)
            for setting, areas in found.items()
        ]


@PROTOCOLS.register_module()
@dataclass(eq=False)
class SegmentationByNeighbours(Segmentation):
    """k-NN segmentation of patch tokens, as in CAPI.

    Args:
        ks: neighbours that vote, from which the held-out images choose.
    """

    ks: Sequence[int] = (1, 3, 10, 30)

    name = "k-NN segmentation"
    grid = "ks"

    def segment(self, task: SegmentationTask) -> tuple[dict[str, Areas], ...]:
        """Areas by setting on the held-out training images and on the test images."""
        return task.neighbours(self.ks)


@PROTOCOLS.register_module()
@dataclass(eq=False)
class SegmentationByRegression(Segmentation):
    """Logistic regression of patch tokens, as in CAPI.

    Args:
        strengths: scikit-learn's `C`, from which the held-out images choose.
    """

    strengths: Sequence[float] = STRENGTHS

    name = "logistic segmentation"
    grid = "strengths"

    def takes(self, features: Mapping[str, Features]) -> None:
        """It takes hours of CPUs."""

    def segment(self, task: SegmentationTask) -> tuple[dict[str, Areas], ...]:
        """Areas by setting on the held-out training images and on the test images."""
        return task.regression(self.strengths)


def can_segment(evaluated: Evaluated) -> bool:
    """True if the images have pixel labels and names of classes, and the backbone patch tokens."""
    for name in DENSE:
        if "gt_sem_seg" not in evaluated.images[name].dataset[0].get("data_samples", ()):
            return False
    has_patches = math.prod(evaluated.features["dense_train"].grid) > 0
    return has_patches and bool(evaluated.images["dense_train"].class_names)


def shared_task(evaluated: Evaluated) -> SegmentationTask:
    """The images prepared once for both protocols."""
    if "segmentation" not in evaluated.shared:
        train = evaluated.images["dense_train"]
        test = evaluated.images["dense_val"]
        features = evaluated.features["dense_train"]
        # As many labels per side of a patch as it has pixels.
        num_pixels = math.prod(train.dataset[0]["inputs"].shape[1:])
        side = max(1, round((num_pixels / math.prod(features.grid)) ** 0.5))
        evaluated.shared["segmentation"] = SegmentationTask(
            features,
            pixel_labels(train),
            evaluated.features["dense_val"],
            pixel_labels(test),
            len(train.class_names),
            side,
            evaluated.device,
        )
    return evaluated.shared["segmentation"]
