"""A codebook: centroids of encoder features; the nearest one is a feature's token (paper Section 4.2)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import digest

CODEBOOK_FORMAT = "mapet_mm.codebook"
HOW_TO_GET_ONE = "fit one with `mapet-mm fit-codebook` or correct the path in the config"
# Rows times centroids of one distance block: 64 MiB in float32, little beside any encoder.
BLOCK_ELEMENTS = 2**24
# Points are centred for products if |mean|^2 > FAR * variance. Without it, float32 misplaces 1 token in 2,000
# at 100. Below it nothing changes, bit for bit: to centre always would change codebooks that exist, because
# k-means follows other ties.
FAR = 100.0


class CodebookError(UserError, ValueError):
    """A codebook cannot be made, read or used; the message is one line that says what to do."""


class _Operands(NamedTuple):
    """A codebook on a device, as its product with features takes it."""

    mean: Float[Tensor, " dim"] | None  # of the centroids, if it is subtracted
    centroids: Float[Tensor, "dim k"]
    half_norms: Float[Tensor, " k"]  # half the squared norm of each centroid


class Codebook:
    """`k` centroids of `dim` channels; a token is the index of the nearest one.

    Args:
        centroids: (k, D) array or tensor, kept as float32.
        metadata: what the centroids were made from (encoder, weights, preprocessing, ...), as JSON values.

    Raises:
        CodebookError: the centroids are not a (k, D) matrix of finite numbers.

    Examples:
        >>> import torch
        >>> from mapet_mm.tokenizers import Codebook
        >>> codebook = Codebook([[0.0, 0.0], [4.0, 0.0]], metadata={"encoder": "by hand"})
        >>> codebook.assign(torch.tensor([[1.0, 0.5], [3.0, 0.0]]))
        tensor([0, 1])
        >>> codebook.save("codebook.safetensors")
        >>> Codebook.load("codebook.safetensors").metadata
        {'encoder': 'by hand'}
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
        self._operands: dict[torch.device, _Operands] = {}

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of the centroids' shape and bytes: the identity of a float32 tokenizer."""
        sha = hashlib.sha256(np.asarray(self.centroids.shape, dtype="<i8").tobytes())
        sha.update(self.centroids.numpy().astype("<f4", copy=False).tobytes())
        return sha.hexdigest()

    def digest_at(self, precision: str) -> str:
        """The tokenizer's identity if its features are computed in a precision: `digest` for 'float32'."""
        return self.digest if precision == "float32" else digest([self.digest, precision])

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file in one step: a killed run leaves the old file or the new one."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {key: json.dumps(value) for key, value in self.metadata.items()}
        header["format"] = CODEBOOK_FORMAT
        # Written as bytes, because `save_file` makes files that only their owner can read.
        replace_file(path, save({"centroids": self.centroids}, metadata=header))

    @classmethod
    def load(cls, path: str | os.PathLike) -> Codebook:
        """Read what `save` wrote; CodebookError if the file is missing, damaged, or not a codebook."""
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if header.pop("format", None) != CODEBOOK_FORMAT:
                    raise CodebookError(f"`{path}` is not a codebook of this package: {HOW_TO_GET_ONE}")
                metadata = {key: json.loads(value) for key, value in header.items()}
                return cls(file.get_tensor("centroids"), metadata)
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise CodebookError(f"codebook `{path}` cannot be read ({error}): {HOW_TO_GET_ONE}") from error

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
        tokens = []
        for block in features.reshape(-1, self.dim).split(max(1, BLOCK_ELEMENTS // self.k)):
            distances, ids = self.nearest(block.float())
            tokens.append(ids.masked_fill(~distances.isfinite(), -1))
        return torch.cat(tokens).reshape(features.shape[:-1])

    @torch.no_grad()
    def nearest(
        self, rows: Float[Tensor, "rows dim"]
    ) -> tuple[Float64[Tensor, " rows"], Int[Tensor, " rows"]]:
        """Squared L2 distance to the nearest centroid, and its index, of rows in float32 on any device."""
        mean, centroids, half_norms = self._on(rows.device)
        if mean is not None:
            rows = rows - mean
        # |x - c|^2 = |x|^2 + 2 (|c|^2 / 2 - x.c), and |x|^2 is the same for every centroid.
        with torch.autocast(rows.device.type, enabled=False):
            scores = torch.addmm(half_norms, rows, centroids, alpha=-1)  # rows k
        score, ids = scores.min(dim=1)
        squared_norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
        return (squared_norms + 2 * score.double()).clamp_min(0), ids

    def _on(self, device: torch.device) -> _Operands:
        """The centroids on a device, computed once."""
        if device not in self._operands:
            exact = self.centroids.double()
            mean = far_mean(self.centroids)
            if mean is not None:
                exact = exact - mean
                mean = mean.to(device)
            half_norms = exact.square().sum(dim=1).div(2).float()
            transposed = exact.float().T
            self._operands[device] = _Operands(mean, transposed.to(device), half_norms.to(device))
        return self._operands[device]


def far_mean(points: Float[Tensor, "rows dim"]) -> Float[Tensor, " dim"] | None:
    """The mean of points that are far from the origin for their spread; None if they are not."""
    exact = points.double()
    mean = exact.mean(dim=0).float()
    variance = (exact - mean).square().sum(dim=1).mean()
    is_far = mean.double().square().sum() > FAR * variance
    return mean if is_far else None
