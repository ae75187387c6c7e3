"""An evaluation: protocols turn features into rows of a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from mmengine.config import Config
from mmengine.registry import Registry
from torch import Tensor

from mapet_mm.evaluation import VERSION
from mapet_mm.evaluation.features import FeatureBank, take_features
from mapet_mm.evaluation.image_sets import SECTION, SETS, ImageSet, answers, check_labels, read_image_sets
from mapet_mm.evaluation.models import Checkpoint
from mapet_mm.utils.config import read_config, type_name
from mapet_mm.utils.dist import is_first_process, print_once
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.tables import Column, Table

HELD_OUT = 10  # every tenth training image chooses between settings, as in CAPI
DRAWS = 1000  # of a bootstrap
PROTOCOLS = Registry("evaluation protocol", scope="mapet_mm", locations=["mapet_mm.evaluation.protocols"])


@dataclass(frozen=True)
class Row:
    """One figure."""

    protocol: str  # its name in the table: 'k-NN'
    setting: str  # the features: 'class token'
    value: float
    unit: str = "top-1, %"
    spread: float | None = None  # standard deviation over draws
    interval: tuple[float, float] | None = None  # 95 %, over images: see `bootstrap`
    note: str = ""  # the choice made: 'layer 3, rate 0.1'
    detail: bool = False  # True for a row of the JSON file only

    @property
    def name(self) -> str:
        """The name in a table's `metric` and in a log."""
        return f"{self.protocol}, {self.setting}"


@dataclass(frozen=True)
class Evaluated:
    """A checkpoint's features and images by the name of the set, as protocols get them."""

    features: Mapping[str, FeatureBank]
    images: Mapping[str, ImageSet]
    device: torch.device  # where to compute


class Protocol:
    """One way of judging features. Options are arguments of the constructor, kept under their names.

    Subclasses are registered in `PROTOCOLS`; `needs` names their image sets, with the kinds of features.
    """

    needs: ClassVar[Mapping[str, Sequence[str]]] = {"train": ["pooled"], "val": ["pooled"]}

    def wanted(self, images: Mapping[str, ImageSet]) -> Mapping[str, Sequence[str]]:
        """`needs`, and what is taken of image sets that may be there."""
        return self.needs

    def check(self, images: Mapping[str, ImageSet]) -> None:
        """Raise UserError if the images do not suit, before any features are taken."""

    def run(self, evaluated: Evaluated) -> list[Row]:
        """The figures of one checkpoint."""
        raise NotImplementedError


def held_out(count: int) -> Bool[Tensor, " image"]:
    """True for the training images that choose between settings: every tenth, or the last of fewer."""
    places = torch.arange(count)
    return places % HELD_OUT == min(HELD_OUT, count) - 1


def at_edge(value: float, grid: Sequence[float]) -> str:
    """A note that a chosen value is the lowest or highest of several: others may be better."""
    if len(set(grid)) == 1 or min(grid) < value < max(grid):
        return ""
    return f" (the {'lowest' if value == min(grid) else 'highest'} of the grid)"


def bootstrap(figure: Callable[..., float], *values: Shaped[np.ndarray, "image ..."]) -> tuple[float, float]:
    """The middle 95 % of a figure over draws of as many images, with replacement (Efron's percentiles)."""
    generator, images = np.random.default_rng(0), len(values[0])
    draws = (generator.integers(images, size=images) for _ in range(DRAWS))
    found = [figure(*(one[drawn] for one in values)) for drawn in draws]
    low, high = np.nanquantile(found, [0.025, 0.975])
    return float(low), float(high)


