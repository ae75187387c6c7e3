"""The garments' means and deviations, computed from docs/records by nothing but this file."""

import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest

DOCS = Path(__file__).parents[3] / "docs"
RECORDS = {file.stem: json.loads(file.read_text()) for file in DOCS.glob("records/*/results/*.json")}
PAGES = "".join((DOCS / f"results/{name}.md").read_text() for name in ("garments", "scenes"))
DATA, TOP1 = "fashion_mnist_20000", "accuracy/top1"
# Of a column's heading: the start of the run's name, and the metric.
COLUMNS = {
    "k-NN": ("vit-micro_frozen", "k-NN, both"),
    "10 labels a class": ("vit-micro_frozen", "logistic regression, both, 10 a class"),
    "attentive probe": ("vit-micro_frozen", "attentive probe, patch tokens, last layer"),
    "k-NN segmentation": ("vit-micro_frozen", "k-NN segmentation, patch tokens"),
    "class token": ("vit-micro_frozen", "k-NN, class token"),
    "patch mean": ("vit-micro_frozen", "k-NN, mean"),
    "both": ("vit-micro_frozen", "k-NN, both"),
    "linear probe, all labels": ("vit-micro_1xb128-linear-coslr", TOP1),
    "linear probe, 100 labels": ("vit-micro_1xb100-linear-coslr_few-labels", TOP1),
    "600 labels": ("vit-micro_1xb50-coslr_few-labels", TOP1),
    "6,000 labels": ("vit-micro_1xb64(-scratch)?-coslr_ann_file-meta-train_6000.txt", TOP1),
    "20,000 labels": ("vit-micro_1xb64(-scratch)?-coslr", TOP1),
    "frozen, linear, 200 scenes": ("vit-micro_linear-segmentation_1xb8-coslr", "mIoU"),
    "frozen, linear, all 2000 scenes": ("vit-micro_linear-segmentation_1xb8-coslr_indices-2000", "mIoU"),
    "UperNet, 200 scenes": ("vit-micro_upernet_1xb8-poly", "mIoU"),
    "UperNet, all 2000 scenes": ("vit-micro_upernet_1xb8-poly_indices-2000", "mIoU"),
}
NARROW = "_embed_dims-64_num_heads-2_feedforward_channels-256_embed_dims-64"
FORMS = {"c = 35": "_cutting_point-35", "a third": "_prediction_ratio-0.34", "query": "_query_from_layer-2"}


def pretraining(row: str) -> tuple[str, str]:
    """The name of a row's pre-training, and the data it trained on."""
    if row in ("no pre-training", "tokens alone"):
        return "scratch", ""
    method = (re.match("MIM|PIM|BEiT|CAE", row) or ["MaPeT"])[0].lower()
    start = re.match(r"round (\d)", row)
    form = "".join(name for word, name in FORMS.items() if word in row) + NARROW * ("width 64" in row)
    if (share := re.match(r"c = (\d+) \(", row)) and share[1] != "15":
        form = f"_cutting_point-{share[1]}"
    long = {"MIM, equal compute": "11", "BEiT, equal compute": "10"}.get(row)
    long = long or (re.search(r" (\d+) epochs", row) or ["", "5"])[1]
    form += "_going-on" if "going on" in row else "" if long == "5" else f"_max_epochs-{long}_end-{long}"
    data = f"{DATA}_round{start[1]}" if start else f"{DATA}_scenes" if "unlabelled" in row else DATA
    return f"{method}_vit-micro_kclip_1xb32-coslr{form}", data


def seeds(evaluation: str, row: str, metric: str) -> list[float]:
    """A cell's figures in the order of their seeds."""
    (name, data), found = pretraining(row), {}
    if row == "tokens alone":
        evaluation, metric = "tokens-micro_frozen", metric.replace("both", "class token")
    for record in RECORDS.values():
        run = re.fullmatch(rf"{evaluation}--{re.escape(name)}_seed-(?P<seed>\d)", record["run"])
        if run and (not data or data in [RECORDS[Path(needed).name]["data"] for needed in record["needs"]]):
            found.setdefault(run["seed"], []).append(record["metrics"][metric])
    assert all(len(values) == 1 for values in found.values())
    return [found[seed][0] for seed in sorted(found)]


@pytest.mark.parametrize(
    ("section", "cells", "alone"),
    [
        ("Objectives", 42, False),
        ("Nearest neighbours by pooling", 24, False),
        ("Fine-tuning", 24, False),
        ("Transfer to digits", 16, False),
        ("Cutting point", 20, True),
        ("Quality over compute", 68, False),
        ("Rounds of bootstrapped tokens", 32, True),
        ("Segmentation of garment scenes", 32, True),
    ],
)
def test_a_table_of_garments_is_the_mean_and_deviation_of_its_records(section, cells, alone):
    """alone: the table has seed 0 only."""
    text = PAGES[PAGES.index(f"\n## {section}\n") :].replace("**", "")
    head, _, *rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    compared = 0
    for row in rows:
        name, *shown = row[2:-2].split(" | ")
        for heading, cell in zip(head[2:-2].split(" | ")[1:], shown, strict=True):
            evaluation, metric = COLUMNS.get(heading.rpartition(" (")[0], ("", ""))
            if evaluation and cell.strip() not in ("", "-"):
                values = seeds(evaluation + "_digits" * (section == "Transfer to digits"), name, metric)
                values = values[:1] if alone else values
                spread = f" ± {stdev(values):.1f}" if len(values) > 1 else " (1 seed)" * (not alone)
                assert cell == f"{mean(values):.1f}{spread}", (name, heading)
                compared += 1
    assert compared == cells
