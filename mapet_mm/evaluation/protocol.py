"""Protocols, which turn features into rows of a table, and which of them run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from mmengine.registry import Registry
from torch import Tensor

from mapet_mm.evaluation.features import TOKENS, Features
from mapet_mm.evaluation.images import ImageSet
from mapet_mm.evaluation.metrics.class_sizes import class_weights
from mapet_mm.evaluation.tables import Row
from mapet_mm.utils.config import type_name
from mapet_mm.utils.disk import GIGABYTE
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError

# Patch tokens of one protocol that nobody asked for which may be written; ImageNet's take 386 GB.
MOST_TOKENS = 20 * GIGABYTE
# The suite's protocols, the cheapest first, and the file of `protocols/` that has each.
FILES = {
    "NearestNeighbours": "knn",
    "LowShot": "regression",
    "LabelFree": "label_free",
    "Regression": "regression",
    "SegmentationByNeighbours": "segmentation",
    "LinearProbes": "linear",
    "AttentiveProbe": "attentive",
}
PROTOCOLS = Registry(
    "evaluation protocol",
    scope="mapet_mm",
    locations=[f"mapet_mm.evaluation.protocols.{name}" for name in dict.fromkeys(FILES.values())],
)


@dataclass(frozen=True)
class Evaluated:
    """A model's features and images by the name of the set, as protocols get them."""

    features: Mapping[str, Features]
    images: Mapping[str, ImageSet]
    device: torch.device  # where to compute

    @property
    def num_classes(self) -> int:
        """Number of classes of `train`, which are numbered from 0."""
        return int(self.images["train"].labels.max()) + 1

    @cached_property
    def class_weights(self) -> Float[Tensor, " class"] | None:
        """What an image of each class of `train` counts, where classes are of unequal size.

        None where images count alike: those of other classes, or because `val` has `per_class=False`.
        """
        if self.images["val"].per_class is False:
            return None
        return class_weights(self.features["train"].labels.bincount())

    def is_per_class(self, name: str) -> bool:
        """True if a set's figures are means over its classes: as its config says, or for unequal ones.

        Images with several right answers each are of no one class.
        """
        images = self.images[name]
        if images.per_class is not None:
            return images.per_class
        return self.class_weights is not None and not images.answers


class Protocol:
    """One way of judging features, by four members. Options are arguments of the constructor, with defaults.

    Subclasses are registered in `PROTOCOLS`.
    """

    def needs(self, images: Mapping[str, ImageSet]) -> Mapping[str, Sequence[str | int]]:
        """The image sets that it takes, with the kinds of features; without one of these it cannot run.

        Kinds are 'pooled' of the last layer, a number of last layers, all 'layers', and patch 'tokens'.

        Args:
            images: that there are.
        """
        return {"train": ["pooled"], "val": ["pooled"]}

    def unfit(self, images: Mapping[str, ImageSet], features: Mapping[str, Features]) -> str | None:
        """Why it cannot run on these images, or on features of this size, which are not computed yet.

        A `UserError` says it as well.
        """
        return None

    def takes(self, features: Mapping[str, Features]) -> Mapping[str, Any] | None:
        """The options of its rows where nobody names it; None if features of this size take minutes."""
        return {}

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """The figures of one model."""
        raise NotImplementedError


def known_protocols() -> dict[str, type[Protocol]]:
    """All protocols by name: the suite's, the cheapest first, then a user's."""
    PROTOCOLS.import_from_location()
    kinds = PROTOCOLS.module_dict
    return {name: kinds[name] for name in dict.fromkeys([*FILES, *kinds])}


def build_protocol(config: Mapping[str, Any]) -> Protocol:
    """A protocol of a config `dict(type=..., ...)`; UserError if there is no such protocol."""
    options = dict(config)
    name = type_name(options.pop("type"))
    known = known_protocols()
    if name not in known:
        raise UserError(f"`protocols` has {name}: one of {', '.join(known)}")
    return known[name](**options)


def choose_protocols(
    declared: Sequence[Mapping[str, Any]] | None,
    names: Sequence[str] | None,
    every: bool,
    images: Mapping[str, ImageSet],
    features: Mapping[str, Features],
) -> list[Protocol]:
    """The protocols that run on some images.

    Those that are named, or that a config declares, run or are refused; of declared ones, those without their
    images are passed over. Where nobody names or declares any, all run that the images suit and that take
    seconds.

    Args:
        declared: of a config: dicts with `type` and options; None if it declares none.
        names: of protocols, each of which runs as it is declared, if it is.
        every: also run all others that the images suit, however long they take.
        images: the image sets by name.
        features: their sizes.

    Raises:
        UserError: no such protocol, images that do not suit one that was asked for, or nothing to run.
        ImportError: a protocol needs scikit-learn, which is not installed.
    """
    if names and every:
        raise UserError("--all runs all protocols: leave out --protocols, or --all")
    asked = named_protocols(names, declared or []) if names else list(declared or [])
    of_asked = {type_name(config["type"]) for config in asked}
    others = []
    if every or (declared is None and not names):
        others = [dict(type=name) for name in known_protocols() if name not in of_asked]
    chosen = []
    left_out = []
    for config in [*asked, *others]:
        protocol = build_protocol(config)
        name = type(protocol).__name__
        absent = set(protocol.needs(images)) - set(images)
        if absent:
            reason = f"there are no `{min(absent)}` images"
        else:
            reason = reason_against(protocol, images, features)
        if reason and config in asked and (names or not absent):
            raise UserError(f"{name}: {reason}")
        if config in others:
            reason = reason or many_tokens(protocol, images, features)
        if reason:
            print_once(f"no {name}: {reason}")
            continue
        if config in others and not every:
            options = protocol.takes(features)
            if options is None:
                left_out.append(name)
                continue
            if options:
                left_out.append(f"{name} (other {', '.join(options)})")
                protocol = build_protocol({**config, **options})
        chosen.append(protocol)
    if left_out:
        print_once(f"left out, to be quick: {', '.join(left_out)}; --protocols NAME or --all runs them")
    if not chosen:
        raise UserError(
            f"no protocol suits these images ({', '.join(images)}), so there is nothing to compute"
        )
    return chosen


def named_protocols(names: Sequence[str], declared: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The named protocols, each as it is declared, else with its defaults."""
    known = {*known_protocols(), *(type_name(one["type"]) for one in declared)}
    chosen = []
    for name in names:
        if name not in known:
            raise UserError(f"--protocols {name}: one of {', '.join(sorted(known))}")
        # A config may declare one several times, with other settings.
        chosen += [one for one in declared if type_name(one["type"]) == name] or [dict(type=name)]
    return chosen


def reason_against(
    protocol: Protocol, images: Mapping[str, ImageSet], features: Mapping[str, Features]
) -> str | None:
    """Why a protocol cannot run, whether it returns the reason or raises it."""
    try:
        return protocol.unfit(images, features)
    except UserError as error:
        return str(error)


def many_tokens(
    protocol: Protocol, images: Mapping[str, ImageSet], features: Mapping[str, Features]
) -> str | None:
    """That a protocol takes so many patch tokens that somebody should ask for it."""
    needed = 0
    for name, kinds in protocol.needs(images).items():
        if TOKENS in kinds and features[name].grid != (0, 0):
            needed += features[name].missing_bytes(TOKENS)
    if needed <= MOST_TOKENS:
        return None
    name = type(protocol).__name__
    return f"its patch tokens take {needed / GIGABYTE:.1f} GB on disk; `--protocols {name}` takes them"
