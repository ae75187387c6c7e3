"""timm and Hugging Face load exports by themselves, with the features and the images of the training."""

import copy
import functools
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import transformers
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import init_default_scope
from mmpretrain.models import SelfSupDataPreprocessor
from mmpretrain.registry import MODELS
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import nn
from torch.nn import functional

from mapet_mm.interop.convert import mm_to_timm
from mapet_mm.interop.description import config_of, describe
from mapet_mm.interop.export import timm_arguments, write_export
from mapet_mm.models import MaPeTPretrainViT, MaPeTViT
from mapet_mm.weight_files import read_checkpoint, read_weights, write_weights

CONFIGS = Path(__file__).parents[1] / "configs" / "mapet"
TINY = CONFIGS / "mapet_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"
TOOL = Path(__file__).parents[1] / "tools" / "convert.py"
FINETUNED = "vit-tiny-p16_4xb256-amp-coslr-300e_in1k.py"
SMALL = dict(embed_dims=48, num_layers=2, num_heads=3, feedforward_channels=192)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def recipe() -> Config:
    """A recipe of the paper, with a smaller network."""
    recipe = Config.fromfile(TINY)
    recipe.model.backbone.arch = SMALL
    return recipe


@pytest.fixture(scope="module")
def weights(recipe) -> dict[str, torch.Tensor]:
    options = {name: value for name, value in recipe.model.backbone.items() if name != "type"}
    vit = MaPeTPretrainViT(**options)
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.1)
    return {f"backbone.{name}": value for name, value in vit.state_dict().items()}


@pytest.fixture(scope="module")
def meta(recipe) -> dict[str, str]:
    return {"cfg": recipe.pretty_text}


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(1, 3, 224, 224)


@pytest.fixture(scope="module")
@torch.no_grad()
def tokens(weights, images) -> torch.Tensor:
    vit = MaPeTViT(SMALL, out_type="raw").eval()
    own = {name.removeprefix("backbone."): value for name, value in weights.items()}
    vit.load_state_dict(own)
    return vit(images)[0]


@torch.no_grad()
@pytest.mark.parametrize("classes", [0, 5])
def test_torchvision_takes_the_network_without_layer_scale(weights, meta, images, classes, tmp_path):
    """Exact but for the order of rounding; with a classifier on the class token too."""
    state = dict(weights)
    if classes:
        state |= {"head.fc.weight": torch.randn(classes, 48), "head.fc.bias": torch.randn(classes)}
    told = write_export(tmp_path / "vit.pth", "torchvision", state, meta)
    made: dict[str, nn.Module] = {}
    exec(told.splitlines()[0], {"torchvision": torchvision, "torch": torch, "functools": functools}, made)
    vit = made["vit"].eval()
    vit.load_state_dict(read_weights(tmp_path / "vit.pth"), strict=True)
    ours = MaPeTViT(SMALL, out_type="cls_token").eval()
    ours.load_state_dict({name.removeprefix("backbone."): value for name, value in weights.items()})
    (features,) = ours(images)
    expected = (
        functional.linear(features, state["head.fc.weight"], state["head.fc.bias"]) if classes else features
    )
    assert (vit(images) - expected).norm() / expected.norm() < 2e-6


@torch.no_grad()
@pytest.mark.parametrize("side", [224, 192])
def test_a_folded_network_of_timm_has_no_layer_scale_and_the_same_features(weights, meta, side, tmp_path):
    told = write_export(tmp_path, "timm", weights, meta, fold=True)
    vit = eval(told.splitlines()[0], {"timm": timm}).eval()
    assert not any("ls1" in name for name in vit.state_dict())
    vit.set_input_size((side, side))
    ours = MaPeTViT(SMALL, img_size=side, out_type="raw").eval()
    resized = MaPeTViT(SMALL, img_size=224)
    resized.load_state_dict({name.removeprefix("backbone."): value for name, value in weights.items()})
    state = resized.state_dict()
    state["pos_embed"] = vit.pos_embed.data.clone()  # each library resizes positions in its own way
    ours.load_state_dict(state)
    images = torch.randn(1, 3, side, side)
    assert (vit.forward_features(images) - ours(images)[0]).norm() / ours(images)[0].norm() < 2e-6