class Classification(Protocol):
    """A protocol that learns the classes of `train` and is tested on `val` and on further image sets."""

    name: ClassVar[str]  # in the table

    def check(self, images: Mapping[str, ImageSet]) -> None:
        """See `check_labels` and `answers`."""
        num_classes = check_labels(images["train"], images["val"])
        for name in further(images):
            answers(images["train"], images[name], num_classes)

    def wanted(self, images: Mapping[str, ImageSet]) -> Mapping[str, Sequence[str]]:
        """Further sets as `val`."""
        return {**self.needs, **dict.fromkeys(further(images), self.needs["val"])}

    def labelled(self, evaluated: Evaluated) -> tuple[FeatureBank, FeatureBank, int]:
        """Features of `train` and `val`, and the number of classes."""
        num_classes = check_labels(evaluated.images["train"], evaluated.images["val"])
        return evaluated.features["train"], evaluated.features["val"], num_classes

    def rows(
        self,
        evaluated: Evaluated,
        setting: str,
        *scorers: Callable[[FeatureBank], Float[Tensor, "image class"]],
        note: str = "",
        detail: bool = False,
    ) -> list[Row]:
        """A row for `val` and one for each further set: top-1 in percent, with an interval over images.

        The scorers give the classes' scores of a set's images; of several, a row has mean and spread.
        """
        made = []
        for name in ("val", *further(evaluated.images)):
            images = evaluated.images[name]
            offered, right = answers(evaluated.images["train"], images, self.labelled(evaluated)[2])
            judged = right.any(1)  # ReaL leaves images without an answer
            hits = []
            for scores in scorers:
                best = offered[scores(evaluated.features[name]).cpu()[:, offered].argmax(1)]
                hits.append(100 * right.gather(1, best[:, None])[judged, 0].double())
            each = torch.stack(hits).numpy()  # scorer image
            groups = (images.labels if images.per_class else torch.zeros(len(judged)).long())[judged].numpy()
            figures = [mean_of_groups(one, groups) for one in each]
            spread = float(np.std(figures, ddof=1)) if len(each) > 1 else None
            interval = bootstrap(mean_of_groups, each.mean(0), groups)
            title = setting if name == "val" else f"{setting}, on {name}"
            unit = "mean per class, %" if images.per_class else "top-1, %"
            known = dict(spread=spread, interval=interval, note=note, detail=detail)
            made.append(Row(self.name, title, float(np.mean(figures)), unit, **known))
        return made


def mean_of_groups(values: Float[np.ndarray, " image"], groups: Int64[np.ndarray, " image"]) -> float:
    """The mean over some groups, 0, 1, ..., of each one's mean value; with one group the mean."""
    sizes = np.bincount(groups)
    return float((np.bincount(groups, values)[sizes > 0] / sizes[sizes > 0]).mean())


def further(images: Mapping[str, ImageSet]) -> list[str]:
    """Names of the image sets on which classifiers are tested beside `val`."""
    return [name for name in images if name not in SETS]


def build_protocols(configs: Sequence[Mapping[str, Any]]) -> list[Protocol]:
    """Protocols of configs `dict(type=..., ...)`."""
    PROTOCOLS.import_from_location()
    built = []
    for config in configs:
        options = dict(config)
        kind = PROTOCOLS.module_dict[type_name(options.pop("type"))]
        built.append(kind(**options))
    return built


def choose_protocols(
    config: Config, data: str | None, names: Sequence[str] | None, images: Mapping[str, ImageSet]
) -> list[Protocol]:
    """The declared protocols or, without a declaration, all that the images suit, with their defaults.

    Args:
        config: the model's; its section `evaluation` may have `protocols`.
        data: another config, which declares them instead; a folder declares none.
        names: only these of the protocols.
        images: the image sets by name.

    Raises:
        UserError: no such protocol, or images that do not suit one that was asked for.
    """
    configs = (declaring(config, data).get(SECTION) or {}).get("protocols")
    asked = names is not None or configs is not None
    if configs is None:
        PROTOCOLS.import_from_location()
        configs = [dict(type=name) for name in PROTOCOLS.module_dict]
    known = [type_name(one["type"]) for one in configs]
    if unknown := set(names or ()) - set(known):
        raise UserError(f"--protocols {unknown.pop()}: one of {', '.join(known)}")
    chosen = [one for one, name in zip(configs, known, strict=True) if name in (names or known)]
    suited = []
    for protocol in build_protocols(chosen):
        try:
            if absent := set(protocol.needs) - set(images):
                print_once(f"no {type(protocol).__name__}: there are no `{min(absent)}` images")
                continue
            protocol.check(images)
            suited.append(protocol)
        except UserError as error:
            if asked:
                raise
            print_once(f"no {type(protocol).__name__}: {error}")
    return suited


