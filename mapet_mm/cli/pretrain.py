"""`mapet-mm pretrain DIR`: a folder of images in, a pre-trained ViT for timm, Hugging Face and OpenMMLab out.

Looks at the images, chooses a tokenizer, writes two configs and runs the tools on them: codebook, tokens,
squares (each image decoded once, if there are several epochs and half of the free disk has room for them),
pre-training, export. The same command resumes after an interruption. The configs are ordinary configs: you
can edit them and run the printed commands yourself, in RUN.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from mapet_mm.cli.options import EPOCHS, PretrainOptions
from mapet_mm.cli.stages import Stage, claim, run_job, run_stages
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.commands import loading_call, tool_command
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import (
    digest_of_file,
    file_digests,
    file_of,
    require_same_files,
    require_settings,
)
from mapet_mm.utils.options import parse_options
from mapet_mm.utils.run_folder import CHOOSING, IMAGES, INIT, PRETRAINING, TEACHER, TOKENIZER, Run

LIBRARIES = {"timm": "timm", "hf": "Hugging Face"}


def parse_args(arguments: Sequence[str]) -> PretrainOptions:
    """The options on a command line."""
    return parse_options(PretrainOptions, arguments, "mapet-mm pretrain", __doc__)


def main(arguments: Sequence[str]) -> None:
    """Decide, write the configs, run the stages."""
    run_job(lambda: pretrain(parse_args(arguments)))


def pretrain(args: PretrainOptions) -> None:
    """The whole job."""
    if not args.images.is_dir():
        raise UserError(f"{args.images} is not a folder of images")
    from mapet_mm.cli.configs import lengthen, process_count, set_max_skipped, share_batch
    from mapet_mm.utils.dist import run_alone
    from mapet_mm.utils.gpus import require_usable_gpu
    from mapet_mm.utils.loader_workers import usable_workers

    run_alone()
    require_usable_gpu()  # what is chosen and written depends on it
    usable_workers(args.workers, batch_bytes=lambda: 0)  # each loader looks at its own batches
    held = claim(args.out)
    if held is None:
        raise UserError(f"{args.out}: another `mapet-mm pretrain` is at work there")

    with held:  # also kept by the processes that it starts, until they have ended
        # More epochs than before are no other job: they lengthen the training that is there.
        run = args.run
        earlier = run.options
        args = replace(args, epochs=args.epochs or earlier.get("epochs", EPOCHS))
        epochs = min(args.epochs, earlier.get("epochs", args.epochs))
        options = prepare(args, replace(args, epochs=epochs).recorded())
        shared = share_batch(run, process_count(args))
        if shared:
            print(shared, flush=True)
        if args.epochs > epochs:
            print(lengthen(run, options, args.epochs), flush=True)
        if args.max_skipped is not None:
            set_max_skipped(run, args.max_skipped)
        commands = stages(args)
        print(f"the following commands run in {run}, where you can also run them yourself", flush=True)
        run_stages(commands, args.out, held)
    print(next_steps(run))


def with_start(args: PretrainOptions, options: dict[str, Any]) -> dict[str, Any]:
    """The options with the identity of the weights to start from, once RUN has these.

    What lies in RUN counts; and the source, as long as it is there.
    """
    if not args.init:
        return options
    from mapet_mm.cli.starts import source_digest

    recorded = args.run.options
    source = source_digest(args.init)
    if "start" in recorded:
        before = recorded["start"]["source"]
        if source is None or before is None:
            source = before
        elif source == before:  # wherever it lies now
            options = {**options, "init": recorded["init"]}
    return {**options, "start": dict(weights=digest_of_file(args.run / INIT), source=source)}


def with_files(args: PretrainOptions, options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
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
        require_all(args, names)
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


def require_all(args: PretrainOptions, names: Sequence[str]) -> None:
    """Raise UserError unless a folder has all images of RUN, but for those that could not be decoded."""
    from mapet_mm.structures import TokenStore
    from mapet_mm.structures.names import read_lines

    if not (args.run / IMAGES).exists():  # the first start ended early
        return
    listed = read_lines(args.run / IMAGES)
    missing = set(listed).difference(names)
    if missing and args.run.tokens.exists():
        missing.difference_update(TokenStore.open(args.run.tokens).skipped)
    if missing:
        raise UserError(
            f"{args.images} lacks {len(missing)} of the {len(listed)} images of run `{args.out}`, such as "
            f"{min(missing)}: bring them back, or take another --out"
        )


def require_same_teacher(args: PretrainOptions, names: Sequence[str]) -> None:
    """Note the digests of the tokenizer's own images at the first start; later, refuse others.

    Raises:
        UserError: one is missing, or has changed since it was tokenised.
    """
    if args.teacher_images is None:
        return
    names = list(dict.fromkeys(map(file_of, names)))
    paths = [args.teacher_images / name for name in names]
    missing = [name for name, path in zip(names, paths, strict=True) if not path.is_file()]
    with ThreadPoolExecutor() as threads:
        digests = {} if missing else dict(zip(names, threads.map(digest_of_file, paths), strict=True))
    recorded = args.run / TEACHER
    before = json.loads(recorded.read_text()) if recorded.exists() else digests
    changed = missing or [name for name in names if digests[name] != before.get(name, digests[name])]
    if changed:
        raise UserError(
            f"--teacher-images {args.teacher_images}: {len(changed)} images of run `{args.out}` are missing "
            f"or have changed since they were tokenised, such as {changed[0]}: bring them back, or take "
            "another --out"
        )
    replace_json(recorded, {**digests, **before})


def prepare(args: PretrainOptions, options: dict[str, Any]) -> dict[str, Any]:
    """Decide, and write the configs into RUN; or keep those that are there, if they are of these options.

    Returns:
        The options with the identity of the weights to start from.
    """
    from mapet_mm.cli.choices import choose, training_images
    from mapet_mm.cli.configs import move_images, write_configs
    from mapet_mm.cli.verdict import require_same_classes
    from mapet_mm.structures.names import read_lines

    configs = [args.run / TOKENIZER, args.run / PRETRAINING]
    if not all(config.exists() for config in configs):
        choices = choose(args)
        print("\n".join(choices.words), flush=True)
        options = with_start(args, with_files(args, options, choices.names))
        require_settings(args.out, options, "run", "take another --out")
        require_same_teacher(args, choices.names)
        write_configs(args, choices)
        return options

    require_same_classes(args, args.run.options)
    names, _ = training_images(args)
    options = with_start(args, with_files(args, options, names))
    require_settings(args.out, options, "run", "take another --out")
    listed = read_lines(args.run / IMAGES)
    require_same_teacher(args, listed)
    print(f"going on with {' and '.join(map(str, configs))}", flush=True)
    if args.teacher_images is None:  # else both folders stay where they were
        moved = move_images(args.run, args.images)
        if moved:
            print(moved, flush=True)
    num_new = len(set(names).difference(listed))
    if num_new:
        print(f"images: {num_new} are new and left out (another --out trains with them)", flush=True)
    return options


def stages(args: PretrainOptions) -> list[Stage]:
    """The commands that run the configs in RUN, from there; each finds what it has done before.

    They name files by whole paths, so what the tools print is right from any folder.
    """
    from mapet_mm.cli.configs import process_count

    run = Run(args.out.absolute())
    checkpoint = run.checkpoint
    retry = ["--retry-skipped"] if args.retry_skipped else []
    commands = [
        ("codebook", "fit-codebook", run / TOKENIZER),
        ("tokens", "extract-tokens", run / TOKENIZER, *retry),
    ]
    if run.config.train_dataloader.dataset.type == "mapet_mm.StoredImages":
        commands.append(("squares", "store-images", run / PRETRAINING))
    commands.append(("pre-training", "train", run / PRETRAINING, "--work-dir", checkpoint.parent))
    if (run / CHOOSING).exists():
        commands.append(("change", "choose-change", run, "--cache", run / "features"))
    for library in run.libraries:
        title = f"for {LIBRARIES[library]}"
        commands.append((title, "convert", "mm", library, run.result, run.export(library)))
    if run.held_out:
        commands.append(("verdict", "verdict", run, "--cache", run / "features", "--out", run))
    made = []
    for title, tool, *arguments in commands:
        words = [str(argument) for argument in arguments]
        processes = process_count(args)
        if tool in ("choose-change", "convert", "verdict"):
            processes = 1
        elif tool == "store-images":  # it decodes in its own process
            processes = max(1, args.workers)
        several = ["--processes", str(processes)] if processes > 1 else []
        shown = shlex.join(["mapet-mm", *several, tool, *words])
        made.append(Stage(title, tool_command(tool, words, processes), shown))
    return made


def next_steps(run: Run) -> str:
    """What to do with a RUN that has ended, by names that are right in the folder of the caller."""
    evaluate = shlex.join(["mapet-mm", "evaluate", str(run)])
    lines = []
    if run.held_out:  # all protocols on the verdict's images
        lines.append(f"{evaluate} --all")
    lines.append(f"{evaluate} --data FOLDER")
    lines.append(f"{shlex.join(['mapet-mm', 'finetune', str(run)])} --images FOLDER --out OUT")
    for library in run.libraries:
        lines.append(loading_call(library, run.export(library)))
    lines.append(f"{run.backbone}  # in an OpenMMLab config")
    return "next: " + "\n      ".join(lines)
