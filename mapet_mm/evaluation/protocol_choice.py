"""Which protocols are run: those that a config declares, or all that the images suit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config

from mapet_mm.engine.runners.launch import read_config
from mapet_mm.evaluation.declared_images import SECTION
from mapet_mm.evaluation.image_sets import ImageSet
from mapet_mm.evaluation.protocol import PROTOCOLS, Protocol
from mapet_mm.evaluation.protocols.knn import NearestNeighbours
from mapet_mm.utils.config import type_name
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError


def choose_protocols(
    cfg: Config, data: str | None, names: list[str] | None, images: Mapping[str, ImageSet]
) -> list[Protocol]:
    """The declared protocols or, without a declaration, all that the images suit, with their defaults.

    Args:
        cfg: the model's config; its section `evaluation` may have `protocols`.
        data: another config, which declares them instead; a folder declares none.
        names: only these of the protocols.
        images: the image sets by name.

    Raises:
        UserError: no such protocol, or images that do not suit one that was asked for.
    """
    declared = read_config(data) if data and not Path(data).is_dir() else cfg
    configs = (declared.get(SECTION) or {}).get("protocols")
    asked = names is not None or configs is not None
    configs = default_protocols(cfg, images) if configs is None else configs
    if names:
        known = [type(protocol).__name__ for protocol in build_all(configs)]
        if unknown := [name for name in names if name not in known]:
            raise UserError(f"--protocols {unknown[0]}: one of {', '.join(known)}")
        configs = [config for config, name in zip(configs, known, strict=True) if name in names]
    protocols, lines = build_protocols(configs, images), []
    built = {type(protocol).__name__ for protocol in protocols}
    if missing := [name for one in configs if (name := type_name(one["type"])) not in built]:
        lines.append(f"no {', '.join(missing)}: of their images there are {', '.join(images)} only")
    if asked:
        for protocol in protocols:
            protocol.check(images)
    else:
        protocols, reasons = leave_out(protocols, images)
        lines += reasons
    if lines:
        print_once("\n".join(lines))
    return protocols


def default_protocols(cfg: Config, images: Mapping[str, ImageSet]) -> list[dict]:
    """All protocols, k-NN with the settings of the config's k-NN hook, or as many neighbours as there are."""
    PROTOCOLS.import_from_location()
    probe, number = cfg.get("knn_probe") or {}, len(images.get("train", ()))
    options = {name: probe[name] for name in ("k", "temperature") if name in probe}
    if "k" not in options and 0 < number < NearestNeighbours().k:
        options["k"] = number
        print_once(f"k-NN with k={number}, all `train` images")
    return [
        dict(type=name, **(options if kind is NearestNeighbours else {}))
        for name, kind in PROTOCOLS.module_dict.items()
    ]


def build_all(configs: Sequence[Mapping[str, Any]]) -> list[Protocol]:
    """All protocols, whatever images they need.

    Raises:
        UserError: no name, an unknown one, an option that the protocol does not have, or the same one twice.
    """
    built: list[Protocol] = []
    for config in configs:
        protocol = _build(config)
        if any(type(one) is type(protocol) and vars(one) == vars(protocol) for one in built):
            raise UserError(
                f"`protocols` have {type(protocol).__name__} twice with the same options: leave one out"
            )
        built.append(protocol)
    return built


def _build(config: Mapping[str, Any]) -> Protocol:
    PROTOCOLS.import_from_location()
    known = ", ".join(PROTOCOLS.module_dict)
    if not isinstance(config, Mapping):  # as --cfg-options makes it of any dict in a list
        raise UserError(f"`protocols` has an entry {config!r}: give it a dict(type=...) in a config")
    options = dict(config)
    if "type" not in options:
        raise UserError(f"`protocols` has an entry {options} without a `type`: name one of {known}")
    kind = type_name(options.pop("type"))
    if kind not in PROTOCOLS:
        raise UserError(f"there is no protocol {kind}: one of {known}")
    try:
        protocol = PROTOCOLS.get(kind)(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"protocol {kind}: {error}") from error
    if lost := sorted(options.keys() - vars(protocol).keys()):
        raise UserError(
            f"protocol {kind} has no attribute `{lost[0]}` of its option's name, by which stored results are "
            f"told apart: set self.{lost[0]} in its constructor"
        )
    return protocol


def build_protocols(configs: Sequence[Mapping[str, Any]], images: Mapping[str, ImageSet]) -> list[Protocol]:
    """The protocols whose image sets are there.

    Raises:
        UserError: see `build_all`.
    """
    return [protocol for protocol in build_all(configs) if set(protocol.needs) <= set(images)]


def leave_out(
    protocols: Sequence[Protocol], images: Mapping[str, ImageSet]
) -> tuple[list[Protocol], list[str]]:
    """The protocols that the images suit, and lines that say of the others why not.

    Args:
        protocols: whose image sets are there.
        images: the image sets by name.
    """
    suited: list[Protocol] = []
    others: dict[str, list[str]] = {}
    for protocol in protocols:
        try:
            protocol.check(images)
            suited.append(protocol)
        except UserError as error:
            others.setdefault(str(error), []).append(type(protocol).__name__)
    return suited, [f"no {', '.join(names)}: {reason}" for reason, names in others.items()]
