"""What an evaluation is: protocols that turn features into rows of a table, and pictures of them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from matplotlib.figure import Figure
from mmengine.registry import Registry

from mapet_mm import __version__
from mapet_mm.evaluation.extraction import take_features
from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import ImageSet, check_labels
from mapet_mm.evaluation.models import Checkpoint
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.dist import is_first_process
from mapet_mm.utils.errors import UserError
from mapet_mm.visualization.report import Column, Section, Table

# Raised when what protocols share changes, so that stored results are not taken; their own files are known by
# what they hold.
RESULTS = 3
PROTOCOLS = Registry("evaluation protocol", scope="mapet_mm", locations=["mapet_mm.evaluation.protocols"])


@dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        protocol: as the table calls it: 'k-NN'.
        setting: on what: 'class token'.
        value: the figure.
        unit: with its meaning: 'top-1, %'.
        spread: standard deviation over draws.
        note: what was chosen: 'layer 3, rate 0.1'.
        detail: whether it stands in the JSON file only.
    """

    protocol: str
    setting: str
    value: float
    unit: str = "top-1, %"
    spread: float | None = None
    note: str = ""
    detail: bool = False

    @property
    def name(self) -> str:
        """What a table's `metric` and a log call it."""
        return f"{self.protocol}, {self.setting}"

    @property
    def key(self) -> tuple[str, str, str]:
        """What the figures of several checkpoints have in common."""
        return self.protocol, self.setting, self.unit


@dataclass(frozen=True)
class Evaluated:
    """A checkpoint with its features, as protocols get them.

    Args:
        checkpoint: with the backbone; None where features alone are evaluated.
        features: by the name of the image set.
        images: the image sets by name: datasets, labels, names of classes.
        device: where to compute.
    """

    checkpoint: Checkpoint | None
    features: Mapping[str, Features]
    images: Mapping[str, ImageSet]
    device: torch.device


class Protocol:
    """One way of judging features. Options are arguments of the constructor, kept under their names.

    Subclasses are registered in `PROTOCOLS`; `needs` names their image sets, with the kinds of features.
    """

    needs: ClassVar[Mapping[str, Sequence[str]]] = {"train": ["pooled"], "val": ["pooled"]}

    def check(self, images: Mapping[str, ImageSet]) -> None:
        """Raise UserError if the images, of which no features are taken yet, are not what it takes."""

    def run(self, evaluated: Evaluated) -> list[Row]:
        """The figures of one checkpoint."""
        raise NotImplementedError

    def identity(self, evaluated: Evaluated) -> list[str]:
        """What decides the figures beside the protocol, its options and the features."""
        return []

    def sections(self, evaluated: Evaluated, rows: Sequence[Row]) -> list[Section]:
        """Pictures for the page, of the features and of this protocol's rows."""
        return []


class Classification(Protocol):
    """A protocol that learns the classes of `train` and is tested on `val`."""

    def check(self, images: Mapping[str, ImageSet]) -> None:
        """See `check_labels`."""
        check_labels(images["train"], images["val"])

    def labelled(self, evaluated: Evaluated) -> tuple[Features, Features, int]:
        """Features of `train` and `val`, and the number of classes."""
        num_classes = check_labels(evaluated.images["train"], evaluated.images["val"])
        return evaluated.features["train"], evaluated.features["val"], num_classes


def evaluate(
    checkpoint: Checkpoint,
    images: Mapping[str, ImageSet],
    protocols: Sequence[Protocol],
    cache: Path,
    amp: bool | None = None,
) -> tuple[Evaluated, list[list[Row]]]:
    """A checkpoint's features and, in the first process, the rows of each protocol, cached where they were.

    Args:
        checkpoint: the backbone with its weights.
        images: the image sets by name.
        protocols: what to run, in this order.
        cache: folder of features and results.
        amp: see `take_features`.

    Raises:
        UserError: two rows of one name (see `tell_apart`).
    """
    kinds: dict[str, list[str]] = {}
    for protocol in protocols:
        for name, needed in protocol.needs.items():
            kinds[name] = sorted({*kinds.get(name, []), *needed})
    features = {
        name: take_features(checkpoint, images[name], cache, needed, amp) for name, needed in kinds.items()
    }
    evaluated = Evaluated(checkpoint, features, images, checkpoint.backbone.device)
    if not is_first_process():  # the first process has the table
        return evaluated, []
    return evaluated, tell_apart(protocols, [_rows(protocol, evaluated, cache) for protocol in protocols])


