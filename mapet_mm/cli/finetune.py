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

from mapet_mm.cli.command_options import parse_options
from mapet_mm.cli.finetuning.options import FinetuneOptions
from mapet_mm.cli.stages import Stage, begin, run_job, run_stages, stage_of
from mapet_mm.utils.errors import UserError

if TYPE_CHECKING:
    from mapet_mm.cli.finetuning.labels import LabelledImages

RESULTS = "result.json"


def parse_args(arguments: Sequence[str]) -> FinetuneOptions:
    """The options on a command line."""
    return parse_options(FinetuneOptions, arguments, "mapet-mm finetune", __doc__)


def main(arguments: Sequence[str]) -> None:
    """Look, write the configs, train, compare."""
    run_job(lambda: finetune(parse_args(arguments)))


def finetune(args: FinetuneOptions) -> None:
    """The whole job."""
    for folder in [args.run, *filter(None, [args.images]), *(args.masks or ())]:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
    from mmengine.logging import MMLogger

    from mapet_mm.cli.finetuning.labels import look
    from mapet_mm.cli.finetuning.pretrained import read_run
    from mapet_mm.cli.finetuning.recipe import write_recipe
    from mapet_mm.evaluation.verdict import RESULT
    from mapet_mm.utils.identity import digest, digest_of_file, require_settings

    MMLogger.get_instance("finetune", log_level="WARNING")  # MMEngine logs what is loaded
    with begin(args.out, "finetune", args.workers) as held:  # also kept by the processes that it starts
        pretrained = read_run(args)
        labels = look(args, pretrained.load_image)
        print("\n".join(labels.words), flush=True)
        checkpoint = Path(pretrained.weights[RESULT]["checkpoint"])
        settings = {
            **args.recorded(),
            "labels": digest(labels.lists),
            "checkpoint": checkpoint.name,  # RUN may have been trained on, or anew
            "weights": digest_of_file(checkpoint),
        }
        require_settings(args.out, settings, "fine-tuning", "take another --out")
        write_recipe(args, labels, pretrained)
        starts = args.compared(pretrained.weights)
        print(cost_of(args, len(labels.split.trained), starts), flush=True)
        run_stages(stages(args, starts), args.out, held)
        compare(args, starts, labels)
    print(next_step(args))


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
    """The trainings and their tests, which write what each image adds; each finds what it has done before."""
    from mapet_mm.cli.finetuning.recipe import CONFIGS, FOLDERS

    metric = "Accuracy" if args.images else "IoUMetric"
    out = args.out.absolute()
    made = []
    for start in starts:
        config = out / CONFIGS[start]
        folder = out / FOLDERS[start]
        work_dir = ("--work-dir", folder)
        made.append(stage_of(f"training from {start}", args.processes, "train", config, *work_dir))
        sums = sums_file(args, start)
        if not sums.exists():
            evaluator = dict(type="mapet_mm.ByImage", metric=metric, file=sums)
            options = [f"test_evaluator.{name}={value}" for name, value in evaluator.items()]
            words = (folder / f"epoch_{args.epochs}.pth", *work_dir, "--cfg-options", *options)
            made.append(stage_of(f"test from {start}", args.processes, "test", config, *words))
    return made


def sums_file(args: FinetuneOptions, start: str) -> Path:
    """What each held-out image adds to the figure of a training."""
    from mapet_mm.cli.finetuning.recipe import FOLDERS

    return args.out.absolute() / FOLDERS[start] / f"by_image_{args.epochs}.npy"


def compare(args: FinetuneOptions, starts: Sequence[str], labels: LabelledImages) -> None:
    """Print the table, and write it into OUT."""
    from mapet_mm.evaluation.task import judge_task
    from mapet_mm.utils.atomic_files import replace_json
    from mapet_mm.utils.tables import format_table

    measure = "top-1 (%)" if args.images else "mIoU (%)"
    if labels.val_classes is not None:
        measure = "mean accuracy per class (%)"
    sums = {start: np.load(sums_file(args, start)) for start in starts}
    verdict = judge_task(measure, sums, labels.val_groups, labels.val_classes)
    print(f"\n{format_table(verdict.table)}\n\n{verdict.sentence}")
    replace_json(args.out / RESULTS, verdict.as_json())


def next_step(args: FinetuneOptions) -> str:
    """What to do with the trained model."""
    from mapet_mm.cli.finetuning.recipe import CONFIG, FOLDERS
    from mapet_mm.evaluation.verdict import RESULT

    checkpoint = args.out / FOLDERS[RESULT] / f"epoch_{args.epochs}.pth"
    words = ["mapet-mm", "test", str(args.out / CONFIG), str(checkpoint), "--out", "predictions.pkl"]
    return f"next: {shlex.join(words)}"
