"""Features in clusters that overlap, and the labels of their images."""

from types import SimpleNamespace

import torch
from torch import Tensor

from mapet_mm.evaluation import features
from mapet_mm.evaluation.features import TOKENS, Features
from mapet_mm.evaluation.protocol import Evaluated

CLASSES, LAYERS, DIM, PATCHES = 5, 3, 16, 9


class MemoryFeatures(Features):
    """Features in memory: pooled `(L, n, S D)`, tokens `(n, N, D)`."""

    def __init__(self, pooled: Tensor, tokens: Tensor | None = None, *, name, layers, poolings, grid, labels):
        self.name = name
        self.labels = labels
        self.layers = layers
        self.poolings = poolings
        self.dim = pooled.shape[2] // len(poolings)
        self.grid = grid
        self.ends = torch.tensor([len(rows) for rows in pooled[0].split(features.BLOCK)]).cumsum(0)
        self.values = {"pooled": pooled, TOKENS: tokens}

    def read(self, kind: str, block: int, layer: int = -1) -> Tensor:
        values = self.values[kind]
        return (values[layer] if kind == "pooled" else values)[self.rows(block)]


def make_features(name: str, size: int, seed: int, rare: bool = False) -> MemoryFeatures:
    """Clusters that overlap, so that no figure is 100 %; one patch of nine says more than the others.

    With `rare` there are two, and every twentieth image is of class 1.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(9))
    labels = torch.randint(CLASSES, (size,), generator=generator)
    if rare:
        labels = (torch.arange(size) % 20 == 0).long()
    pooled = centres[labels] + 2.5 * torch.randn(2, LAYERS, size, DIM, generator=generator)
    tokens = torch.randn(size, PATCHES, DIM, generator=generator)
    tokens[torch.arange(size), torch.randint(PATCHES, (size,), generator=generator)] += 2 * centres[labels]
    known = dict(layers=["1", "2", "output"], poolings=["class token", "mean"], grid=(3, 3), labels=labels)
    return MemoryFeatures(torch.cat(list(pooled), dim=-1), tokens, name=name, **known)


def as_evaluated(train: MemoryFeatures, val: MemoryFeatures) -> Evaluated:
    """Features as protocols get them, with labels for image sets."""
    features = {"train": train, "val": val}
    images = {}
    for name, one in features.items():
        known = dict(labels=one.labels, groups=None, class_names=None, answers=None, per_class=None)
        images[name] = SimpleNamespace(name=name, path=f"{name}/{{}}".format, **known)
    return Evaluated(features, images, torch.device("cpu"))


def tenth_of_each_class(labels: torch.Tensor) -> torch.Tensor:
    """True for every tenth image of each class, counted image by image."""
    seen, chosen = {}, []
    for label in labels.tolist():
        seen[label] = seen.get(label, 0) + 1
        chosen.append(seen[label] % 10 == 0)
    return torch.tensor(chosen)


def evaluated_clusters() -> Evaluated:
    """600 training images and 400 others."""
    return as_evaluated(make_features("train", 600, 0), make_features("val", 400, 1))


def rare_class() -> Evaluated:
    """As many images, of which one in twenty is of class 1, the others of class 0."""
    return as_evaluated(make_features("train", 600, 0, rare=True), make_features("val", 400, 1, rare=True))


def one_pooling(bank: MemoryFeatures, pooling: str, scale: float = 1.0) -> MemoryFeatures:
    """The same images seen by a backbone that has one pooling and one layer."""
    values = scale * bank.pooled(pooling)[None]
    known = dict(layers=["output"], poolings=[pooling], grid=(3, 3), labels=bank.labels)
    return MemoryFeatures(values, name=bank.name, **known)
