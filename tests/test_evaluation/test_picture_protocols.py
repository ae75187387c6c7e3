"""From images on disk and a model to rows and pictures: what the evaluation shows of a pre-training."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image

from mapet_mm.evaluation.adapters import TokenBackbone
from mapet_mm.evaluation.features import MemoryFeatures
from mapet_mm.evaluation.image_sets import ImageSet
from mapet_mm.evaluation.picture_protocols import (
    FeaturePictures,
    LabelFree,
    TokenPredictions,
    rgb_image,
    spread,
)
from mapet_mm.evaluation.protocol import Evaluated, side_by_side
from mapet_mm.models import MaPeT
from mapet_mm.registry import MODELS
from mapet_mm.structures import TokenStore
from mapet_mm.visualization.report import Section

VOCABULARY = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight images of 8 x 12 pixels, red on top, in two classes, and tokens of all but none, 4 x 6."""
    root = tmp_path_factory.mktemp("images")
    (root / "val").mkdir()
    rng = np.random.default_rng(0)
    for index in range(8):
        pixels = rng.integers(0, 99, (8, 12, 3)).astype(np.uint8)
        pixels[:4, :, 0] = 255
        Image.fromarray(pixels).save(root / f"val/{index}.png")
    (root / "val.txt").write_text("".join(f"{i}.png {i % 2}\n" for i in range(8)))
    names = [f"val/{i}.png" for i in range(8)]
    store = TokenStore.create(
        root / "tokens", names, (4, 6), vocab_size=VOCABULARY, tokenizer="test", data_root=str(root)
    )
    store.write(range(8), rng.integers(0, VOCABULARY, (8, 4, 6)))
    return root


def evaluated(folder, store="tokens", objective="mapet", rgb=False, images=8) -> Evaluated:
    torch.manual_seed(0)
    arch = dict(embed_dims=12, num_layers=2, num_heads=2, feedforward_channels=24)
    backbone = dict(
        type="mapet_mm.MaPeTPretrainViT",
        arch=arch,
        img_size=(8, 12),
        patch_size=2,
        objective=objective,
        cutting_point=7,
    )
    head = dict(type="mapet_mm.TokenPredictionHead", embed_dims=12, vocab_size=VOCABULARY)
    model = MaPeT(backbone, head, None).eval()
    model.init_weights()
    preprocessor = dict(
        type="mmpretrain.ClsDataPreprocessor", mean=[127.5] * 3, std=[60.0] * 3, to_rgb=not rgb
    )
    pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="mapet_mm.LoadTokenGrid", store=str(folder / store)),
    ]
    config = Config(dict(train_dataloader=dict(dataset=dict(pipeline=pipeline))))
    dataset = dict(
        type="mmpretrain.CustomDataset",
        data_root=str(folder),
        data_prefix="val",
        ann_file="val.txt",
        indices=images,
        pipeline=[
            dict(type="LoadImageFromFile"),
            *([dict(type="mmpretrain.NumpyToPIL", to_rgb=True), dict(type="mmpretrain.PILToNumpy")] * rgb),
            dict(type="mmpretrain.PackInputs"),
        ],
    )
    image_set = ImageSet("val", dict(dataset=dataset))
    tokens = TokenBackbone(model, MODELS.build(preprocessor | dict(to_rgb=not rgb)))
    inputs = torch.stack([image_set.dataset[i]["inputs"] for i in range(images)])
    with torch.no_grad():
        found = tokens(tokens.normalise(inputs))
    pooled = torch.stack([found.class_token[:, -1], found.patches[-1].mean(1)])[:, None]
    features = MemoryFeatures(
        pooled,
        found.patches[-1],
        name="val",
        layers=["output"],
        poolings=["class token", "mean"],
        grid=tokens.grid,
        labels=image_set.labels,
    )
    checkpoint = SimpleNamespace(name="tiny", config=config, backbone=tokens)
    return Evaluated(checkpoint, {"val": features}, {"val": image_set}, torch.device("cpu"))


def test_all_pictures_of_a_pretraining_are_drawn(folder):
    known = evaluated(folder)
    sections = FeaturePictures(images=4).sections(known, [])
    assert [section.title for section in sections] == [
        "Patch features as colours",
        "Similar to one patch",
        "What the class token attends to",
        "Nearest neighbours",
    ]
    heads = sections[2].figures[0].axes[:3]
    assert [axes.get_title() for axes in heads] == ["image", "head 1", "head 2"]


