"""Contents of the demo's report: results with and without pre-training, pictures, the machine."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import processor
from experiments.fill import TableFiller
from experiments.plan import Run
from experiments.records import record_of

import mapet_mm.utils.logging  # noqa: F401
from mapet_mm.models.utils.objectives import OBJECTIVES
from mapet_mm.tokenizers import TokenStore
from mapet_mm.visualization.attention_masks import GROUP_NAMES, attention_mask_figure
from mapet_mm.visualization.codebook_sheet import (
    SheetRow,
    choose_members,
    draw_codebook_sheet,
    find_members,
)
from mapet_mm.visualization.curves import PRETRAINING_PANELS, curve_figure, place_figure
from mapet_mm.visualization.report import Column, Section, Table
from mapet_mm.visualization.segmentation import segmentation_figure
from mapet_mm.visualization.token_statistics import measure_usage
from mapet_mm.visualization.training_log import read_scalars

SCRATCH, MAPET = "no pre-training", "MaPeT"
LIBRARIES = ("torch", "torchvision", "mmengine", "mmcv", "mmpretrain", "mmseg", "mapet_mm")
RESULT_COLUMNS = (
    Column("task"),
    Column(SCRATCH, ".1f"),
    Column(MAPET, ".1f"),
    Column("gain", "+.1f"),
)


def results_table(filler: TableFiller) -> Table:
    """Each task's result without and with pre-training, and the gain in points.

    Raises:
        KeyError: a metric was never logged.
    """
    rows = []
    for column in filler.table.columns:
        cells = [cell for cell in filler.plan.cells if cell.column == column.heading]
        values = {cell.row: record_of(cell.run)["metrics"][cell.metric] for cell in cells}
        rows.append([column.heading, values[SCRATCH], values[MAPET], values[MAPET] - values[SCRATCH]])
    return Table(RESULT_COLUMNS, rows, filler.table.notes)


def stage_table(runs: Sequence[Run], others: Sequence[tuple[str, float]] = ()) -> Table:
    """Seconds of each run, after the given other stages."""
    rows = [*others, *((run.name, record_of(run)["seconds"]) for run in runs)]
    note = "Stages run side by side where they can, so the sum is more than the time on the clock."
    return Table([Column("stage"), Column("seconds", ".0f")], [list(row) for row in rows], [note])


def machine_facts(jobs: int) -> list[tuple[str, str]]:
    """Processor, threads and versions that the figures depend on."""
    versions = [(name, importlib.import_module(name).__version__) for name in LIBRARIES]
    return [
        ("system", f"{platform.system()} {platform.machine()}"),
        ("processor", f"{processor()}, {os.cpu_count()} cores"),
        ("side by side", f"{jobs} stages with one thread each"),
        ("Python", platform.python_version()),
        *versions,
    ]


def curves_section(work_dir: str | os.PathLike, reference: str | os.PathLike | None) -> Section:
    """Loss and token accuracy of the pre-training, drawn over a committed reference run."""
    records = read_scalars(work_dir)
    behind = None if reference is None else read_scalars(reference)
    caption = "Training: mean over each epoch. Validation: the same permutations every time."
    if reference is not None:
        caption += f" Grey: the committed reference run, {reference}."
    figures = [curve_figure(panel, records, behind) for panel in PRETRAINING_PANELS]
    if places := place_figure(records):
        figures.append(places)
        caption += " By place: the later a target, the more of the others it sees."
    return Section("Pre-training", caption, figures)


def codebook_section(store_path: str | os.PathLike, image_root: str | os.PathLike, seed: int = 0) -> Section:
    """Patches that share a token: the most used tokens, and some drawn at random."""
    store = TokenStore.open(store_path)
    usage = measure_usage(store)
    choices = usage.most_used(6), usage.random(6, seed)
    members = find_members(store, [token for tokens in choices for token in tokens])
    rows = {
        token: SheetRow(f"token {token}: {len(patches):,} patches", choose_members(patches, 6, seed))
        for token, patches in members.items()
    }
    figures = [
        draw_codebook_sheet([rows[token] for token in tokens], image_root, store.grid) for tokens in choices
    ]
    caption = (
        "One token a row, its patch framed in red in its surroundings: the six most used of "
        f"{store.vocab_size} tokens, and six drawn at random (seed {seed})."
    )
    return Section("Patches that share a token", caption, figures)


def masks_section() -> Section:
    """The attention masks of the three objectives, from the code that training uses."""
    names = ", ".join(f"{group} {name}" for group, name in GROUP_NAMES.items())
    caption = (
        "Rows attend to columns; a coloured cell is one that is seen. Drawn from the function that builds "
        f"the masks of the model, with 3 context tokens and 4 targets. {names}; nobody attends to Q."
    )
    return Section("Who sees whom", caption, [attention_mask_figure([one]) for one in OBJECTIVES.values()])


def segmentation_section(config: str, runs: Mapping[str, Run], count: int = 5) -> Section:
    """Ground truth and prediction on the first validation images, for each run by its row's name.

    Args:
        config: name of the config that a run keeps in its folder.
        runs: trainings of it.
        count: number of images.
    """
    figures = [
        segmentation_figure(Path(run.folder, config), run.outputs[0], count, name)
        for name, run in runs.items()
    ]
    return Section("Segmentation", f"The first {count} validation images, after fine-tuning.", figures)
