"""`mapet-mm pretrain DIR`: a folder of images in, a pre-trained ViT for timm, Hugging Face and OpenMMLab out.

Looks at the images, chooses a tokenizer, writes two configs and runs the tools on them: codebook, tokens,
pre-training, export. The same command resumes after an interruption. The configs are ordinary configs: you
can edit them and run the printed commands yourself.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mapet_mm.cli.stages import Stage, claim, run_stages
from mapet_mm.utils.commands import tool_command
from mapet_mm.utils.errors import UserError, one_line_errors
from mapet_mm.utils.identity import IDENTITY, canonical, require_settings

ARCHS = ("tiny", "small", "base")
BESIDES = ("out", "workers", "processes")  # options that do not decide the results
EPOCHS = 300


def parse_args(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="mapet-mm pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, workers = parser.add_argument, min(4, os.cpu_count() or 1)
    add("images", type=Path, metavar="DIR", help="folder of images, searched recursively")
    add("--out", type=Path, required=True, metavar="RUN", help="folder for everything that is made")
    add("--arch", choices=ARCHS, help="size of the ViT (default: small, or that of --init)")
    told = "start from these: a checkpoint of MAE, DeiT, DINOv2, timm, Hugging Face or this package"
    add("--init", type=Path, metavar="WEIGHTS", help=told)
    told = (
        "whose features are clustered into tokens: `clip`, a CLIP ResNet's; `init`, the weights of --init; "
        "`random`, a network's with random weights. auto (default): clip if its weights are there or can be "
        "downloaded, else init, else random"
    )
    add("--tokenizer", default="auto", choices=("auto", "clip", "init", "random"), help=told)
    told = f"passes over the images (default {EPOCHS}); with more of them, a RUN that has ended goes on"
    add("--epochs", type=int, help=told)
    add("--batch-size", type=int, default=64, help="images per step and process (default 64)")
    add("--workers", type=int, default=workers, help=f"processes that load images (default {workers})")
    add("--processes", type=int, help="processes to train in (default: one for each GPU)")
    add("--seed", type=int, default=0, help="seed of all random numbers (default 0)")
    args = parser.parse_args(arguments)
    if args.batch_size < 1 or (args.epochs is not None and args.epochs < 1):
        parser.error("--epochs and --batch-size must be 1 or more")
    if args.tokenizer == "init" and not args.init:
        parser.error("--tokenizer init needs --init WEIGHTS")
    return args


def main(arguments: Sequence[str]) -> None:
    """Decide, write the configs, run the stages."""
    try:
        one_line_errors(lambda: pretrain(parse_args(arguments)))()
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again to continue.", file=sys.stderr)
        sys.exit(130)  # as shells have it


def pretrain(args: argparse.Namespace) -> None:
    """The whole job."""
    if not args.images.is_dir():
        raise UserError(f"{args.images} is no folder of images")
    from mapet_mm.cli.choices import choose, find_images
    from mapet_mm.cli.configs import IMAGES, PRETRAINING, TOKENIZER, lengthen, write_configs

    held = claim(args.out)  # until this process and those that it starts have ended
    if held is None:
        raise UserError(f"{args.out}: another `mapet-mm pretrain` is at work there")
    configs, identity = [args.out / TOKENIZER, args.out / PRETRAINING], args.out / IDENTITY
    known = json.loads(identity.read_text()) if identity.exists() else {}
    args.epochs = args.epochs or known.get("epochs", EPOCHS)
    epochs = min(args.epochs, known.get("epochs", args.epochs))
    options = {name: value for name, value in vars(args).items() if name not in BESIDES}
    options = canonical(options | {"images": args.images.resolve(), "epochs": epochs})
    if all(config.exists() for config in configs):
        require_settings(args.out, options, "run", "take another --out")
        print(f"going on with {' and '.join(map(str, configs))}", flush=True)
        listed = (args.out / IMAGES).read_text().split("\n")
        if new := len(set(find_images(args.images)[0]).difference(listed)):
            print(f"images: {new} are new and left out (another --out trains with them)", flush=True)
    else:
        choices = choose(args)
        print("\n".join(choices.words), flush=True)
        require_settings(args.out, options, "run", "take another --out")
        write_configs(args, choices)
    if args.epochs > epochs:
        print(lengthen(args.out, options, args.epochs), flush=True)
    run_stages(stages(args), args.out, held)
    print(
        f'next: timm.create_model("local-dir:{args.out}/timm", pretrained=True), or transformers: '
        f'AutoModel.from_pretrained("{args.out}/huggingface")'
    )


def stages(args: argparse.Namespace) -> list[Stage]:
    """The commands that run the configs in RUN, from there; each finds what it has done before."""
    from mapet_mm.cli.configs import PRETRAINING, TOKENIZER, Config, process_count

    cfg = Config.fromfile(args.out / PRETRAINING)
    checkpoint = f"{cfg.work_dir}/epoch_{cfg.train_cfg.max_epochs}.pth"
    commands = [
        ("codebook", "fit-codebook", TOKENIZER),
        ("tokens", "extract-tokens", TOKENIZER),
        ("pre-training", "train", PRETRAINING),
        ("for timm", "convert", "mm", "timm", checkpoint, "timm"),
        ("for Hugging Face", "convert", "mm", "hf", checkpoint, "huggingface"),
    ]
    made = []
    for title, tool, *words in commands:
        processes = 1 if tool == "convert" else process_count(args)
        several = ["--processes", str(processes)] if processes > 1 else []
        shown = shlex.join(["mapet-mm", *several, tool, *words])
        made.append(Stage(title, tool_command(tool, words, processes), shown))
    return made
