"""The demo: from raw images to a segmentation mIoU on handwritten digits, with and without pre-training.

    python tools/demo.py [--jobs N] [--out work_dirs/demo]

Runs each stage below, prints its exact command line, and ends with a table and a self-contained HTML report.
After a kill or a failure, the same command resumes and skips completed stages.
"""

import argparse
import sys
import time
from pathlib import Path

from demo_report import (
    MAPET,
    SCRATCH,
    codebook_section,
    curves_section,
    machine_facts,
    masks_section,
    results_table,
    segmentation_section,
    stage_table,
)
from experiments.declaration import Column, Row, TableDeclaration
from experiments.fill import TableFiller
from experiments.local import LocalRunner

from mapet_mm.utils.errors import one_line_errors
from mapet_mm.visualization.report import Report, format_table, write_report

CONFIGS = "configs/micro"
PRETRAIN = f"{CONFIGS}/mapet_vit-micro_kclip_1xb32-coslr.py"
SEGMENTATION = f"{CONFIGS}/vit-micro_linear-segmentation_1xb8-coslr.py"
DATA, PIXELS, TOKENS = "data/digits", "data/digits_pixels", "work_dirs/digits/tokens"
REFERENCE = "docs/reference/mapet_digits.json"
PROBE = f"{CONFIGS}/vit-micro_1xb100-linear-mean-coslr_few-labels.py"
FINETUNE_FEW = f"{CONFIGS}/vit-micro_1xb50-coslr_few-labels.py"
FINETUNE = f"{CONFIGS}/vit-micro_1xb64-coslr.py"

# All stages; rows that need the pre-training come first, so that it starts as early as possible.
TABLE = TableDeclaration(
    name="demo",
    dataset="digits",
    title="MaPeT on handwritten digits",
    data=dict(command=["tools/dataset_converters/digits.py"], outputs=[DATA, PIXELS]),
    rows=[Row(MAPET, pretrain=PRETRAIN, tokenizer=f"{CONFIGS}/kclip.py"), Row(SCRATCH)],
    columns=[
        Column("linear probe, 100 labels", "top-1, %", PROBE, "accuracy/top1"),
        Column("fine-tuning, 100 labels", "top-1, %", FINETUNE_FEW, "accuracy/top1"),
        Column("fine-tuning, all labels", "top-1, %", FINETUNE, "accuracy/top1"),
        Column("linear segmentation, 100 labels", "mIoU, %", SEGMENTATION, "mIoU", data="digits_pixels"),
        Column(
            "fine-tuned segmentation, 100 labels",
            "mIoU, %",
            SEGMENTATION,
            "mIoU",
            options={"model.backbone.frozen_stages": -1},
            data="digits_pixels",
        ),
    ],
    notes=(
        "One run each, seed 0. Validation after the last epoch, no selection.",
        "The same digits come back on the same machine type only; docs/results.md has the spread of three "
        "seeds.",
        "Segmentation: a linear layer on the patch tokens of the ViT, frozen or fine-tuned; 100 digits with "
        "pixel labels.",
        "k-CLIP's encoder here is a small CLIP ResNet with fixed random weights.",
    ),
)


def make_report(filler: TableFiller, jobs: int, set_up: float | None, started: float) -> Report:
    runs = filler.plan.runs
    pretraining = next(run for run in runs if run.kind == "pre-training")
    # The last column's: fine-tuned.
    segmenters = {cell.row: cell.run for cell in filler.plan.cells if cell.metric == "mIoU"}
    reference = REFERENCE if Path(REFERENCE).is_file() else None
    return Report(
        title=TABLE.title,
        summary="From raw images to a segmentation mIoU: digits, codebook, tokens, MaPeT pre-training, "
        "then the same small ViT with and without it. "
        f"This run took {time.monotonic() - started:.0f} s with {jobs} stages side by side.",
        results=results_table(filler),
        sections=[
            curves_section(pretraining.folder, reference),
            codebook_section(TOKENS, DATA),
            masks_section(),
            segmentation_section(Path(SEGMENTATION).name, segmenters),
        ],
        stages=stage_table(runs, [] if set_up is None else [("set-up", set_up)]),
        facts=machine_facts(jobs),
        commands=["export OMP_NUM_THREADS=1", *(run.line for run in runs)],
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("work_dirs/demo"), help="folder for everything written"
    )
    parser.add_argument("--jobs", type=int, default=2, help="stages at a time, one thread each")
    parser.add_argument("--setup-seconds", type=float, help="time of the set-up, for the report")
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args, started = parse_args(), time.monotonic()
    try:
        filler = TableFiller(TABLE, [0], args.out, "make demo")
        LocalRunner(filler.plan.runs, args.jobs).run()
        print("drawing the report")
        report = make_report(filler, args.jobs, args.setup_seconds, started)
        path = write_report(args.out / "report.html", report)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command resumes")
    print(f"\n{format_table(report.results)}\n\nreport: {path} (open it in a browser)")
    print("next: put your own images in a folder and follow README.md, `Your own images`")


if __name__ == "__main__":
    main()
