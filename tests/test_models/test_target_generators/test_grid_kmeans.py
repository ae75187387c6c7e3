"""Tokens of any encoder's grid features: the library's own features, a stated grid, one identity."""

import pytest
import timm
import torch
from mmengine.runner import save_checkpoint
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from mapet_mm.models import MaPeTPretrainViT, MaPeTViT
from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import Codebook, CodebookError, GridKMeans, TokenizerError

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
OWN = dict(arch=ARCH, img_size=24, patch_size=4)


@pytest.mark.parametrize("registers", [0, 4])
def test_features_of_a_vit_of_timm_are_timms_own(registers):
    config = dict(model_name="vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, reg_tokens=registers)
    ours = GridKMeans(dict(type="TIMMBackbone", **config), 32, random_seed=0)
    theirs = timm.create_model(num_classes=0, **config).eval()
    theirs.load_state_dict(ours.network.timm_model.state_dict())
    images = torch.randn(3, 3, 32, 32)
    block = GridKMeans(ours.network, 32, layer="timm_model.blocks.0")
    with torch.no_grad():
        assert torch.equal(ours.features(images), theirs.forward_features(images)[:, 1 + registers :])
        (expected,) = theirs.get_intermediate_layers(images, n=[0])
    assert torch.equal(block.features(images), expected)
    assert ours.grid == (4, 4)


@pytest.mark.parametrize(("out_type", "layer"), [("raw", -1), ("featmap", -1), ("cls_token", "ln1")])
def test_features_of_a_vit_of_mmpretrain_are_its_own(out_type, layer):
    ours = GridKMeans(
        dict(type="VisionTransformer", out_type=out_type, **OWN), 24, layer=layer, random_seed=0
    )
    theirs = MODELS.build(dict(type="VisionTransformer", out_type="raw", **OWN))
    theirs.load_state_dict(ours.network.state_dict())
    theirs.eval()
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        assert torch.equal(ours.features(images), theirs(images)[0][:, 1:])


@pytest.mark.parametrize("layer", [-1, 1])
def test_features_of_a_vit_of_hugging_face_are_its_hidden_states(layer, tmp_path):
    vit = ViTConfig(image_size=24, patch_size=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=3)
    theirs = ViTForImageClassification(vit).eval()
    theirs.save_pretrained(tmp_path / "vit")
    config = dict(type="HuggingFaceClassifier", model_name=str(tmp_path / "vit"), pretrained=True)
    ours = GridKMeans(config, 24, layer=layer, num_extra_tokens=1)
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected = theirs(images, output_hidden_states=True).hidden_states[layer][:, 1:]
    assert torch.equal(ours.features(images), expected)
    assert "a file" not in ours.metadata["encoder"]


def test_an_encoder_is_the_same_in_a_folder_that_has_a_file_of_an_options_name(tmp_path, monkeypatch):
    config = dict(type="mapet_mm.MaPeTViT", out_type="raw", **OWN)
    before = GridKMeans(config, 24, random_seed=0).identity
    (tmp_path / "raw").touch()
    monkeypatch.chdir(tmp_path)
    assert GridKMeans(config, 24, random_seed=0).identity == before


def test_features_of_an_own_pre_training_are_the_backbones(tmp_path):
    """Of a checkpoint as the runner writes it, with mask token and head."""
    vit = MaPeTPretrainViT(cutting_point=10, **OWN)
    pretrained = nn.ModuleDict({"backbone": vit, "head": nn.Linear(2, 2)})
    save_checkpoint({"state_dict": pretrained.state_dict()}, str(tmp_path / "epoch_1.pth"))
    start = dict(type="Pretrained", checkpoint=str(tmp_path / "epoch_1.pth"), prefix="backbone.")
    theirs = MaPeTViT(out_type="featmap", init_cfg=start, **OWN)
    theirs.init_weights()
    theirs.eval()
    ours = GridKMeans(dict(type="mapet_mm.MaPeTViT", out_type="raw", init_cfg=[start], **OWN), 24)
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected = theirs(images)[0].flatten(2).transpose(1, 2)
    assert torch.equal(ours.features(images), expected)
    assert ours.metadata["weights"] == "epoch_1.pth"


class Cells(nn.Module):
    """Means of cells of 4 x 4 pixels behind some tokens of the whole image, one of several outputs."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, images: torch.Tensor) -> dict:
        cells = nn.functional.avg_pool2d(images, 4).flatten(2).transpose(1, 2)
        whole = images.mean((2, 3))[:, None]
        return {"tokens": [torch.cat([whole] * self.extra + [cells], dim=1), whole]}


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_extra_tokens_are_left_out(extra):
    ours = GridKMeans(Cells(extra), 24, layer="tokens", num_extra_tokens=extra)
    images = torch.randn(2, 3, 24, 24)
    expected = nn.functional.avg_pool2d(images, 4).flatten(2).transpose(1, 2)
    assert torch.equal(ours.features(images), expected)
    assert (ours.grid, ours.dim) == ((6, 6), 3)


class Windows(nn.Module):
    """A feature map as its four windows, side by side in the batch."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        cells = nn.functional.avg_pool2d(images, 3)
        return cells.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 4, 4)


class ChannelsLast(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.avg_pool2d(images, 4).permute(0, 2, 3, 1)


VIT = dict(type="VisionTransformer", **OWN)
REFUSED = [
    (VIT, dict(), r"gives \(2, 24\)"),
    (VIT, dict(layer="layers.9"), r"no output for layer 'layers\.9'"),
    (dict(VIT, out_type="raw"), dict(layer=7), "no output for layer 7"),
    (dict(VIT, out_type="raw"), dict(num_extra_tokens=3), "3 extra tokens"),
    (Cells(1), dict(layer="tokens"), "0 extra tokens"),
    (Windows(), dict(), r"\(8, 3, 4, 4\) for 2 images"),
    (ChannelsLast(), dict(), r"\(2, 6, 6, 3\)"),
    (ChannelsLast(), dict(layer=1), "no output"),
]


@pytest.mark.parametrize(("encoder", "options", "noun"), REFUSED)
def test_outputs_without_a_stated_square_grid_are_refused(encoder, options, noun):
    with pytest.raises(TokenizerError, match=noun) as error:
        GridKMeans(encoder, 24, random_seed=0, **options)
    assert "\n" not in str(error.value)


def test_weights_and_layer_of_the_encoder_are_part_of_the_identity():
    raw = dict(type="mapet_mm.MaPeTViT", out_type="raw", **OWN)
    first = GridKMeans(raw, 24, random_seed=0)
    features = first.features(torch.randn(1, 3, 24, 24))[0]
    bare, fitted = Codebook(features[:9]), Codebook(features[:9], first.metadata)
    assert GridKMeans(raw, 24, fitted, random_seed=0).digest == fitted.digest
    digests = [
        GridKMeans(raw, 24, bare, **options).digest
        for options in (dict(random_seed=0), dict(random_seed=1), dict(random_seed=0, layer="layers.0"))
    ]
    assert len(set(digests)) == 3
    assert GridKMeans(raw, 24, bare, random_seed=1).digest == digests[1]
    with pytest.raises(CodebookError, match=r"encoder_digest: .*seed 0.*seed 1"):
        GridKMeans(raw, 24, fitted, random_seed=1)
    with pytest.raises(CodebookError, match=r"layer: -1, now layers\.0"):
        GridKMeans(raw, 24, fitted, layer="layers.0", random_seed=0)
