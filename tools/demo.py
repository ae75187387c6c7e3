"""The demo: from raw images of handwritten digits to frozen features that are judged beside random weights.

    python tools/demo.py [--comparison] [--jobs N] [--out work_dirs/demo] [--quick]

Runs the stages below that are not done yet, prints each one's exact command line, and ends with a table and a
self-contained HTML report. With --comparison it pre-trains longer and goes on to fine-tuning and
segmentation, with and without pre-training. After a kill or a failure, the same command continues.
"""

import json
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from command_line import described_parser
from demo_stages import Stage, run_stages

from mapet_mm.tokenizers import TokenStore
from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import one_line_errors
from mapet_mm.utils.identity import digest
from mapet_mm.utils.tables import Column, Table, format_table
from mapet_mm.visualization.attention_masks import masks_section
from mapet_mm.visualization.codebook_sheet import codebook_section
from mapet_mm.visualization.curves import curves_section
from mapet_mm.visualization.report import Report, Section, write_report
from mapet_mm.visualization.segmentation import segmentation_figure
from mapet_mm.visualization.token_statistics import measure_usage

TRAIN = "tools/train.py"
RECIPES = "configs/micro"
TOKENIZER = f"{RECIPES}/kclip.py"
PRETRAINING = f"{RECIPES}/mapet_vit-micro_kclip_1xb32-coslr.py"
SHORT = {"train_cfg.max_epochs": 6, "param_scheduler.1.end": 6}
EVALUATE, FROZEN, PROTOCOLS = (
    "tools/evaluate_features.py",
    "configs/evaluation/micro.py",
    ("NearestNeighbours", "LowShot"),
)
PROBE = f"{RECIPES}/vit-micro_1xb100-linear-mean-coslr_few-labels.py"
SEGMENTATION = f"{RECIPES}/vit-micro_linear-segmentation_1xb8-coslr.py"
DATA, PIXELS, TOKENS = "data/digits", "data/digits_pixels", "work_dirs/digits/tokens"
CODEBOOK = "work_dirs/digits/codebook.safetensors"
LIBRARIES = ("torch", "torchvision", "mmengine", "mmcv", "mmpretrain", "mmseg", "mapet_mm")
TOP1 = "accuracy/top1"
SCRATCH, MAPET = "scratch", "mapet"  # what a stage starts from


class Task(NamedTuple):
    """A row of the table: a recipe that starts from the pre-training, and one from random weights."""

    name: str
    heading: str
    recipe: str
    scratch_recipe: str
    metric: str = TOP1
    data: str = "digits"
    options: Mapping[str, Any] = MappingProxyType({})  # changes to both recipes
    spread: str = "not measured"  # standard deviations over three seeds, from scratch and from MaPeT


TASKS = (
    Task("probe", "linear probe, 100 labels: top-1 (%)", PROBE, PROBE, spread="1.8, 2.2"),
    Task(
        name="few-labels",
        heading="fine-tuning, 100 labels: top-1 (%)",
        recipe=f"{RECIPES}/vit-micro_1xb50-coslr_few-labels.py",
        scratch_recipe=f"{RECIPES}/vit-micro_1xb50-scratch-coslr_few-labels.py",
    ),
    Task(
        name="all-labels",
        heading="fine-tuning, all 1,437 labels: top-1 (%)",
        recipe=f"{RECIPES}/vit-micro_1xb64-coslr.py",
        scratch_recipe=f"{RECIPES}/vit-micro_1xb64-scratch-coslr.py",
        spread="0.5, 0.6",
    ),
    Task(
        name="segmentation-frozen",
        heading="segmentation, 100 labelled digits, frozen: mIoU (%)",
        recipe=SEGMENTATION,
        scratch_recipe=SEGMENTATION,
        metric="mIoU",
        data="digits_pixels",
    ),
    Task(
        name="segmentation",
        heading="segmentation, 100 labelled digits, fine-tuned: mIoU (%)",
        recipe=SEGMENTATION,
        scratch_recipe=f"{RECIPES}/vit-micro_linear-segmentation_1xb8-scratch-coslr.py",
        metric="mIoU",
        data="digits_pixels",
        options={"model.backbone.frozen_stages": -1},
    ),
)
FROZEN_NOTES = (
    "One run of 6 epochs, seed 0. Top-1 (%) on 360 digits.",
    "The same figures come back on the same type of machine only.",
    "k-CLIP's encoder here is a small CLIP ResNet with fixed random weights.",
)
NOTES = (
    "One run each, seed 0. Validation after the last epoch, no selection.",
    "Fine-tuning without pre-training has its own recipe: no layer-wise decay, and as many images as in "
    "pre-training and fine-tuning together.",
    "The same figures come back on the same type of machine only. Spread: standard deviation of three seeds.",
    "Segmentation: a linear layer on the patch tokens of the ViT; 100 digits with pixel labels.",
    "k-CLIP's encoder here is a small CLIP ResNet with fixed random weights.",
)


