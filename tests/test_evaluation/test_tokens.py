"""Adapters give each layer's tokens, and these equal what the model itself computes."""

import pytest
import torch
from mmengine.model import ImgDataPreprocessor
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample
from torch import nn

from mapet_mm.evaluation.tokens import BackboneError, TokenBackbone, network_of

ARCH = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=48)
VIT = dict(type="mapet_mm.MaPeTViT", arch=ARCH, img_size=16, patch_size=4)
PLAIN = dict(VIT, type="VisionTransformer")
SMALL = dict(type="TIMMBackbone", img_size=32, patch_size=8, embed_dim=24, depth=2)
TIMM = dict(SMALL, model_name="vit_tiny_patch16_224", num_heads=3)
NORMED, BARE, TWO = ["1", "2", "3", "output"], ["1", "2", "3"], ["1", "2", "output"]


PRETRAINING = dict(
    type="mapet_mm.MaPeT",
    backbone=dict(VIT, type="mapet_mm.MaPeTPretrainViT", cutting_point=6),
    head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=8),
    target_generator=None,
)
CLASSIFIER = dict(type="ImageClassifier", backbone=PLAIN, neck=dict(type="GlobalAveragePooling"))
TOKENS = dict(type="mapet_mm.TokenViT", vocab_size=9, grid=(4, 6), arch=ARCH)
CAIT = dict(SMALL, model_name="cait_xxs24_224")
REGISTERS = dict(TIMM, model_name="vit_base_patch16_reg4_gap_256")
CASES = {
    # config, image (H, W): layers, class token, grid
    "ours": (VIT, (16, 16), NORMED, True, (4, 4)),
    "another size": (VIT, (24, 16), NORMED, True, (6, 4)),
    "oblong patches": (dict(VIT, patch_size=(4, 8)), (16, 16), NORMED, True, (4, 2)),
    "no final norm": (dict(VIT, out_type="avg_featmap", final_norm=False), (16, 16), BARE, True, (4, 4)),
    "a pre-training": (PRETRAINING, (16, 16), NORMED, True, (4, 4)),
    "a masked pre-training's ViT": (dict(PLAIN, type="BEiTPretrainViT"), (16, 16), NORMED, True, (4, 4)),
    "a classifier": (CLASSIFIER, (16, 16), NORMED, True, (4, 4)),
    "no class token": (dict(PLAIN, with_cls_token=False, out_type="raw"), (16, 16), NORMED, False, (4, 4)),
    "two tokens": (dict(PLAIN, type="DistilledVisionTransformer"), (16, 16), NORMED, True, (4, 4)),
    "BEiT": (dict(PLAIN, type="BEiTViT"), (16, 16), BARE, True, (4, 4)),
    "token ids": (TOKENS, (4, 6), NORMED, True, (4, 6)),
    "timm": (TIMM, (32, 32), TWO, True, (4, 4)),
    "timm's classifier": (dict(TIMM, type="TimmClassifier"), (32, 32), TWO, True, (4, 4)),
    "registers": (REGISTERS, (32, 32), TWO, False, (4, 4)),
    "class token at the end": (CAIT, (32, 32), ["output"], False, (4, 4)),
    "stages": (dict(type="ResNet", depth=18), (64, 64), ["output"], False, (2, 2)),
    "timm's stages": (dict(type="TIMMBackbone", model_name="resnet18"), (64, 64), ["output"], False, (2, 2)),
}


def build(config: dict) -> TokenBackbone:
    model = MODELS.build(config)
    model.eval()
    return TokenBackbone(model)


@pytest.mark.parametrize("case", CASES)
def test_layers_class_token_and_grid(case):
    config, (height, width), layers, has_class_token, grid = CASES[case]
    images = torch.rand(2, 1 if case == "token ids" else 3, height, width).round()
    tokens = build(config)(images)
    assert (tokens.names, tokens.grid) == (layers, grid)
    assert [one.shape[:2] for one in tokens.patches] == [(2, grid[0] * grid[1])] * len(layers)
    assert tokens.poolings == ["class token"] * has_class_token + ["mean"]
    dim = tokens.patches[0].shape[2]
    for layer in range(len(layers)):
        assert tokens.pooled(layer).shape == (2, dim * (1 + has_class_token))
        torch.testing.assert_close(tokens.pooled(layer)[:, -dim:], tokens.patches[layer].mean(1))


