"""How much of what a training changed of its start is kept, by k-NN on images that no verdict takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mapet_mm.cli.held_out import drop_skipped, write_lines
from mapet_mm.cli.options import PretrainOptions
from mapet_mm.datasets.groups import draw_share
from mapet_mm.evaluation.extraction import take_features
from mapet_mm.evaluation.image_sets import SECTION, read_image_sets
from mapet_mm.evaluation.models import load_model
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.verdict import knn_hits
from mapet_mm.models.utils.low_rank import ADAPTERS
from mapet_mm.structures.names import read_lines
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.run_folder import CHOOSING, INIT, PRETRAINING, TESTED, VOTING, Run
from mapet_mm.weight_files import read_checkpoint, read_weights, write_weights

SHARES = (0, 0.25, 0.5, 0.75, 1)  # of the change
LEAST = 15  # tested images, of which a third chooses
CHANGE = "change"  # in the metadata of the result


def set_aside(args: PretrainOptions, groups: Mapping[str, str]) -> str:
    """Let a third of the verdict's tested images, whole groups, choose instead; returns a line about it."""
    run = args.run
    lines = read_lines(run / TESTED) if run.held_out else []
    if not lines or not read_lines(run / VOTING):
        return "change: all of it is kept, because there are no labels to choose by"
    if len(lines) < LEAST:
        return f"change: all of it is kept, because {len(lines)} tested images are too few to choose by some"
    classes = dict(line.rsplit(" ", 1) for line in lines)
    choosing = set(draw_share(classes, 1 / 3, args.seed, classes, groups))
    for file, is_choosing in ((CHOOSING, True), (TESTED, False)):
        own = [line for line, name in zip(lines, classes, strict=True) if (name in choosing) is is_choosing]
        write_lines(run / file, own)
    return (
        f"change: {len(choosing)} of the tested images choose how much of it is kept, and the verdict takes "
        f"the other {len(lines) - len(choosing)}"
    )


def choose_change(run: Run, cache: Path) -> float:
    """Write the result of a RUN: its start plus the share of the change by which k-NN is best.

    Of equal figures the larger share counts. To be called in RUN, to which its paths are relative.

    Args:
        run: whose training has ended.
        cache: folder of the features.
    """
    drop_skipped(run, CHOOSING)
    start = read_weights(run / INIT)
    trained, meta = read_checkpoint(run.checkpoint)
    trial = run.work_dir / "trial.pth"
    figures = {}
    for share in SHARES:
        write_weights(trial, changed(start, trained, share), meta)
        figures[share] = top1_of(trial, cache)
        print_once(f"start + {share:g} of the change: k-NN {figures[share]:.1f} %")
    trial.unlink()
    best = max(SHARES, key=lambda share: (figures[share], share))
    write_weights(run.result, changed(start, trained, best), {**meta, CHANGE: best})
    print_once(f"kept: {best:g} of the change, in {run.result}")
    return best


def changed(start: Mapping[str, Tensor], trained: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """`start + share * (trained - start)`; what the start does not have is as trained."""
    # Adapters are in the weights already; beside other shares of the change they would not fit.
    mixed = {name: value for name, value in trained.items() if not name.startswith(ADAPTERS)}
    if share < 1:
        for name in start.keys() & mixed.keys():
            mixed[name] = start[name].lerp(trained[name], share)
    return mixed


def top1_of(checkpoint: Path, cache: Path) -> float:
    """k-NN top-1 (%) of weights of the RUN in the working folder, on the images that choose."""
    model = load_model(PRETRAINING, str(checkpoint))
    model.config[SECTION].val.dataset.ann_file = CHOOSING
    images = read_image_sets(model.config)
    features = {name: take_features(model, images[name], cache) for name in ("train", "val")}
    return knn_hits(Evaluated(features, images, model.backbone.device)).figure
