"""Run protocols on models: open everything and ask everybody first, then compute, and keep each figure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mapet_mm.evaluation import VERSION
from mapet_mm.evaluation.extraction import fill_bank, open_bank, require_few_left_out
from mapet_mm.evaluation.features import TOKENS, FeatureBank
from mapet_mm.evaluation.image_sets import SECTION, declaring_config, read_image_sets
from mapet_mm.evaluation.images import ImageSet
from mapet_mm.evaluation.models import Model
from mapet_mm.evaluation.protocol import Evaluated, Protocol, build_protocols, known_protocols
from mapet_mm.evaluation.tables import Row
from mapet_mm.utils.config import type_name
from mapet_mm.utils.disk import GIGABYTE, require_room
from mapet_mm.utils.dist import is_first_process, print_once
from mapet_mm.utils.errors import UserError

# Patch tokens of one protocol that a default evaluation may write; ImageNet's take 386 GB.
MOST_TOKENS = 20 * GIGABYTE


@dataclass(frozen=True)
class Wish:
    """What somebody wants to know.

    Args:
        data: a config that names image sets and protocols, or a folder of images; None for those that the
            first model's config names.
        names: protocols, as they are declared if they are; None for the declared ones or, without a
            declaration, those that the images suit and that take seconds.
        every: also all others that the images suit.
        labels: see `read_image_sets`.
        class_level: see `read_image_sets`.
        workers: see `read_image_sets`.
        groups: see `read_image_sets`.
    """

    data: str | None = None
    names: Sequence[str] | None = None
    every: bool = False
    labels: str | None = None
    class_level: int | None = None
    workers: int | None = None
    groups: str | None = None


class OpenBanks(dict):
    """Features by the name of the image set, as far as the cache has them; opened when somebody asks."""

    def __init__(self, model: Model, images: Mapping[str, ImageSet], cache: Path) -> None:
        super().__init__()
        self.model = model
        self.images = images
        self.cache = cache

    def __missing__(self, name: str) -> FeatureBank:
        self[name] = open_bank(self.model, self.images[name], self.cache)
        return self[name]


@dataclass(frozen=True)
class Job:
    """A model on one group of image sets, with the protocols that will run."""

    model: Model
    group: str  # its name, at the end of the rows' settings; "" for an only group
    images: Mapping[str, ImageSet]
    features: OpenBanks
    protocols: Sequence[Protocol]

    @property
    def kinds(self) -> dict[str, list[str | int]]:
        """The kinds of features that the protocols take of each image set, by its name."""
        kinds: dict[str, list[str | int]] = defaultdict(list)
        for protocol in self.protocols:
            for name, needed in protocol.needs(self.images).items():
                kinds[name] += needed
        return kinds


def evaluate(
    models: Mapping[str, Model],
    wish: Wish,
    cache: Path,
    show: Callable[[Row], None] = lambda row: None,
    keep: Callable[[Mapping[str, Sequence[Row]]], None] = lambda results: None,
) -> dict[str, list[Row]]:
    """The figures of some models, by model; the first process alone gets them.

    All image sets are opened and all protocols are asked before any features are computed.

    Args:
        models: by the name of their column.
        wish: images and protocols.
        cache: folder of all features.
        show: is given each row as soon as it is known.
        keep: is given all rows that are known, after each protocol.

    Raises:
        UserError: no such images or protocols, or some that do not suit each other; or too little disk.
    """
    first = next(iter(models.values()))
    plans = {}
    for name, model in models.items():
        config = model.config if wish.data else first.config
        plans[name] = list(plan(replace(model, config=config), wish, cache))
    check_space([job for jobs in plans.values() for job in jobs], cache)
    results: dict[str, list[Row]] = {}
    for name, jobs in plans.items():
        print_once(f"{name}:")
        results[name] = []
        figures = defaultdict(list)
        for job in jobs:
            for rows in figures_of(job):
                for row in rows:
                    figures[row.protocol, row.setting].append(row)
                    named = replace(row, setting=f"{row.setting}, {job.group}") if job.group else row
                    results[name].append(named)
                    show(named)
                keep(results)
        if len(jobs) > 1 and is_first_process():
            results[name] += [mean_row(rows) for rows in figures.values() if len(rows) == len(jobs)]
            keep(results)
    return results


def plan(model: Model, wish: Wish, cache: Path) -> Iterator[Job]:
    """The jobs of a model: one, or one for each group that a section's `folders` names.

    Raises:
        UserError: the section asks for another `version` of the protocols, or has no such images; see also
            `choose_protocols`.
    """
    section = declaring_config(model.config, wish.data).get(SECTION) or {}
    version = section.get("version", VERSION)
    if version != VERSION:
        raise UserError(f"the config asks for version {version} of the protocols: these are {VERSION}")
    for group, folder in (section.get("folders") or {"": wish.data}).items():
        images = read_image_sets(
            model.config, folder, wish.labels, wish.class_level, wish.workers, wish.groups
        )
        for image_set in images.values():
            image_set.per_class |= group in section.get("per_class", ())
        features = OpenBanks(model, images, cache)
        protocols = choose_protocols(section.get("protocols"), wish, images, features)
        yield Job(model, group, images, features, protocols)


def choose_protocols(
    declared: Sequence[Mapping[str, Any]] | None,
    wish: Wish,
    images: Mapping[str, ImageSet],
    features: Mapping[str, FeatureBank],
) -> list[Protocol]:
    """The named protocols, or the declared ones where their images are, or those that take seconds, or all.

    Args:
        declared: of a config: dicts with `type` and options.
        wish: has `names` and `every`.
        images: the image sets by name.
        features: their sizes.

    Raises:
        UserError: no such protocol, images that do not suit one that was asked for, or nothing to run.
        ImportError: a protocol needs scikit-learn, which is not installed.
    """
    if wish.names and wish.every:
        raise UserError("--all runs all protocols: leave out --protocols, or --all")
    configs = named_protocols(wish.names, declared or []) if wish.names else declared or []
    chosen = []
    for protocol in build_protocols(configs):
        name = type(protocol).__name__
        absent = absent_set(protocol, images)
        reason = absent or reason_against(protocol, images, features)
        if absent and not wish.names:
            print_once(f"no {name}: {absent}")
        elif reason:
            raise UserError(f"{name}: {reason}")
        else:
            chosen.append(protocol)
    if wish.every or not (wish.names or declared is not None):
        known = {type_name(one["type"]) for one in configs}
        chosen += others(known, wish.every, images, features)
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


def others(
    known: set[str], every: bool, images: Mapping[str, ImageSet], features: Mapping[str, FeatureBank]
) -> list[Protocol]:
    """The protocols that nobody named, but the images suit: those that take seconds or, with `every`, all."""
    chosen = []
    left_out = []
    for name, kind in known_protocols().items():
        if name in known:
            continue
        protocol = kind()
        reason = (
            absent_set(protocol, images)
            or reason_against(protocol, images, features)
            or many_tokens(protocol, images, features)
        )
        if reason:
            print_once(f"no {name}: {reason}")
            continue
        options = {} if every else protocol.takes(features)
        if options is not None:
            chosen.append(kind(**options))
        if options is None or options:
            part = ", ".join(options or ())
            left_out.append(f"{name} (other {part})" if part else name)
    if left_out:
        print_once(f"left out, to be quick: {', '.join(left_out)}; --protocols NAME or --all runs them")
    return chosen


def absent_set(protocol: Protocol, images: Mapping[str, ImageSet]) -> str | None:
    """Which image set a protocol needs and nobody has named."""
    absent = set(protocol.needs(images)) - set(images)
    return f"there are no `{min(absent)}` images" if absent else None


def reason_against(
    protocol: Protocol, images: Mapping[str, ImageSet], features: Mapping[str, FeatureBank]
) -> str | None:
    """Why a protocol cannot run, whether it returns the reason or raises it."""
    try:
        return protocol.unfit(images, features)
    except UserError as error:
        return str(error)


def many_tokens(
    protocol: Protocol, images: Mapping[str, ImageSet], features: Mapping[str, FeatureBank]
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


def check_space(jobs: Sequence[Job], cache: Path) -> None:
    """Say how much will be written; raise UserError if the disk has less."""
    missing = {}  # two jobs may share features
    for job in jobs:
        for name, kinds in job.kinds.items():
            bank = job.features[name]
            for part in bank.names(kinds):
                missing[bank.folder, part] = bank.missing_bytes(part)
    require_room(cache, sum(missing.values()), "features", "name another --cache, or fewer --protocols")


def figures_of(job: Job) -> Iterator[list[Row]]:
    """The rows of each protocol, after all features were taken.

    Raises:
        UserError: two rows have one name, by which a table's column knows them.
    """
    features = {}
    for name, kinds in job.kinds.items():
        features[name] = fill_bank(job.features[name], job.model, kinds)
    require_few_left_out(job.images.values())
    if not is_first_process():
        return
    evaluated = Evaluated(features, job.images, job.model.backbone.device)
    names = set()
    for protocol in job.protocols:
        rows = protocol.rows(evaluated)
        for row in rows:
            if row.name in names:
                raise UserError(
                    f"`protocols` give two results `{row.name}`: run these protocols one at a time"
                )
            names.add(row.name)
        yield rows


def mean_row(rows: Sequence[Row]) -> Row:
    """The mean of one figure over several groups of image sets."""
    value = float(np.mean([row.value for row in rows]))
    units = sorted({row.unit for row in rows})
    setting = f"{rows[0].setting}, mean of {len(rows)} sets"
    return Row(rows[0].protocol, setting, value, " and ".join(units), detail=rows[0].detail)