def make_stage(
    out: Path,
    name: str,
    tool: str,
    config: str | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    output: str | None = None,
    needs: Sequence[Stage] = (),
    data: str = "digits",
    metric: str | None = None,
) -> Stage:
    """A stage in a folder named after what decides its result, so that a changed recipe is run anew.

    The output of a training is its last checkpoint, of an evaluation its file of results.
    """
    words = [tool]
    settings = None
    if config is not None:
        words.append(config)
        settings = read_config(config, data, options).to_dict()
    decisive = digest([words, settings, [need.folder.name for need in needs]])
    folder = out / f"{name}-{decisive[:8]}"
    if tool == TRAIN:
        words += ["--work-dir", str(folder)]
        length = settings["train_cfg"]
        last = f"epoch_{length['max_epochs']}" if "max_epochs" in length else f"iter_{length['max_iters']}"
        output = f"{folder}/{last}.pth"
    if tool == EVALUATE:
        (pretraining,) = needs
        words += [str(pretraining.output), "--data", FROZEN, "--protocols", *PROTOCOLS, "--out", str(folder)]
        output = f"{folder}/results.json"
    if options:
        words += ["--cfg-options", *(f"{key}={value}" for key, value in options.items())]
    return Stage(name, folder, words, Path(output), needs, data, metric)


def plan_stages(out: Path, quick: bool = False, comparison: bool = False) -> list[Stage]:
    """All stages, each after those that it needs; if `quick`, of one epoch or two iterations."""
    one_epoch = {"train_cfg.max_epochs": 1} if quick else {}
    two_iterations = {"train_cfg.max_iters": 2} if quick else {}

    data = make_stage(out, "data", "tools/dataset_converters/digits.py", output=PIXELS)
    codebook = make_stage(out, "codebook", "tools/fit_codebook.py", TOKENIZER, output=CODEBOOK, needs=[data])
    tokens = make_stage(out, "tokens", "tools/extract_tokens.py", TOKENIZER, output=TOKENS, needs=[codebook])
    length = one_epoch or ({} if comparison else SHORT)
    pretraining = make_stage(out, "pretraining", TRAIN, PRETRAINING, length, needs=[tokens])
    if not comparison:
        frozen = make_stage(out, "frozen", EVALUATE, PRETRAINING, needs=[pretraining])
        return [data, codebook, tokens, pretraining, frozen]

    from_scratch = {"model.backbone.init_cfg": None}
    from_mapet = {"model.backbone.init_cfg.checkpoint": str(pretraining.output)}
    scratch = []
    mapet = []
    for task in reversed(TASKS):  # the longest first
        changes = {**task.options, **(one_epoch if task.metric == TOP1 else two_iterations)}
        measured = dict(data=task.data, metric=task.metric)
        name = f"{task.name}-{SCRATCH}"
        options = {**changes, **from_scratch}
        scratch.append(make_stage(out, name, TRAIN, task.scratch_recipe, options, needs=[data], **measured))
        name = f"{task.name}-{MAPET}"
        options = {**changes, **from_mapet}
        mapet.append(make_stage(out, name, TRAIN, task.recipe, options, needs=[pretraining], **measured))
    return [data, codebook, tokens, pretraining, *scratch, *mapet]