@pytest.mark.parametrize("target", ["hf", "reference", "mm"])
def test_layer_scale_is_folded_only_where_the_network_can_do_without(weights, meta, target, tmp_path):
    with pytest.raises(ValueError, match=f"--fold-layerscale is for timm and torchvision, not .* {target}"):
        write_export(tmp_path / "vit.pth", target, weights, meta, fold=True)


@pytest.mark.parametrize(
    ("without", "message"),
    [("cls_token", "have no class token"), ("ln1.weight", r"have no final norm \(`backbone.ln1.weight`\)")],
)
def test_torchvision_refuses_what_its_network_cannot_be_without(weights, meta, without, message, tmp_path):
    fewer = {name: value for name, value in weights.items() if not name.startswith(f"backbone.{without}")}
    if without == "cls_token":
        fewer["backbone.pos_embed"] = fewer["backbone.pos_embed"][:, 1:]
    with pytest.raises(ValueError, match=message):
        write_export(tmp_path / "vit.pth", "torchvision", fewer, meta)


@torch.no_grad()
def test_timm_makes_the_network_of_a_folder_with_imagenets_mean(weights, meta, images, tokens, tmp_path):
    told = write_export(tmp_path, "timm", weights, meta)
    vit = eval(told.splitlines()[0], {"timm": timm}).eval()
    data = resolve_model_data_config(vit)
    assert (tuple(data["mean"]), tuple(data["std"])) == IMAGENET
    assert (data["input_size"], data["interpolation"], data["crop_pct"]) == ((3, 224, 224), "bicubic", 1.0)
    torch.testing.assert_close(vit.forward_features(images), tokens, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(vit(images), tokens[:, 1:].mean(1), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_hugging_face_makes_the_network_of_a_folder(weights, meta, images, tokens, tmp_path):
    told = write_export(tmp_path, "hf", weights, meta)
    vit = eval(told.splitlines()[0], {"transformers": transformers}).eval()
    assert vit.config.num_attention_heads == 3
    torch.testing.assert_close(vit(images).last_hidden_state, tokens, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_both_prepare_an_image_as_the_training_did(weights, meta, tmp_path):
    """A photograph of another shape, through each library's own transform and the recipe's test pipeline."""
    image = Image.effect_mandelbrot((300, 260), (-2, -1.2, 1, 1.2), 80).convert("RGB")
    image.putpixel((150, 130), (255, 0, 60))
    image.save(tmp_path / "image.png")
    expected = prepared_by_the_recipe(tmp_path / "image.png")
    for target in ("timm", "hf"):
        write_export(tmp_path / target, target, weights, meta)
    vit = timm.create_model(f"local-dir:{tmp_path}/timm", pretrained=True)
    by_timm = create_transform(**resolve_model_data_config(vit))(image)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    by_hf = processor(image, return_tensors="pt")["pixel_values"][0]
    # Cutting and resizing in the other order moves edges by a part of a pixel.
    assert (by_timm - expected).abs().mean() < 0.02
    assert (by_hf - expected).abs().mean() < 0.02


@torch.no_grad()
def test_both_squash_an_image_where_the_training_did(weights, recipe, tmp_path):
    """As a dataset of another size is read in CONTRIBUTING."""
    image = Image.effect_mandelbrot((300, 260), (-2, -1.2, 1, 1.2), 80).convert("RGB")
    image.save(tmp_path / "image.png")
    steps = [
        dict(type="LoadImageFromFile"),
        dict(type="Resize", scale=224, backend="pillow", interpolation="bilinear"),
    ]
    expected = prepared_by_the_recipe(tmp_path / "image.png", steps)
    pipeline = [*steps, dict(type="PackInputs")]
    meta = changed(recipe, test_dataloader=dict(dataset=dict(type="CustomDataset", pipeline=pipeline)))
    for target in ("timm", "hf"):
        told = write_export(tmp_path / target, target, weights, meta)
        assert told.splitlines()[1].startswith("images: RGB, squashed to 224 x 224 bilinear, mean (0.485,")
        assert "otherwise" not in told
    vit = timm.create_model(f"local-dir:{tmp_path}/timm", pretrained=True)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    by_timm = create_transform(**resolve_model_data_config(vit))(image)
    by_hf = processor(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(by_timm, expected, rtol=0, atol=1e-4)
    assert (by_hf - expected).abs().mean() < 0.01


@pytest.mark.parametrize(
    ("steps", "others"),
    [
        ([dict(type="Resize", scale=(512, 224), keep_ratio=True)], "Resize"),
        ([dict(type="ResizeEdge", scale=256)], "OpenCV's resizing, which does not smooth"),
        ([dict(type="CenterCrop", crop_size=192), dict(type="mine.Blur")], "CenterCrop, Blur"),
        ([dict(type="ResizeEdge", scale=256, edge="long")], "ResizeEdge"),
        ([dict(type="LoadImageFromFile"), dict(type="CenterCrop", crop_size=224)], None),
        (
            [dict(type="MultiView", transforms=[[dict(type="Blur")], [dict(type="Resize", scale=112)]])],
            "Blur",
        ),
    ],
)
def test_what_no_library_is_told_about_images_is_said(steps, others, weights, recipe, tmp_path):
    meta = changed(recipe, test_dataloader=dict(dataset=dict(type="CustomDataset", pipeline=steps)))
    told = write_export(tmp_path / "vit.safetensors", "timm", weights, meta)
    end = f"; prepare them otherwise as in training: {others}" if others else "std (0.229, 0.224, 0.225)"
    assert told.endswith(end)


@pytest.mark.parametrize(
    ("steps", "size"),
    [
        ([], "short side 224 bicubic, central 224 x 224"),
        ([dict(type="Resize", scale=(224, 224), backend="pillow")], "squashed to 224 x 224 bilinear"),
        (
            [
                dict(type="ResizeEdge", scale=256, backend="pillow"),
                dict(type="RandomCrop", crop_size=224),
                dict(type="ColorJitter", brightness=0.4),
            ],
            "short side 256 bilinear, central 224 x 224",
        ),
    ],
)
def test_images_are_prepared_as_in_training_where_a_config_has_no_others(
    steps, size, weights, recipe, tmp_path
):
    """As in the configs of `mapet-mm pretrain`: without validation and test."""
    pipeline = [dict(type="LoadImageFromFile"), *(steps or recipe.load_square[1:]), recipe.color_jitter]
    meta = changed(
        recipe, val_dataloader=None, test_dataloader=None, **{"train_dataloader.dataset.pipeline": pipeline}
    )
    told = write_export(tmp_path / "vit.safetensors", "timm", weights, meta).splitlines()[1]
    assert told == f"images: RGB, {size}, mean {IMAGENET[0]}, std {IMAGENET[1]}"


def prepared_by_the_recipe(path: Path, steps: list[dict] | None = None) -> torch.Tensor:
    recipe = Config.fromfile(TINY)
    init_default_scope("mmpretrain")
    steps = [*(steps or recipe.load_square), dict(type="PackInputs")]
    image = Compose(steps)({"img_path": str(path)})["inputs"]
    options = {name: value for name, value in recipe.data_preprocessor.items() if name != "type"}
    return SelfSupDataPreprocessor(**options)({"inputs": image[None], "data_samples": None})["inputs"][0]


@pytest.mark.parametrize("out_type", ["avg_featmap", "cls_token"])
def test_a_classifier_of_patches_or_of_the_class_token_is_one_in_timm(out_type, tmp_path):
    recipe = Config.fromfile(CONFIGS / "benchmarks" / FINETUNED)
    recipe.model.backbone.update(arch=SMALL, out_type=out_type, final_norm=out_type == "cls_token")
    recipe.model.head.in_channels = SMALL["embed_dims"]
    model = MODELS.build(dict(recipe.model, train_cfg=None)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    write_export(tmp_path, "timm", model.state_dict(), {"cfg": recipe.pretty_text})
    vit = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(vit(images), model(images), rtol=1e-3, atol=1e-3)
    resize = next(step["scale"] for step in recipe.test_pipeline if step["type"] == "ResizeEdge")
    transform = create_transform(**resolve_model_data_config(vit))
    assert (transform.transforms[0].size, transform.transforms[1].size) == (resize, (224, 224))


def test_a_file_for_timm_says_what_makes_the_network_and_how_images_are_prepared(weights, meta, tmp_path):
    told = write_export(tmp_path / "vit.safetensors", "timm", weights, meta)
    call, images = told.splitlines()
    with torch.device("meta"):
        vit = eval(call, {"timm": timm})
    vit.load_state_dict(read_weights(tmp_path / "vit.safetensors"), strict=True, assign=True)
    assert images == (
        "images: RGB, short side 224 bicubic, central 224 x 224, mean (0.485, 0.456, 0.406), "
        "std (0.229, 0.224, 0.225)"
    )
    header = read_checkpoint(tmp_path / "vit.safetensors")[1]
    assert (json.loads(header["mean"]), json.loads(header["std"])) == tuple(map(list, IMAGENET))
    assert [header[name] for name in ("img_size", "patch_size", "num_heads")] == ["[224, 224]", "16", "3"]


@pytest.mark.parametrize("arch", ["deit-tiny", "deit-small", "deit-base", "large"])
def test_the_line_for_timm_is_right_for_each_architecture(arch):
    recipe = Config.fromfile(TINY)
    recipe.model.backbone.arch = arch
    with torch.device("meta"):
        ours = {f"backbone.{name}": value for name, value in MaPeTViT(arch).state_dict().items()}
        theirs = timm.models.VisionTransformer(
            **timm_arguments(ours, describe(ours, recipe.to_dict())), num_classes=0
        )
    expected = {name: value.shape for name, value in theirs.state_dict().items()}
    assert {name: value.shape for name, value in mm_to_timm(ours).items()} == expected
    assert theirs.blocks[0].attn.head_dim == 64


def test_names_of_this_package_keep_the_config_and_convert_later(weights, meta, tmp_path):
    first = tmp_path / "weights.safetensors"
    assert (
        write_export(first, "mm", weights, meta | {"dataset_meta": {"classes": ["cat"]}, "time": "now"}) == ""
    )
    for path in (first, tmp_path / "weights.pth"):
        read, kept = read_checkpoint(first)
        write_export(path, "mm", read, kept)
        assert set(read_checkpoint(path)[1]) - {"format"} == {"cfg", "dataset_meta"}
        assert "local-dir" in write_export(tmp_path / "vit", "timm", *read_checkpoint(path))


def changed(recipe: Config, **options) -> dict[str, str]:
    changed = copy.deepcopy(recipe)
    for name, value in options.items():
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, changed), last, value)
    return {"cfg": changed.pretty_text}


def wrapped(interpolation: str) -> dict:
    """A loader whose dataset is inside of another one."""
    steps = [dict(type="ResizeEdge", scale=256, interpolation=interpolation)]
    return dict(dataset=dict(type="RepeatDataset", dataset=dict(type="ImageNet", pipeline=steps)))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (None, r"are not known \(the file has no config of a training\): give the training's config"),
        ({"model.backbone.arch": "deit-small"}, "backbone has embed_dims=384, the weights have 48"),
        ({"model.backbone.arch": "vit"}, "names no architecture of a ViT"),
        (
            {"model.backbone.img_size": 256},
            r"images have \(256, 256\) pixels, the weights are for 196 patches",
        ),
        (
            {"patch": (3, 8, 16)},
            r"patches have 8 x 16 pixels of 3 channels, other libraries' are square and RGB",
        ),
        ({"patch": (1, 16, 16)}, r"patches have 16 x 16 pixels of 1 channels"),
        ({"data_preprocessor.to_rgb": False}, "images are BGR"),
        (
            {"model.backbone.norm_cfg": dict(type="LN", eps=1e-2)},
            r"norm_cfg=\{'eps': 0.01, 'type': 'LN'\}, other libraries' ViT \{'type': 'LN', 'eps': 1e-06\}",
        ),
        ({"model.backbone.layer_cfgs": dict(act_cfg=dict(type="ReLU"))}, "backbone has layer_cfgs="),
        ({"test_dataloader": wrapped("area")}, "config resizes images by `area`"),
        ({"data_preprocessor.mean": None}, "has no mean and std"),
        ({"model.backbone.arch": {"embed_dims": 48}}, r"another form: KeyError\('num_layers'\)"),
        ({"test_dataloader": [1, 2]}, "another form: AttributeError"),
    ],
)
def test_a_folder_without_what_is_known_is_not_written(options, match, weights, recipe, tmp_path):
    options = dict(options or {})
    if patch := options.pop("patch", None):
        weights = weights | {"backbone.patch_embed.projection.weight": torch.ones(48, *patch)}
    meta = {} if "no config" in match else changed(recipe, **options)
    with pytest.raises(ValueError, match=match):
        write_export(tmp_path / "vit", "timm", weights, meta)
    assert not (tmp_path / "vit").exists()
    assert re.search(match, write_export(tmp_path / "vit.safetensors", "timm", weights, meta))
    assert set(read_checkpoint(tmp_path / "vit.safetensors")[1]) == {"format"}


def test_images_that_are_not_square_go_to_timm_and_not_to_dinov2(recipe, weights, images, tmp_path):
    meta = changed(recipe, **{"model.backbone.img_size": [112, 448]})
    write_export(tmp_path / "timm", "timm", weights, meta)
    vit = timm.create_model(f"local-dir:{tmp_path}/timm", pretrained=True)
    assert vit.patch_embed.grid_size == (7, 28)
    with pytest.raises(ValueError, match="112 x 448 pixels, Dinov2Model takes square ones"):
        write_export(tmp_path / "hf", "hf", weights, meta)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("target", "options", "more", "match"),
    [
        (
            "torchvision",
            {"model.backbone.img_size": [112, 448]},
            {},
            r"square images, these are \(112, 448\)",
        ),
        (
            "torchvision",
            {},
            {"ln2.weight": 48, "ln2.bias": 48},
            "ln2.weight`: torchvision's ViT has nothing of this name",
        ),
        ("timm", {}, {"ln2.weight": 48, "ln2.bias": 48}, "timm's network has one of them"),
    ],
)
def test_what_another_network_cannot_be_is_said_before_a_file_is_written(
    target, options, more, match, weights, recipe, tmp_path
):
    state = weights | {f"backbone.{name}": torch.ones(size) for name, size in more.items()}
    with pytest.raises(ValueError, match=match):
        write_export(tmp_path / "vit.pth", target, state, changed(recipe, **options))
    assert not list(tmp_path.iterdir())


