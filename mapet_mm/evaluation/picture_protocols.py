"""What the page shows of a checkpoint, and the figures that need no labels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from matplotlib.figure import Figure
from torch import Tensor

from mapet_mm.evaluation.adapters import swaps_channels
from mapet_mm.evaluation.dense_protocols import PatchTokens
from mapet_mm.evaluation.feature_pictures import (
    component_figure,
    neighbour_figure,
    prediction_figure,
    similarity_figure,
)
from mapet_mm.evaluation.label_free import label_free, rank_me, usage_entropy
from mapet_mm.evaluation.masked_prediction import (
    Prediction,
    cut_patches,
    predict_tokens,
    token_loader,
    token_patches,
)
from mapet_mm.evaluation.pictures import foreground
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Protocol, Row
from mapet_mm.models.selfsup.mapet import MaPeT
from mapet_mm.structures import MissingTokensError, TokenStoreError
from mapet_mm.utils.dist import print_once
from mapet_mm.visualization.report import Section

# Images that components and foreground are fitted over.
FITTED = 256
BATCH = 32
# Heading and caption of each kind of picture.
COLOURS = (
    "Patch features as colours",
    "Images, the first three principal components of their foreground's patches as red, green and blue, "
    "and of all patches. The foreground is the side of the first component that touches the borders "
    "less; everything is fitted over the images of the set, so one colour means the same in all of "
    "them.",
)
SIMILAR = (
    "Similar to one patch",
    "The patch in the frame, and how similar (cosine) the patches of its image and of others are to it: "
    "dark is least, light is most.",
)
NEIGHBOURS = (
    "Nearest neighbours",
    "Left an image, then those of the set with the most similar patch mean, with their cosine "
    "similarity; green where the class is the same, red where not.",
)
PREDICTED = (
    "What is predicted for masked images",
    "The image; what the model sees of it; in the targets' places a patch that stands for the predicted "
    "token, and one for the true token: of the set's patches with this token the one nearest to their "
    "mean. Last, the order of prediction: the numbered targets come one by one, each knowing those "
    "before it. Green is right.",
)


@PROTOCOLS.register_module()
class LabelFree(Protocol):
    """Figures that need no labels: RankMe, norms, the similarity of patches by their distance."""

    needs: ClassVar = {"val": ["pooled", "tokens"]}

    def run(self, evaluated: Evaluated) -> list[Row]:
        """Rows of the last layer's tokens."""
        features = evaluated.features["val"]
        class_tokens = features.pooled("class token") if "class token" in features.poolings else None
        if not math.prod(features.grid):  # a backbone whose features are vectors
            return [] if class_tokens is None else [_row("RankMe, class token", rank_me([class_tokens]))]
        found = label_free(PatchTokens(features), class_tokens)
        by_distance, across = found.pop("similarity by distance"), found.pop("similarity across images")
        similarity = {f"distance {distance}": value for distance, value in enumerate(by_distance) if distance}
        similarity["different images"] = across
        table = ("distance 1", f"distance {len(by_distance) - 1}", "different images")
        return [
            *(_row(name, value) for name, value in found.items()),
            *(
                Row("patch similarity", name, value, "cosine", detail=name not in table)
                for name, value in similarity.items()
                if np.isfinite(value)
            ),
        ]


def _row(name: str, value: float) -> Row:
    protocol, _, setting = name.partition(", ")
    if protocol == "RankMe":
        return Row(protocol, setting, value, "effective rank")
    return Row("patch tokens' norm", setting, value, "L2 norm", detail=setting in ("1 %", "99 %"))


