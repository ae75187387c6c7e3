"""Model cards of exports: what Hugging Face reads of them, what they say, and what stays the user's."""

import json
import os
import re
import shutil
import time
from html import unescape
from pathlib import Path

import pytest
from config_building import ROOT
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from mmengine.config import Config
from torch import Tensor

from mapet_mm.evaluation.verdict import RESULT, Gain, Measure, Verdict
from mapet_mm.interop.description import description_entry
from mapet_mm.interop.export import write_export
from mapet_mm.interop.model_card import BEGIN, CARD, END, add_verdict, command_of, plain
from mapet_mm.models import MaPeTViT
from mapet_mm.registry import MODELS
from mapet_mm.structures import Codebook, TokenStore
from mapet_mm.utils.run_folder import VERDICT, Run
from mapet_mm.weight_files import read_weights, write_weights

TINY = ROOT / "configs/mapet/mapet_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"
SMALL = dict(embed_dims=48, num_layers=2, num_heads=3, feedforward_channels=192)
NAMES = [
    "a | b",
    "<b>bold</b> & *stars* `ticks`",
    "[a](b) ~c~ #1 $x$",
    "two\nlines_with_underscores_",
    "&lt;",
]
OPTIONS = dict(arch="tiny", init=None, tokenizer="random", epochs=2, batch_size=64, seed=3, no_verdict=False)
COMMAND = "--arch tiny --tokenizer random --epochs 2 --batch-size 64 --seed 3"
VERDICT_OF_RUN = Verdict(
    compared_with="random weights",
    measures=[
        Measure(
            "k-NN, top-1 (%)",
            values={RESULT: 81.23, "random weights": 75.1},
            intervals={RESULT: (80.1, 82.4), "random weights": (74.0, 76.2)},
            gain=Gain(points=6.13, interval=(3.9, 8.24)),
        ),
        Measure("held-out token accuracy (%)", values={RESULT: 0.25}),
    ],
    sentence="Pre-training gains 6.1 points of k-NN (3.9 to 8.2) over random weights.",
    num_images=1200,
)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return {f"backbone.{name}": value for name, value in MaPeTViT(SMALL).state_dict().items()}


@pytest.fixture
def run(tmp_path) -> Path:
    """As much of a folder of `mapet-mm pretrain` as a card is about."""
    run = tmp_path / "run"
    codebook = Codebook([[0.0], [1.0]], metadata=dict(encoder="RN50", weights="openai"))
    codebook.save(run / "codebook.safetensors")
    TokenStore.create(run / "tokens", ["cat.png"], grid=14, vocab_size=2, tokenizer=codebook.digest)
    (run / "identity.json").write_text(json.dumps({"images": "/home/me/my photos", **OPTIONS}))
    (run / "pretrain.py").write_text("work_dir = 'training'\ntrain_cfg = dict(max_epochs=2)\n")
    return run


@pytest.fixture
def meta(run) -> dict:
    """Of the checkpoint that the pre-training in `run` ends with."""
    recipe = Config.fromfile(TINY)
    recipe.model.backbone.arch = SMALL
    name = time.strftime("pretrain_%Y%m%d_%H%M%S")
    of_training = dict(epoch=2, iter=1234, seed=3, experiment_name=name, time=time.strftime("%Y%m%d_%H%M%S"))
    tokenizer = Codebook.load(run / "codebook.safetensors").digest
    return dict(of_training, num_images=5678, tokenizer=tokenizer, **description_entry(recipe))


def cells(card: Path) -> list[list[str]]:
    """The cells of each row of a card's tables, as a reader sees them."""
    page = MarkdownIt("commonmark").enable("table").render(ModelCard.load(card).text)
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [[unescape(cell) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", row)] for row in rows]


@pytest.mark.parametrize(
    ("target", "library", "architecture"), [("timm", "timm", "vit_"), ("hf", "transformers", "Dinov2Model")]
)
def test_a_card_says_what_was_trained(target, library, architecture, run, meta, weights):
    write_export(run / "export", target, weights, meta)
    card = ModelCard.load(run / "export" / CARD)
    assert card.data.library_name == library
    assert card.data.pipeline_tag == "image-feature-extraction"
    assert card.data.license == "unknown"
    assert "vision-transformer" in card.data.tags
    facts = dict(cells(run / "export" / CARD))
    assert facts["network"].startswith(architecture)
    assert facts["network"].endswith("0.1 M parameters, images of 224 x 224")
    assert (facts["training images"], facts["epochs"], facts["steps"]) == ("5,678", "2", "1,234")
    assert (facts["config"], facts["seed"]) == ("pretrain.py", "3")
    assert facts["tokenizer"] == "2 clusters of the features of RN50 (openai)"
    assert facts["codebook, SHA-256"] == facts["tokenizer's digest"] == meta["tokenizer"]
    assert f"    mapet-mm pretrain 'my photos' --out run {COMMAND}\n" in card.text
    assert "/home/me" not in card.text
    assert f'"{"hf-hub:" if target == "timm" else ""}USER/NAME"' in card.text


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            "timm",
            "model(transform(image)[None])  # of a float tensor (4, height, width), values between 0 and 1",
        ),
        ("hf", "model(images).last_hidden_state  # of a batch of 4 bands"),
    ],
)
def test_a_card_says_how_images_of_four_bands_are_read(target, said, run, meta):
    load = "type='mapet_mm.LoadPicture', bands=(1, 2, 3, 4), range=(0, 4095)"
    with (run / "pretrain.py").open("a") as config:
        config.write(f"train_dataloader = dict(dataset=dict(pipeline=[dict({load})]))\n")
    recipe = Config.fromfile(TINY)
    recipe.model.backbone.arch = SMALL
    recipe.data_preprocessor = dict(mean=[51.0] * 4, std=[25.5] * 4)
    vit = MaPeTViT(SMALL, in_channels=4)
    weights = {f"backbone.{name}": value for name, value in vit.state_dict().items()}
    write_export(run / "export", target, weights, meta | description_entry(recipe))
    text = (run / "export" / CARD).read_text()
    assert said in text
    assert "PIL image in RGB" not in text
    read_by = dict(cells(run / "export" / CARD))["images are read by"]
    assert read_by == "mapet_mm.LoadPicture(bands=(1, 2, 3, 4), range=(0, 4095))"