def test_an_mlp_that_dinov2_cannot_have_is_refused(recipe, tmp_path):
    arch = SMALL | {"feedforward_channels": 100}
    state = {f"backbone.{name}": value for name, value in MaPeTViT(arch).state_dict().items()}
    with pytest.raises(ValueError, match="MLP's width is no multiple of the tokens', as Dinov2Model has it"):
        write_export(tmp_path / "vit", "hf", state, changed(recipe, **{"model.backbone.arch": arch}))


def test_a_classifier_of_an_unknown_feature_is_not_described(weights, recipe, tmp_path):
    classifier = weights | {"head.fc.weight": torch.ones(5, 48), "head.fc.bias": torch.ones(5)}
    with pytest.raises(ValueError, match="config classifies out_type='raw'; known are 'cls_token'"):
        write_export(
            tmp_path / "vit", "timm", classifier, changed(recipe, **{"model.backbone.out_type": "raw"})
        )


@pytest.mark.parametrize("norm", [{}, {"ln2.weight": 48, "ln2.bias": 48}])
@pytest.mark.parametrize(("layers", "refused"), [(0, 0), ([-2], -2), ((0, 1), None), (-1, None)])
def test_a_classifier_of_an_earlier_layer_is_not_described(layers, refused, norm, weights, recipe, tmp_path):
    state = {name: value for name, value in weights.items() if not (norm and name.startswith("backbone.ln1"))}
    state |= {f"backbone.{name}": torch.ones(size) for name, size in norm.items()}
    state |= {"head.fc.weight": torch.ones(5, 48), "head.fc.bias": torch.ones(5)}
    options = {"model.backbone.out_indices": layers, "model.backbone.out_type": "cls_token"}
    write = functools.partial(write_export, tmp_path / "vit", "timm", state, changed(recipe, **options))
    if refused is None:
        write()
    else:
        with pytest.raises(ValueError, match=f"config classifies the output of layer {refused}, other lib"):
            write()


