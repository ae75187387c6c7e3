"""The tool: one table, again from the cache, for several models."""

import json

import cv2
import numpy as np
import pytest
import torch
from config_building import run_tool
from mmengine.config import Config

import mapet_mm


def table(printed: str) -> str:
    return printed[printed.index("result ") :]


def test_the_tool_gives_the_same_table_again_from_the_cache(config, root, monkeypatch, capsys):
    arguments = [root / "config.py", root / "weights.pth", "--cache", root / "cache", "--out", root / "out"]
    compare = ["--compare", root / "config.py", "--compare", root / "config.py", root / "weights.pth"]
    run_tool(monkeypatch, "evaluate_features.py", *arguments, *compare)
    first = table(capsys.readouterr().out)
    rows = json.loads((root / "out" / "results.json").read_text())
    assert list(rows) == ["config, weights", "config", "config, weights (3)"]
    assert rows["config, weights"] == rows["config, weights (3)"]
    protocols = {row["protocol"] for row in rows["config"]}
    assert protocols == {"k-NN", "linear (SGD)", "logistic regression", "attentive probe"}
    assert "k-NN, class token" in (root / "out" / "report.html").read_text()
    monkeypatch.setattr("mapet_mm.evaluation.extraction.fill", None)  # nothing is computed again
    run_tool(monkeypatch, "evaluate_features.py", *arguments, *compare)
    assert table(capsys.readouterr().out) == first


def test_features_of_images_that_were_rewritten_are_computed_anew(config, root):
    """Also where the new file has as many bytes."""
    model = dict(model=root / "config.py", checkpoint=root / "weights.pth", cache=root / "cache")
    before = mapet_mm.evaluate(protocols=["NearestNeighbours"], **model)
    assert {row.value for row in before if row.unit == "top-1, %"} == {100.0}
    for path in sorted((root / "data/val").rglob("*.png")):
        label = "abc".index(path.parent.name)
        image = np.full((16, 16, 3), 80 * ((label + 1) % 3) + 30, np.uint8)
        content = cv2.imencode(".png", image)[1].tobytes()
        path.write_bytes(content.ljust(path.stat().st_size, b"\0"))
    after = mapet_mm.evaluate(protocols=["NearestNeighbours"], **model)
    assert {row.value for row in after if row.unit == "top-1, %"} == {0.0}


def test_all_models_are_evaluated_on_the_first_ones_images(config, root, monkeypatch):
    """The second's config names images that are not there, and another protocol."""
    config.evaluation.val.dataset.data_prefix = config.evaluation.train.dataset.data_prefix = "nowhere"
    config.evaluation.protocols = [dict(type="LabelFree")]
    config.dump(root / "other.py")
    arguments = ["--cache", root / "cache", "--out", root / "out", "--protocols", "NearestNeighbours"]
    compare = ["--compare", root / "other.py", root / "weights.pth"]
    run_tool(
        monkeypatch, "evaluate_features.py", root / "config.py", root / "weights.pth", *arguments, *compare
    )
    rows = json.loads((root / "out" / "results.json").read_text())
    assert rows["other, weights"] == rows["config, weights"]


def test_a_pre_training_and_its_checkpoint_are_evaluated_on_a_folder(config, root, monkeypatch, capsys):
    """Its images are resized as it trained on them, and not varied; its backbone is read as a plain ViT."""
    steps = [
        dict(type="LoadImageFromFile"),
        dict(type="EfficientNetCenterCrop", crop_size=16, crop_padding=0, backend="pillow"),
        dict(type="ColorJitter", brightness=0.4),
        dict(type="mapet_mm.LoadTokenGrid", store="tokens"),
        dict(type="PackInputs", algorithm_keys=["token_grid"]),
    ]
    backbone = dict(config.model.backbone, type="mapet_mm.MaPeTPretrainViT", cutting_point=6)
    backbone.pop("out_type")
    dataset = dict(type="CustomDataset", data_prefix="nowhere", pipeline=steps)
    pretraining = dict(
        default_scope="mmpretrain",
        model=dict(type="mapet_mm.MaPeT", backbone=backbone),
        data_preprocessor=config.data_preprocessor,
        train_dataloader=dict(dataset=dataset),
        test_dataloader=None,
    )
    Config(pretraining).dump(root / "pretrain.py")
    arguments = ["--cache", root / "cache", "--out", root / "out", "--protocols", "NearestNeighbours"]
    of_folder = ["--data", root / "data", "--compare", root / "config.py", root / "weights.pth"]
    run_tool(
        monkeypatch,
        "evaluate_features.py",
        root / "pretrain.py",
        root / "weights.pth",
        *arguments,
        *of_folder,
    )
    assert "short side 16 bicubic, central 16 x 16" in capsys.readouterr().out
    rows = json.loads((root / "out" / "results.json").read_text())
    assert len(rows["pretrain, weights"]) == 3
    assert rows["pretrain, weights"] == rows["config, weights"]


