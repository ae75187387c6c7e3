"""Multinomial logistic regression over features in blocks(): scikit-learn's objective, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

# As scikit-learn's `tol`: the largest component of the gradient at which the search ends.
TOLERANCE = 1e-4
MAX_ITERATIONS = 1000


def fit_logistic(
    blocks: Callable[[], Iterable[tuple[Float[Tensor, "row dim"], Int64[Tensor, " row"]]]],
    num_classes: int,
    strength: float,
    start: Float[Tensor, "classes weight"] | None = None,
) -> Float[Tensor, "classes weight"]:
    """Minimise the mean cross-entropy plus `|W|^2 / (2 C rows)` by L-BFGS; the bias is free.

    Args:
        blocks: gives all features and their classes, some rows at a time, once for each step of the search.
        num_classes: number of classes.
        strength: `C`.
        start: where to begin, such as the weights of another `C`; zeros if None.

    Returns:
        `(num_classes, D + 1)`, the bias last.
    """
    from scipy.optimize import minimize

    first, _ = next(iter(blocks()))
    rows = sum(len(labels) for _, labels in blocks())
    device, shape = first.device, (num_classes, first.shape[1] + 1)

    def loss_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.from_numpy(flat).reshape(shape).to(device)
        penalised = F.pad(weights[:, :-1], (0, 1))
        loss = penalised.square().sum() / (2 * strength * rows)
        gradient = penalised / (strength * rows)
        narrow = weights.to(first.dtype)
        for features, labels in blocks():
            log_shares = (features @ narrow[:, :-1].T + narrow[:, -1]).log_softmax(1)
            places = torch.arange(len(labels), device=device), labels
            loss -= log_shares[places].double().sum() / rows
            slopes = log_shares.exp_()
            slopes[places] -= 1
            gradient[:, :-1] += slopes.T @ features / rows
            gradient[:, -1] += slopes.sum(0) / rows
        return loss.item(), gradient.cpu().numpy().ravel()

    begin = np.zeros(shape) if start is None else start.double().cpu().numpy()
    options = dict(maxiter=MAX_ITERATIONS, gtol=TOLERANCE, ftol=64 * np.finfo(float).eps, maxls=50)
    found = minimize(loss_and_gradient, begin.ravel(), jac=True, method="L-BFGS-B", options=options)
    return torch.from_numpy(found.x).reshape(shape).to(device, torch.float32)