@pytest.mark.parametrize(
    ("target", "said"), [("hf", "transformers reads it as model.safetensors"), ("reference", "")]
)
def test_a_file_for_a_library_without_a_call_says_how_it_is_read_and_of_which_images(
    target, said, weights, meta, tmp_path
):
    told = write_export(tmp_path / "vit.safetensors", target, weights, meta).splitlines()
    assert told[-1].startswith("images: RGB, short side 224 bicubic")
    assert "".join(told[:-1]).startswith(said)
    assert len(told) == 1 + bool(said)


def test_a_folder_is_for_timm_and_hugging_face_alone(weights, meta, tmp_path):
    for target in ("mm", "reference"):
        with pytest.raises(
            ValueError, match=f"names of {target} go to a .safetensors or .pth file, not to the"
        ):
            write_export(tmp_path, target, weights, meta)


def test_a_configs_text_is_read_and_not_run(tmp_path):
    canary = tmp_path / "canary"
    text = f"""
a = dict(b=[1, -2.5, dict(c=(None, True))], d={{'e f': 'g'}})
made = open({str(canary)!r}, 'w')
hidden = dict(x=open({str(canary)!r}, 'w'))
import os
os.mkdir({str(canary)!r})
z = 'after'
"""
    assert config_of(text) == {"a": {"b": [1, -2.5, {"c": (None, True)}], "d": {"e f": "g"}}, "z": "after"}
    assert not canary.exists()
    assert config_of("not a config (") == {}


