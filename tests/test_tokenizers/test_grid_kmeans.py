"""Tokens of any encoder's grid features: the library's own, the grid found by trying, one identity."""

import json

import numpy as np
import open_clip
import pytest
import timm
import torch
from digits_tokenizer import kclip_config, write_few_digits
from mmengine.runner import save_checkpoint
from torch import nn

from mapet_mm.models import MaPeTPretrainViT, MaPeTViT
from mapet_mm.models.target_generators.clip_tower import TowerError, build_visual
from mapet_mm.models.target_generators.grid_layout import find_layout
from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import KCLIP, Codebook, CodebookError, GridError, GridKMeans, TokenizerError
from mapet_mm.tokenizers.run import build_tokenizer, run_extract_tokens, run_fit_codebook

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
TIMM = dict(model_name="vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2)
OWN = dict(arch=ARCH, img_size=24, patch_size=4)


def grid_of(tokens: torch.Tensor, tokens_before: int = 1) -> torch.Tensor:
    return tokens[:, tokens_before:]


def test_with_a_clip_tower_it_gives_the_codes_of_kclip(data_dir, tmp_path):
    with np.load(data_dir / "kclip_reference.npz") as file:
        reference = {name: torch.from_numpy(file[name]) for name in file.files}
    weights = {name[2:]: value for name, value in reference.items() if name.startswith("w/")}
    torch.save(weights, tmp_path / "tower.pt")
    *layers, width, image_size, _ = reference["meta"].tolist()
    tower = dict(
        clip_model=dict(layers=layers, width=width, image_size=image_size),
        pretrained=str(tmp_path / "tower.pt"),
    )
    codebook = Codebook(reference["centroids"])
    ours = GridKMeans(dict(type="mapet_mm.OpenCLIPVisual", **tower), image_size, codebook)
    assert torch.equal(ours(reference["images"]), reference["codes"])
    assert torch.equal(ours.features(reference["images"]), KCLIP(**tower).features(reference["images"]))
    assert (ours.grid, ours.dim) == ((4, 4), 256)


def test_features_of_a_vit_of_timm_are_timms_own(tmp_path):
    theirs = timm.create_model(num_classes=0, **TIMM).eval()
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    own = dict(type="TIMMBackbone", checkpoint_path=str(tmp_path / "timm.pth"), num_classes=0, **TIMM)
    ours = GridKMeans(own, 32)  # weights by timm's own option
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours.features(images), grid_of(theirs.forward_features(images)))
        block = GridKMeans(own, 32, layer="timm_model.blocks.0")
        (expected,) = theirs.get_intermediate_layers(images, n=[0])
    assert torch.equal(block.features(images), expected)
    assert ours.grid == (4, 4)


@pytest.mark.parametrize(("out_type", "layer"), [("raw", -1), ("featmap", -1), ("cls_token", "ln1")])
def test_features_of_a_vit_of_mmpretrain_are_its_own(out_type, layer, tmp_path):
    config = dict(type="VisionTransformer", out_type=out_type, **OWN)
    theirs = MODELS.build(dict(config, out_type="raw"))
    theirs.init_weights()
    theirs.eval()
    torch.save(
        {"state_dict": {f"backbone.{k}": v for k, v in theirs.state_dict().items()}}, tmp_path / "w.pth"
    )
    start = dict(type="Pretrained", checkpoint=str(tmp_path / "w.pth"), prefix="backbone.")
    ours = GridKMeans(dict(config, init_cfg=start), 24, layer=layer)
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        assert torch.equal(ours.features(images), grid_of(theirs(images)[0]))


def test_features_of_an_own_pre_training_are_the_backbones(tmp_path):
    """Of a checkpoint as the runner writes it, with mask token and head."""
    pretrained = nn.ModuleDict(
        {"backbone": MaPeTPretrainViT(cutting_point=10, **OWN), "head": nn.Linear(2, 2)}
    )
    pretrained["backbone"].init_weights()
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


def test_features_of_a_vit_of_open_clip_are_its_own():
    theirs = open_clip.transformer.VisionTransformer(
        image_size=32, patch_size=8, width=64, layers=2, heads=2, mlp_ratio=2.0, output_dim=16
    ).eval()
    ours = GridKMeans(theirs, 32, layer="transformer.resblocks.1")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        (expected,) = theirs.forward_intermediates(images, indices=1)["image_intermediates"]
    assert torch.equal(ours.features(images), expected.flatten(2).transpose(1, 2))


