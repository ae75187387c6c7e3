"""Layers, class token, patches and grid are found in any backbone, and equal what the model itself gives."""

import pytest
import torch
from mmpretrain.registry import MODELS
from torch import nn

from mapet_mm.evaluation.adapters import BackboneError, TokenBackbone

ARCH = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=48)
VIT = dict(type="mapet_mm.MaPeTViT", arch=ARCH, img_size=16, patch_size=4)
PLAIN = dict(VIT, type="VisionTransformer")
LAYERS = ["1", "2", "3"]
TIMM = dict(type="TIMMBackbone", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)


def build(config: dict) -> TokenBackbone:
    model = MODELS.build(config)
    model.eval()
    return TokenBackbone(model)


def pretraining() -> dict:
    return dict(
        type="mapet_mm.MaPeT",
        backbone=dict(VIT, type="mapet_mm.MaPeTPretrainViT", cutting_point=6),
        head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=8),
        target_generator=None,
    )


CASES = {
    # config, image (H, W): layers, tokens before the patches, class token, grid
    "ours": (VIT, (16, 16), [*LAYERS, "output"], 1, True, (4, 4)),
    "another size": (VIT, (24, 16), [*LAYERS, "output"], 1, True, (6, 4)),
    "oblong patches": (dict(VIT, patch_size=(4, 8)), (16, 16), [*LAYERS, "output"], 1, True, (4, 2)),
    "no final norm": (dict(VIT, out_type="avg_featmap", final_norm=False), (16, 16), LAYERS, 1, True, (4, 4)),
    "one layer": (dict(VIT, arch=dict(ARCH, num_layers=1)), (16, 16), ["1", "output"], 1, True, (4, 4)),
    "MaPeT": (pretraining(), (16, 16), [*LAYERS, "output"], 1, True, (4, 4)),
    "a classifier": (
        dict(type="ImageClassifier", backbone=PLAIN, neck=dict(type="GlobalAveragePooling")),
        (16, 16),
        [*LAYERS, "output"],
        1,
        True,
        (4, 4),
    ),
    "no class token": (
        dict(PLAIN, with_cls_token=False, out_type="raw"),
        (16, 16),
        [*LAYERS, "output"],
        0,
        False,
        (4, 4),
    ),
    "BEiT": (dict(PLAIN, type="BEiTViT"), (16, 16), LAYERS, 1, True, (4, 4)),
    "two tokens": (
        dict(PLAIN, type="DistilledVisionTransformer"),
        (16, 16),
        [*LAYERS, "output"],
        2,
        True,
        (4, 4),
    ),
    "timm": (dict(TIMM, model_name="vit_tiny_patch16_224"), (32, 32), ["1", "2", "output"], 1, True, (4, 4)),
    "registers": (
        dict(TIMM, model_name="vit_base_patch16_reg4_gap_256"),
        (32, 32),
        ["1", "2", "output"],
        4,
        False,
        (4, 4),
    ),
    "stages": (dict(type="ResNet", depth=18), (64, 64), ["output"], 0, False, (2, 2)),
    "class token at the end": (
        dict(
            type="TIMMBackbone", model_name="cait_xxs24_224", img_size=32, patch_size=8, embed_dim=24, depth=2
        ),
        (32, 32),
        ["output"],
        1,
        True,
        (4, 4),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_backbone_is_understood_by_what_it_computes(case):
    config, size, layers, prefix, has_class_token, grid = CASES[case]
    backbone = build(config)
    with torch.no_grad():
        tokens = backbone(torch.randn(2, 3, *size))
    assert (backbone.layers, backbone.prefix, backbone.grid, tokens.grid) == (layers, prefix, grid, grid)
    assert (tokens.class_token is not None) == backbone.has_class_token == has_class_token
    assert [one.shape[:2] for one in tokens.patches] == [(2, grid[0] * grid[1])] * len(layers)
    if has_class_token:
        assert tokens.class_token.shape == (2, len(layers), tokens.patches[0].shape[-1])


def test_tokens_are_the_models_own():
    """Of each layer without a norm, and of the output with the model's."""
    raw = MODELS.build(dict(PLAIN, out_type="raw", out_indices=[0, 1, 2], final_norm=False))
    normed = MODELS.build(dict(PLAIN, out_type="raw"))
    normed.load_state_dict(raw.state_dict(), strict=False)
    nn.init.normal_(normed.ln1.weight)
    raw.eval(), normed.eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = [*raw(images), normed(images)[-1]]
        tokens = TokenBackbone(normed)(images)
    for place, layer in enumerate(expected):
        torch.testing.assert_close(tokens.class_token[:, place], layer[:, 0])
        torch.testing.assert_close(tokens.patches[place], layer[:, 1:])


TNT = dict(embed_dims_outer=24, embed_dims_inner=8, num_layers=3, num_heads_outer=2, num_heads_inner=2)
# Backbones whose longest list of alike modules is not their layers, with the axes of what they give last.
OTHERS = {
    "streams of pixels and patches": (dict(type="TNT", arch=TNT, img_size=32), 32, (0, 0)),
    "two streams": (dict(PLAIN, type="RevVisionTransformer"), 16, (0, 0)),
    "tokens that become fewer": (dict(type="LeViT", arch="128s", img_size=128), 128, (2, 2)),
    "channels first": (
        dict(type="EfficientFormer", arch=dict(layers=[1, 1, 1, 2], embed_dims=[8, 8, 8, 24], vit_num=1)),
        224,
        (7, 7),
    ),
}
OTHERS["channels first"][0]["arch"]["downsamples"] = [False, True, True, True]


@pytest.mark.parametrize("case", OTHERS)
def test_parts_of_a_block_and_of_a_stream_are_no_layers(case):
    """Features are then what the backbone gives last, patches in the places of its last map."""
    config, side, grid = OTHERS[case]
    backbone, images = build(config), torch.randn(2, 3, side, side)
    with torch.no_grad():
        tokens, expected = backbone(images), backbone.model(images)[-1]
    assert (backbone.layers, backbone.grid) == (["output"], grid)
    if grid == (0, 0):
        assert torch.equal(tokens.class_token, expected[:, None])
        assert tokens.patches[-1].shape[1] == 0
    else:
        assert tokens.class_token is None
        assert torch.equal(tokens.patches[-1], expected.flatten(2).mT)


class Projected(nn.Module):
    """A ViT whose features a last layer projects to another width, as CLIP's are; or that gives a dict."""

    def __init__(self, as_dict: bool) -> None:
        super().__init__()
        self.vit = MODELS.build(dict(VIT, out_type="raw"))
        self.projection, self.as_dict, self.data_preprocessor = nn.Linear(24, 10), as_dict, None

    def forward(self, images):
        (tokens,) = self.vit(images)
        return {"tokens": tokens} if self.as_dict else self.projection(tokens[:, 0])


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_projection_behind_the_layers_and_a_dict_of_outputs_hide_no_layer(as_dict):
    model = Projected(as_dict).eval()
    backbone, images = TokenBackbone(model), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        tokens, expected = backbone(images), model.vit(images)[0]
    assert (backbone.layers, backbone.grid, backbone.prefix) == ([*LAYERS, "output"], (4, 4), 1)
    assert torch.equal(tokens.patches[-1], expected[:, 1:])


def test_as_many_tokens_as_channels_are_not_turned():
    backbone = TokenBackbone(
        Gives(lambda images: images.flatten(2)[:, :1, :256].unflatten(2, (16, 16))[:, 0])
    )
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(backbone(images).patches[0], images[:, 0])


def test_features_of_other_numbers_of_images_are_refused():
    windows = nn.Unfold(8, stride=8)
    backbone = TokenBackbone(Gives(lambda images: windows(images).mT.flatten(0, 1)))  # (B N) D
    message = "the backbone gives 32 features of 8 images: none are taken of it"
    with pytest.raises(BackboneError, match=f"^{message}$"):
        backbone(torch.randn(2, 3, 16, 16))


def test_tokens_whose_places_are_not_known_are_refused():
    """A class token that joined patches of which there is no map; two features of one image."""
    patches = nn.Unfold(4, stride=4)  # 16 of 48 numbers

    def with_class_token(images):
        return torch.nn.functional.pad(patches(images).mT, (0, 0, 1, 0))

    for output, message in (
        (with_class_token, "the backbone gives 17 tokens of 16 x 16 pixels, which are no grid of patches"),
        (lambda images: ((images, images),), "the backbone gives tuple of 2, of which no features are taken"),
    ):
        with pytest.raises(BackboneError, match=message):
            TokenBackbone(Gives(output))(torch.randn(2, 3, 16, 16))
    backbone = TokenBackbone(Gives(lambda images: patches(images).mT))
    assert torch.equal(backbone(images := torch.randn(2, 3, 16, 16)).patches[-1], patches(images).mT)
    assert backbone.grid == (4, 4)


def test_hugging_faces_wrapper(tmp_path):
    transformers = pytest.importorskip("transformers")
    options = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48)
    config = transformers.Dinov2WithRegistersConfig(**options, image_size=28, patch_size=7)
    config.save_pretrained(tmp_path)
    backbone = build(dict(type="HuggingFaceClassifier", model_name=str(tmp_path)))
    with torch.no_grad():
        tokens = backbone(images := torch.randn(2, 3, 28, 28))
        expected = backbone.model.model.base_model(images).last_hidden_state
    assert backbone.layers == ["1", "2", "output"]
    assert backbone.grid == (4, 4)
    torch.testing.assert_close(tokens.class_token[:, -1], expected[:, 0])
    torch.testing.assert_close(tokens.patches[-1], expected[:, -16:])  # four registers between


def test_stages_of_hugging_face_are_no_layers(tmp_path):
    """Each gives the tokens of the next one; their grid had been that of the first."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Swinv2Config(
        image_size=64, patch_size=4, embed_dim=24, depths=[1, 1], num_heads=[2, 2], window_size=4
    )
    config.save_pretrained(tmp_path)
    backbone = build(dict(type="HuggingFaceClassifier", model_name=str(tmp_path)))
    with torch.no_grad():
        tokens = backbone(images := torch.randn(2, 3, 64, 64))
        expected = backbone.model.model.base_model(images).last_hidden_state
    assert (backbone.layers, backbone.grid, backbone.prefix) == (["output"], (8, 8), 0)
    assert torch.equal(tokens.patches[-1], expected)


def test_grids_of_token_ids_are_images_as_well():
    backbone = build(dict(type="mapet_mm.TokenViT", vocab_size=9, grid=(4, 6), arch=ARCH))
    with torch.no_grad():
        tokens = backbone(torch.randint(9, (2, 1, 4, 6)).float())
    assert (backbone.grid, tokens.patches[0].shape) == ((4, 6), (2, 24, 24))


def test_vectors_are_class_tokens():
    backbone = build(dict(type="mapet_mm.TokenMLP", vocab_size=9, embed_dims=16))
    tokens = backbone(torch.randint(9, (2, 1, 4, 6)).float())
    assert (backbone.grid, tokens.class_token.shape, tokens.patches[0].shape[1]) == ((0, 0), (2, 1, 16), 0)


def test_images_of_a_size_that_the_backbone_does_not_take_are_refused():
    backbone = build(dict(TIMM, model_name="vit_tiny_patch16_224"))
    with pytest.raises(BackboneError, match=r"does not take images of 40 x 32 pixels \(Input height"):
        backbone(torch.randn(2, 3, 40, 32))


def test_a_backbone_that_permutes_at_random_is_refused():
    with pytest.raises(BackboneError, match=r"other features each time .* config of the whole pre-training"):
        build(pretraining()["backbone"])(torch.randn(2, 3, 16, 16))


class Gives(nn.Module):
    """A backbone without layers that gives something."""

    def __init__(self, output) -> None:
        super().__init__()
        self.output, self.data_preprocessor = output, None

    def forward(self, images):
        return self.output(images)


def out_of_memory(images):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_maps_with_the_channels_last_are_maps():
    cells = nn.AvgPool2d(4)
    backbone = TokenBackbone(Gives(lambda images: cells(images).permute(0, 2, 3, 1)))  # B H W D
    images = torch.randn(2, 3, 16, 24)
    assert torch.equal(backbone(images).patches[-1], cells(images).flatten(2).mT)
    assert backbone.grid == (4, 6)


def test_what_is_no_feature_is_refused_and_a_full_memory_is_no_fault_of_the_images():
    with pytest.raises(BackboneError, match="the backbone gives dict, of which no features are taken"):
        TokenBackbone(Gives(lambda images: {"x": images}))(torch.randn(2, 3, 16, 16))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        TokenBackbone(Gives(out_of_memory))(torch.randn(2, 3, 16, 16))
