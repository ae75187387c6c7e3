"""Features in clusters that overlap, and the labels of their images."""

import torch

from mapet_mm.evaluation.features import MemoryFeatures
from mapet_mm.evaluation.protocol import Evaluated

CLASSES, LAYERS, DIM, PATCHES = 5, 3, 16, 9


class Labelled:
    """An image set of which only the labels are asked."""

    def __init__(self, name, labels):
        self.name, self.labels, self.class_names = name, labels, None


def make_features(name: str, size: int, seed: int) -> MemoryFeatures:
    """Clusters that overlap, so that no figure is 100 %; one patch of nine says more than the others."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(9))
    labels = torch.randint(CLASSES, (size,), generator=generator)
    pooled = centres[labels] + 2.5 * torch.randn(2, LAYERS, size, DIM, generator=generator)
    tokens = torch.randn(size, PATCHES, DIM, generator=generator)
    tokens[torch.arange(size), torch.randint(PATCHES, (size,), generator=generator)] += 2 * centres[labels]
    known = dict(layers=["1", "2", "output"], poolings=["class token", "mean"], grid=(3, 3), labels=labels)
    return MemoryFeatures(pooled, tokens, name=name, **known)


def evaluated_clusters() -> Evaluated:
    """What protocols take: 600 training images and 400 others."""
    features = {"train": make_features("train", 600, 0), "val": make_features("val", 400, 1)}
    images = {name: Labelled(name, one.labels) for name, one in features.items()}
    return Evaluated(None, features, images, torch.device("cpu"))
