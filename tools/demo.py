"""The demo: from raw images to a segmentation mIoU on handwritten digits, with and without pre-training.

    python tools/demo.py [--jobs N] [--out work_dirs/demo]

Runs each stage below, prints its exact command line, and ends with a table and a self-contained HTML report.
After a kill or a failure, the same command resumes and skips completed stages.
"""

import importlib
import sys
import time
from pathlib import Path

from benchmarks.harness import machine
from command_line import described_parser
from experiments.declaration import Column, Row, TableDeclaration
from experiments.fill import TableFiller
from experiments.local import LocalRunner
from experiments.records import record_of

from mapet_mm.models.utils.objectives import OBJECTIVES
from mapet_mm.tokenizers import TokenStore
from mapet_mm.utils import tables
from mapet_mm.utils.errors import one_line_errors
from mapet_mm.utils.tables import Table, format_table
from mapet_mm.visualization import codebook_sheet, report
from mapet_mm.visualization.attention_masks import GROUP_NAMES, attention_mask_figure
from mapet_mm.visualization.curves import PRETRAINING_PANELS, curve_figure
from mapet_mm.visualization.report import Section, write_report
from mapet_mm.visualization.segmentation import segmentation_figure
from mapet_mm.visualization.token_statistics import measure_usage
from mapet_mm.visualization.training_log import read_scalars

SCRATCH, MAPET = "no pre-training", "MaPeT"
LIBRARIES = ("torch", "torchvision", "mmengine", "mmcv", "mmpretrain", "mmseg", "mapet_mm")
CONFIGS = "configs/micro"
PRETRAIN = f"{CONFIGS}/mapet_vit-micro_kclip_1xb32-coslr.py"
SEGMENTATION = f"{CONFIGS}/vit-micro_linear-segmentation_1xb8-coslr.py"
DATA, PIXELS, TOKENS = "data/digits", "data/digits_pixels", "work_dirs/digits/tokens"
REFERENCE = "docs/reference/mapet_digits.json"
PROBE = f"{CONFIGS}/vit-micro_1xb100-linear-mean-coslr_few-labels.py"
FINETUNE_FEW = f"{CONFIGS}/vit-micro_1xb50-coslr_few-labels.py"
FINETUNE = f"{CONFIGS}/vit-micro_1xb64-coslr.py"
# Standard deviations over three seeds, without and with pre-training, where they were measured.
SPREADS = {"linear probe, 100 labels": "1.8, 2.2", "fine-tuning, all labels": "0.6, 0.8"}
UNFROZEN = {"model.backbone.frozen_stages": -1}

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
            "fine-tuned segmentation, 100 labels", "mIoU, %", SEGMENTATION, "mIoU", UNFROZEN, "digits_pixels"
        ),
    ],
    notes=(
        "One run each, seed 0. Validation after the last epoch, no selection.",
        "The same figures come back on the same type of machine only. Spread: standard deviation of 3 seeds.",
        "Segmentation: a linear layer on the patch tokens of the ViT, frozen or fine-tuned; 100 digits with "
        "pixel labels.",
        "k-CLIP's encoder here is a small CLIP ResNet with fixed random weights.",
    ),
)


def results_table(filler: TableFiller) -> Table:
    """Each task's result without and with pre-training, the gain in points, and the spread of both."""
    rows = []
    for column in filler.table.columns:
        cells = [cell for cell in filler.plan.cells if cell.column == column.heading]
        values = {cell.row: record_of(cell.run)["metrics"][cell.metric] for cell in cells}
        gain, spread = values[MAPET] - values[SCRATCH], SPREADS.get(column.name, "not measured")
        rows.append([column.heading, values[SCRATCH], values[MAPET], gain, spread])
    headings = (("task", ""), (SCRATCH, ".1f"), (MAPET, ".1f"), ("gain", "+.1f"), ("spread of each", ""))
    return Table([tables.Column(*heading) for heading in headings], rows, filler.table.notes)


