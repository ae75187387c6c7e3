"""A RUN that is continued: what must be as at its first start, and what may change and is written into it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config

from mapet_mm.cli.options import PretrainOptions
from mapet_mm.cli.starts import source_digest
from mapet_mm.datasets.reading import in_threads
from mapet_mm.structures import TokenStore
from mapet_mm.structures.image_files import file_digests, file_of, require_same_files
from mapet_mm.structures.names import read_lines
from mapet_mm.utils.atomic_files import replace_file, replace_json
from mapet_mm.utils.config import nodes, read_config
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import IDENTITY, digest_of_file, require_settings
from mapet_mm.utils.run_folder import IMAGES, INIT, PRETRAINING, TEACHER, TOKENIZER, Run

HEAD = "# Written by `mapet-mm pretrain`, yours to edit; its paths are relative to this folder.\n"


def require_same_job(
    args: PretrainOptions, options: dict[str, Any], names: Sequence[str], listed: Sequence[str]
) -> dict[str, Any]:
    """Note what a RUN is made of at its first start, and raise UserError if it is continued with others.

    Args:
        args: of this start.
        options: of the first start, as far as `args` say them.
        names: of the images that there are.
        listed: of those that RUN has.

    Returns:
        The options with the identity of the images, of the labels and of the weights to start from.
    """
    options = _with_start(args, _with_files(args, options, names))
    require_settings(args.out, options, "run", "take another --out")
    _require_same_teacher(args, listed)
    return options


def _with_start(args: PretrainOptions, options: dict[str, Any]) -> dict[str, Any]:
    """The options with the identity of the weights to start from, once RUN has these.

    What lies in RUN counts; and the source, as long as it is there.
    """
    if not args.init:
        return options
    recorded = args.run.options
    source = source_digest(args.init)
    if "start" in recorded:
        before = recorded["start"]["source"]
        if source is None or before is None:
            source = before
        elif source == before:  # wherever it lies now
            options = {**options, "init": recorded["init"]}
    return {**options, "start": dict(weights=digest_of_file(args.run / INIT), source=source)}


def _with_files(args: PretrainOptions, options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The options with digests of 64 of the images, and of the labels: their identity, wherever they lie.

    Images and labels that are those of RUN's first start keep the path that they had then. A RUN from before
    there were digests goes by the paths.

    Raises:
        UserError: images of RUN are missing or others, or the labels are.
    """
    recorded = args.run.options
    files = recorded.get("files")
    if not recorded:
        labels = digest_of_file(args.labels) if args.labels else None
        return {**options, "files": dict(images=file_digests(args.images, names), labels=labels)}
    if files is None:
        return options
    if options.get("tiles") == recorded.get("tiles"):  # other tiles are named by `require_settings`
        _require_all(args, names)
    remedy = "bring that one back, or take another --out"
    is_same = require_same_files(files["images"], args.images, f"run `{args.out}`", remedy)
    if is_same and args.teacher_images is None:
        options = {**options, "images": recorded["images"]}
    labels = files["labels"]
    if labels and args.labels and args.labels.is_file():
        if digest_of_file(args.labels) != labels:
            raise UserError(
                f"--labels {args.labels}: run `{args.out}` was made with other lines; take another --out"
            )
        options = {**options, "labels": recorded["labels"]}
    return {**options, "files": files}


def _require_all(args: PretrainOptions, names: Sequence[str]) -> None:
    """Raise UserError unless a folder has all images of RUN, but for those that could not be decoded."""
    if not (args.run / IMAGES).exists():  # the first start ended early
        return
    listed = read_lines(args.run / IMAGES)
    missing = set(listed).difference(names)
    if missing and args.run.store.exists():
        missing.difference_update(TokenStore.open(args.run.store).skipped)
    if missing:
        raise UserError(
            f"{args.images} lacks {len(missing)} of the {len(listed)} images of run `{args.out}`, such as "
            f"{min(missing)}: bring them back, or take another --out"
        )


