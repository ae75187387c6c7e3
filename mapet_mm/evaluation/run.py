"""Run protocols on a model: choose them, say what the features cost, take these, collect the rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config

from mapet_mm.evaluation import VERSION
from mapet_mm.evaluation.extraction import fill, open_bank, require_few_left_out
from mapet_mm.evaluation.features import FeatureBank
from mapet_mm.evaluation.image_sets import SECTION, ImageSet, declaring_config, read_image_sets
from mapet_mm.evaluation.models import Model
from mapet_mm.evaluation.protocol import Evaluated, Protocol, build_protocols, known_protocols
from mapet_mm.evaluation.rows import Row
from mapet_mm.utils.config import type_name
from mapet_mm.utils.disk import GIGABYTE, require_room
from mapet_mm.utils.dist import is_first_process, print_once
from mapet_mm.utils.errors import UserError

# Patch tokens of one protocol that a default evaluation may write; ImageNet's take 386 GB.
MOST_TOKENS = 20 * GIGABYTE


def evaluate_data(
    config: Config,
    model: Model,
    data: str | None,
    names: Sequence[str] | None,
    cache: Path,
    every: bool = False,
    show: Callable[[Row], None] = lambda row: None,
    labels: str | None = None,
    class_level: int | None = None,
) -> list[Row]:
    """The figures on one group of image sets, or on each of the several that a section's `folders` names.

    Rows of several have the group's name at the end; last come their means.

    Args:
        config: the model's; its section `evaluation` may name image sets and `protocols`.
        model: the backbone.
        data: another config, which names them instead, or a folder of images.
        names: these protocols instead, as they are declared if they are.
        cache: folder of all features.
        every: also the expensive protocols, if neither `names` nor the config chooses.
        show: is given each row as soon as it is known.
        labels: see `read_image_sets`.
        class_level: see `read_image_sets`.

    Raises:
        UserError: the section asks for another `version` of the protocols; see also `choose_protocols` and
            `evaluate`.
    """
    section = declaring_config(config, data).get(SECTION) or {}
    version = section.get("version", VERSION)
    if version != VERSION:
        raise UserError(f"the config asks for version {version} of the protocols: these are {VERSION}")
    folders = section.get("folders") or {"": data}
    asked = names is not None or "protocols" in section
    found = []
    groups = defaultdict(list)
    for name, folder in folders.items():
        images = read_image_sets(config, folder, labels, class_level)
        for image_set in images.values():
            image_set.per_class |= name in section.get("per_class", ())
        protocols = choose_protocols(config, data, names, images, every)

        def take(row: Row, group: str = name) -> None:
            groups[row.protocol, row.setting].append(row)
            named = replace(row, setting=f"{row.setting}, {group}") if group else row
            found.append(named)
            show(named)

        quick = not (asked or every)
        evaluate(model, images, protocols, cache, asked, take, quick)
    if len(folders) > 1:
        complete = [rows for rows in groups.values() if len(rows) == len(folders)]
        found += [mean_row(rows) for rows in complete]
    return found


def mean_row(rows: Sequence[Row]) -> Row:
    """The mean of one figure over several groups of image sets."""
    value = float(np.mean([row.value for row in rows]))
    units = sorted({row.unit for row in rows})
    setting = f"{rows[0].setting}, mean of {len(rows)} sets"
    return Row(rows[0].protocol, setting, value, " and ".join(units), detail=rows[0].detail)


def choose_protocols(
    config: Config,
    data: str | None,
    names: Sequence[str] | None,
    images: Mapping[str, ImageSet],
    every: bool = False,
) -> list[Protocol]:
    """The declared protocols or, without a declaration, those that the images suit and that take seconds.

    Args:
        config: the model's; its section `evaluation` may have `protocols`.
        data: another config, which declares them instead; a folder declares none.
        names: these protocols instead, as they are declared if they are.
        images: the image sets by name.
        every: without a declaration, all that the images suit.

    Raises:
        UserError: no such protocol, or images that do not suit one that was asked for.
        ImportError: a protocol needs scikit-learn, which is not installed.
    """
    declared = (declaring_config(config, data).get(SECTION) or {}).get("protocols")
    asked = names is not None or declared is not None
    if names:
        chosen = named_protocols(names, declared or [])
    elif declared is not None:
        chosen = declared
    elif every:
        chosen = [dict(type=name) for name in known_protocols()]
    else:
        chosen = quick_protocols(images)
    with_images = []
    for protocol in build_protocols(chosen):
        absent = set(protocol.needs) - set(images)
        if absent:
            print_once(f"no {type(protocol).__name__}: there are no `{min(absent)}` images")
        else:
            with_images.append(protocol)
    return suiting(with_images, lambda protocol: check_images(protocol, images), asked)


def named_protocols(names: Sequence[str], declared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The named protocols, each as it is declared, else with its defaults."""
    known = {*known_protocols(), *(type_name(one["type"]) for one in declared)}
    chosen = []
    for name in names:
        if name not in known:
            raise UserError(f"--protocols {name}: one of {', '.join(sorted(known))}")
        # A config may declare one several times, with other settings.
        chosen += [one for one in declared if type_name(one["type"]) == name] or [dict(type=name)]
    return chosen


