"""The codebook of k-CLIP: k centroids of encoder features, found by k-means (paper Section 3.3)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError

FORMAT = "mapet_mm.codebook"
REMEDY = "fit one with tools/fit_codebook.py or correct the path in the config"
# Rows times centroids of one distance block: 64 MiB in float32, small beside any encoder.
BLOCK_ELEMENTS = 2**24
# Points whose mean is further from the origin than this, squared and in units of their variance, are centred
# for products in float32, which would otherwise round too much: at 100, of 2,000 tokens 1 is wrong. Others
# are not, so that their codebooks and tokens stay the same, bit for bit.
FAR = 100.0


class CodebookError(UserError, ValueError):
    """A codebook cannot be made, read or used; the message is one line that says what to do."""


@dataclass(frozen=True)
class KMeansOptions:
    """Settings of k-means, with faiss's meaning; the defaults are k-CLIP's, not faiss's.

    Args:
        k: number of centroids.
        niter: iterations of each redo; fewer if an iteration changes nothing.
        nredo: random starts; the one with the lowest inertia is kept.
        max_points_per_centroid: if there are more than k times this many rows, that many are sampled.
        seed: for that sample, the starts and the splits.
    """

    k: int
    niter: int = 20
    nredo: int = 5
    max_points_per_centroid: int = 512
    seed: int = 0


class Codebook:
    """`k` centroids of `dim` channels; a token is the index of the nearest one.

    Args:
        centroids: (k, D) array or tensor, kept as float32.
        metadata: what the centroids were made from (encoder, weights, preprocessing, ...), as JSON values.

    Raises:
        CodebookError: the centroids are not a (k, D) matrix of finite numbers.
    """

    def __init__(self, centroids: np.ndarray | Tensor, metadata: Mapping[str, Any] | None = None) -> None:
        centroids = torch.as_tensor(centroids).detach().to("cpu", torch.float32).contiguous().clone()
        if centroids.ndim != 2 or 0 in centroids.shape:
            raise CodebookError(f"centroids must be a (k, D) matrix, got shape {tuple(centroids.shape)}")
        if not torch.isfinite(centroids).all():
            raise CodebookError("centroids hold NaN or infinity: check the features they were fitted on")
        self.centroids = centroids
        self.k, self.dim = centroids.shape
        self.metadata = dict(metadata or {})
        self._operands: dict[torch.device, tuple[Tensor, Tensor, Tensor | None]] = {}

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of the centroids' shape and bytes: the tokenizer's identity."""
        sha = hashlib.sha256(np.asarray(self.centroids.shape, dtype="<i8").tobytes())
        sha.update(self.centroids.numpy().astype("<f4", copy=False).tobytes())
        return sha.hexdigest()

    @classmethod
    def fit(
        cls, features: np.ndarray | Tensor, k: int, metadata: Mapping[str, Any] | None = None, **options: int
    ) -> Codebook:
        """Find k centroids by k-means: L2 distance, features not normalised (paper Section 3.3).

        Args:
            features: (rows, D) encoder features.
            k: number of centroids.
            metadata: recorded beside what this function adds (k, dim, rows, seed, inertia, versions).
            options: of `KMeansOptions`: `niter`, `nredo`, `max_points_per_centroid`, `seed`.

        Raises:
            CodebookError: fewer rows than centroids, or features that are not a finite matrix.
        """
        from mapet_mm.tokenizers.kmeans import BLOCK_ROWS, cluster  # only this needs faiss

        rows = np.array(features.numpy(force=True) if isinstance(features, Tensor) else features, np.float32)
        if rows.ndim != 2 or not np.isfinite(rows).all():
            raise CodebookError(f"features must be a (rows, D) matrix of finite numbers, got {rows.shape}")
        blocks = [rows[first : first + BLOCK_ROWS] for first in range(0, len(rows), BLOCK_ROWS)]
        centroids, fitted = cluster(blocks, list(map(len, blocks)), KMeansOptions(k, **options))
        return cls(centroids, {**(metadata or {}), **fitted})

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file in one step: a killed run leaves the old file or the new one."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"format": FORMAT, **{key: json.dumps(value) for key, value in self.metadata.items()}}
        # Written as bytes, because `save_file` makes files that only their owner can read.
        replace_file(path, save({"centroids": self.centroids}, metadata=header))

    @classmethod
    def load(cls, path: str | os.PathLike) -> Codebook:
        """Read what `save` wrote; CodebookError if the file is missing, damaged, or not a codebook."""
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if header.pop("format", None) != FORMAT:
                    raise CodebookError(f"`{path}` is not a codebook of this package: {REMEDY}")
                metadata = {key: json.loads(value) for key, value in header.items()}
                return cls(file.get_tensor("centroids"), metadata)
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise CodebookError(f"codebook `{path}` cannot be read ({error}): {REMEDY}") from error

    @torch.no_grad()
    def assign(self, features: Float[Tensor, "*rows dim"]) -> Int[Tensor, "*rows"]:
        """Index of the nearest centroid of each feature, in L2 distance, computed in float32.

        Args:
            features: (..., D), on any device.

        Returns:
            (...) int64, on the features' device; -1 where a feature is not finite.
        """
        if features.shape[-1] != self.dim:
            raise CodebookError(f"features have {features.shape[-1]} channels, the codebook {self.dim}")
        rows = features.reshape(-1, self.dim)
        blocks = rows.split(max(1, BLOCK_ELEMENTS // self.k))
        nearest = [self.nearest(block.float()) for block in blocks]
        tokens = [ids.masked_fill(~distances.isfinite(), -1) for distances, ids in nearest]
        return torch.cat(tokens).reshape(features.shape[:-1])

    @torch.no_grad()
    def nearest(
        self, rows: Float[Tensor, "rows dim"]
    ) -> tuple[Float64[Tensor, " rows"], Int[Tensor, " rows"]]:
        """Squared L2 distance to the nearest centroid, and its index, of rows in float32 on any device."""
        # |x - c|^2 = |x|^2 + 2 (|c|^2 / 2 - x.c), and |x|^2 is the same for every centroid.
        transposed, half_norms, centre = self._on(rows.device)
        rows = rows if centre is None else rows - centre
        with torch.autocast(rows.device.type, enabled=False):
            scores, ids = torch.addmm(half_norms, rows, transposed, alpha=-1).min(dim=1)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
        return (norms + 2 * scores.double()).clamp_min(0), ids

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Centroids, transposed, and half their squared norms; and what was subtracted from them, if any."""
        if device not in self._operands:
            exact = self.centroids.double()
            if (centre := far_centre(self.centroids)) is not None:
                exact, centre = exact - centre, centre.to(device)
            half_norms = exact.square().sum(dim=1).div(2).float()
            self._operands[device] = (exact.float().T.to(device), half_norms.to(device), centre)
        return self._operands[device]


def far_centre(points: Float[Tensor, "rows D"]) -> Float[Tensor, " D"] | None:
    """The mean of points that are far from the origin for their spread; None if they are not."""
    exact = points.double()
    centre = exact.mean(dim=0).float()
    variance = (exact - centre).square().sum(dim=1).mean()
    return centre if centre.double().square().sum() > FAR * variance else None