def evaluate(
    checkpoint: Checkpoint, images: Mapping[str, ImageSet], protocols: Sequence[Protocol], cache: Path
) -> list[Row]:
    """Figures of a checkpoint, with its features in the folder `cache`; the first process alone gets them.

    Raises:
        UserError: two rows of one name, by which a table's column knows them.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    for protocol in protocols:
        for name, needed in protocol.wanted(images).items():
            kinds[name].update(needed)
    features = {
        name: take_features(checkpoint, images[name], cache, sorted(some)) for name, some in kinds.items()
    }
    if not is_first_process():
        return []
    evaluated = Evaluated(features, images, checkpoint.backbone.device)
    rows = [row for protocol in protocols for row in protocol.run(evaluated)]
    names = Counter(row.name for row in rows)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UserError(f"`protocols` give two results `{twice[0]}`: run these protocols one at a time")
    return rows


def evaluate_data(
    config: Config, checkpoint: Checkpoint, data: str | None, names: Sequence[str] | None, cache: Path
) -> list[Row]:
    """The figures on one group of image sets, or on each of the several that a section's `folders` names.

    Rows of several have the group's name at the end; last come their means. Arguments are as for
    `choose_protocols` and `evaluate`.

    Raises:
        UserError: the section asks for another `version` of the protocols.
    """
    section = declaring(config, data).get(SECTION) or {}
    if (version := section.get("version", VERSION)) != VERSION:
        raise UserError(f"the config asks for version {version} of the protocols: these are {VERSION}")
    folders = section.get("folders") or {"": data}
    found, values = [], defaultdict(list)
    for name, folder in folders.items():
        images = read_image_sets(config, folder)
        for one in images.values():
            one.per_class |= name in section.get("per_class", ())
        for row in evaluate(checkpoint, images, choose_protocols(config, data, names, images), cache):
            values[row.protocol, row.setting].append(row)
            found.append(replace(row, setting=f"{row.setting}, {name}") if name else row)
    for (protocol, setting), some in values.items():
        if len(some) == len(folders) > 1:
            mean, units = float(np.mean([row.value for row in some])), sorted({row.unit for row in some})
            found.append(Row(protocol, f"{setting}, mean of {len(some)} sets", mean, " and ".join(units)))
    return found


def declaring(config: Config, data: str | None) -> Config:
    """The config that declares image sets and protocols: another one if `data` names it."""
    return read_config(data) if data and not Path(data).is_dir() else config


def results_table(results: Mapping[str, Sequence[Row]]) -> Table:
    """One column per checkpoint, one line per figure.

    Args:
        results: the rows by the checkpoint's name.
    """
    keys = {(row.name, row.unit): None for rows in results.values() for row in rows if not row.detail}
    columns = [Column("result"), Column("figure"), *(Column(name) for name in results)]
    found = {name: {(row.name, row.unit): row for row in rows} for name, rows in results.items()}
    lines = [[*key, *(_cell(found[name].get(key)) for name in results)] for key in keys]
    return Table(columns, lines)


def _cell(row: Row | None) -> str | None:
    if row is None:
        return None
    spread = "" if row.spread is None else f" ± {row.spread:.1f}"
    interval = "" if row.interval is None else " [{:.1f}, {:.1f}]".format(*row.interval)
    note = f" ({row.note})" if row.note else ""
    return f"{row.value:.{1 if abs(row.value) >= 1 else 3}f}{spread}{interval}{note}"
