"""The tool: one table, again from the cache, for several models."""

import json

import pytest
from config_building import run_tool
from mmengine.config import Config


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
    monkeypatch.setattr("mapet_mm.evaluation.extraction.fill_blocks", None)  # nothing is computed again
    run_tool(monkeypatch, "evaluate_features.py", *arguments, *compare)
    assert table(capsys.readouterr().out) == first


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


def test_a_pre_training_is_evaluated_on_a_folder(config, root, monkeypatch, capsys):
    """The next command that a pre-training prints; its own images are resized squares, with tokens."""
    arch = config.model.backbone.arch
    backbone = dict(type="mapet_mm.MaPeTPretrainViT", arch=arch, img_size=16, patch_size=4, cutting_point=6)
    pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="ResizeEdge", scale=20, backend="pillow", interpolation="bicubic"),
        dict(type="CenterCrop", crop_size=16),
        dict(type="mapet_mm.LoadTokenGrid", store="tokens"),
        dict(type="PackInputs", algorithm_keys=["token_grid"]),
    ]
    content = dict(
        default_scope="mmpretrain",
        model=dict(
            type="mapet_mm.MaPeT",
            backbone=backbone,
            head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=16, vocab_size=8),
            target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=8),
        ),
        data_preprocessor=dict(config.data_preprocessor, type="mapet_mm.TokenGridDataPreprocessor"),
        train_dataloader=dict(batch_size=8, dataset=dict(type="CustomDataset", pipeline=pipeline)),
        test_dataloader=None,
    )
    Config(content).dump(root / "pretrain.py")
    arguments = ["--data", root / "data", "--cache", root / "cache", "--out", root / "out"]
    run_tool(
        monkeypatch,
        "evaluate_features.py",
        *[root / "pretrain.py", root / "weights.pth", *arguments, "--protocols", "NearestNeighbours"],
        *["--compare", root / "config.py", root / "weights.pth"],
    )
    assert "short side 20 bicubic, central 16 x 16" in capsys.readouterr().out
    rows = json.loads((root / "out" / "results.json").read_text())
    assert [row["setting"] for row in rows["pretrain, weights"]] == ["class token", "mean", "both"]


def test_two_checkpoints_for_one_config_are_refused(config, root, monkeypatch):
    arguments = [root / "config.py", "--compare", root / "config.py", root / "weights.pth", "more.pth"]
    with pytest.raises(SystemExit, match="one model and one checkpoint"):
        run_tool(monkeypatch, "evaluate_features.py", *arguments, "--cache", root / "cache")


def test_a_config_of_another_version_of_the_protocols_is_refused(config, root, monkeypatch):
    """A table's run that waited while the code was replaced gives no figure of another protocol."""
    options = ["--cfg-options", "evaluation.version=1"]
    with pytest.raises(SystemExit, match="version 1"):
        run_tool(monkeypatch, "evaluate_features.py", root / "config.py", "--cache", root / "cache", *options)
