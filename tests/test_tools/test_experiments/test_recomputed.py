"""The garments' means and deviations, computed from docs/records by nothing but this file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

import pytest
from scipy.stats import ttest_ind

DOCS = Path(__file__).parents[3] / "docs"
RECORDS = {file.stem: json.loads(file.read_text()) for file in DOCS.glob("records/*/results/*.json")}
PAGES = "".join((DOCS / f"results/{name}.md").read_text() for name in ("garments", "scenes", "archive"))
DATA, TOP1 = "fashion_mnist_20000", "accuracy/top1"
# Of a column's heading: the start of the run's name, and the metric.
COLUMNS = {
    "k-NN": ("vit-micro_frozen", "k-NN, both"),
    "10 labels a class": ("vit-micro_frozen", "logistic regression, both, 10 a class"),
    "attentive probe": ("vit-micro_frozen", "attentive probe, patch tokens, last layer"),
    "k-NN, class token": ("vit-micro_frozen", "k-NN, class token"),
    "k-NN, patch mean": ("vit-micro_frozen", "k-NN, mean"),
    "k-NN segmentation": ("vit-micro_frozen", "k-NN segmentation, patch tokens"),
    "linear probe, all labels": ("vit-micro_1xb128-linear-coslr", "accuracy/layer-4"),
    "linear probe, 100 labels": ("vit-micro_1xb100-linear-coslr_few-labels", "accuracy/layer-4"),
    "600 labels": ("vit-micro_1xb50-coslr_few-labels", TOP1),
    "6,000 labels": ("vit-micro_1xb64(-scratch)?-coslr_ann_file-meta-train_6000.txt", TOP1),
    "20,000 labels": ("vit-micro_1xb64(-scratch)?-coslr", TOP1),
    "frozen, linear, 200 scenes": ("vit-micro_linear-segmentation_1xb8-coslr", "mIoU"),
    "frozen, linear, all 2000 scenes": ("vit-micro_linear-segmentation_1xb8-coslr_indices-2000", "mIoU"),
    "UperNet, 200 scenes": ("vit-micro_upernet_1xb8-poly", "mIoU"),
    "UperNet, all 2000 scenes": ("vit-micro_upernet_1xb8-poly_indices-2000", "mIoU"),
    "perplexity": ("token-mlp_TOKENS_1xb64-coslr", "tokens/perplexity"),
    "dead": ("token-mlp_TOKENS_1xb64-coslr", "tokens/dead"),
    "purity": ("token-mlp_TOKENS_1xb64-coslr", "tokens/purity"),
    "MLP on the tokens": ("token-mlp_TOKENS_1xb64-coslr", TOP1),
    "ViT on the tokens": ("token-vit-micro_TOKENS_1xb64-coslr", TOP1),
}
TOKENIZERS = {"DALL-E": "dalle", "VQ-KD": "vqkd", "k-CLIP": "kclip"}
OWN = {
    f"k-means of {name}": f"{DATA}_round{n}"
    for n, name in enumerate(["pixels", "MaPeT's own features, round 1", "MaPeT's own features, round 2"])
}
# Tables whose runs name their rates and draw their tokenizers; the epochs that cost what MaPeT's 5 do.
OWN_RATES = ("Objectives", "Fine-tuning", "Transfer to digits", "Quality over compute", "Cutting point")
OWN_TOKENS = f"{DATA}_tokens{{seed}}"
EQUAL = {"MIM": "11", "PIM": "7", "PIM, late": "9", "BEiT": "10", "CAE": "9"}


def pretraining(row: str, own_rate: bool) -> tuple[str, str]:
    """A pattern of the name of a row's pre-training, and the data that it trained on."""
    if row in ("no pre-training", "tokens alone"):
        return "scratch", OWN_TOKENS if row == "tokens alone" else ""
    method = (re.match("MIM|PIM, late|PIM|BEiT|CAE", row) or ["MaPeT"])[0]
    start = re.match(r"round (\d)", row)
    share = re.match(r"c = (\d+) \(", row)
    rate = "0.003" if "3e-3" in row or share else "0.048" if method == "MaPeT" else r"[\d.]+"
    cut = f"_cutting_point-{share[1]}" if share and share[1] != "15" else ""
    form = rf"-amp-coslr{cut}_lr-{rate}" if own_rate else "-coslr"
    long = EQUAL[method] if "equal compute" in row else (re.search(r" (\d+) epochs", row) or ["", "5"])[1]
    form += "_going-on" if "going on" in row else "" if long == "5" else f"_max_epochs-{long}_end-{long}"
    data = f"{DATA}_round{start[1]}" if start else f"{DATA}_scenes" if "unlabelled" in row else DATA
    method = method.lower().replace(", ", "-")
    return f"{method}_vit-micro_kclip_1xb32{form}", OWN_TOKENS if own_rate else data


