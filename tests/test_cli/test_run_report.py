"""The page of a RUN: its curves, verdict, pictures and command; names are escaped, and nothing is loaded."""

import base64
import io
import json
import re
import runpy
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from config_building import ROOT, run_tool
from markupsafe import escape
from PIL import Image
from scipy import stats
from starts import save_timm

from mapet_mm.cli import pretrain as command
from mapet_mm.cli.held_out import choice_words
from mapet_mm.cli.pretrain import parse_args, pretrain
from mapet_mm.cli.run_report import curves_of
from mapet_mm.structures import TokenStore
from mapet_mm.utils.run_folder import INIT, Run
from mapet_mm.visualization import report as pages
from mapet_mm.visualization.report import Report
from mapet_mm.weight_files import read_checkpoint, write_weights

FOLDER = "photos <b>&"
CLASSES = ("<i>&amp;", " second")  # a space before a name puts a folder first
EPOCHS = 2


def write_photographs(folder: Path) -> None:
    """Thirty images of each class, noise that is brighter in the second."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index in range(30):
            pixels = rng.integers(0, 240, (32, 32, 3)) + 3 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"<u>{index}.png")


def write_scalars(work_dir: Path) -> None:
    """What a training of two epochs logs."""
    records = []
    for epoch, loss in ((1, 5.0), (2, 4.0)):
        records.append(dict(loss=loss, token_accuracy=10.0 * epoch, epoch=epoch, step=epoch))
        records.append({"knn/top1": 50.0 + epoch, "knn/rank_me": 3.0, "step": epoch})
        records.append({"token/accuracy": 8.0 * epoch, "token/cross_entropy": loss + 0.5, "step": epoch})
    file = work_dir / "20260101_000000/vis_data/scalars.json"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A RUN with codebook and tokens, and a made-up training: the start's weights, changed."""
    folder = tmp_path_factory.mktemp("page")
    write_photographs(folder / FOLDER)
    save_timm("vit", folder / "start")
    run = folder / "run"

    def tokens_alone(stages, run, held) -> None:
        for stage in stages[:2]:
            _, tool, *arguments = stage.command
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(run)
                patch.setattr(sys, "argv", [tool, *arguments])
                patch.syspath_prepend(str(Path(tool).parent))
                runpy.run_path(tool, run_name="__main__")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "run_stages", tokens_alone)
        start = f"timm:local-dir:{folder / 'start'}"
        options = ["--init", start, "--epochs", str(EPOCHS), "--workers", "0"]
        pretrain(parse_args([str(folder / FOLDER), "--out", str(run), *options]))

    weights, meta = read_checkpoint(run / INIT)
    torch.manual_seed(0)
    changed = {name: value + 0.1 * torch.randn(value.shape) for name, value in weights.items()}
    write_scalars(run / "training")
    write_weights(run / f"training/epoch_{EPOCHS}.pth", changed, meta)
    shutil.copy(run / f"training/epoch_{EPOCHS}.pth", run / "training/best_knn.pth")
    return run


@pytest.fixture(scope="module")
def written(run) -> tuple[Report, Path]:
    """The page's contents and file, in a folder without anything beside it."""
    made = []
    write = pages.write_report

    def remember(path: Path, report: Report) -> Path:
        made.append(report)
        return write(path, report)

    out = run.parent / "page"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "write_report", remember)
        patch.syspath_prepend(str(ROOT / "tools"))
        patch.chdir(run.parent)
        run_tool(patch, "verdict.py", run, "--cache", run / "features", "--out", out)
    (report,) = made
    return report, out / "report.html"


def test_a_curve_of_classes_of_unequal_size_has_its_unit(tmp_path):
    write_scalars(tmp_path / "training")
    (tmp_path / "pretrain.py").write_text("work_dir = 'training'")
    (scalars,) = tmp_path.rglob("scalars.json")
    scalars.write_text(scalars.read_text().replace("knn/top1", "knn/mean_per_class"))
    section = curves_of(Run(tmp_path), None)
    (axes,) = section.figures[-1].axes
    assert axes.get_ylabel() == "mean per class (%)"
    assert "k-NN was best after epoch 2 (52.0 %)" in section.caption


def test_curves_are_the_logged_values(written, run):
    """With the entropy of the tokens, and where the weights of the best probe are."""
    report, _ = written
    (section,) = (section for section in report.sections if section.title == "Pre-training")
    tokens = TokenStore.open(run / "tokens").grids(range(60))
    entropy = pytest.approx(stats.entropy(np.bincount(tokens.ravel())))
    assert (
        "k-NN was best after epoch 2 (52.0 %), whose weights are in training/best_knn.pth." in section.caption
    )
    drawn = {}
    for figure in section.figures:
        (axes,) = figure.axes
        drawn[axes.get_title()] = [list(line.get_ydata()) for line in axes.lines]
    assert drawn == {
        "Pre-training loss": [[5, 4], [5.5, 4.5], [entropy, entropy]],
        "Token accuracy": [[10, 20], [8, 16]],
        "k-NN during the pre-training": [[51, 52]],
    }


