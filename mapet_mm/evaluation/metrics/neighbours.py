"""Nearest neighbours among features, and their votes for classes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int64
from mmengine.dist import all_gather
from torch import Tensor
from torch.nn import functional as F

# Queries (rows of a product) and keys (its columns) that are compared at once: 128 MiB of similarities.
ROWS = 2**11
COLUMNS = 2**14
NEIGHBOURS = 20  # DINO's k
VOTERS_A_CLASS = 3  # on average, without which there is no figure
ENOUGH_VOTERS = 1000  # of however many classes: a low figure, but one that differs between models
SHOTS = 10  # labels a class, of a verdict's second figure


def suiting_k(num_voters: int) -> int:
    """The neighbours that vote among so many images: at most a tenth of them, so that the nearest decide.

    Examples:
        >>> suiting_k(10_000), suiting_k(72)
        (20, 7)
    """
    return max(1, min(NEIGHBOURS, num_voters // 10))


def too_few_voters(num_voters: int, num_classes: int) -> bool:
    """True if a figure of nearest neighbours would say little about so many classes.

    Examples:
        >>> too_few_voters(11, 9), too_few_voters(10_000, 21_841)
        (True, False)
    """
    return num_voters < min(VOTERS_A_CLASS * num_classes, ENOUGH_VOTERS)


def knn_votes(
    queries: Float[Tensor, "query dim"],
    known: Iterable[tuple[Float[Tensor, "some dim"], Int64[Tensor, " some"]]],
    num_classes: int,
    k: int = 20,
    temperature: float = 0.07,
    weights: Float[Tensor, " class"] | None = None,
) -> Float[Tensor, "query class"]:
    """Votes for each class: the k most similar training images vote with `exp(cosine / temperature)`.

    If there are fewer than k training images, all vote. Several processes each compare all queries with their
    own training images; only each query's k nearest go from process to process.

    Args:
        queries: `(Q, D)` of the images to classify, the same in all processes.
        known: features and labels of this process's training images, some at a time. Only one part is
            normalised at a time, so the memory is that of the features.
        num_classes: number of classes.
        k: neighbours that vote.
        temperature: of the votes.
        weights: what a vote for each class counts; all alike by default.

    Returns:
        `(Q, C)`, relative to the vote of the nearest.

    Examples:
        >>> train, labels = torch.eye(2), torch.tensor([0, 1])
        >>> knn_votes(torch.tensor([[3.0, 1.0]]), [(train, labels)], num_classes=2, k=1).argmax(1)
        tensor([0])
    """
    # Normalised, products are cosines.
    keys = ((F.normalize(features.to(queries.device), dim=1), labels) for features, labels in known)
    similarity, voters = nearest(F.normalize(queries, dim=1), keys, k)  # Q k
    of_processes = zip(all_gather(similarity), all_gather(voters), strict=True)
    similarity, voters = _largest(of_processes, k)
    # Relative to the largest, because exp(1 / temperature) overflows float32 for temperatures up to 0.011.
    relative = similarity - similarity[:, :1]
    votes = torch.zeros(len(queries), num_classes, device=queries.device)
    of_voters = (relative / temperature).exp().to(votes.dtype)  # PyTorch 2.6 adds no float16 to float32
    votes.scatter_add_(1, voters, of_voters)
    return votes if weights is None else votes * weights.to(votes)


def nearest(
    queries: Float[Tensor, "query dim"],
    known: Iterable[tuple[Float[Tensor, "some dim"], Int64[Tensor, " some"]]],
    k: int,
) -> tuple[Float[Tensor, "query k"], Int64[Tensor, "query k"]]:
    """The k largest products of each query with some keys, in falling order, and these keys' values.

    Args:
        queries: `(Q, D)`.
        known: keys `(n, D)` and a value for each (its label, its index), some at a time.
        k: number of keys. If there are fewer, products of minus infinity with the value 0 fill up.
    """
    products = queries.new_full((len(queries), k), float("-inf"))
    values = torch.zeros(len(queries), k, dtype=torch.int64, device=queries.device)
    for keys, values_of_keys in known:
        keys = keys.to(queries.device)
        values_of_keys = values_of_keys.to(queries.device)
        for start in range(0, len(queries), ROWS):
            some = slice(start, start + ROWS)
            found, indices = (queries[some] @ keys.T).topk(min(k, len(keys)), dim=1)
            before = (products[some], values[some])
            products[some], values[some] = _largest([before, (found, values_of_keys[indices])], k)
    return products, values


def _largest(parts: Iterable[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The k largest products in some parts' columns, in falling order, with the values beside them."""
    parts = list(parts)
    products = torch.cat([products for products, _ in parts], dim=1)
    values = torch.cat([values for _, values in parts], dim=1)
    products, indices = products.topk(k, dim=1)
    return products, values.gather(1, indices)
