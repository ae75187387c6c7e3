"""What features say without labels: their rank, their norms, how alike patches are, the tokens' entropy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mapet_mm.evaluation.metrics.rank_me import rank_me


def norm_quantiles(lengths: Float[Tensor, " row"]) -> dict[str, float]:
    """Quantiles of features' L2 norms; a maximum far off betrays outlier tokens (registers are missing)."""
    places = {"norm, 1 %": 0.01, "norm, median": 0.5, "norm, 99 %": 0.99, "norm, maximum": 1.0}
    quantiles = np.quantile(lengths.cpu().numpy(), list(places.values()))
    return dict(zip(places, map(float, quantiles), strict=True))


class PatchSimilarity:
    """Mean cosine similarity of two patches of an image by their distance, and of patches of two images.

    Args:
        grid: patches by rows and columns.
    """

    def __init__(self, grid: tuple[int, int]) -> None:
        places = torch.cartesian_prod(*(torch.arange(float(count)) for count in grid)).view(-1, 2)
        # In whole patches: neighbours in a row, a column or a diagonal are at distance 1.
        self.distance = torch.cdist(places, places).round().long()
        self.pairs = torch.bincount(self.distance.flatten()).double()
        self.sums = torch.zeros_like(self.pairs)
        self.images, self.squares, self.total = 0, 0.0, 0.0

    def add(self, tokens: Float[Tensor, "image row column dim"]) -> None:
        """Count some images' pairs of patches."""
        for image in F.normalize(tokens.flatten(1, 2).float(), dim=-1).cpu():
            similarity = (image @ image.T).flatten().double()
            self.sums += torch.bincount(self.distance.flatten(), similarity, len(self.sums))
            mean = image.double().mean(0)
            self.images += 1
            self.squares, self.total = self.squares + mean @ mean, self.total + mean

    @property
    def by_distance(self) -> Float[np.ndarray, " distance"]:
        """The similarity at distance 0 (which is 1), 1, 2, ... in patches."""
        return (self.sums / (self.images * self.pairs)).numpy()

    @property
    def across_images(self) -> float:
        """The similarity of two patches of different images; NaN of a single image."""
        pairs = self.images * (self.images - 1)
        return float((self.total @ self.total - self.squares) / pairs) if pairs else float("nan")


def usage_entropy(counts: Int[np.ndarray, " token"] | Sequence[int]) -> float:
    """Entropy, in bits, of how often each token is used: 0 of one token, log2 V of V used evenly."""
    shares = np.asarray(counts, float) / np.sum(counts)
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def prediction_entropy(logits: Float[Tensor, "*target vocab"]) -> Float[Tensor, "*target"]:
    """Entropy, in bits, of each predicted distribution over the tokens."""
    log_shares = logits.float().log_softmax(-1)
    return -(log_shares.exp() * log_shares).sum(-1) / np.log(2)


def label_free(
    tokens: Any, class_tokens: Float[Tensor, "image dim"] | None = None, block: int = 64
) -> dict[str, Any]:
    """All figures of a set of images that need no labels.

    Args:
        tokens: patch tokens `(images, H, W, D)`, an array or what gives `(n, H, W, D)` for a slice.
        class_tokens: `(images, D)`; None where the backbone has none.
        block: images at a time.

    Returns:
        `RankMe` of patch tokens, patch means and class tokens, quantiles of the patch tokens' norms, and
        their similarity: `by distance` (in patches; the first is 0, a patch with itself), `across images`.
    """

    def blocks() -> Iterator[Float[Tensor, "image row column dim"]]:
        return (
            torch.as_tensor(tokens[start : start + block]).float() for start in range(0, len(tokens), block)
        )

    similarity, lengths, means = PatchSimilarity(tuple(tokens[:1].shape[1:3])), [], []
    for part in blocks():
        similarity.add(part)
        lengths.append(part.norm(dim=-1).flatten())
        means.append(part.mean((1, 2)))
    whole = {"patch mean": torch.cat(means), "class token": class_tokens}
    return {
        "RankMe, patch tokens": rank_me(part.flatten(0, 2) for part in blocks()),
        **{f"RankMe, {name}": rank_me([each]) for name, each in whole.items() if each is not None},
        **norm_quantiles(torch.cat(lengths)),
        "similarity by distance": similarity.by_distance.tolist(),
        "similarity across images": similarity.across_images,
    }
