"""Logistic regression of features, solved until it has converged: linear probes without SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import ImageSet
from mapet_mm.evaluation.protocol import PROTOCOLS, Classification, Evaluated, Row, at_edge, held_out
from mapet_mm.evaluation.protocols.linear import Chosen, probed_layers, rows_of_layers

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

STRENGTHS = tuple(float(c) for c in 10 ** np.linspace(-6, 5, 8))  # CAPI's, of C
# L-BFGS takes thousands of steps at large C; at its default of 1e-4, from a smaller C, it takes none.
SOLVER = dict(solver="newton-cg", tol=1e-6, max_iter=1000)
GIB = 2**30
# Numbers that a step of the solver multiplies (rows x width x classes) up to which it takes seconds: for one
# strength, and for a sweep, whose weakest regularisation needs far more steps (docs/evaluation.md).
QUICK = 10**8
QUICK_SWEEP = 5 * 10**6


def regressions(
    rows: Float[np.ndarray, "row dim"], labels: Int[np.ndarray, " row"], strengths: Sequence[float]
) -> dict[float, LogisticRegression]:
    """scikit-learn's logistic regression (L2) at each `C`, in rising order."""
    # Imported here, because a backbone's user needs no scikit-learn.
    from sklearn.linear_model import LogisticRegression

    rows = rows.astype(np.float64)  # gradients of float32 do not get that small
    found = tqdm(sorted(strengths), "logistic regression", unit="fit", delay=5)
    return {strength: LogisticRegression(C=strength, **SOLVER).fit(rows, labels) for strength in found}


def require_scikit_learn() -> None:
    """Raise ImportError, which says what to install, before any features are computed."""
    import sklearn  # noqa: F401


def num_classes_of(train: Features) -> int:
    """The number of classes, numbered from 0."""
    return int(train.labels.max()) + 1


def is_quick(train: Features, num_rows: int, limit: int) -> bool:
    """True unless a regression of some rows multiplies more numbers in a step than the limit."""
    columns = train.columns(train.settings[-1])
    return num_rows * (columns.stop - columns.start) * num_classes_of(train) <= limit


def scores_of(
    model: LogisticRegression,
    scaler: StandardScaler,
    num_classes: int,
    pooling: str,
    bank: Features,
    layer: int = -1,
) -> Float[Tensor, "image class"]:
    """A fitted model's log-probabilities of all classes; classes that it has not seen have none."""
    rows = bank.pooled(pooling, layer).numpy()
    scores = torch.full((len(rows), num_classes), float("-inf"), dtype=torch.float64)
    chances = model.predict_log_proba(scaler.transform(rows))
    scores[:, model.classes_.tolist()] = torch.from_numpy(chances).double()
    return scores


@PROTOCOLS.register_module()
@dataclass(eq=False)
class Regression(Classification):
    """Logistic regression of every layer and pooling on standardised features, solved at each strength.

    Held-out images choose the strength, and the layer; the regression is then solved again with all images.
    `LinearProbes` trains the same classifiers by SGD, on features of any size.

    Args:
        strengths: scikit-learn's `C`.
        layers: number of last layers that are probed; all by default.
        memory: GiB that the features of a probe may take in float32. The solver holds a few copies of them.
    """

    strengths: Sequence[float] = STRENGTHS
    layers: int | None = None
    memory: float = 0.5

    name = "linear (solved)"

    def unfit(self, images: Mapping[str, ImageSet], features: Mapping[str, Features]) -> str | None:
        """Labels that do not suit, no image that can be held out, or features beyond its memory."""
        super().unfit(images, features)
        held_out(images["train"].labels)
        require_scikit_learn()
        train = features["train"]
        columns = train.columns(train.settings[-1])
        needed = 4 * len(train) * (columns.stop - columns.start) / GIB
        if needed > self.memory:
            return (
                f"the features of {len(train)} images take {needed:.1f} GiB, and `memory` is "
                f"{self.memory:g}: LinearProbes trains on features of any size"
            )
        return None

    def takes(self, features: Mapping[str, Features]) -> Mapping[str, Any] | None:
        """The last layer; of many images it takes minutes."""
        train = features["train"]
        return {"layers": 1} if is_quick(train, len(train), QUICK_SWEEP) else None

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """Rows of the last layer and the best one, for each pooling; of all in detail."""
        train = evaluated.features["train"]
        rows = []
        for pooling in train.settings:
            chosen = []
            for layer in probed_layers(train.layers, self.layers):
                chosen.append(self.best_model(evaluated, pooling, layer))
            rows += rows_of_layers(self, evaluated, pooling, chosen)
        return rows

    def best_model(self, evaluated: Evaluated, pooling: str, layer: int) -> Chosen:
        """The regression with the strength that classifies the held-out images best, of equals the least."""
        from sklearn.preprocessing import StandardScaler

        train, _, num_classes = self.labelled(evaluated)
        labels = train.labels.numpy()
        chooses = held_out(train.labels).numpy()
        scaler = StandardScaler()
        rows = scaler.fit_transform(train.pooled(pooling, layer).numpy())
        # Choose on the held-out images, then learn from them, too.
        models = regressions(rows[~chooses], labels[~chooses], self.strengths)
        top1 = {strength: 100 * one.score(rows[chooses], labels[chooses]) for strength, one in models.items()}
        best = max(top1, key=top1.get)
        model = regressions(rows, labels, [best])[best]
        scores = partial(scores_of, model, scaler, num_classes, pooling, layer=layer)
        note = f"C {best:.3g}{at_edge(best, self.strengths)}"
        return Chosen(train.layers[layer], top1[best], scores, note)
