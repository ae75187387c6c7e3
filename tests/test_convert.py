"""Converted weights give the same outputs in the authors', timm's and Hugging Face's networks."""

import argparse
import pickle
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
from mmengine.logging import HistoryBuffer
from mmpretrain.registry import MODELS
from torch import nn

from mapet_mm.convert import (
    hf_to_mm,
    mm_to_hf,
    mm_to_reference,
    mm_to_timm,
    reference_to_mm,
    timm_to_mm,
)
from mapet_mm.models import MaPeT, MaPeTPretrainViT, MaPeTViT
from mapet_mm.weight_files import WeightFileError, read_weights, write_weights

ARCH = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=96)
TOOL = Path(__file__).parents[1] / "tools" / "convert.py"


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter drawn anew, biases, norms and LayerScale too, so that none can be mixed up."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture
def pretrained() -> dict[str, torch.Tensor]:
    model = MaPeT(
        backbone=dict(
            type="mapet_mm.MaPeTPretrainViT", arch=ARCH, img_size=20, patch_size=4, cutting_point=8
        ),
        head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=32),
        target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=32),
    )
    return randomised(model).state_dict()


@pytest.fixture
def classifier() -> nn.Module:
    backbone = dict(
        type="mapet_mm.MaPeTViT",
        arch=ARCH,
        img_size=20,
        patch_size=4,
        out_type="avg_featmap",
        final_norm=False,
    )
    head = dict(type="LinearClsHead", num_classes=7, in_channels=24)
    return randomised(MODELS.build(dict(type="ImageClassifier", backbone=backbone, head=head)))


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 20, 20)


def trunk_of(weights: dict[str, torch.Tensor]) -> MaPeTViT:
    """The plain ViT with the backbone's weights; gives class token and patches after the final norm."""
    vit = MaPeTViT(ARCH, 20, 4, out_type="raw")
    own = {k.removeprefix("backbone."): v for k, v in weights.items() if k.startswith("backbone.")}
    own.pop("mask_token", None)
    vit.load_state_dict(own)
    return vit.eval()


def assert_same_weights(ours: dict, others: dict) -> None:
    assert set(ours) == set(others)
    for name, value in ours.items():
        assert torch.equal(value, others[name]), name


def timm_vit(**options) -> nn.Module:
    return timm.models.VisionTransformer(
        img_size=20, patch_size=4, embed_dim=24, depth=3, num_heads=3, init_values=0.1, **options
    ).eval()


