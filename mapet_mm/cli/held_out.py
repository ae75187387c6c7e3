"""What `mapet-mm pretrain` holds out, and which images its verdict takes: lists of names in RUN."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mapet_mm.cli.options import PretrainOptions
from mapet_mm.datasets.groups import draw_share, groups_in_turn, shuffled_classes
from mapet_mm.datasets.labels import Labels, split_images
from mapet_mm.evaluation.metrics.neighbours import NEIGHBOURS, SHOTS, suiting_k, too_few_voters
from mapet_mm.evaluation.protocols.regression import require_scikit_learn
from mapet_mm.structures import TokenStore
from mapet_mm.structures.names import read_lines
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.run_folder import (
    BEST,
    GROUPS,
    HELD_OUT,
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


def write_lists(args: PretrainOptions, labels: Labels) -> str:
    """Hold images out, write the lists of a verdict into RUN, and return the line that says so.

    Of several copies of an image one is drawn, and the others go where it goes; but groups stay whole.
    """
    if args.no_verdict:
        return "verdict: none (--no-verdict)"
    if len(labels.names) < LEAST:
        return f"verdict: none, which would take {LEAST} images"
    original = labels.originals(args.images)
    distinct = {name for name in labels.names if original[name] == name}
    drawn = draw_held_out(distinct.intersection(labels.classes or distinct), labels, args.seed)
    split = split_images(labels.names, labels.groups or original, drawn)
    if not split.held_out:
        reason = "too few images have a class"
        if labels.groups:
            reason = f"each group is too large to be held out; {labels.about_groups}"
        return f"verdict: none, because {reason}"

    for file, listed in ((TRAINED, split.trained), (HELD_OUT, split.held_out)):
        write_lines(args.run / file, sorted(listed))
    voters = distinct.intersection(split.trained)
    trained_on = {original[name] for name in split.trained}  # where groups part copies
    testable = [name for name in drawn if name not in trained_on]
    chosen = write_verdict_lists(args.run.folder, labels, voters, testable, args.epochs, args.seed)
    if read_lines(args.run / VOTING):
        require_scikit_learn()  # which the verdict takes, after the training

    how_many = f"{len(split.held_out)} images"
    if labels.groups:
        write_groups(args.run / GROUPS, labels)
        how_many += f", {len({labels.groups[name] for name in split.held_out})} whole groups,"
    about = labels.about
    num_copies = len(labels.names) - len(distinct)
    if num_copies:
        whither = "are neither tested nor vote" if labels.groups else "stay on their side"
        about += f"; copies of other images, which {whither}: {num_copies}"
    return (
        f"verdict: {how_many} are held out of the pre-training, {chosen}; {about} "
        "(--no-verdict trains on all)"
    )


def draw_held_out(names: Collection[str], labels: Labels, seed: int) -> list[str]:
    """A tenth of the images, at most 10,000, in random order; see `draw_share`.

    Of few groups more are held out, so that an interval over them says something: ten, or a fifth.
    """
    share = min(SHARE, MOST / len(names))
    if labels.groups:
        num_groups = len({labels.groups[name] for name in names})
        share = max(share, min(MOST_OF_GROUPS, LEAST_GROUPS / num_groups))
    return draw_share(names, share, seed, labels.classes, labels.groups)


def write_verdict_lists(
    folder: Path,
    labels: Labels,
    voters: Collection[str],
    testable: Sequence[str],
    epochs: int,
    seed: int,
) -> str:
    """Choose the images of a verdict and write their lists, of lines `name class` if there are classes.

    Each passes two or three networks forward; in a step of training one, forward and backward, in two
    streams. A tenth of the training's images is thus less than a tenth of its time. A short training's
    verdict takes longer: if there are as many, 100 images are tested, and 200 and ten of each class vote.
    Where only some are taken, each group has its turn.

    Args:
        folder: where they are written.
        labels: of the images.
        voters: names of images that can vote.
        testable: names of images that can be tested, in random order.
        epochs: of the training.
        seed: of the draw.

    Returns:
        Words for the choice.
    """
    budget = int(SHARE * (epochs * len(labels.names)))
    tested = groups_in_turn(testable, labels.groups)[: max(FEWEST_TESTED, budget // 2)]
    words = f"{len(tested)} of them tested, measures without labels"
    if labels.classes:
        with_class = [name for name in tested if name in labels.classes]
        floor = max(FEWEST_VOTING, SHOTS * len(set(labels.classes.values())))
        most = min(MOST, max(floor, budget - len(with_class)))
        voting = voting_images(voters, labels, most, seed)
        voted = {labels.classes[name] for name in voting}
        with_class = [name for name in with_class if labels.classes[name] in voted]
        reason = want_of_voters(len(voting), len(voted), with_class, labels)
        if not reason:
            numbers = {name: number for number, name in enumerate(sorted(set(labels.classes.values())))}
            for file, listed in ((VOTING, voting), (TESTED, with_class)):
                lines = [f"{name} {numbers[labels.classes[name]]}" for name in sorted(listed)]
                write_lines(folder / file, lines)
            k = suiting_k(len(voting))
            return f"{len(with_class)} of them tested, {len(voting)} others vote (k = {k})"
        words += f", because {reason}"
    for file, listed in ((VOTING, []), (TESTED, tested)):
        write_lines(folder / file, sorted(listed))
    return words


def want_of_voters(num_voting: int, num_voted: int, tested: Sequence[str], labels: Labels) -> str:
    """Why a verdict cannot go by labels; empty if it can."""
    num_tested = len({labels.groups[name] for name in tested}) if labels.groups else len(tested)
    if num_tested < FEWEST:
        return "too few have images to test and others to vote"
    if too_few_voters(num_voting, num_voted):
        return f"{num_voting} images to vote are too few for {num_voted} classes"
    return ""


def voting_images(names: Collection[str], labels: Labels, most: int, seed: int) -> list[str]:
    """At most so many images that have a class: first ten of each, then in proportion to the classes."""
    labelled = [name for name in names if name in labels.classes]
    ranked = []
    for of_class in shuffled_classes(labelled, labels.classes, seed):
        for rank, name in enumerate(groups_in_turn(of_class, labels.groups)):
            is_later = rank >= SHOTS
            ranked.append((is_later, rank / len(of_class) if is_later else rank, name))
    return [name for *_, name in sorted(ranked)[:most]]


def image_sets(loader: Mapping[str, Any], folder: Path, written: str = "") -> dict[str, dict[str, Any]]:
    """The image sets of a verdict's two lists, of which the first is empty without labels.

    Their groups are in a third file, if it is there.

    Args:
        loader: of both.
        folder: that has the lists.
        written: what the config writes before their names; RUN's own lie beside its configs.
    """
    has_classes = bool((folder / VOTING).read_text())
    sets = {"train": VOTING, "val": TESTED} if has_classes else {"val": TESTED}
    made: dict[str, Any] = {}
    for name, file in sets.items():
        dataset = dict(loader["dataset"], ann_file=written + file, with_label=has_classes)
        if (folder / GROUPS).exists():
            dataset["groups"] = written + GROUPS
        made[name] = dict(loader, dataset=dataset)
    if not has_classes:
        made["view"] = dict(type="RandomFlip", prob=1.0)
    return made


def choice_words(model: str, checkpoint: str | None, data: str | None) -> str:
    """A sentence about weights of a RUN that were chosen on the images of its verdict; none about others."""
    on_chosen = data is None and Path(model, TESTED).is_file()
    if not on_chosen or not checkpoint or Path(checkpoint).name != BEST:
        return ""
    return "These weights were chosen by k-NN on images that are tested here, so their figures are too good."


def drop_skipped(run: Run, tested: str = TESTED) -> None:
    """Leave the images out of the verdict's lists that RUN's store skipped: they cannot be decoded.

    Images of a class that then has none to vote are not tested.
    """
    skipped = TokenStore.open(run.store).skipped
    listed = {file: read_lines(run / file) for file in (VOTING, tested)}
    kept = {}
    for file, lines in listed.items():
        kept[file] = [
            line for line in lines if line not in skipped and line.rpartition(" ")[0] not in skipped
        ]
    if kept[VOTING]:
        voted = {line.rpartition(" ")[2] for line in kept[VOTING]}
        kept[tested] = [line for line in kept[tested] if line.rpartition(" ")[2] in voted]
    for file, lines in kept.items():
        if lines != listed[file]:  # a colleague's RUN may be where nothing can be written
            write_lines(run / file, lines)


def write_groups(file: Path, labels: Labels) -> None:
    """Write the group of each image, as `groups_of` reads it."""
    write_lines(file, [f"{name}\t{group}" for name, group in labels.groups.items()])


def write_lines(file: Path, lines: Sequence[str]) -> None:
    """Write a list, a name or more a line."""
    replace_file(file, "\n".join(lines).encode())