def test_two_checkpoints_for_one_config_are_refused(config, root, monkeypatch):
    arguments = [root / "config.py", "--compare", root / "config.py", root / "weights.pth", "more.pth"]
    with pytest.raises(SystemExit, match="one model and one checkpoint"):
        run_tool(monkeypatch, "evaluate_features.py", *arguments, "--cache", root / "cache")


def test_a_mistyped_second_model_is_found_before_weights_are_read(config, root, monkeypatch):
    monkeypatch.setattr("mapet_mm.evaluation.models.Request.load", lambda request: pytest.fail("it loads"))
    for name in ("not_there.py", "timm:vit_tiny_patch16_225"):
        arguments = [root / "config.py", "--compare", name, "--cache", root / "cache"]
        with pytest.raises(SystemExit, match=name):
            run_tool(monkeypatch, "evaluate_features.py", *arguments)


def test_a_config_of_another_version_of_the_protocols_is_refused(config, root, monkeypatch):
    """A table's run that waited while the code was replaced gives no figure of another protocol."""
    options = ["--cfg-options", "evaluation.version=1"]
    with pytest.raises(SystemExit, match="version 1"):
        run_tool(monkeypatch, "evaluate_features.py", root / "config.py", "--cache", root / "cache", *options)


def test_a_single_model_has_a_column_of_random_weights(config, root, monkeypatch, capsys):
    """Of the same network, not with the weights that the config names; none beside random weights."""
    config.model.backbone.init_cfg = dict(
        type="Pretrained", checkpoint=str(root / "weights.pth"), prefix="backbone."
    )
    weights = torch.load(root / "weights.pth")["state_dict"]
    changed = {name: value + 0.1 * torch.randn_like(value) for name, value in weights.items()}
    torch.save({"state_dict": changed}, root / "weights.pth")
    config.evaluation.protocols = [dict(type="LabelFree")]
    config.dump(root / "named.py")
    config.model.backbone.init_cfg = None
    config.dump(root / "config.py")
    arguments = ["--cache", root / "cache", "--out", root / "out"]

    def columns(*words: object) -> dict[str, list]:
        run_tool(monkeypatch, "evaluate_features.py", *words, *arguments)
        return json.loads((root / "out" / "results.json").read_text())

    both = columns(root / "named.py")
    assert "--no-random" in capsys.readouterr().out
    alone = columns(root / "config.py")  # random weights already
    assert list(both) == ["named", "random weights"]
    assert both["random weights"] == alone["config"] != both["named"]
    assert list(alone) == ["config"]
    assert list(columns(root / "named.py", "--no-random")) == ["named"]


def test_a_verdict_compares_a_result_with_its_start_and_random_weights(config, root, monkeypatch, capsys):
    """Again from the cache; the figures are those of `mapet-mm evaluate`."""
    weights = torch.load(root / "weights.pth")["state_dict"]
    for name, scale in (("start", 0.1), ("result", 0.3)):
        changed = {key: value + scale * torch.randn_like(value) for key, value in weights.items()}
        torch.save({"state_dict": changed}, root / f"{name}.pth")
    start = ["--start", root / "config.py", root / "start.pth"]
    arguments = [root / "config.py", root / "result.pth", "--cache", root / "cache", "--out", root / "out"]
    run_tool(monkeypatch, "verdict.py", *arguments, *start)
    first = json.loads((root / "out/verdict.json").read_text())
    assert first["sentence"] in capsys.readouterr().out
    (knn,) = first["measures"]
    assert list(knn["values"]) == ["this pre-training", "its start", "random weights"]
    assert (first["compared_with"], first["num_images"]) == ("its start", 9)
    difference = knn["values"]["this pre-training"] - knn["values"]["its start"]
    assert knn["gain"]["points"] == pytest.approx(difference)

    monkeypatch.setattr("mapet_mm.evaluation.extraction.fill", None)  # nothing is computed again
    run_tool(monkeypatch, "verdict.py", *arguments, *start)
    assert json.loads((root / "out/verdict.json").read_text()) == first
    monkeypatch.undo()
    run_tool(monkeypatch, "verdict.py", *arguments)
    assert json.loads((root / "out/verdict.json").read_text())["compared_with"] == "random weights"