def test_the_page_has_the_verdicts_table_and_sentence(written):
    _, file = written
    page = file.read_text()
    verdict = json.loads((file.parent / "verdict.json").read_text())
    assert f"<p>{escape(verdict['sentence'])} 60 images in " in page
    models = ["this pre-training", "its start", "random weights"]
    headings = re.findall(r"<th(?: class=\"number\")?>(.*?)</th>", page)
    assert headings[:5] == ["measure", *models, "gain over its start"]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    knn = verdict["measures"][0]
    assert cells[0] == knn["name"] == "k-NN, top-1 (%)"
    for cell, model in zip(cells[1:4], models, strict=True):
        assert cell.startswith(f"{knn['values'][model]:.1f} [")
    assert cells[4].startswith(f"{knn['gain']['points']:+.1f} [")
    accuracy = cells.index("held-out token accuracy (%)")
    assert cells[accuracy + 1] == "16.0"


def test_the_page_shows_features_neighbours_codebook_command_and_versions(written):
    _, file = written
    page = file.read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Results",
        "The verdict",
        "Pre-training",
        "What the patches&#39; features tell apart",
        "Where the class token looks",
        "Nearest neighbours",
        "Patches that share a token",
        "What it ran on",
        "Commands",
    ]
    assert "<code>mapet-mm pretrain " in page
    assert "<code>backbone=dict(type=&#34;mapet_mm.TIMMViT&#34;, model_name=&#34;/" in page
    assert f"--epochs {EPOCHS}" in page
    assert f"<td>torch {version('torch')}</td>" in page


@pytest.mark.parametrize("by_evaluate", [False, True])
def test_other_classes_are_judged_without_another_training(run, monkeypatch, capsys, by_evaluate):
    """Here whether a number is odd, which no features tell; the RUN's own classes stay as they are."""
    names = (run / "images.txt").read_text().split("\n")
    labels = [f"{name}\t{'odd' if int(re.findall(r'[0-9]+', name)[-1]) % 2 else 'even'}" for name in names]
    (run.parent / "labels.txt").write_text("\n".join(labels))
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.chdir(run.parent)
    before = (run / "verdict_val.txt").read_text()
    if by_evaluate:
        options = ["--protocols", "NearestNeighbours", "--no-random", "--labels", "labels.txt"]
        run_tool(monkeypatch, "evaluate_features.py", "run", "--cache", run / "features", *options)
    else:
        run_tool(monkeypatch, "verdict.py", "run", "--cache", run / "features", "--labels", "labels.txt")
    printed = capsys.readouterr().out
    assert "2 classes (`even`, `odd`), of " in printed
    assert "6 of them tested, 54 others vote (k = 5)" in printed
    assert "k-NN" in printed
    (listed,) = (run / "features").glob("lists-*/verdict_val.txt")
    tested = listed.read_text().split("\n")
    assert len(tested) == 6
    assert all(int(re.findall(r"[0-9]+", line)[-2]) % 2 == int(line[-1]) for line in tested)
    assert (run / "verdict_val.txt").read_text() == before


def test_a_verdict_on_the_best_probes_weights_says_that_they_were_chosen_so(run, monkeypatch, capsys):
    """Here they are the last ones. Their path is relative to where the command is given."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.chdir(run.parent)
    printed = []
    for file in ("best_knn.pth", f"epoch_{EPOCHS}.pth"):
        run_tool(monkeypatch, "verdict.py", "run", f"run/training/{file}", "--cache", run / "features")
        printed.append(capsys.readouterr().out.partition("\nmeasure ")[2])
        monkeypatch.chdir(run.parent)
    chosen = f" {choice_words(str(run), 'best_knn.pth', None)}"
    assert "chosen by k-NN on images that are tested here" in chosen
    assert not choice_words(str(run), "best_knn.pth", data="photos")
    assert printed[0].count(chosen) == 1
    assert printed[0].replace(chosen, "") == printed[1]
    assert "token accuracy" not in printed[1]  # that of the last weights, whichever were named


def test_names_are_escaped_and_the_page_loads_nothing(written):
    _, file = written
    page = file.read_text()
    assert "photos &lt;b&gt;&amp;" in page
    assert not re.search(r"<[biu]>|photos <", page)
    assert not re.search(r"https?://|url\(|@import|<script|<link|href=", page)
    sources = re.findall(r' src="([^"]*)"', page)
    # The verdict, three curves, two figures each of features and of attention, neighbours, codebook.
    assert len(sources) == 10
    for source in sources:
        head, _, picture = source.partition(",")
        assert head == "data:image/png;base64"
        Image.open(io.BytesIO(base64.b64decode(picture))).load()