def test_the_backbone_that_a_card_shows_has_the_exports_weights(run, meta, weights):
    write_export(run / "export", "timm", weights, meta)
    (entry,) = re.findall(r"^backbone=.*$", ModelCard.load(run / "export" / CARD).text, re.MULTILINE)
    (backbone,) = eval(f"dict({entry.replace('FOLDER', str(run / 'export'))})").values()
    vit = MODELS.build(backbone)
    own = read_weights(run / "export")
    assert all(value.equal(own[name.removeprefix("timm_model.")]) for name, value in vit.state_dict().items())


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        ("/home/me/weights/vit.pth", "vit.pth"),
        ("hf:/home/me/vit/", "hf:vit"),
        ("hf:../me/vit", "hf:vit"),
        ("timm:local-dir:me/vit", "timm:local-dir:vit"),
        ("hf:facebook/dinov2-small", "hf:facebook/dinov2-small"),
        ("timm:vit_small_patch14_dinov2.lvd142m", "timm:vit_small_patch14_dinov2.lvd142m"),
    ],
)
def test_a_starts_folder_is_private(option, shown, run, meta, weights):
    recorded = json.loads((run / "identity.json").read_text())
    (run / "identity.json").write_text(json.dumps(recorded | {"init": option}))
    write_export(run / "export", "timm", weights, meta)
    assert f" --init {shown} --tokenizer" in (run / "export" / CARD).read_text()


def test_a_folder_elsewhere_has_what_the_checkpoint_says(run, meta, weights, tmp_path):
    write_export(tmp_path / "export", "timm", weights, meta)
    facts = dict(cells(tmp_path / "export" / CARD))
    assert facts["training images"] == "5,678"
    assert "codebook, SHA-256" not in facts
    assert "mapet-mm pretrain" not in (tmp_path / "export" / CARD).read_text()


def test_other_weights_in_the_folder_are_not_taken_for_its_own(run, meta, weights):
    write_export(run / "other", "timm", weights, {**meta, "tokenizer": "another"})
    assert "mapet-mm pretrain" not in (run / "other" / CARD).read_text()


def test_a_verdict_is_added_with_its_intervals(run, meta, weights):
    write_weights(run / "training/epoch_2.pth", weights, meta)
    for name, target in (("timm", "timm"), ("huggingface", "hf")):
        write_export(run / name, target, weights, meta)
    before = (run / "timm" / CARD).read_text()
    add_verdict(Run(run))
    assert (run / "timm" / CARD).read_text() == before
    (run / VERDICT).write_text(json.dumps(VERDICT_OF_RUN.as_json()))
    add_verdict(Run(run))
    for name in ("timm", "huggingface"):
        assert "Measured on 1,200 held-out images" in (run / name / CARD).read_text()
        *_, heading, neighbours, tokens = cells(run / name / CARD)
        assert heading == ["measure", RESULT, "random weights", "gain over random weights"]
        assert neighbours[1:] == ["81.2 [80.1, 82.4]", "75.1 [74.0, 76.2]", "+6.1 [+3.9, +8.2]"]
        assert tokens == ["held-out token accuracy (%)", "0.250", "–", "–"]


def test_a_verdict_on_a_shorter_training_is_left_out(run, meta, weights):
    (run / VERDICT).write_text(json.dumps(VERDICT_OF_RUN.as_json()))
    os.utime(run / VERDICT, (0, time.time() - 60))
    write_export(run / "timm", "timm", weights, meta)
    assert "Pre-training gains" not in (run / "timm" / CARD).read_text()


def test_what_the_user_wrote_stays(run, meta, weights):
    card = run / "timm" / CARD
    write_export(card.parent, "timm", weights, meta)
    edited = card.read_text().replace("license: unknown", "license: cc-by-4.0") + "Thanks to all.\n"
    card.write_text(edited)
    write_export(card.parent, "timm", weights, {**meta, "epoch": 7})
    assert dict(cells(card))["epochs"] == "7"
    assert card.read_text() == re.sub(r"\| epochs \| 2 \|", "| epochs | 7 |", edited)
    card.write_text("My own card.\n")
    write_export(card.parent, "timm", weights, meta)
    assert card.read_text() == "My own card.\n"


@pytest.mark.parametrize("name", NAMES)
def test_markdown_shows_a_name_as_it_is(name):
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(f"| {plain(name)} |\n| --- |\n")
    (shown,) = re.findall(r"<th>(.*?)</th>", page, re.DOTALL)
    assert unescape(shown) == " ".join(name.split())
    assert "<b>" not in shown


def test_a_folder_with_any_name_has_a_card(run, meta, weights):
    named = run.with_name("---\n<!-- `a` | *b*")
    shutil.move(run, named)
    write_export(named / "timm", "timm", weights, meta)
    text = (named / "timm" / CARD).read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert ModelCard.load(named / "timm" / CARD).data.library_name == "timm"
    page = MarkdownIt("commonmark").render(ModelCard.load(named / "timm" / CARD).text)
    assert "<h1>--- &lt;!-- `a` | *b*</h1>" in page
    lines = [line.strip() for line in command_of(Run(named)).split("\n")]
    assert all(f"    {line}" in text for line in lines)