def _require_same_teacher(args: PretrainOptions, names: Sequence[str]) -> None:
    """Note the digests of the tokenizer's own images at the first start; later, refuse others.

    Raises:
        UserError: one is missing, or has changed since it was tokenised.
    """
    if args.teacher_images is None:
        return
    names = list(dict.fromkeys(map(file_of, names)))
    paths = [args.teacher_images / name for name in names]
    changed = [name for name, path in zip(names, paths, strict=True) if not path.is_file()]
    if not changed:
        found = in_threads(digest_of_file, paths, "looking at the tokenizer's images")
        digests = dict(zip(names, found, strict=True))
        recorded = args.run / TEACHER
        before = json.loads(recorded.read_text()) if recorded.exists() else {}
        changed = [name for name in names if digests[name] != before.get(name, digests[name])]
    if changed:
        raise UserError(
            f"--teacher-images {args.teacher_images}: {len(changed)} images of run `{args.out}` are missing "
            f"or have changed since they were tokenised, such as {changed[0]}: bring them back, or take "
            "another --out"
        )
    replace_json(recorded, {**digests, **before})


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


def write_config(path: Path, cfg: Config) -> None:
    """Write one config of RUN, which then inherits nothing."""
    replace_file(path, (HEAD + cfg.pretty_text).encode())


def move_images(run: Run, images: Path) -> str:
    """Let RUN's configs read the images from the folder in which they lie now.

    Returns:
        A line about it; empty if it is the same folder as before.
    """
    before = run.images
    if os.path.realpath(run / before) == os.path.realpath(images):
        return ""
    now = str(images.absolute())
    configs = (PRETRAINING, TOKENIZER) if run.has_tokens else (PRETRAINING,)
    for name in configs:  # the one that says where they were comes last
        cfg = read_config(run / name)
        moved = {key: now for key, value in nodes(cfg.to_dict()) if value == before}
        cfg.merge_from_dict(moved)
        if name == PRETRAINING:
            cfg.resume = True
        write_config(run / name, cfg)
    return f"images: in {before} before, now in {now}"


def share_batch(run: Run, processes: int) -> str:
    """Let another number of processes share the images of a step of RUN's training, which stay as many.

    Returns:
        A line about it; empty if the number is the same as before.

    Raises:
        UserError: they cannot share them equally.
    """
    cfg = run.config
    before = cfg.auto_scale_lr.get("processes", processes)
    if processes == before:
        return ""
    batch = before * cfg.train_dataloader.batch_size
    if batch % processes:
        fitting = max(count for count in range(1, processes) if batch % count == 0)
        raise UserError(
            f"{run} trains with {batch} images a step, which {processes} processes cannot share equally: add "
            f"--processes {fitting}"
        )
    share = batch // processes
    cfg.resume = True
    cfg.train_dataloader.batch_size = share
    cfg.auto_scale_lr.processes = processes
    write_config(run / PRETRAINING, cfg)
    return f"processes: {before}, now {processes}, with {share} images each, {batch} a step as before"


def lengthen(run: Run, options: dict[str, Any], epochs: int) -> str:
    """Give RUN's training more epochs than its options have; returns a line about it."""
    cfg = run.config
    cfg.resume = True
    cfg.train_cfg.max_epochs = epochs
    cfg.param_scheduler[-1].end = epochs
    write_config(run / PRETRAINING, cfg)
    replace_json(run / IDENTITY, {**options, "epochs": epochs})
    return (
        f"epochs: {options['epochs']}, now {epochs}: the training goes on from its last checkpoint, at the "
        f"learning rate that {epochs} epochs have there"
    )


def set_max_skipped(run: Run, share: float) -> None:
    """Let this share of the images be left out, now and at later starts."""
    name = TOKENIZER if run.has_tokens else PRETRAINING
    cfg = read_config(run / name)
    if cfg.max_skipped != share:
        cfg.max_skipped = share
        write_config(run / name, cfg)
