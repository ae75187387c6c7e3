"""The ONNX file computes what the network does, for images of every number and size."""

import importlib.util
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

from mapet_mm.interop.onnx_export import Features, write_onnx
from mapet_mm.models import MaPeTViT
from mapet_mm.utils.errors import UserError

SMALL = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
CONFIG = f"""
model = dict(backbone=dict(arch={SMALL}, img_size=(32, 128)))
data_preprocessor = dict(mean=[128, 128, 128], std=[64, 64, 64], to_rgb=True)
"""


@pytest.fixture(scope="module")
def vit() -> MaPeTViT:
    return drawn(MaPeTViT(SMALL, img_size=(32, 128), out_type="raw"))


def drawn(vit: MaPeTViT) -> MaPeTViT:
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.3)
    return vit.eval()


def weights(vit: MaPeTViT) -> dict[str, Tensor]:
    return {f"backbone.{name}": value for name, value in vit.state_dict().items()}


@pytest.fixture(scope="module")
def session(vit, tmp_path_factory):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    path = tmp_path_factory.mktemp("onnx") / "vit.onnx"
    jaxtyping.config.update("jaxtyping_disable", True)  # a checked shape is a constant to the exporter
    try:
        assert "32 x 128" in write_onnx(path, weights(vit), {"cfg": CONFIG})
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert [file.name for file in path.parent.iterdir()] == ["vit.onnx"]
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


# The training's size; other squares and rectangles; one patch; sides that are padded to whole patches.
every_shape = pytest.mark.parametrize(
    "shape", [(2, 3, 32, 128), (1, 3, 128, 32), (3, 3, 128, 128), (1, 3, 16, 16), (1, 3, 70, 33)]
)


@pytest.mark.slow  # 10 s, nearly all of it in the exporter of PyTorch
@every_shape
def test_the_file_computes_what_the_network_does(session, vit, shape):
    images = torch.randn(shape)
    outputs = session.run(["class_token", "patch_features"], {"images": images.numpy()})
    assert_same(vit, images, *map(torch.from_numpy, outputs))


@every_shape
def test_what_is_exported_computes_what_the_network_does(exported, vit, shape):
    images = torch.randn(shape)
    with torch.no_grad():
        assert_same(vit, images, *exported(images))


@pytest.fixture(scope="module")
def exported(vit, tmp_path_factory) -> Features:
    return given_to_the_exporter(vit, CONFIG, tmp_path_factory.mktemp("exported"))


@pytest.mark.parametrize("option", [dict(interpolate_mode="bilinear"), dict(pre_norm=True)])
def test_options_of_the_backbone_that_change_outputs_are_exported(option, tmp_path):
    """Images of another size than the training's, for which positions are resized."""
    ((name, value),) = option.items()
    vit = drawn(MaPeTViT(SMALL, img_size=(32, 128), out_type="raw", **option))
    config = CONFIG.replace("img_size", f"{name}={value!r}, img_size")
    images = torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        assert_same(vit, images, *given_to_the_exporter(vit, config, tmp_path)(images))


def given_to_the_exporter(vit: MaPeTViT, config: str, folder: Path) -> Features:
    """What PyTorch's exporter is given."""
    given = []

    class Program:
        def save(self, file) -> None:
            file.write(b"onnx")

    def export(module: Features, images: tuple[Tensor], **options) -> Program:
        given.append(module)
        assert images[0].shape == (2, 3, 32, 48)  # no two sizes alike
        return Program()

    path = folder / "vit.onnx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: Path)
        patch.setattr(torch.onnx, "export", export)
        told = write_onnx(path, weights(vit), {"cfg": config})
    assert told.startswith("inputs: images (B, 3, H, W); outputs: class_token (B, D), patch_features (B, D")
    assert path.read_bytes() == b"onnx"
    return given[0]


def assert_same(vit: MaPeTViT, images: Tensor, of_class: Tensor, of_patches: Tensor) -> None:
    with torch.no_grad():
        (tokens,) = vit(images)
    shape = images.shape
    assert of_patches.shape[2:] == (-(-shape[2] // 16), -(-shape[3] // 16))
    torch.testing.assert_close(of_class, tokens[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_patches.flatten(2).mT, tokens[:, 1:], rtol=1e-4, atol=1e-5)


def test_missing_packages_are_one_line_with_the_extra(vit, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^ONNX needs onnx and onnxscript: pip install 'mapet_mm\[onnx\]'$"):
        write_onnx(tmp_path / "vit.onnx", weights(vit), {"cfg": CONFIG})


@pytest.mark.parametrize(
    ("name", "config", "match"),
    [
        ("vit.pth", CONFIG, r"ONNX goes to a \.onnx file, not to .*vit\.pth"),
        ("vit.onnx", "", "architecture, mean and std are not known .*--config"),
        ("vit.onnx", CONFIG, "the backbone has no class token, which is one of the outputs"),
        ("vit.onnx", CONFIG, "`backbone.reg_token`: MaPeTViT has nothing of this name"),
    ],
)
def test_what_cannot_be_written_is_refused_first(name, config, match, vit, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Path)
    state = weights(vit)
    if "class token" in match:
        del state["backbone.cls_token"]
        state["backbone.pos_embed"] = state["backbone.pos_embed"][:, 1:]
    if "reg_token" in match:
        state["backbone.reg_token"] = torch.ones(1, 4, 24)
    with pytest.raises(ValueError, match=match):
        write_onnx(tmp_path / name, state, {"cfg": config})
    assert not list(tmp_path.iterdir())
