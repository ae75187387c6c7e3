"""Run protocols on models: open everything and ask everybody first, then compute, and keep each figure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from mmengine.config import Config

from mapet_mm.datasets.seen import WARNING, pretrained_on
from mapet_mm.evaluation import VERSION
from mapet_mm.evaluation.extraction import fill_features, open_features, require_few_left_out
from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import SECTION, DeclaredSets, declaring_config
from mapet_mm.evaluation.images import Data, ImageSet
from mapet_mm.evaluation.models import Model
from mapet_mm.evaluation.protocol import Evaluated, Protocol, choose_protocols
from mapet_mm.evaluation.tables import Row
from mapet_mm.utils.disk import require_room
from mapet_mm.utils.dist import is_first_process, print_once
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.run_folder import Run

LEARNT = ("train", "view", "dense_train")  # image sets that nothing is tested on


class OpenFeatures(dict):
    """Features by the name of the image set, as far as the cache has them; opened when somebody asks."""

    def __init__(self, model: Model, images: Mapping[str, ImageSet], cache: Path) -> None:
        super().__init__()
        self.model = model
        self.images = images
        self.cache = cache

    def __missing__(self, name: str) -> Features:
        self[name] = open_features(self.model, self.images[name], self.cache)
        return self[name]


@dataclass(frozen=True)
class Job:
    """A model on one group of image sets, with the protocols that will run."""

    model: Model
    group: str  # its name, at the end of the rows' settings; "" for an only group
    evaluated: Evaluated
    protocols: Sequence[Protocol]

    @property
    def kinds(self) -> dict[str, list[str | int]]:
        """The kinds of features that the protocols take of each image set, by its name."""
        kinds: dict[str, list[str | int]] = defaultdict(list)
        for protocol in self.protocols:
            for name, needed in protocol.needs(self.evaluated.images).items():
                kinds[name] += needed
        return kinds


def evaluate(
    models: Mapping[str, Model],
    data: Data,
    cache: Path,
    names: Sequence[str] | None = None,
    every: bool = False,
    show: Callable[[Row], None] = lambda row: None,
    keep: Callable[[Mapping[str, Sequence[Row]]], None] = lambda results: None,
) -> dict[str, list[Row]]:
    """The figures of some models, by model; the first process alone gets them.

    All image sets are opened and all protocols are asked before any features are computed.

    Args:
        models: by the name of their column.
        data: the images; without a path those that the first model's config names.
        cache: folder of all features.
        names: protocols; see `choose_protocols`.
        every: see `choose_protocols`.
        show: is given each row as soon as it is known.
        keep: is given all rows that are known, after each protocol.

    Raises:
        UserError: no such images or protocols, or some that do not suit each other; or too little disk.
    """
    jobs = plan(models, data, cache, names, every)
    check_space(list(chain.from_iterable(jobs.values())), cache)
    results: dict[str, list[Row]] = {}
    for name, of_model in jobs.items():
        print_once(f"{name}:")
        results[name] = []
        figures = defaultdict(list)
        for job in of_model:
            for rows in figures_of(job):
                for row in rows:
                    figures[row.protocol, row.setting].append(row)
                    named = replace(row, setting=f"{row.setting}, {job.group}") if job.group else row
                    results[name].append(named)
                    show(named)
                keep(results)
        if len(of_model) > 1 and is_first_process():
            results[name] += [mean_row(rows) for rows in figures.values() if len(rows) == len(of_model)]
            keep(results)
    return results


def plan(
    models: Mapping[str, Model], data: Data, cache: Path, names: Sequence[str] | None, every: bool
) -> dict[str, list[Job]]:
    """The jobs of each model: one, or one for each group of image sets that a section's `folders` names."""
    first = next(iter(models.values()))
    section = declaring_config(first.config, data.path).get(SECTION) or {}
    version = section.get("version", VERSION)
    if version != VERSION:
        raise UserError(f"the config asks for version {version} of the protocols: these are {VERSION}")
    declared = {}
    for group, path in (section.get("folders") or {"": data.path}).items():
        declared[group] = DeclaredSets(first.config, replace(data, path=path))

    jobs: dict[str, list[Job]] = {}
    for name, model in models.items():
        jobs[name] = []
        for group, sets in declared.items():
            # Without a path all models take the first one's images as that takes them.
            images = sets.of_model(model.config if data.path else first.config)
            if "per_class" in section:
                for image_set in images.values():
                    image_set.per_class = group in section["per_class"]
            if data.path and not model.is_random:  # a RUN's own images for tests are held out
                say_seen(model.config, images)
            features = OpenFeatures(model, images, cache)
            protocols = choose_protocols(section.get("protocols"), names, every, images, features)
            evaluated = Evaluated(features, images, model.backbone.device)
            jobs[name].append(Job(model, group, evaluated, protocols))
    return jobs


def say_seen(config: Config, images: Mapping[str, ImageSet]) -> None:
    """Print how many of the images to test on were in the pre-training, if the config is that of a RUN."""
    run = Run(Path(config.filename or "").parent)
    if not run.exists:
        return
    for name, image_set in images.items():
        seen = set() if name in LEARNT else pretrained_on(run, image_set.files)
        if seen:
            print_once(f"{len(seen)} of {len(image_set.files)} `{name}` images were {WARNING}")


def check_space(jobs: Sequence[Job], cache: Path) -> None:
    """Say how much will be written; raise UserError if the disk has less."""
    missing = {}  # two jobs may share features
    for job in jobs:
        for name, kinds in job.kinds.items():
            features = job.evaluated.features[name]
            for part in features.names(kinds):
                missing[features.folder, part] = features.missing_bytes(part)
    require_room(cache, sum(missing.values()), "features", "name another --cache, or fewer --protocols")


def figures_of(job: Job) -> Iterator[list[Row]]:
    """The rows of each protocol, after all features were taken.

    Raises:
        UserError: two rows have one name, by which a table's column knows them.
    """
    for name, kinds in job.kinds.items():
        fill_features(job.evaluated.features[name], job.model, kinds)
    require_few_left_out(job.evaluated.images.values())
    if not is_first_process():
        return
    names = set()
    for protocol in job.protocols:
        rows = protocol.rows(job.evaluated)
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
