"""The verdict of a RUN by other classes or groups than its pre-training took: lists beside the features."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmengine.config import Config

from mapet_mm.cli.held_out import image_sets, write_groups, write_verdict_lists
from mapet_mm.datasets.groups import draw_share, shuffled_classes
from mapet_mm.datasets.labels import Labels, Split, labels_of
from mapet_mm.evaluation.image_sets import SECTION
from mapet_mm.evaluation.images import Data
from mapet_mm.structures import TokenStore
from mapet_mm.structures.names import read_lines
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.identity import digest
from mapet_mm.utils.run_folder import GROUPS, HELD_OUT, TESTED, TRAINED, Run


def with_other_classes(cfg: Config, model: str, data: Data, cache: Path) -> tuple[Config, Data]:
    """The config of a RUN with the classes or groups that are asked for, in place of its pre-training's.

    Args:
        cfg: of the model.
        model: RUN; or another model, whose config stays as it is.
        data: what is asked for; of images that are named in it, these are the classes then.
        cache: folder of the features, where the lists are written, too.

    Returns:
        The config, and what is asked for beside it.
    """
    run = Run(Path(model))
    is_asked = any(source is not None for source in (data.labels, data.class_level, data.groups))
    if not is_asked or data.path is not None or not (run / TESTED).is_file():
        return cfg, data
    groups = data.groups
    if groups is None and (run / GROUPS).exists():
        groups = str(run / GROUPS)
    split = decoded_images(run)
    labels = labels_of([*split.trained, *split.held_out], data.labels, data.class_level, groups)
    seed = cfg.randomness.seed
    (testable,) = shuffled_classes(split.held_out, None, seed)
    split, about_groups = with_whole_groups(Split(split.trained, testable), labels, seed)

    folder = folder_of_lists(cache, run, data.labels, data.class_level, groups)
    chosen = write_verdict_lists(
        folder, labels, split.trained, split.held_out, cfg.train_cfg.max_epochs, seed
    )
    if labels.groups:
        write_groups(folder / GROUPS, labels)
    else:  # but perhaps before RUN was made anew
        (folder / GROUPS).unlink(missing_ok=True)
    print_once(f"{chosen}; {labels.about}{about_groups}")
    loader = cfg[SECTION].val.to_dict()
    loader["dataset"]["type"] = "mapet_mm.ImageFolder"
    loader["dataset"].pop("groups", None)
    cfg[SECTION] = image_sets(loader, folder, f"{folder}/")
    return cfg, replace(data, labels=None, class_level=None, groups=None)


def decoded_images(run: Run) -> Split:
    """The images that a RUN trained on and held out, without those that it could not decode."""
    skipped = TokenStore.open(run.store).skipped
    trained, held_out = (
        [name for name in read_lines(run / file) if name not in skipped] for file in (TRAINED, HELD_OUT)
    )
    return Split(trained, held_out)


def with_whole_groups(split: Split, labels: Labels, seed: int) -> tuple[Split, str]:
    """Let no group vote and be tested: of those with images on both sides half are tested, the others vote.

    Args:
        split: images that were trained on, and that were held out.
        labels: of these.
        seed: of the draw.

    Returns:
        Those that can vote and those that can be tested, and words about the groups, if there are such.
    """
    group_of = labels.groups
    if not group_of:
        return split, ""
    divided = {group_of[name] for name in split.trained} & {group_of[name] for name in split.held_out}
    if not divided:
        return split, ""
    their_images = [name for name in split.trained if group_of[name] in divided]
    drawn = draw_share(their_images, 0.5, seed, labels.classes, group_of)
    tested = {group_of[name] for name in drawn}
    voting = divided - tested
    whole = Split(
        [name for name in split.trained if group_of[name] not in tested],
        [name for name in split.held_out if group_of[name] not in voting],
    )
    return whole, f"; {len(divided)} have images that were trained on, and {len(voting)} of them vote"


def folder_of_lists(cache: Path, *question: Any) -> Path:
    """The folder of one question's lists, the same from wherever it is asked: several may be asked at once.

    Args:
        cache: folder of the features.
        *question: the files and other words that it is asked by.
    """
    words = [os.path.realpath(word) if os.path.exists(word) else word for word in map(str, question)]
    folder = cache.absolute() / f"lists-{digest(words)[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