def quick_protocols(images: Mapping[str, ImageSet]) -> list[dict[str, Any]]:
    """Configs of the protocols that take seconds after their features; says what is left out."""
    configs = []
    left_out = []
    for name, kind in known_protocols().items():
        if kind.by_default is not None:
            configs.append(dict(type=name, **kind.by_default))
        if kind.by_default != {} and set(kind.needs) <= set(images):
            part = ", ".join(kind.by_default or ())
            left_out.append(f"{name} (other {part})" if part else name)
    if left_out:
        print_once(f"left out, to be quick: {', '.join(left_out)}; --protocols NAME or --all runs them")
    return configs


def check_images(protocol: Protocol, images: Mapping[str, ImageSet]) -> None:
    """Raise an error, before any features are computed, if a protocol cannot run on these images."""
    if protocol.needs_scikit_learn:
        import sklearn  # noqa: F401  # the error names what to install
    protocol.check(images)


def suiting(protocols: Sequence[Protocol], check: Callable[[Protocol], None], asked: bool) -> list[Protocol]:
    """The protocols that pass a check; one that was asked for ends the run with its UserError."""
    passed = []
    for protocol in protocols:
        name = type(protocol).__name__
        try:
            check(protocol)
        except UserError as error:
            if asked:
                raise type(error)(f"{name}: {error}") from error
            print_once(f"no {name}: {error}")
        else:
            passed.append(protocol)
    return passed


def evaluate(
    model: Model,
    images: Mapping[str, ImageSet],
    protocols: Sequence[Protocol],
    cache: Path,
    asked: bool = True,
    show: Callable[[Row], None] = lambda row: None,
    quick: bool = False,
) -> list[Row]:
    """Figures of a model, with its features in the folder `cache`; the first process alone gets them.

    Args:
        model: the backbone.
        images: the image sets by name.
        protocols: of `choose_protocols`.
        cache: folder of all features.
        asked: True if somebody chose the protocols; else those are left out whose patch tokens take more
            than 20 GB, or whose features do not suit.
        show: is given each row as soon as it is known.
        quick: leave out protocols that take minutes on features of this size.

    Raises:
        UserError: the disk has too little space, features do not suit a protocol that was asked for, or two
            rows have one name, by which a table's column knows them.
    """
    names = {name for protocol in protocols for name in protocol.wanted(images)}
    banks = {name: open_bank(model, one, cache) for name, one in images.items() if name in names}
    protocols = suiting(protocols, lambda protocol: protocol.check_features(banks), asked)
    if not asked:
        protocols = suiting(protocols, lambda protocol: check_tokens(protocol, images, banks), asked)
    if quick:
        protocols = suiting(protocols, lambda protocol: protocol.check_quick(banks), asked)
    kinds = needed_kinds(protocols, images)
    check_space(banks, kinds, cache)
    for name, needed in kinds.items():
        banks[name] = fill(banks[name], model, images[name], needed)
    require_few_left_out(images.values())
    if not is_first_process():
        return []
    evaluated = Evaluated(banks, images, model.backbone.device)
    rows = {}
    for protocol in protocols:
        for row in protocol.run(evaluated):
            if row.name in rows:
                raise UserError(
                    f"`protocols` give two results `{row.name}`: run these protocols one at a time"
                )
            rows[row.name] = row
            show(row)
    return list(rows.values())


def needed_kinds(protocols: Sequence[Protocol], images: Mapping[str, ImageSet]) -> dict[str, list[str]]:
    """The kinds of features that some protocols take of each image set, by its name."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for protocol in protocols:
        for name, needed in protocol.wanted(images).items():
            kinds[name].update(needed)
    return {name: sorted(needed) for name, needed in kinds.items()}


def missing_bytes(banks: Mapping[str, FeatureBank], kinds: Mapping[str, Sequence[str]]) -> int:
    """Size on disk of features that are not in the cache yet."""
    return sum(banks[name].missing_bytes(kind) for name, needed in kinds.items() for kind in needed)


def check_tokens(
    protocol: Protocol, images: Mapping[str, ImageSet], banks: Mapping[str, FeatureBank]
) -> None:
    """Raise UserError if a protocol takes so many patch tokens that somebody should ask for it."""
    tokens = {name: ["tokens"] for name, kinds in protocol.wanted(images).items() if "tokens" in kinds}
    needed = missing_bytes(banks, tokens)
    if needed > MOST_TOKENS:
        name = type(protocol).__name__
        raise UserError(
            f"its patch tokens take {needed / GIGABYTE:.1f} GB on disk; `--protocols {name}` takes them"
        )


def check_space(banks: Mapping[str, FeatureBank], kinds: Mapping[str, Sequence[str]], cache: Path) -> None:
    """Say how much will be written; raise UserError if the disk has less."""
    remedy = "name another --cache, or fewer --protocols"
    require_room(cache, missing_bytes(banks, kinds), "features", remedy)
