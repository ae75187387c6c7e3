"""What `mapet-mm pretrain` holds out for its verdict: lists of images, and the config's entries for them."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config

from mapet_mm.structures import TokenStore
from mapet_mm.structures.image_names import read_lines
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.config import type_name
from mapet_mm.utils.errors import UserError, reason_of

TRAINED = "train.txt"  # images that are trained on
HELD_OUT = "held_out.txt"  # the others
# Of these, the images that the verdict takes, with labels if there are any.
VOTING = "verdict_train.txt"
TESTED = "verdict_val.txt"
SHARE = 0.1
MOST = 10_000  # images that are held out, and images that vote
LEAST = 50  # images, for a verdict
FEWEST = 5  # tested images with others of their class to vote, for a verdict by labels
SHOTS = 10  # labels a class
PROBES = 10  # of k-NN, during the training
MOST_PROBED = 2_000


def write_lists(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Hold images out, write the lists of a verdict into RUN, and return the lines that say so."""
    if args.no_verdict:
        return ["verdict: none (--no-verdict)"]
    if len(names) < LEAST:
        return [f"verdict: none, which would take {LEAST} images"]
    classes, words = classes_of(args.labels, names)
    held_out = hold_out(names, classes, args.seed)
    trained = sorted(set(names) - set(held_out))
    # Each image passes two or three networks forward; in a step of training one, forward and backward, in two
    # streams. A tenth of the training's images is thus less than a tenth of its time.
    budget = max(20, int(SHARE * args.epochs * len(names)))
    tested = held_out[: max(10, budget // 2)]
    voting = []
    if classes:
        voting = voting_images(trained, classes, min(MOST, max(10, budget - len(tested))), args.seed)
        voted = {classes[name] for name in voting}
        with_votes = [name for name in tested if classes[name] in voted]
        if len(with_votes) >= FEWEST:
            tested = with_votes
        else:
            classes = None
            voting = []
            words += ", of which too few have images to test and others to vote"
    numbers = {name: number for number, name in enumerate(sorted(set((classes or {}).values())))}
    for file, listed in ((TRAINED, trained), (HELD_OUT, sorted(held_out))):
        replace_file(args.out / file, "\n".join(listed).encode())
    for file, listed in ((VOTING, voting), (TESTED, tested)):
        lines = [f"{name} {numbers[classes[name]]}" if classes else name for name in sorted(listed)]
        replace_file(args.out / file, "\n".join(lines).encode())
    taken = f"{len(voting)} others vote" if classes else "measures without labels"
    return [
        f"verdict: {len(held_out)} images are held out of the pre-training, {len(tested)} of them tested, "
        f"{taken}; {words} (--no-verdict trains on all)"
    ]


def classes_of(labels: Path | None, names: Sequence[str]) -> tuple[dict[str, str] | None, str]:
    """The class of each image, by a file or by its folder; None if the images have none. And words for it."""
    if labels:
        classes = read_labels(labels, names)
        return classes, f"{len(set(classes.values()))} classes, of {labels}"
    classes = {name: Path(name).parent.name for name in names}
    counts = Counter(classes.values())
    if "" in counts or sum(count > 1 for count in counts.values()) < 2:
        return None, "there is no folder per class (--labels FILE names classes)"
    return classes, f"{len(counts)} classes, by the folders' names"


def read_labels(file: Path, names: Sequence[str]) -> dict[str, str]:
    """The class of each image in a file of lines `name<tab or space>class`.

    Raises:
        UserError: no such text, a line without a class, or images without a line.
    """
    try:
        lines = file.read_text().split("\n")  # with the empty ones, which count
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--labels {file}: {reason_of(error)}; name a text of lines `name class`") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, _, label = line.rpartition("\t" if "\t" in line else " ")
        if not name:
            raise UserError(f"{file}, line {number}: `{line}` is not a name and a class")
        found[name.strip(" \t")] = label.strip()
    missing = [name for name in names if name not in found]
    if missing:
        raise UserError(
            f"{file} has no class for {len(missing)} of {len(names)} images, such as {missing[0]}: add them, "
            "by names relative to the folder of images"
        )
    classes = {name: found[name] for name in names}
    if len(set(classes.values())) < 2:
        raise UserError(f"{file} names one class only: a verdict by labels takes two")
    return classes


def shuffled_classes(names: Sequence[str], classes: Mapping[str, str] | None, seed: int) -> list[list[str]]:
    """The images of each class in random order; all in one group without classes."""
    groups = defaultdict(list)
    for name in sorted(names):
        groups[(classes or {}).get(name)].append(name)
    random = np.random.default_rng(seed)
    return [[group[index] for index in random.permutation(len(group))] for _, group in sorted(groups.items())]


def hold_out(names: Sequence[str], classes: Mapping[str, str] | None, seed: int) -> list[str]:
    """A tenth of the images, at most 10,000, in random order: as near to that share of each class as can be.

    What rounding takes from a class it gives to the next: of small classes, every second or third has one.
    """
    share = min(SHARE, MOST / len(names))
    chosen = []
    end = 0
    for group in shuffled_classes(names, classes, seed):
        start = end
        end += len(group)
        chosen += group[: round(share * end) - round(share * start)]
    order = np.random.default_rng(seed).permutation(len(chosen))
    return [chosen[index] for index in order]


def voting_images(names: Sequence[str], classes: Mapping[str, str], most: int, seed: int) -> list[str]:
    """At most so many images: first ten of each class, then in proportion to the classes."""
    ranked = []
    for group in shuffled_classes(names, classes, seed):
        for rank, name in enumerate(group):
            ranked.append((rank >= SHOTS, rank / len(group) if rank >= SHOTS else rank, name))
    return [name for *_, name in sorted(ranked)[:most]]


def add_entries(cfg: Config, args: argparse.Namespace) -> Config:
    """Let a config train without the held-out images and validate on them, and name the verdict's images."""
    if not (args.out / HELD_OUT).exists():
        return cfg
    loader = cfg.train_dataloader
    dataset = loader.dataset.to_dict()
    steps = [step for step in dataset["pipeline"] if type_name(step["type"]) != "ColorJitter"]
    plain = [step for step in steps[:-1] if type_name(step["type"]) != "LoadTokenGrid"]
    plain.append(dict(type="PackInputs"))
    loader.dataset.ann_file = TRAINED
    options = {key: loader[key] for key in ("batch_size", "num_workers", "persistent_workers")}

    # Validate: token accuracy.
    interval = max(1, cfg.train_cfg.max_epochs // PROBES)
    cfg.train_cfg.val_interval = interval
    cfg.val_cfg = dict()
    cfg.val_evaluator = dict(type="mapet_mm.TokenAccuracy")
    ordered = dict(type="DefaultSampler", shuffle=False)
    held_out = dict(dataset, ann_file=HELD_OUT, pipeline=steps)
    cfg.val_dataloader = dict(options, sampler=ordered, dataset=held_out)

    # The images of the verdict, and k-NN on some of them during the training.
    has_classes = bool((args.out / VOTING).read_text())
    sets = {"train": VOTING, "val": TESTED} if has_classes else {"val": TESTED}
    loaders = {}
    for name, file in sets.items():
        listed = dict(dataset, ann_file=file, with_label=has_classes, pipeline=plain)
        loaders[name] = dict(options, dataset=listed)
    cfg.evaluation = dict(loaders) if has_classes else dict(loaders, view=dict(type="RandomFlip", prob=1.0))
    if has_classes:
        num_trained = len(read_lines(args.out / TRAINED))
        probe: dict[str, Any] = dict(type="mapet_mm.KNNProbeHook", interval=interval)
        probe["most_images"] = max(20, min(MOST_PROBED, num_trained * interval // 20))
        for name, own in loaders.items():
            probe[f"{name}_dataloader"] = own
        cfg.custom_hooks = [*cfg.custom_hooks, probe]
    return cfg


def drop_skipped(run: Path) -> None:
    """Leave the images out of the verdict's lists that RUN's token store skipped: they cannot be decoded.

    Images of a class that then has none to vote are not tested.
    """
    skipped = TokenStore.open(run / "tokens").skipped
    kept = {}
    for file in (VOTING, TESTED):
        kept[file] = [
            line
            for line in read_lines(run / file)
            if line not in skipped and line.rpartition(" ")[0] not in skipped
        ]
    if kept[VOTING]:
        voted = {line.rpartition(" ")[2] for line in kept[VOTING]}
        kept[TESTED] = [line for line in kept[TESTED] if line.rpartition(" ")[2] in voted]
    for file, lines in kept.items():
        replace_file(run / file, "\n".join(lines).encode())