def test_images_are_shown_as_they_are_whatever_order_their_channels_are_read_in(folder):
    for rgb in (False, True):
        assert rgb_image(evaluated(folder, rgb=rgb), "val", 0)[0, 0, 0] == 255


def test_without_a_class_token_there_is_no_attention_to_show_and_of_two_images_no_neighbours(folder):
    known = evaluated(folder, images=2)
    known.checkpoint.backbone.has_class_token = False
    titles = [section.title for section in FeaturePictures().sections(known, [])]
    assert titles == ["Patch features as colours", "Similar to one patch"]


def test_label_free_rows_name_what_the_table_shows(folder):
    known = evaluated(folder)
    rows = LabelFree().run(known)
    assert {row.protocol for row in rows} == {"RankMe", "patch tokens' norm", "patch similarity"}
    shown = [row.setting for row in rows if row.protocol == "patch similarity" and not row.detail]
    assert shown == ["distance 1", "distance 6", "different images"]
    (section,) = LabelFree().sections(known, rows)
    line = section.figures[0].axes[0].lines[0]
    assert line.get_ydata().tolist() == [row.value for row in rows if row.setting.startswith("distance")]


@pytest.mark.parametrize("objective", ["mapet", "mim"])
def test_predicted_tokens_are_measured_and_drawn(folder, objective):
    known = evaluated(folder, objective=objective)
    rows = {row.setting: row.value for row in TokenPredictions().run(known)}
    assert 0 < rows["the predicted tokens"] <= np.log2(VOCABULARY)
    assert rows["one prediction, mean"] == pytest.approx(np.log2(VOCABULARY), abs=0.1)  # not trained
    assert 0 <= rows["predicted right"] <= 100
    (section,) = TokenPredictions().sections(known, [])
    order = section.figures[0].axes[4]
    assert len(order.texts) == (18 if objective == "mapet" else 0)


def test_the_head_and_the_tokens_are_part_of_what_predictions_are(folder):
    known = evaluated(folder)
    before = TokenPredictions().identity(known)
    with torch.no_grad():
        known.checkpoint.backbone.model.head.projection.bias[0] += 1
    assert TokenPredictions().identity(known) != before


@pytest.mark.parametrize("store", ["elsewhere", "val"])  # nothing, and a folder that is no store
def test_without_tokens_of_the_images_there_are_no_predictions_and_a_word(folder, capsys, monkeypatch, store):
    known = evaluated(folder, store=store)
    assert TokenPredictions().identity(known)[2] == ""
    assert TokenPredictions().run(known) == []
    assert "no predicted tokens: " in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert TokenPredictions().run(known) == []
    assert not capsys.readouterr().out  # the first process has said it


def test_other_models_predict_no_tokens(folder):
    known = evaluated(folder)
    known.checkpoint.backbone.model = torch.nn.Identity()
    assert TokenPredictions().identity(known) == TokenPredictions().run(known) == []
    assert TokenPredictions().sections(known, []) == []


def test_features_that_are_vectors_have_a_rank_and_no_pictures_of_patches(folder):
    known = evaluated(folder)
    vectors = MemoryFeatures(
        torch.eye(8)[None, None],
        torch.zeros(8, 0, 8),
        name="val",
        layers=["output"],
        poolings=["class token"],
        grid=(0, 0),
        labels=None,
    )
    known = Evaluated(known.checkpoint, {"val": vectors}, known.images, known.device)
    (row,) = LabelFree().run(known)
    assert (row.protocol, row.setting, row.value) == ("RankMe", "class token", pytest.approx(8, abs=0.01))
    assert LabelFree().sections(known, [row]) == []
    assert [section.title for section in FeaturePictures().sections(known, [])] == ["Nearest neighbours"]


def test_pictures_of_all_checkpoints_stand_under_one_heading():
    sections = [Section("a", "x", [1]), Section("b", "y", [2]), Section("a", "x", [3])]
    assert side_by_side(sections) == [Section("a", "x", [1, 3]), Section("b", "y", [2])]


def test_images_are_drawn_evenly():
    assert spread(10, 4) == [0, 3, 6, 9]
    assert spread(3, 9) == [0, 1, 2]
    assert spread(1, 5) == [0]