def test_the_visual_tower_of_a_vit_is_open_clips_own(tmp_path):
    config = dict(
        embed_dim=16,
        vision_cfg=dict(image_size=32, patch_size=8, width=64, layers=1, head_width=32),
        text_cfg=dict(context_length=8, vocab_size=16, width=16, heads=1, layers=1),
    )
    (tmp_path / "tiny-vit.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "tiny-vit.json")
    model = open_clip.create_model("tiny-vit")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    tower = build_visual("tiny-vit", str(tmp_path / "weights.pt"))
    assert not tower.training
    assert not any(parameter.requires_grad for parameter in tower.parameters())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(tower(images), model.eval().visual(images))
    with pytest.raises(
        TowerError, match=r"could not build tiny-vit with weights 'laion' \(.*\): give a tag of"
    ):
        build_visual("tiny-vit", "laion")


class Cells(nn.Module):
    """Means of cells of an image, in some form, behind tokens that see the whole of it."""

    def __init__(self, form: str, cell: tuple[int, int] = (4, 4), before: int = 0, after: int = 0) -> None:
        super().__init__()
        self.form, self.cell, self.before, self.after = form, cell, before, after

    def forward(self, images: torch.Tensor):
        cells = nn.functional.avg_pool2d(images, self.cell)
        if self.form == "B D H W":
            return cells
        if self.form == "B H W D":
            return {"map": cells.permute(0, 2, 3, 1)}
        tokens = cells.flatten(2).transpose(1, 2)
        whole = 5 * images.mean((2, 3))[:, None]
        tokens = torch.cat([whole] * self.before + [tokens] + [whole] * self.after, dim=1)
        forms = {"B N D": tokens, "B D N": tokens.transpose(1, 2), "N B D": tokens.transpose(0, 1)}
        return (images, [forms[self.form], whole])


@pytest.mark.parametrize(
    ("encoder", "layer"),
    [
        (Cells("B N D"), 1),
        (Cells("B N D", before=5), 1),
        (Cells("B N D", (4, 2), before=1, after=4), 1),
        (Cells("B D N", before=1), -1),
        (Cells("N B D", before=1), -1),
        (Cells("B D H W", (2, 4)), 0),
        (Cells("B H W D"), "map"),
        (Cells("B H W D", (8, 8)), "map"),  # 3 x 3 x 3: no side says which is which
    ],
)
def test_the_grid_is_found_in_outputs_of_any_form(encoder, layer):
    ours = GridKMeans(encoder, 24, layer=layer)
    rows, columns = (24 // side for side in encoder.cell)
    assert ours.grid == (rows, columns)
    images = torch.randn(2, 3, 24, 24)
    expected = nn.functional.avg_pool2d(images, encoder.cell).flatten(2).transpose(1, 2)
    assert torch.equal(ours.features(images), expected)


def test_an_output_without_a_grid_is_refused_with_what_to_do():
    pooled = dict(type="VisionTransformer", **OWN)
    with pytest.raises(GridError, match=r"no grid .*\('B', 24\); choose another `layer`, .*ln1") as error:
        GridKMeans(pooled, 24, random_seed=0)
    assert "\n" not in str(error.value)
    # as many tokens as a grid has, in no order
    order = torch.randperm(36, generator=torch.Generator().manual_seed(0))
    with pytest.raises(GridError, match="no grid"):
        find_layout(lambda images: Cells("B N D")(images)[1][0][:, order], 24, "cpu")
    with pytest.raises(TokenizerError, match=r"no output for layer 'layer\.9': give the index .*layers"):
        GridKMeans(pooled, 24, layer="layer.9", random_seed=0)
    with pytest.raises(TokenizerError, match="no output for layer 7"):
        GridKMeans(dict(pooled, out_type="raw"), 24, layer=7, random_seed=0)


class Windows(nn.Module):
    """A feature map by way of its four windows, which a submodule sees as images of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        cells = nn.functional.avg_pool2d(images, 3)
        windows = cells.unfold(2, 4, 4).unfold(3, 4, 4)  # B D H W h w
        return self.attention(windows.permute(0, 2, 3, 4, 5, 1).reshape(-1, 4, 4, 3))


def test_windows_are_not_taken_for_images():
    """Before: an image's tokens were those of another image's windows."""
    shape = r"\('20 of 5 images', 4, 4, 3\)"
    for layer in (-1, "attention"):
        with pytest.raises(GridError, match=rf"no grid of features in an output of shape {shape}; choose"):
            GridKMeans(Windows(), 24, layer=layer)


@pytest.mark.parametrize("encoder", ["mapet_mm.MaPeTViT", {}, None])
def test_what_is_no_encoder_is_refused(encoder):
    with pytest.raises(TokenizerError, match=r"encoder is .*: give dict"):
        GridKMeans(encoder, 24)


def test_an_encoder_that_nobody_gave_weights_is_refused(tmp_path):
    raw = dict(type="VisionTransformer", out_type="raw", **OWN)
    with pytest.raises(TokenizerError, match=r"encoder VisionTransformer has no weights: give .*random_seed"):
        GridKMeans(raw, 24)
    state = torch.get_rng_state()
    assert GridKMeans(raw, 24, random_seed=3).metadata["weights"] == "random, seed 3"
    assert torch.equal(torch.get_rng_state(), state)
    torch.save({"cls_token": torch.zeros(1, 1, 24)}, tmp_path / "w.pth")
    start = dict(type="Pretrained", checkpoint=str(tmp_path / "w.pth"))
    with pytest.raises(TokenizerError, match=r"lacks \d+ of the encoder's \d+ tensors"):
        GridKMeans(dict(raw, init_cfg=start), 24)


def saved_encoder(tmp_path) -> tuple[dict, str]:
    """An encoder's config, and a checkpoint with its weights as a model's `backbone`."""
    config = dict(type="VisionTransformer", out_type="raw", **OWN)
    network = MODELS.build(config)
    weights = {f"backbone.{name}": tensor for name, tensor in network.state_dict().items()}
    torch.save({"state_dict": weights}, tmp_path / "w.pth")
    return config, str(tmp_path / "w.pth")


def test_a_prefix_needs_no_dot(tmp_path):
    """As MMEngine's own loading of a part of a checkpoint."""
    config, file = saved_encoder(tmp_path)
    digests = {
        GridKMeans(
            dict(config, init_cfg=dict(type="Pretrained", checkpoint=file, prefix=prefix)), 24
        ).encoder_digest
        for prefix in ("backbone.", "backbone")
    }
    assert len(digests) == 1
    with pytest.raises(
        TokenizerError, match=r"`.*w\.pth` has nothing with the prefix `bckbone\.`: .*`backbone"
    ):
        GridKMeans(dict(config, init_cfg=dict(type="Pretrained", checkpoint=file, prefix="bckbone")), 24)


def test_a_missing_prefix_is_named(tmp_path):
    """Before: a classifier's checkpoint was said to belong to another architecture."""
    config, checkpoint = saved_encoder(tmp_path)
    weights = dict(type="Pretrained", checkpoint=checkpoint)
    with pytest.raises(TokenizerError) as error:
        GridKMeans(dict(config, init_cfg=weights), 24)
    assert str(error.value).endswith(
        "tensors, `cls_token` first: it has that as `backbone.cls_token`; set `init_cfg.prefix`"
    )


def test_a_name_that_ends_as_the_one_that_does_not_fit_is_no_missing_prefix(tmp_path):
    """A ResNet's stem is its `conv1`, and each block has one."""
    config = dict(type="ResNet", depth=18, base_channels=8, stem_channels=8)
    torch.save(MODELS.build(config).state_dict(), tmp_path / "w.pth")
    weights = dict(type="Pretrained", checkpoint=str(tmp_path / "w.pth"))
    for other in (dict(in_channels=1), dict(stem_channels=16)):
        with pytest.raises(TokenizerError, match=r"`conv1\.weight` first: it belongs to another arch"):
            GridKMeans(dict(config, **other, init_cfg=weights), 32)


def test_weights_from_a_file_and_from_a_seed_are_refused(tmp_path):
    """Before: one of the two was ignored."""
    config, file = saved_encoder(tmp_path)
    start = dict(type="Pretrained", checkpoint=file, prefix="backbone.")
    with pytest.raises(TokenizerError, match=r"both init_cfg=dict\(type='Pretrained', .* and random_seed=3"):
        GridKMeans(dict(config, init_cfg=start), 24, random_seed=3)
    nested = dict(type="ImageClassifier", backbone=dict(config, init_cfg=[start]))
    with pytest.raises(TokenizerError, match=r"`backbone\.init_cfg` .* nothing loads, and random_seed=0"):
        GridKMeans(nested, 24, random_seed=0)


@pytest.mark.parametrize("seed", [dict(), dict(random_seed=0)])
def test_weights_beside_the_encoder_are_refused(tmp_path, seed):
    """Nothing loads the tokenizer's own `init_cfg`."""
    config, file = saved_encoder(tmp_path)
    start = dict(type="Pretrained", checkpoint=file, prefix="backbone.")
    message = r"`init_cfg` of the tokenizer.* loads nothing: .*into `encoder`"
    with pytest.raises(TokenizerError, match=message):
        GridKMeans(dict(config, **({} if seed else dict(init_cfg=start))), 24, init_cfg=start, **seed)
    with pytest.raises(TokenizerError, match=message):
        GridKMeans(MODELS.build(config), 24, init_cfg=start)


def test_weights_and_layer_of_the_encoder_are_part_of_the_identity():
    raw = dict(type="mapet_mm.MaPeTViT", out_type="raw", **OWN)
    first = GridKMeans(raw, 24, random_seed=0)
    features = first.features(torch.randn(1, 3, 24, 24))[0]
    bare, fitted = Codebook(features[:9]), Codebook(features[:9], first.metadata)
    assert GridKMeans(raw, 24, fitted, random_seed=0).digest == fitted.digest
    digests = {
        GridKMeans(raw, 24, bare, **options).digest
        for options in (dict(random_seed=0), dict(random_seed=1), dict(random_seed=0, layer="layers.0"))
    }
    assert len(digests) == 3
    assert GridKMeans(raw, 24, bare, random_seed=1).digest in digests
    with pytest.raises(CodebookError, match=r"fitted with encoder_digest .*seed 0.*GridKMeans has .*seed 1"):
        GridKMeans(raw, 24, fitted, random_seed=1)
    with pytest.raises(CodebookError, match=r"fitted with layer -1 .*GridKMeans has layers\.0"):
        GridKMeans(raw, 24, fitted, layer="layers.0", random_seed=0)


def test_tokens_of_an_own_checkpoint_are_fitted_extracted_and_trained_on(tmp_path):
    """Bootstrapped: the tools' way for stored tokens, and the same ids on the fly inside a training."""
    write_few_digits(tmp_path / "digits", 40)
    pretrained = MaPeTPretrainViT(cutting_point=10, **OWN)
    pretrained.init_weights()
    torch.save({f"backbone.{k}": v for k, v in pretrained.state_dict().items()}, tmp_path / "epoch_1.pth")
    start = dict(type="Pretrained", checkpoint=str(tmp_path / "epoch_1.pth"), prefix="backbone.")
    cfg = kclip_config(tmp_path / "digits", tmp_path, **{"codebook.positions_per_image": 16})
    cfg.tokenizer = dict(
        type="mapet_mm.GridKMeans",
        encoder=dict(type="mapet_mm.MaPeTViT", out_type="raw", init_cfg=start, **OWN),
        image_size=24,
        codebook=cfg.tokenizer.codebook,
    )
    keep = [step for step in cfg.dataset[0].pipeline if step.type != "ResizeEdge"]
    for dataset in (*cfg.dataset, cfg.codebook.dataset):
        dataset.pipeline = keep
    _, codebook = run_fit_codebook(cfg)
    store, done = run_extract_tokens(cfg)
    tokenizer, _ = build_tokenizer(cfg)
    assert (done.images, store.grid, store.tokenizer) == (80, (6, 6), codebook.digest)
    model = MODELS.build(
        dict(
            type="mapet_mm.MaPeT",
            backbone=dict(type="mapet_mm.MaPeTPretrainViT", cutting_point=10, **OWN),
            head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=12),
            target_generator=cfg.tokenizer,
        )
    )
    model.init_weights()
    images = torch.randn(2, 3, 24, 24)
    assert torch.equal(model.target_generator(images), tokenizer(images))
    model([images, images], mode="loss")["loss"].backward()
    assert not [name for name in model.state_dict() if name.startswith("target_generator")]


@pytest.mark.parametrize("stride", [32, 16, 8, 4])
def test_a_tower_of_another_stride_sees_the_same_on_a_finer_grid(stride):
    """On an even image every position but those near the border has the same feature, whatever the stride."""
    tower = dict(
        clip_model=dict(layers=[1, 2, 2, 2], width=8, image_size=128), pretrained=dict(type="random", seed=0)
    )
    image = torch.full((1, 3, 320, 320), 0.5)
    plain = KCLIP(image_size=320, **tower).features(image).reshape(10, 10, -1)[5, 5]
    kclip = KCLIP(image_size=320, stride=stride, **tower)
    assert kclip.grid == (320 // stride, 320 // stride)
    features = kclip.features(image).reshape(*kclip.grid, -1)
    torch.testing.assert_close(features[kclip.grid[0] // 2, kclip.grid[1] // 2], plain)
    assert kclip.metadata["encoder"].endswith("" if stride == 32 else f" with stride {stride}")


def test_other_strides_are_refused():
    with pytest.raises(ValueError, match="`stride` is 24: 32, the towers' own, or 16, 8 or 4"):
        KCLIP(dict(layers=[1, 1, 1, 1], width=8, image_size=48), dict(type="random"), stride=24)
    with pytest.raises(ValueError, match="only ResNets take one: leave it out for ViT-B-32"):
        GridKMeans(dict(type="mapet_mm.OpenCLIPVisual", clip_model="ViT-B-32", stride=16))
