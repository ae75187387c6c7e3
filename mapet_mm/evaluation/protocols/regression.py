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
    layers: Sequence[int] = (-1,),
) -> Float[Tensor, "image class"]:
    """A fitted model's log-probabilities of all classes; classes that it has not seen have none."""
    rows = side_by_side(bank, pooling, layers)
    scores = torch.full((len(rows), num_classes), float("-inf"), dtype=torch.float64)
    chances = model.predict_log_proba(scaler.transform(rows))
    scores[:, model.classes_.tolist()] = torch.from_numpy(chances).double()
    return scores


def side_by_side(bank: Features, pooling: str, layers: Sequence[int]) -> Float[np.ndarray, "image width"]:
    """Features of some layers joined."""
    return torch.cat([bank.pooled(pooling, layer) for layer in layers], dim=1).numpy()


@PROTOCOLS.register_module()
@dataclass(eq=False)
class Regression(Classification):
    """Logistic regression of every layer and pooling on standardised features, solved at each strength.

    Held-out images choose the strength, and the layer; the regression is then solved again with all images.
    `LinearProbes` trains the same classifiers by SGD, on features of any size.

    Args:
        strengths: scikit-learn's `C`.
        layers: number of last layers that are probed; all by default.
        concatenated: number of last layers that are a further probe together, as DINOv2's four.
        memory: GiB that the features of a probe may take in float32. The solver holds a few copies of them.
    """

    strengths: Sequence[float] = STRENGTHS
    layers: int | None = None
    concatenated: int = 1
    memory: float = 0.5

    name = "linear (solved)"

    def needs(self, images: Mapping[str, ImageSet]) -> Mapping[str, Sequence[str]]:
        """All layers if several are joined."""
        needed = super().needs(images)
        return needed if self.concatenated == 1 else {name: ["layers"] for name in needed}

    def unfit(self, images: Mapping[str, ImageSet], features: Mapping[str, Features]) -> str | None:
        """Labels that do not suit, no image that can be held out, or features beyond its memory."""
        super().unfit(images, features)
        held_out(images["train"].labels)
        require_scikit_learn()
        train = features["train"]
        columns = train.columns(train.settings[-1])
        num_layers = min(self.concatenated, len(train.layers))
        needed = 4 * len(train) * (columns.stop - columns.start) * num_layers / GIB
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
        """Rows of the last layer, the best one and the joined ones, for each pooling; of all in detail."""
        train = evaluated.features["train"]
        rows = []
        for pooling in train.settings:
            chosen = []
            for layer in probed_layers(train.layers, self.layers):
                chosen.append(self.best_model(evaluated, pooling, [layer]))
            rows += rows_of_layers(self, evaluated, pooling, chosen)
            if self.concatenated > 1:
                together = last_layers(train.layers, self.concatenated)
                joined = self.best_model(evaluated, pooling, together)
                setting = f"{pooling}, last {len(together)} layers"
                rows += self.rows_of(evaluated, setting, joined.scores, note=joined.note)
        return rows

    def best_model(self, evaluated: Evaluated, pooling: str, layers: Sequence[int]) -> Chosen:
        """The regression with the strength that classifies the held-out images best, of equals the least."""
        from sklearn.preprocessing import StandardScaler

        train, _, num_classes = self.labelled(evaluated)
        labels = train.labels.numpy()
        chooses = held_out(train.labels).numpy()
        scaler = StandardScaler()
        rows = scaler.fit_transform(side_by_side(train, pooling, layers))
        # Choose on the held-out images, then learn from them, too.
        models = regressions(rows[~chooses], labels[~chooses], self.strengths)
        top1 = {strength: 100 * one.score(rows[chooses], labels[chooses]) for strength, one in models.items()}
        best = max(top1, key=top1.get)
        model = regressions(rows, labels, [best])[best]
        scores = partial(scores_of, model, scaler, num_classes, pooling, layers=layers)
        note = f"C {best:.3g}{at_edge(best, self.strengths)}"
        return Chosen(train.layers[layers[-1]], top1[best], scores, note)


def last_layers(names: Sequence[str], count: int) -> list[int]:
    """Indices of the last layers; of the last one, that after the final norm if there is one."""
    indices = list(range(len(names)))
    if names[-1] == "output" and len(names) > 1:
        del indices[-2]  # the same layer without it
    return indices[-count:]
