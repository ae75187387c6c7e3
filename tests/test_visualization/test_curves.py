"""Curves are the numbers that MMEngine logged."""

import json

from mapet_mm.visualization.curves import PRETRAINING_PANELS, Curve, curve, curve_figure
from mapet_mm.visualization.training_log import read_scalars


def train(epoch, step, loss, accuracy):
    return {"lr": 1e-3, "loss": loss, "token_accuracy": accuracy, "epoch": epoch, "iter": step, "step": step}


def val(epoch, accuracy, loss):
    return {"token/accuracy": accuracy, "token/cross_entropy": loss, "step": epoch}


RUN = [
    train(1, 10, 4.0, 10.0),
    train(1, 20, 3.0, 20.0),
    val(1, 12.5, 3.5),
    train(2, 30, 2.0, 30.0),
    val(2, 25.0, 2.5),
]


def log(work_dir, timestamp, records):
    file = work_dir / timestamp / "vis_data/scalars.json"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_curves_are_the_logged_numbers_by_epoch(tmp_path):
    log(tmp_path, "20260101_000000", RUN)
    records = read_scalars(tmp_path)
    assert curve(records, "loss") == Curve([1, 2], [3.5, 2.0], "epoch")
    assert curve(records, "token_accuracy") == Curve([1, 2], [15.0, 30.0], "epoch")
    assert curve(records, "token/cross_entropy") == Curve([1, 2], [3.5, 2.5], "epoch")
    assert curve(records, "token/accuracy") == Curve([1, 2], [12.5, 25.0], "epoch")


def test_training_by_iterations_counts_iterations(tmp_path):
    records = [{"lr": 1.0, "loss": 2.0, "iter": 50, "step": 50}, {"mIoU": 12.0, "step": 100}]
    file = log(tmp_path, "20260101_000000", records)
    assert curve(read_scalars(file), "loss") == Curve([50], [2.0], "iteration")
    assert curve(read_scalars(file), "mIoU") == Curve([100], [12.0], "iteration")


def test_resumed_run_replaces_what_it_did_again(tmp_path):
    """Killed in epoch 2 and resumed from epoch 1: epoch 2 counts once, with the resumed run's numbers."""
    log(tmp_path, "20260101_000000", RUN)
    log(tmp_path, "20260101_000100", [train(2, 30, 1.0, 50.0), val(2, 45.0, 1.5)])
    records = read_scalars(tmp_path)
    assert curve(records, "loss") == Curve([1, 2], [3.5, 1.0], "epoch")
    assert curve(records, "token/accuracy") == Curve([1, 2], [12.5, 45.0], "epoch")


def test_csv_reference_gives_the_same_curves(tmp_path):
    file = tmp_path / "reference.csv"
    file.write_text("epoch,loss,token/cross_entropy\n1,3.5,\n2,2.0,2.5\n")
    assert curve(read_scalars(file), "loss") == Curve([1, 2], [3.5, 2.0], "epoch")
    assert curve(read_scalars(file), "token/cross_entropy") == Curve([2], [2.5], "epoch")


def test_drawn_lines_are_the_curves_with_the_reference_behind():
    reference = [train(1, 10, 9.0, 1.0), val(1, 2.0, 8.0)]
    axes = curve_figure(PRETRAINING_PANELS[0], RUN, reference).axes[0]
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn == {
        "reference, training": ([1], [9.0]),
        "reference, validation": ([1], [8.0]),
        "training": ([1, 2], [3.5, 2.0]),
        "validation": ([1, 2], [3.5, 2.5]),
    }
    assert axes.get_xlabel() == "epochs"
    assert axes.get_ylabel() == "cross-entropy per target (nats)"


def test_without_a_reference_or_a_validation_there_is_no_line_of_it():
    axes = curve_figure(PRETRAINING_PANELS[0], RUN[:2]).axes[0]
    assert [line.get_label() for line in axes.lines] == ["training"]