def curves_section(work_dir: str) -> Section:
    """Loss and token accuracy of the pre-training, drawn over the committed reference run."""
    records, reference = read_scalars(work_dir), read_scalars(REFERENCE)
    figures = [curve_figure(panel, records, reference) for panel in PRETRAINING_PANELS]
    caption = (
        "Training: mean over each epoch. Validation: the same permutations every time. Grey: the committed "
        f"reference run, {REFERENCE}."
    )
    return Section("Pre-training", caption, figures)


def codebook_section() -> Section:
    """Patches that share a token, of the most used tokens."""
    store = TokenStore.open(TOKENS)
    members = codebook_sheet.find_members(store, measure_usage(store).most_used(8))
    rows = []
    for token, patches in members.items():
        chosen = codebook_sheet.choose_members(patches, 6, seed=0)
        rows.append(codebook_sheet.SheetRow(f"token {token}: {len(patches):,} patches", chosen))
    caption = (
        "One token a row, its patch framed in red in its surroundings: the eight most used of "
        f"{store.vocab_size} tokens; patches drawn at random."
    )
    figure = codebook_sheet.draw_codebook_sheet(rows, DATA, store.grid)
    return Section("Patches that share a token", caption, [figure])


def masks_section() -> Section:
    """The attention masks of the three objectives, from the code that training uses."""
    names = ", ".join(f"{group} {name}" for group, name in GROUP_NAMES.items())
    caption = (
        "Rows attend to columns; a coloured cell is one that is seen. Drawn from the function that builds "
        f"the masks of the model, with 3 context tokens and 4 targets. {names}; nobody attends to Q."
    )
    return Section("Who sees whom", caption, [attention_mask_figure(one) for one in OBJECTIVES.values()])


def segmentation_section(filler: TableFiller, count: int = 5) -> Section:
    """Ground truth and prediction on the first validation images, after fine-tuning in each row."""
    runs = {cell.row: cell.run for cell in filler.plan.cells if cell.metric == "mIoU"}  # the last column's
    figures = [
        segmentation_figure(Path(run.folder, Path(SEGMENTATION).name), run.outputs[0], count, name)
        for name, run in runs.items()
    ]
    return Section("Segmentation", f"The first {count} validation images, after fine-tuning.", figures)


def make_report(filler: TableFiller, jobs: int, seconds: float) -> report.Report:
    """The page: results, pictures, machine and commands."""
    runs = filler.plan.runs
    pretraining = next(run for run in runs if run.kind == "pre-training")
    sections = [curves_section(pretraining.folder), codebook_section(), masks_section()]
    versions = [(name, importlib.import_module(name).__version__) for name in LIBRARIES]
    return report.Report(
        title=TABLE.title,
        summary="From raw images to a segmentation mIoU: digits, codebook, tokens, MaPeT pre-training, "
        "then the same small ViT with and without it. "
        f"This run took {seconds:.0f} s with {jobs} stages side by side.",
        results=results_table(filler),
        sections=[*sections, segmentation_section(filler)],
        facts=[("machine", machine()), *versions],
        commands=["export OMP_NUM_THREADS=1", *(run.line for run in runs)],
    )


@one_line_errors
def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("work_dirs/demo"), help="folder of runs and report")
    parser.add_argument("--jobs", type=int, default=2, help="stages at a time, one thread each")
    args, started = parser.parse_args(), time.monotonic()
    try:
        filler = TableFiller(TABLE, [0], args.out, "make demo")
        LocalRunner(filler.plan.runs, args.jobs).run()
        print("drawing the report")
        page = make_report(filler, args.jobs, time.monotonic() - started)
        path = write_report(args.out / "report.html", page)
    except KeyboardInterrupt:
        sys.exit("Stopped. Run the same command again to continue.")
    print(f"\n{format_table(page.results)}\n\nreport: {path} (open it in a browser)")
    print("next: put your own images in a folder and follow README.md, `Your own images`")


if __name__ == "__main__":
    main()
