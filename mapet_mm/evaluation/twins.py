"""Near-twins of tested images among those that vote, such as neighbouring slices, flatter a verdict."""

from __future__ import annotations

import numpy as np
from torch.nn import functional as F

from mapet_mm.datasets.copies import first_copies
from mapet_mm.evaluation.images import ImageSet
from mapet_mm.evaluation.metrics.neighbours import nearest
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols.knn import comparable, voters

ALIKE = 0.01  # near-twins have less than this share of the usual distance
NOTED = 0.01  # share of the tested images with a near-twin, from which on it is said


def twins_sentence(result: Evaluated, start: Evaluated | None) -> str:
    """How many tested images have a near-twin among those that vote; empty for few, or where groups are said.

    Args:
        result: a pre-training's images.
        start: the model that it started from, whose features tell; random ones know no twins, so that without
            a start copies of files alone count.
    """
    if result.images["val"].groups is not None:
        return ""
    if start is not None:
        share = share_of_twins(start)
        kind = "near-twin among the voters (in the start's features under 1 % of the usual distance)"
    else:
        share = share_of_copies(result.images["train"], result.images["val"])
        kind = "copy among the voters"
    if share < NOTED:
        return ""
    return f"{100 * share:.0f} % of the tested images have a {kind}: name --groups."


def share_of_twins(evaluated: Evaluated) -> float:
    """The share of the tested images with a voter at less than a hundredth of the usual distance.

    Distances are 1 - cosine. The share is 0 of features in which most images are alike, whatever they show.
    """
    train = evaluated.features["train"]
    setting = train.settings[-1]
    queries = comparable(evaluated.features["val"].pooled(setting).to(evaluated.device), setting)
    queries = F.normalize(queries, dim=1)
    usual = 1 - (queries * queries.flip(0)).sum(1).median()
    if usual < ALIKE:
        return 0.0
    keys = ((F.normalize(features, dim=1), labels) for features, labels in voters(train, setting))
    similarity, _ = nearest(queries, keys, k=1)
    return float((1 - similarity[:, 0] < ALIKE * usual).float().mean())


def share_of_copies(voting: ImageSet, tested: ImageSet) -> float:
    """The share of the tested images whose files are copies of some that vote."""
    files = [images.path(index) for images in (voting, tested) for index in range(len(images))]
    first = first_copies(files)
    return float(np.mean([index < len(voting) for index in first[len(voting) :]]))