def frozen_table(frozen: Stage) -> Table:
    """What the features are worth, of random weights and of the pre-training, and the gain in points."""
    mapet, scratch = json.loads(frozen.output.read_text()).values()
    rows = []
    for row, random in zip(mapet, scratch, strict=True):
        rows.append(
            [
                f"{row['protocol']}, {row['setting']}",
                random["value"],
                row["value"],
                row["value"] - random["value"],
            ]
        )
    columns = [
        Column("frozen features"),
        Column("random weights", ".1f"),
        Column("MaPeT", ".1f"),
        Column("gain", "+.1f"),
    ]
    return Table(columns, rows, FROZEN_NOTES)


def results_table(stages: Sequence[Stage]) -> Table:
    """Each task's result without and with pre-training, the gain in points, and the spread of both."""
    values = {stage.name: stage.result["value"] for stage in stages if stage.metric}
    rows = []
    for task in TASKS:
        scratch = values[f"{task.name}-{SCRATCH}"]
        mapet = values[f"{task.name}-{MAPET}"]
        rows.append([task.heading, scratch, mapet, mapet - scratch, task.spread])
    columns = [
        Column("task"),
        Column("no pre-training", ".1f"),
        Column("MaPeT", ".1f"),
        Column("gain", "+.1f"),
        Column("spread of each"),
    ]
    return Table(columns, rows, NOTES)


def segmentation_section(stages: Mapping[str, Stage], count: int = 5) -> Section:
    """Ground truth and prediction on the first validation images, after fine-tuning from both starts."""
    figures = []
    for start, title in ((SCRATCH, "no pre-training"), (MAPET, "MaPeT")):
        stage = stages[f"segmentation-{start}"]
        config = stage.folder / Path(stage.command[1]).name
        figures.append(segmentation_figure(config, stage.output, count, title))
    return Section("Segmentation", f"The first {count} validation images, after fine-tuning.", figures)


def make_report(stages: Sequence[Stage], jobs: int) -> Report:
    """The page: results, pictures, machine and commands."""
    by_name = {stage.name: stage for stage in stages}
    seconds = sum(stage.result["seconds"] for stage in stages)
    store = TokenStore.open(TOKENS)
    usage = measure_usage(store)
    sections = [
        curves_section(by_name["pretraining"].folder, entropy=usage.entropy),
        codebook_section(store, usage, DATA),
        masks_section(),
    ]
    if "frozen" in by_name:
        results = frozen_table(by_name["frozen"])
        summary = (
            "From raw images to frozen features: digits, codebook, tokens, MaPeT pre-training, evaluation. "
        )
    else:
        results = results_table(stages)
        sections.append(segmentation_section(by_name))
        summary = (
            "From raw images to a segmentation mIoU: digits, codebook, tokens, MaPeT pre-training, then the "
            "same small ViT with and without it. "
        )
    facts = [
        ("machine", f"{platform.platform()}, {os.cpu_count()} CPU cores"),
        ("Python", platform.python_version()),
        *((name, import_module(name).__version__) for name in LIBRARIES),
    ]
    return Report(
        title="MaPeT on handwritten digits",
        summary=f"{summary}The stages took {seconds:.0f} s in all, {jobs} at a time.",
        results=results,
        sections=sections,
        facts=facts,
        commands=["export OMP_NUM_THREADS=1", *(stage.line for stage in stages)],
    )


@one_line_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("work_dirs/demo"), help="for stages and report")
    parser.add_argument("--comparison", action="store_true", help="fine-tuning and segmentation, too")
    parser.add_argument("--jobs", type=int, default=2, help="stages at a time, one thread each")
    parser.add_argument("--quick", action="store_true", help="one epoch each: the figures mean nothing")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        stages = plan_stages(args.out, args.quick, args.comparison)
        run_stages(stages, args.jobs)
        print("drawing the report")
        report = make_report(stages, args.jobs)
        path = write_report(args.out / "report.html", report)
    except KeyboardInterrupt:
        sys.exit("Stopped. Run the same command again to continue.")
    print(f"\n{format_table(report.results)}\n\nreport: {path} (open it in a browser)")
    print("next: put your own images in a folder and follow README.md, `Your own images`")


if __name__ == "__main__":
    main()