def seeds(evaluation: str, row: str, metric: str, own_rate: bool) -> list[float]:
    """A cell's figures in the order of their seeds."""
    if "TOKENS" in evaluation:
        (name, data), on = ("scratch", ""), OWN.get(row, DATA)
        evaluation = evaluation.replace("TOKENS", TOKENIZERS.get(row, "grid"))
    else:
        (name, data), on = pretraining(row, own_rate), ""
    if row == "tokens alone":
        evaluation, metric = "tokens-micro_frozen", metric.replace("both", "class token")
    found = {}
    for record in RECORDS.values():
        run = re.fullmatch(rf"{evaluation}--{name}_seed-(?P<seed>\d)", record["run"])
        trained_on = [RECORDS[Path(needed).name]["data"] for needed in record["needs"]]
        if run and (not data or data.format(**run.groupdict()) in trained_on) and on in ("", record["data"]):
            found.setdefault(run["seed"], []).append(record["metrics"][metric])
    assert all(len(values) == 1 for values in found.values())
    return [found[seed][0] for seed in sorted(found)]


def cells(section: str, table: int) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """Place, text, figures and the baseline's figures of each cell that comes from the records."""
    text = PAGES[PAGES.index(f"\n## {section}\n") :].replace("**", "")
    head, _, *rows = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)[table].splitlines()
    corner, *headings = head[2:-2].split(" | ")
    for line in rows:
        name, *shown = line[2:-2].split(" | ")
        for heading, cell in zip(headings, shown, strict=True):
            column = heading.rpartition(" (")[0]
            evaluation, metric = COLUMNS.get(column, ("", ""))
            if evaluation and cell.strip() not in ("", "-"):
                evaluation += "_digits" * (section == "Transfer to digits")
                compared = name, corner.removeprefix("less ")
                figures = [seeds(evaluation, row, metric, section in OWN_RATES) for row in compared]
                yield f"{name} ({column})", cell.strip(), *figures


@pytest.mark.parametrize(
    ("section", "number", "alone"),
    [
        ("Objectives", 86, False),
        ("Fine-tuning", 39, False),
        ("Transfer to digits", 26, False),
        ("Cutting point", 30, False),
        ("Quality over compute", 102, False),
        ("Rounds of bootstrapped tokens on garments", 32, True),
        ("Tokenizers", 30, True),
        ("Segmentation of garment scenes", 32, True),
    ],
)
def test_a_table_of_garments_is_the_mean_and_deviation_of_its_records(section, number, alone):
    """alone: figures without a deviation are of seed 0."""
    found = list(cells(section, 0))
    assert len(found) == number
    for place, cell, values, _ in found:
        values = values[:1] if alone and "±" not in cell else values
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else " (1 seed)" * (not alone)
        assert cell == f"{mean(values):.1f}{spread}", place


@pytest.mark.filterwarnings("ignore:Precision loss")  # of seeds that agree
@pytest.mark.parametrize(
    ("section", "number"),
    [("Objectives", 79), ("Fine-tuning", 36), ("Transfer to digits", 24), ("Cutting point", 24)],
)
def test_differences_from_mapet_have_the_p_of_welchs_test(section, number):
    """Holm's correction leaves the cells that the note names."""
    found, chances = list(cells(section, 1)), {}
    assert len(found) == number
    for place, cell, values, baseline in found:
        alike = min(len(values), len(baseline))
        values, baseline = values[:alike], baseline[:alike]
        expected = f"{mean(values) - mean(baseline):+.1f}"
        if alike > 1:
            error = ((stdev(values) ** 2 + stdev(baseline) ** 2) / alike) ** 0.5
            chances[place] = ttest_ind(values, baseline, equal_var=False).pvalue
            p = "< 0.01" if chances[place] < 0.005 else f"{chances[place]:.2f}"
            expected += f" ± {error:.1f}, p {p}"
        assert cell == expected, place
    ordered = sorted(chances.items(), key=lambda one: one[1])
    first = next(rank for rank, (_, p) in enumerate(ordered) if p * (len(ordered) - rank) >= 0.05)
    text = PAGES[PAGES.index(f"\n## {section}\n") :]
    note = re.search(r"Holm's correction for (\d+) comparisons leaves p below 0.05 in: (.*)\.\n", text)
    assert int(note[1]) == len(ordered)
    assert sorted(note[2].split("; ")) == sorted(place for place, _ in ordered[:first] or [("no cell", 1)])