@PROTOCOLS.register_module()
class FeaturePictures(Protocol):
    """Pictures of patch features, of the class token's attention and of nearest neighbours.

    Patch features and attention are also those of the `dense_val` images, where another protocol has their
    features taken.

    Args:
        images: how many to show of each kind of picture.
    """

    needs: ClassVar = {"val": ["pooled", "tokens"]}

    def __init__(self, images: int = 12) -> None:
        if images < 2:
            raise ValueError(f"images={images}: at least 2")
        self.images = images

    def run(self, evaluated: Evaluated) -> list[Row]:
        """No figures."""
        return []

    def sections(self, evaluated: Evaluated, rows: Sequence[Row]) -> list[Section]:
        """Colours, similarity, attention, neighbours."""
        figures: dict[tuple[str, str], list[Figure]] = {}
        for name in ("dense_val", "val"):
            features = evaluated.features.get(name)
            if features is not None and math.prod(features.grid) > 1 and len(features) > 1:
                for heading, figure in self._of_patches(evaluated, name):
                    figures.setdefault(heading, []).append(figure)
        return [Section(*heading, drawn) for heading, drawn in figures.items()] + self._neighbours(evaluated)

    def _of_patches(self, evaluated: Evaluated, name: str) -> Iterator[tuple[tuple[str, str], Figure]]:
        features, title = evaluated.features[name], f"{name}: {evaluated.checkpoint.name}"
        places, stored = spread(len(features), self.images), PatchTokens(features)
        fitted = [*places, *(i for i in spread(len(features), FITTED) if i not in places)]
        tokens = torch.cat([stored[i : i + 1] for i in fitted]).float()
        pictures = [rgb_image(evaluated, name, i) for i in places]
        yield COLOURS, component_figure(pictures, tokens, foreground(tokens), title)
        yield SIMILAR, similarity_figure(pictures, tokens, title)

    def _neighbours(self, evaluated: Evaluated) -> list[Section]:
        features = evaluated.features["val"]
        if len(features) < 3:
            return []
        pooled = features.pooled("mean" if "mean" in features.poolings else features.poolings[0])
        queries = spread(len(features), max(2, self.images // 2))
        figure = neighbour_figure(
            partial(rgb_image, evaluated, "val"), pooled, features.labels, queries, evaluated.checkpoint.name
        )
        return [Section(*NEIGHBOURS, [figure])]


@PROTOCOLS.register_module()
class TokenPredictions(Protocol):
    """What a pre-training model of this suite predicts for masked images, and the tokens' entropy.

    Nothing for other models, for images of another size than its own, and without tokens of the images.

    Args:
        images: of `val`, evenly drawn, whose tokens are predicted.
    """

    needs: ClassVar = {"val": []}

    def __init__(self, images: int = 256) -> None:
        self.images = images

    def identity(self, evaluated: Evaluated) -> list[str]:
        """The head's weights and the tokens."""
        loader, model = token_loader(evaluated.checkpoint.config), evaluated.checkpoint.backbone.model
        if loader is None or not isinstance(model, MaPeT):
            return []
        known = hashlib.sha256(model.backbone.objective.name.encode())
        for value in model.head.state_dict().values():
            known.update(value.detach().cpu().numpy().tobytes())
        try:
            tokenizer = loader.store.tokenizer
        except TokenStoreError:  # `run` says so
            tokenizer = ""
        return [known.hexdigest(), loader.path, tokenizer]

    def run(self, evaluated: Evaluated) -> list[Row]:
        """Entropies in bits, and accuracy."""
        if (found := _predict(evaluated, self.images)) is None:
            return []
        _, prediction, truth = found
        right = prediction.tokens == truth.gather(1, prediction.places)
        rows = {
            "the images' tokens": usage_entropy(np.bincount(truth.flatten())),
            "the predicted tokens": usage_entropy(np.bincount(prediction.tokens.flatten())),
            "one prediction, mean": prediction.entropy.mean().item(),
        }
        return [
            *(Row("tokens' entropy", name, value, "bits") for name, value in rows.items()),
            Row("masked tokens", "predicted right", 100 * right.float().mean().item(), "accuracy, %"),
        ]

    def sections(self, evaluated: Evaluated, rows: Sequence[Row]) -> list[Section]:
        """A few images with what is predicted for them."""
        if (found := _predict(evaluated, self.images)) is None:
            return []
        places, prediction, truth = found
        backbone = evaluated.checkpoint.backbone
        grid = tuple(backbone.model.backbone.patch_resolution)
        pictures = [rgb_image(evaluated, "val", i) for i in places]
        patches, vocabulary = cut_patches(pictures, grid), backbone.model.head.vocab_size
        stand_ins = token_patches(patches, truth.flatten().numpy(), vocabulary)
        few = spread(len(places), 6)
        part = Prediction(*(each[few] for each in prediction[:3]), prediction.one_by_one)
        figure = prediction_figure(
            [pictures[i] for i in few], part, truth[few], stand_ins, grid, evaluated.checkpoint.name
        )
        return [Section(*PREDICTED, [figure])]


def _predict(
    evaluated: Evaluated, count: int
) -> tuple[list[int], Prediction, Int64[Tensor, "image patch"]] | None:
    """Some images, their predicted tokens and their tokens; None, with a word, where there are none."""
    backbone, images = evaluated.checkpoint.backbone, evaluated.images["val"]
    loader = token_loader(evaluated.checkpoint.config)
    if not isinstance(backbone.model, MaPeT) or loader is None:
        return None
    places = spread(len(images), count)
    try:
        grids = [loader.transform({"img_path": images.path(i)})["token_grid"] for i in places]
        inputs = (torch.stack([images.dataset[i]["inputs"] for i in part]) for part in _parts(places, BATCH))
        parts = [predict_tokens(backbone.model, backbone.normalise(each)) for each in inputs]
    except (MissingTokensError, TokenStoreError, ValueError) as error:
        print_once(f"no predicted tokens: {error}")
        return None
    joined = (torch.cat(each) for each in zip(*(part[:3] for part in parts), strict=True))
    truth = torch.from_numpy(np.stack(grids)).flatten(1)
    return places, Prediction(*joined, parts[0].one_by_one), truth


def _parts(places: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (places[start : start + size] for start in range(0, len(places), size))


def spread(total: int, count: int) -> list[int]:
    """Up to `count` of `total` places, evenly drawn."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()


def rgb_image(evaluated: Evaluated, name: str, index: int) -> UInt8[np.ndarray, "height width 3"]:
    """An image as the model sees it, in RGB."""
    image = evaluated.images[name].dataset[index]["inputs"]
    if swaps_channels(evaluated.checkpoint.backbone.preprocessor):
        image = image.flip(0)
    return image.expand(3, -1, -1).permute(1, 2, 0).clamp(0, 255).byte().numpy()