@torch.no_grad()
def test_timm_gives_the_same_tokens(pretrained, images):
    vit = timm_vit(num_classes=0)
    vit.load_state_dict(mm_to_timm(pretrained), strict=True)
    torch.testing.assert_close(
        vit.forward_features(images), trunk_of(pretrained)(images)[0], rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
def test_timm_gives_the_same_classes(classifier, images):
    vit = timm_vit(num_classes=7, global_pool="avg")
    vit.load_state_dict(mm_to_timm(classifier.state_dict()), strict=True)
    expected = classifier.head(classifier.extract_feat(images))
    torch.testing.assert_close(vit(images), expected, rtol=1e-5, atol=1e-5)
    assert_same_weights(timm_to_mm(vit.state_dict()), classifier.state_dict())


@torch.no_grad()
def test_hugging_face_gives_the_same_tokens(pretrained, images, tmp_path):
    """By a folder as on the Hub, whose names every version of transformers knows."""
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=3, mlp_ratio=4, image_size=20, patch_size=4
    )
    config.save_pretrained(tmp_path)
    write_weights(tmp_path / "model.safetensors", mm_to_hf(pretrained))
    vit, report = transformers.Dinov2Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    expected = trunk_of(pretrained)(images)[0]
    torch.testing.assert_close(vit.eval()(images).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


def test_hugging_faces_names_convert_back(pretrained):
    backbone = {name: value for name, value in pretrained.items() if name.startswith("backbone.")}
    assert_same_weights(hf_to_mm(mm_to_hf(pretrained)), backbone)


def test_the_authors_names_convert_both_ways(data_dir):
    golden = np.load(data_dir / "mapet_reference_d48.npz")
    theirs = {k[2:]: torch.from_numpy(golden[k]) for k in golden.files if k.startswith("w/")}
    ours = reference_to_mm({f"module.{name}": value for name, value in theirs.items()})
    assert_same_weights(mm_to_reference(ours), theirs)
    image, patch, dim, depth, heads, cutting_point, _ = golden["meta"].tolist()
    arch = dict(embed_dims=dim, num_layers=depth, num_heads=heads, feedforward_channels=4 * dim)
    vit = MaPeTPretrainViT(arch, image, patch, cutting_point)
    assert {f"backbone.{name}" for name in vit.state_dict()} == {n for n in ours if n.startswith("backbone.")}


def test_the_authors_fine_tuned_names_convert_both_ways(classifier):
    ours = classifier.state_dict()
    theirs = mm_to_reference(ours)
    assert {"fc_norm.weight", "head.bias", "blocks.2.attn.kv.bias"} <= set(theirs)
    assert_same_weights(reference_to_mm(theirs), ours)


def test_what_has_no_place_is_named(pretrained, classifier):
    with pytest.raises(ValueError, match=r"`blocks.0.attn.k_norm.weight`: MaPeTViT has nothing of this name"):
        timm_to_mm({"blocks.0.attn.k_norm.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"`neck.weight`: timm's VisionTransformer has nothing of this name"):
        mm_to_timm(pretrained | {"neck.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"the weights have no final norm \(`backbone.ln1`\)"):
        mm_to_hf(classifier.state_dict())


class Bomb:
    def __reduce__(self):
        return pickle.loads, (pickle.dumps(1),)


def test_a_checkpoints_other_objects_are_passed_over_unexecuted(tmp_path, monkeypatch):
    """MMEngine's log buffers, an argparse namespace, and a pickle that would call a function."""
    path = tmp_path / "epoch_1.pth"
    buffer = HistoryBuffer(np.ones(3), np.ones(3))
    weights = {"a": torch.arange(3.0), "b": nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))}
    torch.save(dict(state_dict=weights, hub=buffer, args=argparse.Namespace(lr=1.0), bomb=Bomb()), path)
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("the checkpoint ran code"))
    read = read_weights(path)
    assert torch.equal(read["a"], weights["a"])
    assert read["b"].dtype == torch.bfloat16
    assert set(read) == {"a", "b"}


def test_no_class_of_torch_is_called_but_sizes_and_dtypes(tmp_path, monkeypatch):
    class Planted:
        def __reduce__(self):
            return Planted, ("called",)

        def __init__(self, *given):
            assert not given, "the checkpoint made an object"

    Planted.__module__, Planted.__qualname__ = "torch", "Planted"
    monkeypatch.setattr(torch, "Planted", Planted, raising=False)
    content = {"state_dict": {"a": torch.ones(2), "c": torch.Size([2])}, "b": Planted()}
    torch.save(content, tmp_path / "file.pth")
    assert list(read_weights(tmp_path / "file.pth")) == ["a"]


def test_a_missing_half_of_an_attention_is_named():
    with pytest.raises(
        ValueError, match=r"`blocks.0.attn.kv.bias` is missing: it belongs to `blocks.0.attn.q.bias`"
    ):
        reference_to_mm({"blocks.0.attn.q.bias": torch.ones(3)})


def test_a_truncated_checkpoint_is_one_clear_line(tmp_path):
    path = tmp_path / "file.pth"
    write_weights(path, {"backbone.cls_token": torch.zeros(1, 1, 300)})
    whole = path.read_bytes()
    for size in range(0, len(whole), 100):
        path.write_bytes(whole[:size])
        with pytest.raises(WeightFileError, match=r"file.pth is no checkpoint \(") as error:
            read_weights(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "does not exist"),
        (b"not a checkpoint", "is no checkpoint"),
        ([1, 2], "holds no weights, but a list"),
        ({"state_dict": {"epoch": 3}}, "holds no weights: no tensors"),
    ],
)
def test_files_without_weights_are_one_clear_line(content, match, tmp_path):
    path = tmp_path / "file.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(WeightFileError, match=match) as error:
        read_weights(path)
    assert "\n" not in str(error.value)


def convert(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name="__main__")


def test_the_tool_converts_files_there_and_back(classifier, tmp_path, monkeypatch, capsys):
    ours, theirs, back = tmp_path / "epoch_9.pth", tmp_path / "new" / "vit.safetensors", tmp_path / "back.pth"
    write_weights(ours, classifier.state_dict())
    convert(monkeypatch, "mm", "timm", ours, theirs)
    values = sum(value.numel() for value in classifier.state_dict().values())
    assert re.search(
        rf"wrote {theirs}: \d+ tensors, {values:,} values, names of timm", capsys.readouterr().out
    )
    convert(monkeypatch, "timm", "mm", theirs, back)
    assert_same_weights(torch.load(back, weights_only=True)["state_dict"], classifier.state_dict())


@pytest.mark.parametrize(
    ("source", "output", "match"),
    [
        ("timm", "out.pth", r"error: .*in.pth: `backbone.cls_token`: MaPeTViT has nothing of this name"),
        ("mm", "out.npz", r"error: .*out.npz: the name has to end in .safetensors or .pth"),
    ],
)
def test_the_tool_says_what_is_wrong_in_one_line(source, output, match, tmp_path, monkeypatch):
    write_weights(tmp_path / "in.pth", {"backbone.cls_token": torch.zeros(1, 1, 3)})
    with pytest.raises(SystemExit, match=match):
        convert(monkeypatch, source, "mm", tmp_path / "in.pth", tmp_path / output)
    assert not (tmp_path / output).exists()