def test_of_the_longest_runs_beits_lead_over_mapet_by_patch_mean_alone_remains():
    """Holm's correction for five objectives and six columns; 25 of the 30 means are ahead."""
    rows = ("MIM, 23 epochs", "PIM, 14 epochs", "PIM, late, 18 epochs", "BEiT, 20 epochs", "CAE, 18 epochs")
    found = []
    for column, of in list(COLUMNS.items())[:6]:
        baseline = seeds(of[0], "MaPeT, 10 epochs", of[1], True)
        for row in rows:
            values = seeds(of[0], row, of[1], True)
            p = ttest_ind(values, baseline, equal_var=False).pvalue
            found.append((p, row, column, mean(values) - mean(baseline)))
    (first, *best, lead), (second, *_) = sorted(found)[:2]
    assert (*best, f"{lead:.1f}") == ("BEiT, 20 epochs", "k-NN, patch mean", "2.6")
    assert 30 * first < 0.05 < 29 * second
    assert sum(one[-1] > 0 for one in found) == 25


def swept() -> dict[tuple[str, str], dict[str, list[float]]]:
    """Of each objective and length in epochs of the sweep: its rates and their figures, the mean last."""
    metrics = ["k-NN, class token", "k-NN, mean", *(metric for _, metric in list(COLUMNS.values())[:3])]
    name = r".*_held_out--(.+)_vit-micro_.*32(-amp)?-coslr(.*)_lr-([\d.]+)(?:_max_epochs-(\d+).*)?_seed-0"
    found = {}
    for record in RECORDS.values():
        if run := re.fullmatch(name, record["run"]):
            kind = run[1] + ", float32" * (not run[2]) + ", c = 13" * bool(run[3])
            values = [record["metrics"][one] for one in metrics]
            found.setdefault((kind, run[5] or "5"), {})[run[4]] = [*values, mean(values[2:])]
    return found


def test_every_run_of_the_rate_sweep_is_a_row_of_its_page_and_the_best_has_its_gain():
    page = (DOCS / "results/rates.md").read_text().replace(", late", "-late").lower()
    rows = re.findall(r"^\| (.+) \| (\d+) \| ([\d.*]+) \| [\d.]+ \| (.+) \|$", page, re.MULTILINE)
    expected = set()
    for (kind, epochs), rates in swept().items():
        best = max(rates, key=lambda rate: rates[rate][-1]) if "float32" not in kind else ""
        for rate, values in rates.items():
            figures = " | ".join(f"{value:.1f}" for value in values)
            expected.add((kind, epochs, f"**{rate}**" if rate == best else rate, figures))
        if best:
            gain = rates[best][-1] - rates["0.003"][-1]
            expected.add((kind, epochs, best, f"{rates[best][-1]:.1f} | {gain:+.1f}"))
    assert set(rows) == expected
    assert len(rows) == len(expected)


def test_every_other_run_at_its_own_rate_has_the_one_that_the_sweep_chose():
    name = r"(\w+(?:-late)?)_vit-micro_kclip_1xb32-amp-coslr_lr-([\d.]+)(?:_max_epochs-(\d+).*)?_seed-\d"
    runs = [(record, re.fullmatch(name, record["run"])) for record in RECORDS.values()]
    runs = [run for record, run in runs if run and record["data"] != DATA]
    runs = [run for run in runs if run[1] + run[2] != "mapet0.003"]  # the row "MaPeT, 3e-3"
    lengths = {method: max(int(epochs) for one, epochs in swept() if one == method) for method, _ in swept()}
    assert len(runs) == 3 * (6 + 5 + 6)
    for method, rate, epochs in (run.groups("5") for run in runs):
        rates = swept()[method, str(min(int(epochs), lengths[method]))]  # the longest take the rate before
        assert rate == max(rates, key=lambda one: rates[one][-1]), method
