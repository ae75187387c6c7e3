"""What `mapet-mm pretrain` holds out for its verdict: lists of images, and the config's entries for them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.config import Config

from mapet_mm.cli.options import PretrainOptions
from mapet_mm.datasets.classes import classes_of, read_labels  # noqa: F401
from mapet_mm.datasets.copies import first_copies
from mapet_mm.datasets.groups import draw_share, groups_in_turn, groups_of, shuffled_classes
from mapet_mm.evaluation.image_sets import SECTION
from mapet_mm.evaluation.metrics.neighbours import NEIGHBOURS, SHOTS, suiting_k, too_few_voters
from mapet_mm.structures import TokenStore
from mapet_mm.structures.names import read_lines
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.config import type_name
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.run_folder import (
    BEST,
    GROUPS,
    HELD_OUT,
    OTHER_GROUPS,
    OTHER_TESTED,
    OTHER_VOTING,
    TESTED,
    TRAINED,
    VOTING,
    Run,
)

SHARE = 0.1
MOST = 10_000  # images that are held out, and images that vote
# Groups that are held out, if this is at most the share of all images.
LEAST_GROUPS = 10
MOST_OF_GROUPS = 0.2
LEAST = 50  # images, for a verdict
# Tested images, or groups of them, with others of their class to vote, for a verdict by labels.
FEWEST = 5
FEWEST_TESTED = 100  # images, however short the training
# Images that vote, in the verdict and during the training, so that k is the same in both.
FEWEST_VOTING = 10 * NEIGHBOURS
PROBES = 10  # of k-NN, during the training
MOST_PROBED = 2_000


def write_lists(args: PretrainOptions, names: Sequence[str]) -> list[str]:
    """Hold images out, write the lists of a verdict into RUN, and return the lines that say so."""
    if args.no_verdict:
        return ["verdict: none (--no-verdict)"]
    if len(names) < LEAST:
        return [f"verdict: none, which would take {LEAST} images"]
    groups, about_groups = groups_of(args.groups, names)
    classes, words = classes_of(args.labels, names, args.class_level, groups)
    split = split_images(names, args.images, classes, groups, args.seed)
    if not split.held_out:
        reason = "too few images have a class"
        if groups:
            reason = f"each group is too large to be held out; {about_groups}"
        return [f"verdict: none, because {reason}"]
    run = Run(args.out)
    num_passed = args.epochs * len(names)
    images = verdict_images(split.voters, split.testable, classes, num_passed, args.seed, groups)
    for file, listed in ((TRAINED, split.trained), (HELD_OUT, split.held_out)):
        replace_file(run / file, "\n".join(sorted(listed)).encode())
    images.write(run, VOTING, TESTED)
    how_many = f"{len(split.held_out)} images"
    if split.num_copies:
        whither = "are neither tested nor vote" if groups else "stay on their side"
        words += f"; copies of other images, which {whither}: {split.num_copies}"
    if groups:
        write_groups(run / GROUPS, groups)
        how_many += f", {len({groups[name] for name in split.held_out})} whole groups,"
        words = f"{about_groups}; {words}"
    return [
        f"verdict: {how_many} are held out of the pre-training, {images.words}; {words} "
        "(--no-verdict trains on all)"
    ]


@dataclass(frozen=True)
class Split:
    """The images that are trained on and those that are held out, and whom of them a verdict may take."""

    trained: Sequence[str]
    held_out: Sequence[str]
    voters: Collection[str]  # of the trained ones
    testable: Sequence[str]  # of the held-out ones, in random order
    num_copies: int  # of other images


def split_images(
    names: Sequence[str],
    folder: Path,
    classes: Mapping[str, str] | None,
    groups: Mapping[str, str] | None,
    seed: int,
) -> Split:
    """Hold images out: none if each group is too large.

    Of several copies of an image one is drawn, and the others go where it goes; but groups stay whole.
    """
    original = originals(names, folder, classes)
    distinct = {name for name in names if original[name] == name}
    drawn = hold_out(distinct.intersection(classes or distinct), classes, seed, groups)
    together = groups or original
    out = {together[name] for name in drawn}
    trained = [name for name in names if together[name] not in out]
    held_out = [name for name in names if together[name] in out]
    seen = {original[name] for name in trained}
    testable = [name for name in drawn if name not in seen]
    return Split(trained, held_out, distinct.intersection(trained), testable, len(names) - len(distinct))


def write_groups(file: Path, groups: Mapping[str, str]) -> None:
    """Write the group of each image, as `groups_of` reads it."""
    replace_file(file, "\n".join(f"{name}\t{group}" for name, group in groups.items()).encode())


def originals(names: Sequence[str], folder: Path, classes: Mapping[str, str] | None) -> dict[str, str]:
    """For each image the one that it is a copy of, or itself; of copies, one with a class comes first."""
    with_class_first = sorted(names, key=lambda name: (name not in (classes or {}), name))
    first = first_copies([os.path.join(folder, name) for name in with_class_first])
    return {name: with_class_first[index] for name, index in zip(with_class_first, first, strict=True)}


def require_same_classes(args: PretrainOptions, recorded: Mapping[str, Any]) -> None:
    """Raise UserError if a RUN is continued with classes or groups that it was made without.

    Args:
        args: of this start.
        recorded: the options of the first one.
    """
    if not args.run.held_out:
        return
    if args.labels and not recorded.get("labels"):
        wish = ["--labels", str(args.labels)]
    elif args.class_level not in (None, recorded.get("class_level")):
        wish = ["--class-level", str(args.class_level or "none")]
    elif args.groups and not recorded.get("groups"):
        wish = ["--groups", args.groups]
    else:
        return
    verdict = shlex.join(["mapet-mm", "verdict", str(args.out), *wish])
    raise UserError(
        f"{args.out} was made without {' '.join(wish)}, and needs no other training for it: leave that out, "
        f"and run `{verdict}` at the end"
    )


@dataclass(frozen=True)
class VerdictImages:
    """The images that a verdict takes: those that vote, with their classes, and those that are tested."""

    voting: Sequence[str]
    tested: Sequence[str]
    classes: Mapping[str, str] | None
    words: str

    def write(self, run: Run, voting: str, tested: str) -> None:
        """Write both lists into RUN, of lines `name class` if there are classes."""
        classes = self.classes or {}
        numbers = {name: number for number, name in enumerate(sorted(set(classes.values())))}
        for file, listed in ((voting, self.voting), (tested, self.tested)):
            lines = [f"{name} {numbers[classes[name]]}" if classes else name for name in sorted(listed)]
            replace_file(run / file, "\n".join(lines).encode())


def verdict_images(
    trained: Collection[str],
    held_out: Sequence[str],
    classes: Mapping[str, str] | None,
    num_passed: int,
    seed: int,
    groups: Mapping[str, str] | None = None,
) -> VerdictImages:
    """Choose the images of a verdict.

    Each passes two or three networks forward; in a step of training one, forward and backward, in two
    streams. A tenth of the training's images is thus less than a tenth of its time. A short training's
    verdict takes longer: if there are as many, 100 images are tested, and 200 and ten of each class vote.
    Where only some are taken, each group has its turn.

    Args:
        trained: names of images that can vote.
        held_out: names of images that can be tested, in random order.
        classes: of the images that have one.
        num_passed: images that the training passes.
        seed: of the draw.
        groups: of the images, if there are any.
    """
    budget = int(SHARE * num_passed)
    measured = groups_in_turn(held_out, groups)[: max(FEWEST_TESTED, budget // 2)]
    why = ""
    if classes:
        tested = [name for name in measured if name in classes]
        floor = max(FEWEST_VOTING, SHOTS * len(set(classes.values())))
        most = min(MOST, max(floor, budget - len(tested)))
        voting = voting_images([name for name in trained if name in classes], classes, most, seed, groups)
        voted = {classes[name] for name in voting}
        tested = [name for name in tested if classes[name] in voted]
        num_groups = len({groups[name] for name in tested}) if groups else len(tested)
        if num_groups < FEWEST:
            why = ", because too few have images to test and others to vote"
        elif too_few_voters(len(voting), len(voted)):
            why = f", because {len(voting)} images to vote are too few for {len(voted)} classes"
        else:
            words = f"{len(tested)} of them tested, {len(voting)} others vote (k = {suiting_k(len(voting))})"
            return VerdictImages(voting, tested, classes, words)
    return VerdictImages([], measured, None, f"{len(measured)} of them tested, measures without labels{why}")


def hold_out(
    names: Collection[str],
    classes: Mapping[str, str] | None,
    seed: int,
    groups: Mapping[str, str] | None = None,
) -> list[str]:
    """A tenth of the images, at most 10,000, in random order; see `draw_share`.

    Of few groups more are held out, so that an interval over them says something: ten, or a fifth.
    """
    share = min(SHARE, MOST / len(names))
    if groups:
        num_groups = len({groups[name] for name in names})
        share = max(share, min(MOST_OF_GROUPS, LEAST_GROUPS / num_groups))
    return draw_share(names, share, seed, classes, groups)


def voting_images(
    names: Sequence[str],
    classes: Mapping[str, str],
    most: int,
    seed: int,
    groups: Mapping[str, str] | None = None,
) -> list[str]:
    """At most so many images: first ten of each class, then in proportion to the classes."""
    ranked = []
    for of_class in shuffled_classes(names, classes, seed):
        for rank, name in enumerate(groups_in_turn(of_class, groups)):
            ranked.append((rank >= SHOTS, rank / len(of_class) if rank >= SHOTS else rank, name))
    return [name for *_, name in sorted(ranked)[:most]]


def add_entries(cfg: Config, run: Run) -> Config:
    """Let a config train without the held-out images and validate on them, and name the verdict's images."""
    if not run.held_out:
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
    loader_of_all = dict(options, dataset=dict(dataset, pipeline=plain))
    sets = image_sets(loader_of_all, run, VOTING, TESTED, GROUPS)
    cfg[SECTION] = sets
    num_voting = len(read_lines(run / VOTING))
    if num_voting:
        num_trained = len(read_lines(run / TRAINED))
        probe: dict[str, Any] = dict(type="mapet_mm.KNNProbeHook", interval=interval)
        probe["k"] = suiting_k(num_voting)
        probe["most_images"] = max(FEWEST_VOTING, min(MOST_PROBED, num_trained * interval // 20))
        for name in ("train", "val"):
            probe[f"{name}_dataloader"] = sets[name]
        cfg.custom_hooks = [*cfg.custom_hooks, probe]
    return cfg


def image_sets(loader: Mapping[str, Any], run: Run, voting: str, tested: str, groups: str) -> dict[str, Any]:
    """The image sets of two lists in a RUN, of which the first is empty without labels.

    Their groups are in a third file, if it is there.
    """
    has_classes = bool((run / voting).read_text())
    sets = {"train": voting, "val": tested} if has_classes else {"val": tested}
    made: dict[str, Any] = {}
    for name, file in sets.items():
        dataset = dict(loader["dataset"], ann_file=file, with_label=has_classes)
        if (run / groups).exists():
            dataset["groups"] = groups
        made[name] = dict(loader, dataset=dataset)
    if not has_classes:
        made["view"] = dict(type="RandomFlip", prob=1.0)
    return made


def takes_other_classes(
    model: str,
    data: str | None,
    labels: Path | None,
    class_level: int | None,
    groups: str | None = None,
) -> bool:
    """True if classes or groups are asked for that are to replace those of a RUN's held-out images."""
    asked = any(source is not None for source in (labels, class_level, groups))
    return asked and data is None and Path(model, TESTED).is_file()


def with_other_classes(
    cfg: Config, run: Run, labels: Path | None, class_level: int | None, groups: str | None = None
) -> Config:
    """The config of a RUN with classes or groups of the held-out images that its pre-training did not take.

    Writes their lists into RUN, where the next evaluation with other ones replaces them. Of groups with
    images on both sides, half are tested, and the others vote.
    """
    trained, held_out = (read_lines(run / file) for file in (TRAINED, HELD_OUT))
    if groups is None and (run / GROUPS).exists():
        groups = str(run / GROUPS)
    group_of, about_groups = groups_of(groups, [*trained, *held_out])
    classes, words = classes_of(labels, [*trained, *held_out], class_level, group_of)
    seed = cfg.randomness.seed
    (in_random_order,) = shuffled_classes(held_out, None, seed)
    num_passed = cfg.train_cfg.max_epochs * (len(trained) + len(held_out))
    (run / OTHER_GROUPS).unlink(missing_ok=True)
    if group_of:
        write_groups(run / OTHER_GROUPS, group_of)
        words = f"{about_groups}; {words}"
        on_both_sides = {group_of[name] for name in trained} & {group_of[name] for name in held_out}
        divided = [name for name in trained if group_of[name] in on_both_sides]
        tested = {group_of[name] for name in draw_share(divided, 0.5, seed, classes, group_of)}
        voting = on_both_sides - tested
        trained = [name for name in trained if group_of[name] not in tested]
        in_random_order = [name for name in in_random_order if group_of[name] not in voting]
        if on_both_sides:
            words += (
                f"; {len(on_both_sides)} have images that were trained on, and {len(voting)} of them vote"
            )
    images = verdict_images(trained, in_random_order, classes, num_passed, seed, group_of)
    images.write(run, OTHER_VOTING, OTHER_TESTED)
    drop_skipped(run, OTHER_VOTING, OTHER_TESTED)
    print_once(f"{images.words}; {words}")
    loader = cfg[SECTION].val.to_dict()
    loader["dataset"]["type"] = "mapet_mm.ImageFolder"
    loader["dataset"].pop("groups", None)
    cfg[SECTION] = image_sets(loader, run, OTHER_VOTING, OTHER_TESTED, OTHER_GROUPS)
    return cfg


def choice_words(model: str, checkpoint: str | None, data: str | None) -> str:
    """A sentence about weights of a RUN that were chosen on the images of its verdict; none about others."""
    on_chosen = data is None and Path(model, TESTED).is_file()
    if not on_chosen or not checkpoint or Path(checkpoint).name != BEST:
        return ""
    return "These weights were chosen by k-NN on images that are tested here, so their figures are too good."


def drop_skipped(run: Run, voting: str = VOTING, tested: str = TESTED) -> None:
    """Leave the images out of the verdict's lists that RUN's token store skipped: they cannot be decoded.

    Images of a class that then has none to vote are not tested.
    """
    skipped = TokenStore.open(run.tokens).skipped
    kept = {}
    for file in (voting, tested):
        kept[file] = [
            line
            for line in read_lines(run / file)
            if line not in skipped and line.rpartition(" ")[0] not in skipped
        ]
    if kept[voting]:
        voted = {line.rpartition(" ")[2] for line in kept[voting]}
        kept[tested] = [line for line in kept[tested] if line.rpartition(" ")[2] in voted]
    for file, lines in kept.items():
        replace_file(run / file, "\n".join(lines).encode())
