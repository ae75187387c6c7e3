"""Linear probes of every layer and pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mapet_mm.evaluation.features import FeatureBank
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Row, at_edge, held_out
from mapet_mm.evaluation.protocols import probes
from mapet_mm.evaluation.protocols.probes import TrainedProbe
from mapet_mm.evaluation.protocols.regression import STRENGTHS, regressions, scores_of

# Thirteen, as DINOv2's, but up to 100 instead of 0.1: the values of layers without a norm may be small.
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# A probe that was chosen: its top-1 on the images that choose, its scores of a set's images, and a note.
Chosen = tuple[float, Callable[[FeatureBank], Tensor], str]


class LinearHead(nn.Linear):
    """A classifier of one pooling, with the same start whichever others are trained.

    Args:
        columns: of the pooling.
        num_classes: number of classes.
    """

    def __init__(self, columns: slice, num_classes: int) -> None:
        super().__init__(columns.stop - columns.start, num_classes)
        self.columns = columns
        start = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(0))
        self.weight.data.copy_(start * 0.01)
        self.bias.data.zero_()

    def forward(self, values: Float[Tensor, "batch width"]) -> Float[Tensor, "batch class"]:
        """Logits."""
        return super().forward(values[:, self.columns])


@PROTOCOLS.register_module()
@dataclass(eq=False)
class LinearProbes(TrainedProbe):
    """Linear classifiers of every layer and pooling; held-out images choose strength or rate, and the layer.

    Features of a layer that fit into 512 MB are standardised, and a logistic regression is solved at each
    strength, then with all images at the chosen one. Others are classified by SGD, with rates swept as DINOv2
    does, one layer at a time.

    Args:
        strengths: scikit-learn's `C`.
        layers: so many last layers are probed; all by default.
        concatenated: so many last layers are a further probe together, as DINOv2's four; solved only.
    """

    rates: Sequence[float] = RATES
    strengths: Sequence[float] = STRENGTHS
    layers: int | None = None
    concatenated: int = 1

    name, kind = "linear", "pooled"

    def optimizer(self, groups: list[dict]) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(groups, momentum=0.9)

    def run(self, evaluated: Evaluated) -> list[Row]:
        """Rows of the last layer and of the best one, for each pooling; of all layers in detail."""
        train, _, _ = self.labelled(evaluated)
        width = train.dim * (2 if len(train.poolings) > 1 else 1)
        solved = 4 * len(train) * width <= probes.WINDOW_BYTES
        found: dict[str, list[tuple[str, Chosen]]] = {pooling: [] for pooling in train.poolings}
        for layer, name in list(enumerate(train.layers))[-(self.layers or 0) :]:
            own = {} if solved else self._swept(evaluated, layer)
            for pooling, chosen in found.items():
                one = self._solved(evaluated, pooling, [layer]) if solved else own[pooling]
                chosen.append((f"layer {name}", one))
        rows = []
        for pooling, chosen in found.items():
            last, best = chosen[-1], max(chosen, key=lambda each: each[1][0])
            shown = {"last layer": last}
            if len(chosen) > 1:
                shown["best layer"] = best[0], (*best[1][:2], f"{best[0]}, {best[1][2]}")
            if solved and self.concatenated > 1:
                together = last_layers(train.layers, self.concatenated)
                which = f"last {len(together)} layers"
                shown[which] = which, self._solved(evaluated, pooling, together)
            for title, (_, (_, scores, note)) in shown.items():
                rows += self.rows(evaluated, f"{pooling}, {title}", scores, note=note)
            for title, (_, scores, note) in chosen:
                rows += self.rows(evaluated, f"{pooling}, {title}", scores, note=note, detail=True)
        return rows

    def _solved(self, evaluated: Evaluated, pooling: str, layers: Sequence[int]) -> Chosen:
        """The regression with the strength that classifies the held-out images best, of equals the least."""
        from sklearn.preprocessing import StandardScaler

        train, _, num_classes = self.labelled(evaluated)
        values = torch.cat([train.pooled(pooling, layer) for layer in layers], dim=1).numpy()
        scaler, chooses, labels = StandardScaler(), held_out(len(train)).numpy(), train.labels.numpy()
        rows = scaler.fit_transform(values)
        models = regressions(rows[~chooses], labels[~chooses], self.strengths)
        top1 = {strength: 100 * one.score(rows[chooses], labels[chooses]) for strength, one in models.items()}
        best = max(top1, key=top1.get)
        model = regressions(rows, labels, [best])[best]
        scores = partial(scores_of, model, scaler, num_classes, pooling, layers=layers)
        return top1[best], scores, f"C {best:.3g}{at_edge(best, self.strengths)}"

    def _swept(self, evaluated: Evaluated, layer: int) -> Mapping[str, Chosen]:
        """Each pooling's head with the best rate on the held-out images, of equals the lowest."""
        train, _, num_classes = self.labelled(evaluated)
        tried = list(product(train.poolings, self.rates))
        heads = [LinearHead(train.columns(one), num_classes).to(evaluated.device) for one, _ in tried]
        pairs = zip(heads, tried, strict=True)
        groups = [one for head, (_, rate) in pairs for one in self.groups(head, rate)]
        top1 = dict(zip(tried, self.trained(evaluated, heads, groups, layer), strict=True))
        chosen = {}
        for pooling in train.poolings:
            own = {rate: top1[pooling, rate] for rate in self.rates}
            rate = max(sorted(own), key=own.get)
            alike = len(own) > 1 and len({*own.values()}) == 1
            note = f"rate {rate:g}" + (", all rates alike" if alike else at_edge(rate, self.rates))
            head = heads[tried.index((pooling, rate))]
            chosen[pooling] = own[rate], partial(self.scores, head, layer=layer), note
        return chosen


def last_layers(names: Sequence[str], count: int) -> list[int]:
    """Places of the last layers; of the last one, that behind the final norm if there is one."""
    places = list(range(len(names)))
    if names[-1] == "output" and len(names) > 1:
        del places[-2]  # the same layer without it
    return places[-count:]
