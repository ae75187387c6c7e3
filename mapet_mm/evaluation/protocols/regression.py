"""Logistic regression of features, solved until it has converged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from mapet_mm.evaluation.features import FeatureBank

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

STRENGTHS = tuple(float(c) for c in 10 ** np.linspace(-6, 5, 8))  # CAPI's, of C
# L-BFGS takes thousands of steps at large C; at its default of 1e-4, from a smaller C, it takes none.
SOLVER = dict(solver="newton-cg", tol=1e-6, max_iter=1000)


def regressions(
    rows: Float[np.ndarray, "row dim"], labels: Int[np.ndarray, " row"], strengths: Sequence[float]
) -> dict[float, LogisticRegression]:
    """scikit-learn's logistic regression (L2) at each `C`, in rising order."""
    # Imported here, because a backbone's user needs no scikit-learn.
    from sklearn.linear_model import LogisticRegression

    rows = rows.astype(np.float64)  # gradients of float32 do not get that small
    found = tqdm(sorted(strengths), "logistic regression", unit="fit", delay=5)
    return {strength: LogisticRegression(C=strength, **SOLVER).fit(rows, labels) for strength in found}


def scores_of(
    model: LogisticRegression,
    scaler: StandardScaler,
    num_classes: int,
    pooling: str,
    bank: FeatureBank,
    layers: Sequence[int] = (-1,),
) -> Float[Tensor, "image class"]:
    """A fitted model's log-probabilities of all classes; classes that it has not seen have none."""
    rows = torch.cat([bank.pooled(pooling, layer) for layer in layers], dim=1).numpy()
    scores = torch.full((len(rows), num_classes), float("-inf"), dtype=torch.float64)
    scores[:, model.classes_.tolist()] = torch.from_numpy(
        model.predict_log_proba(scaler.transform(rows))
    ).double()
    return scores
