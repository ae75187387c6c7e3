"""`mapet-mm finetune RUN`: your labels in, a trained model out, and what the pre-training was worth for it.

Counts the labels and says what it takes them for, holds a part out, writes configs that MMPretrain's and
MMSegmentation's own tools take, too, and trains: from the pre-training, from its start, from random weights,
on the same labels. At the end is a table of the three, with intervals. The same command resumes after an
interruption.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mapet_mm.cli.finetuning.options import FinetuneOptions
from mapet_mm.cli.stages import Stage, claim, run_job, run_stages
from mapet_mm.utils.commands import tool_command
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.options import parse_options

if TYPE_CHECKING:
    from mapet_mm.cli.finetuning.labels import Labels

RESULTS = "result.json"
METRICS = {"images": ("Accuracy", "top-1 (%)"), "masks": ("IoUMetric", "mIoU (%)")}


def parse_args(arguments: Sequence[str]) -> FinetuneOptions:
    """The options on a command line."""
    return parse_options(FinetuneOptions, arguments, "mapet-mm finetune", __doc__)


def main(arguments: Sequence[str]) -> None:
    """Look, write the configs, train, compare."""
    run_job(lambda: finetune(parse_args(arguments)))


def finetune(args: FinetuneOptions) -> None:
    """The whole job."""
    from mmengine.logging import MMLogger

    from mapet_mm.cli.finetuning.pretrained import read_run
    from mapet_mm.cli.finetuning.recipe import write_recipe
    from mapet_mm.utils.dist import run_alone
    from mapet_mm.utils.gpus import require_usable_gpu
    from mapet_mm.utils.identity import digest, require_settings
    from mapet_mm.utils.run_folder import Run

    for folder in [args.run, *filter(None, [args.images]), *(args.masks or ())]:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
    run_alone()
    require_usable_gpu()
    MMLogger.get_instance("finetune", log_level="WARNING")  # MMEngine logs what is loaded
    held = claim(args.out)
    if held is None:
        raise UserError(f"{args.out}: another `mapet-mm finetune` is at work there")

    with held:  # also kept by the processes that it starts, until they have ended
        pretrained = read_run(Run(args.run))
        labels = look(args, pretrained.load_image)
        print("\n".join(labels.words), flush=True)
        settings = {**args.recorded(), "labels": digest(labels.lists())}
        require_settings(args.out, settings, "fine-tuning", "take another --out")
        write_recipe(args, labels, pretrained)
        starts = args.compared(pretrained.weights)
        print(cost_of(args, len(labels.split.train), starts), flush=True)
        run_stages(stages(args, starts), args.out, held)
        compare(args, starts, labels.val_groups())
    print(next_step(args))


def look(args: FinetuneOptions, load_image: dict) -> Labels:
    """Look at the labels, and hold a part out."""
    from mapet_mm.cli.finetuning.labels import look_at_images, look_at_masks

    if args.images is not None:
        return look_at_images(args.images, args.groups, args.seed)
    return look_at_masks(*args.masks, args.ignore, args.groups, args.seed, load_image)


def cost_of(args: FinetuneOptions, num_train: int, starts: Sequence[str]) -> str:
    """A line about what is trained, before it costs anything."""
    passed = args.epochs * num_train
    line = f"training: {args.epochs} epochs of {num_train} images, {passed:,} images forward and backward"
    if len(starts) > 1:
        line += (
            f"; {len(starts)} times, from {', '.join(starts)}: {len(starts) * passed:,} (--no-compare trains "
            "once)"
        )
    return f"{line}. The configs are in {args.out}, yours to edit"


def stages(args: FinetuneOptions, starts: Sequence[str]) -> list[Stage]:
    """The trainings and their tests; each finds what it has done before."""
    from mapet_mm.cli.finetuning.recipe import CONFIGS, FOLDERS

    out = args.out.absolute()
    made = []
    for start in starts:
        config = out / CONFIGS[start]
        folder = out / FOLDERS[start]
        made.append(_stage(f"training from {start}", args, "train", config, "--work-dir", folder))
        if not sums_file(args, start).exists():
            options = _keeping_each_image(args, sums_file(args, start))
            checkpoint = folder / f"epoch_{args.epochs}.pth"
            made.append(
                _stage(
                    f"test from {start}",
                    args,
                    *("test", config, checkpoint, "--work-dir", folder, "--cfg-options", *options),
                )
            )
    return made


def _stage(title: str, args: FinetuneOptions, tool: str, *arguments: str | Path) -> Stage:
    words = [str(argument) for argument in arguments]
    several = ["--processes", str(args.processes)] if args.processes > 1 else []
    shown = shlex.join(["mapet-mm", *several, tool, *words])
    return Stage(title, tool_command(tool, words, args.processes), shown)


def _keeping_each_image(args: FinetuneOptions, file: Path) -> list[str]:
    """The options of a test that writes what each image adds to its figure."""
    metric, _ = METRICS["images" if args.images else "masks"]
    return [
        "test_evaluator.type=mapet_mm.ByImage",
        f"test_evaluator.metric={metric}",
        f"test_evaluator.file={file}",
    ]


def sums_file(args: FinetuneOptions, start: str) -> Path:
    """What each held-out image adds to the figure of a training."""
    from mapet_mm.cli.finetuning.recipe import FOLDERS

    return args.out.absolute() / FOLDERS[start] / f"by_image_{args.epochs}.npy"


def compare(args: FinetuneOptions, starts: Sequence[str], groups: Sequence[str] | None) -> None:
    """Print the table, and write it into OUT."""
    from mapet_mm.evaluation.task import judge_task
    from mapet_mm.utils.atomic_files import replace_json
    from mapet_mm.utils.tables import format_table

    _, measure = METRICS["images" if args.images else "masks"]
    sums = {start: np.load(sums_file(args, start)) for start in starts}
    verdict = judge_task(measure, sums, groups)
    print(f"\n{format_table(verdict.table)}\n\n{verdict.sentence}")
    replace_json(args.out / RESULTS, verdict.as_json())


def next_step(args: FinetuneOptions) -> str:
    """What to do with the trained model."""
    from mapet_mm.cli.finetuning.recipe import CONFIG, FOLDERS
    from mapet_mm.evaluation.verdict import RESULT

    checkpoint = args.out / FOLDERS[RESULT] / f"epoch_{args.epochs}.pth"
    words = ["mapet-mm", "test", str(args.out / CONFIG), str(checkpoint), "--out", "predictions.pkl"]
    return f"next: {shlex.join(words)}"