def tell_apart(protocols: Sequence[Protocol], rows: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Rows of which no two have one name: where two would, those of other options than the default name them.

    Args:
        protocols: as they were run.
        rows: of each protocol.

    Raises:
        UserError: rows that have one name with all options in it.
    """
    taken = Counter(row.name for some in rows for row in some)
    told = []
    for protocol, some in zip(protocols, rows, strict=True):
        options = _options(protocol) if any(taken[row.name] > 1 for row in some) else ""
        told.append([replace(row, protocol=f"{row.protocol}{options}") for row in some])
    twice = [name for name, count in Counter(row.name for some in told for row in some).items() if count > 1]
    if twice:
        raise UserError(
            f"`protocols` give two results of the name `{twice[0]}`: leave one out, or change an option"
        )
    return told


def _options(protocol: Protocol) -> str:
    """The options that are not the default, for a row's name."""
    default = vars(type(protocol)())
    changed = [f"{name}={value}" for name, value in vars(protocol).items() if value != default[name]]
    return f" ({', '.join(changed)})" if changed else ""


def say_what_lacks(name: str, poolings: Sequence[str], features: Features) -> None:
    """Say that a protocol gives no rows because the backbone does not have its features."""
    has = " and ".join(features.poolings)
    print(f"no {name} on {' or '.join(poolings)}: the backbone gives {has} only", flush=True)


def _rows(protocol: Protocol, evaluated: Evaluated, cache: Path) -> list[Row]:
    known = [type(protocol).__name__, {k: str(v) for k, v in vars(protocol).items()}, __version__, RESULTS]
    known += [evaluated.features[name].folder.name for name in protocol.needs]
    known += [*protocol.identity(evaluated), _source(protocol)]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
    file = cache / "results" / f"{type(protocol).__name__}-{digest}.json"
    if file.is_file() and (stored := json.loads(file.read_text())):
        return [Row(**row) for row in stored]
    # No rows are not kept: what could not be measured now, as without tokens, may be measured later.
    if rows := protocol.run(evaluated):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_json(file, [asdict(row) for row in rows])
    return rows


def _source(protocol: Protocol) -> str:
    """Digest of the file that defines a protocol, so that one that is being written is run anew."""
    file = getattr(sys.modules[type(protocol).__module__], "__file__", None)  # a notebook has none
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def results_table(results: Mapping[str, Sequence[Row]]) -> Table:
    """One column of figures a checkpoint, one line a figure.

    Args:
        results: the rows by the checkpoint's name.
    """
    keys = {row.key: None for rows in results.values() for row in rows if not row.detail}
    columns = [Column("protocol"), Column("on"), Column("figure"), *(Column(name) for name in results)]
    found = {name: {row.key: row for row in rows} for name, rows in results.items()}
    lines = [[*key, *(_cell(found[name].get(key)) for name in results)] for key in keys]
    return Table(columns, lines)


def side_by_side(sections: Sequence[Section]) -> list[Section]:
    """Sections with the pictures of all checkpoints under each heading, in the order of the first."""
    merged: dict[tuple[str, str], list[Figure]] = {}
    for section in sections:
        merged.setdefault((section.title, section.caption), []).extend(section.figures)
    return [Section(*heading, figures) for heading, figures in merged.items()]


def _cell(row: Row | None) -> str | None:
    if row is None:
        return None
    spread = "" if row.spread is None else f" ± {row.spread:.1f}"
    return f"{row.value:.{1 if abs(row.value) >= 1 else 3}f}{spread}" + (f" ({row.note})" if row.note else "")