def test_the_text_of_a_recipe_is_read_whole(recipe, meta):
    read = config_of(meta["cfg"])
    for section in ("model", "data_preprocessor", "test_dataloader"):
        assert read[section] == recipe[section].to_dict()


def run_tool(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name="__main__")


def test_the_tool_takes_the_config_from_the_checkpoint_or_from_the_option(
    weights, meta, tmp_path, monkeypatch, capsys
):
    write_weights(tmp_path / "epoch_1.pth", weights, meta)
    write_weights(tmp_path / "bare.pth", weights)
    (tmp_path / "recipe.py").write_text(meta["cfg"])
    run_tool(monkeypatch, "mm", "hf", tmp_path / "epoch_1.pth", tmp_path / "a")
    assert f'transformers.AutoModel.from_pretrained("{tmp_path}/a")' in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: .*bare.pth: architecture, mean and std are not known"):
        run_tool(monkeypatch, "mm", "hf", tmp_path / "bare.pth", tmp_path / "b")
    run_tool(
        monkeypatch, "mm", "hf", tmp_path / "bare.pth", tmp_path / "b", "--config", tmp_path / "recipe.py"
    )
    for name in ("config.json", "preprocessor_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@torch.no_grad()
def test_the_backbone_of_a_segmentor_goes_without_its_head(weights, recipe, images, tmp_path, monkeypatch):
    """Its features are not normalised: timm makes a network without the final norm."""
    segmentor = {name: v for name, v in weights.items() if "ln1" not in name or "layers" in name}
    write_weights(
        tmp_path / "in.pth", segmentor | {"decode_head.weight": torch.ones(1)}, {"cfg": recipe.pretty_text}
    )
    with pytest.raises(
        SystemExit, match=r"error: .*in.pth: `decode_head.weight`: timm's VisionTransformer has"
    ):
        run_tool(monkeypatch, "mm", "timm", tmp_path / "in.pth", tmp_path / "vit")
    run_tool(monkeypatch, "mm", "timm", tmp_path / "in.pth", tmp_path / "vit", "--backbone")
    vit = timm.create_model(f"local-dir:{tmp_path}/vit", pretrained=True).eval()
    ours = MaPeTViT(SMALL, out_type="raw", final_norm=False).eval()
    ours.load_state_dict({name.removeprefix("backbone."): value for name, value in segmentor.items()})
    torch.testing.assert_close(vit.forward_features(images), ours(images)[0], rtol=1e-4, atol=1e-4)
