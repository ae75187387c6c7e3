"""`mapet-mm pretrain DIR`: a folder of images in, a pre-trained ViT for timm, Hugging Face and OpenMMLab out.

Looks at the images, chooses a tokenizer, writes two configs and runs the tools on them: codebook, tokens,
squares (each image decoded once, if there are several epochs and half of the free disk has room for them),
pre-training, export. The same command resumes after an interruption. The configs are ordinary configs: you
can edit them and run the printed commands yourself, in RUN.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mapet_mm.cli.command_options import parse_options
from mapet_mm.cli.options import EPOCHS, PretrainOptions
from mapet_mm.cli.stages import Stage, begin, run_job, run_stages, stage_of
from mapet_mm.utils.commands import loading_call
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.run_folder import CHOOSING, IMAGES, PRETRAINING, TOKENIZER, Run

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
    from mapet_mm.cli.configs import process_count
    from mapet_mm.cli.continuing import lengthen, set_max_skipped, share_batch

    with begin(args.out, "pretrain", args.workers) as held:  # also kept by the processes that it starts
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


def prepare(args: PretrainOptions, options: dict[str, Any]) -> dict[str, Any]:
    """Decide, and write the configs into RUN; or keep those that are there, if they are of these options.

    Returns:
        The options with the identity of the files and of the weights to start from.
    """
    from mapet_mm.cli.choices import choose, training_images
    from mapet_mm.cli.configs import write_configs
    from mapet_mm.cli.continuing import move_images, require_same_classes, require_same_job
    from mapet_mm.structures.names import read_lines

    configs = [args.run / PRETRAINING]
    if args.about_method.has_tokens:
        configs.insert(0, args.run / TOKENIZER)
    if not all(config.exists() for config in configs):
        choices = choose(args)
        print("\n".join(choices.words), flush=True)
        names = choices.labels.names
        options = require_same_job(args, options, names, names)
        write_configs(args, choices)
        return options

    require_same_classes(args, args.run.options)
    names, _ = training_images(args)
    listed = read_lines(args.run / IMAGES)
    options = require_same_job(args, options, names, listed)
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
    processes = process_count(args)
    cache = ("--cache", run / "features")
    retry = ["--retry-skipped"] if args.retry_skipped else []
    made = []
    if run.has_tokens:
        made.append(stage_of("codebook", processes, "fit-codebook", run / TOKENIZER))
        made.append(stage_of("tokens", processes, "extract-tokens", run / TOKENIZER, *retry))
        retry = []
    if run.config.train_dataloader.dataset.type == "mapet_mm.StoredImages":
        decoding = max(1, args.workers)  # it decodes in its own process
        made.append(stage_of("squares", decoding, "store-images", run / PRETRAINING, *retry))
    work_dir = ("--work-dir", run.work_dir)
    made.append(stage_of("pre-training", processes, "train", run / PRETRAINING, *work_dir))
    if (run / CHOOSING).exists():
        made.append(stage_of("change", 1, "choose-change", run, *cache))
    for library in run.libraries:
        title = f"for {LIBRARIES[library]}"
        made.append(stage_of(title, 1, "convert", "mm", library, run.result, run.export(library)))
    if run.held_out:
        made.append(stage_of("verdict", 1, "verdict", run, *cache, "--out", run))
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