def test_tokens_of_mmpretrains_vit_are_its_own_and_its_settings_come_back():
    """Without the final norm for each layer, with it for the output."""
    raw = MODELS.build(dict(PLAIN, out_type="raw", out_indices=[0, 1, 2], final_norm=False))
    normed = MODELS.build(dict(PLAIN, out_type="raw"))
    normed.load_state_dict(raw.state_dict(), strict=False)
    nn.init.normal_(normed.ln1.weight)
    raw.eval(), normed.eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = [*raw(images), normed(images)[-1]]
        tokens = TokenBackbone(normed)(images)
        assert torch.equal(normed(images)[-1], expected[-1])
    for place, layer in enumerate(expected):
        torch.testing.assert_close(tokens.class_token[:, place], layer[:, 0])
        torch.testing.assert_close(tokens.patches[place], layer[:, 1:])


@pytest.mark.parametrize("config", [TIMM, REGISTERS], ids=["class token", "registers"])
def test_tokens_of_timms_vit_are_its_own(config):
    backbone = build(config)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens, expected = backbone(images), backbone.model(images)[-1]
    torch.testing.assert_close(tokens.patches[-1], expected[:, -16:])
    if tokens.class_token is not None:
        torch.testing.assert_close(tokens.class_token[:, -1], expected[:, 0])


def hugging_face(folder, config) -> TokenBackbone:
    config.save_pretrained(folder)
    return build(dict(type="HuggingFaceClassifier", model_name=str(folder)))


def test_tokens_of_hugging_faces_vit_are_its_own(tmp_path):
    """DINOv2 with four registers between class token and patches."""
    transformers = pytest.importorskip("transformers")
    options = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48)
    config = transformers.Dinov2WithRegistersConfig(**options, image_size=28, patch_size=7)
    backbone = hugging_face(tmp_path, config)
    with torch.no_grad():
        tokens = backbone(images := torch.randn(2, 3, 28, 28))
        expected = network_of(backbone.model)(images).last_hidden_state
    assert (tokens.names, tokens.grid) == (TWO, (4, 4))
    torch.testing.assert_close(tokens.class_token[:, -1], expected[:, 0])
    torch.testing.assert_close(tokens.patches[-1], expected[:, -16:])


def test_hugging_faces_stages_are_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    options = dict(embed_dim=24, depths=[1, 1], num_heads=[2, 2], window_size=4)
    config = transformers.Swinv2Config(image_size=64, patch_size=4, **options)
    with pytest.raises(BackboneError, match="stages"):
        hugging_face(tmp_path, config)(torch.randn(2, 3, 64, 64))


def test_a_vector_is_a_class_token():
    tokens = build(dict(type="mapet_mm.TokenMLP", vocab_size=9, embed_dims=16))(torch.ones(2, 1, 4, 6))
    assert (tokens.grid, tokens.patches, tokens.poolings) == ((0, 0), None, ["class token"])
    assert tokens.pooled().shape == (2, 16)


def test_other_outputs_are_refused():
    with pytest.raises(BackboneError, match="feature map"):
        TokenBackbone(nn.Flatten(2))(torch.zeros(2, 3, 4, 4))


def test_patches_that_do_not_fill_the_grid_are_refused():
    with pytest.raises(BackboneError, match="grid of 4 x 3"):
        build(VIT)(torch.zeros(1, 3, 18, 14))


@pytest.mark.parametrize("kind", ["SelfSupDataPreprocessor", "mapet_mm.TokenGridDataPreprocessor"])
def test_images_are_normalised_as_the_model_does(kind):
    preprocessor = MODELS.build(dict(type=kind, mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0], to_rgb=True))
    images = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8)
    samples = [DataSample(token_grid=torch.zeros(1, 1, dtype=torch.int64)) for _ in images]
    expected = preprocessor(dict(inputs=images, data_samples=samples))["inputs"]
    expected = expected[0] if isinstance(expected, list) else expected
    torch.testing.assert_close(TokenBackbone(nn.Identity(), preprocessor).normalise(images), expected)


@pytest.mark.parametrize("swap", [False, True])
def test_channels_are_swapped_if_the_host_library_swaps_them(swap):
    """Reads `_channel_conversion` of MMEngine's preprocessors: this test notices another name."""
    original = nn.Module()  # the original MMSegmentation's
    original.channel_conversion = swap
    images = torch.arange(12.0).view(1, 3, 2, 2)
    for preprocessor in (
        MODELS.build(dict(type="mmpretrain.ClsDataPreprocessor", to_rgb=swap)),
        MODELS.build(dict(type="mmpretrain.SelfSupDataPreprocessor", rgb_to_bgr=swap)),
        ImgDataPreprocessor(bgr_to_rgb=swap),
        original,
    ):
        normalised = TokenBackbone(nn.Identity(), preprocessor).normalise(images)
        assert torch.equal(normalised, images.flip(1) if swap else images)
