"""Other libraries load exports by themselves, with the features and the images of the training."""

import copy
import functools
import json
import re
from types import SimpleNamespace

import pytest
import timm
import torch
import transformers
from config_building import ROOT, run_tool
from mmengine.config import Config, ConfigDict
from mmengine.dataset import Compose
from mmengine.registry import init_default_scope
from mmpretrain.models import SelfSupDataPreprocessor
from mmpretrain.registry import MODELS
from PIL import Image
from small_vit import randomise
from timm.data import create_transform, resolve_model_data_config

from mapet_mm.engine import PortableCheckpointHook
from mapet_mm.interop.description import description_entry, description_of, read_description
from mapet_mm.interop.export import write_export
from mapet_mm.models import MaPeTPretrainViT, MaPeTViT
from mapet_mm.weight_files import read_checkpoint, read_weights, write_weights

CONFIGS = ROOT / "configs" / "mapet"
TINY = CONFIGS / "mapet_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"
FINETUNED = CONFIGS / "benchmarks" / "vit-tiny-p16_4xb256-amp-coslr-300e_in1k.py"
SMALL = dict(embed_dims=48, num_layers=2, num_heads=3, feedforward_channels=192)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def recipe() -> Config:
    recipe = Config.fromfile(TINY)
    recipe.model.backbone.arch = SMALL
    return recipe


@pytest.fixture(scope="module")
def weights(recipe) -> dict[str, torch.Tensor]:
    options = {name: value for name, value in recipe.model.backbone.items() if name != "type"}
    vit = randomise(MaPeTPretrainViT(**options), std=0.1)
    return {f"backbone.{name}": value for name, value in vit.state_dict().items()}


@pytest.fixture(scope="module")
def meta(recipe) -> dict:
    return {"cfg": recipe.pretty_text, **description_entry(recipe)}


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(1, 3, 224, 224)


@pytest.fixture(scope="module")
@torch.no_grad()
def tokens(weights, images) -> torch.Tensor:
    vit = MaPeTViT(SMALL, out_type="raw").eval()
    vit.load_state_dict({name.removeprefix("backbone."): value for name, value in weights.items()})
    return vit(images)[0]


def changed(recipe: Config, **options) -> Config:
    """The recipe with other values, named by dotted keys."""
    changed = copy.deepcopy(recipe)
    for name, value in options.items():
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, changed), last, value)
    return changed


def epsilons(vit: torch.nn.Module) -> set[float]:
    """Of all norms: what these add to the variance shows only where that is tiny."""
    return {module.eps for module in vit.modules() if isinstance(module, torch.nn.LayerNorm)}


@torch.no_grad()
def test_timm_makes_the_network_of_a_folder(weights, meta, images, tokens, tmp_path):
    told = write_export(tmp_path, "timm", weights, meta)
    vit = eval(told.splitlines()[0], {"timm": timm}).eval()
    assert epsilons(vit) == {1e-6}
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
    assert epsilons(vit) == epsilons(MaPeTViT(SMALL)) == {1e-6}
    torch.testing.assert_close(vit(images).last_hidden_state, tokens, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_images_of_four_bands_are_four_in_timm_and_in_hugging_face(recipe, tmp_path):
    options = {name: value for name, value in recipe.model.backbone.items() if name != "type"}
    vit = randomise(MaPeTPretrainViT(**options, in_channels=4), std=0.1)
    weights = {f"backbone.{name}": value for name, value in vit.state_dict().items()}
    preprocessor = dict(type="mapet_mm.TokenGridDataPreprocessor", mean=[51.0] * 4, std=[25.5] * 4)
    meta = description_entry(changed(recipe, data_preprocessor=ConfigDict(preprocessor)))
    write_export(tmp_path / "timm", "timm", weights, meta)
    write_export(tmp_path / "hf", "hf", weights, meta)

    images = torch.randn(2, 4, 224, 224)
    plain = MaPeTViT(SMALL, in_channels=4, out_type="raw").eval()
    plain.load_state_dict(vit.state_dict())
    (tokens,) = plain(images)
    in_timm = timm.create_model(f"local-dir:{tmp_path}/timm", pretrained=True).eval()
    assert resolve_model_data_config(in_timm)["mean"] == [0.2] * 4
    torch.testing.assert_close(in_timm.forward_features(images), tokens, rtol=1e-4, atol=1e-4)
    elsewhere = transformers.AutoModel.from_pretrained(tmp_path / "hf").eval()
    torch.testing.assert_close(elsewhere(images).last_hidden_state, tokens, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_onnx_file_computes_the_features_of_any_number_of_images(weights, meta, images, tokens, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    told = write_export(tmp_path / "vit.onnx", "onnx", weights, meta)
    assert told.startswith("inputs: images (B, 3, H, W); outputs: class_token (B, D), patch_features (B, D, ")
    session = onnxruntime.InferenceSession(tmp_path / "vit.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 3):
        batch = {"images": images.repeat(count, 1, 1, 1).numpy()}
        of_class, of_patches = map(torch.from_numpy, session.run(["class_token", "patch_features"], batch))
        assert of_patches.shape == (count, 48, 14, 14)
        torch.testing.assert_close(of_class[-1], tokens[0, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(of_patches[-1].flatten(1).T, tokens[0, 1:], rtol=1e-4, atol=1e-4)


CUT = [dict(type="ResizeEdge", scale=224, backend="pillow", interpolation="bicubic")]
CUT += [dict(type="CenterCrop", crop_size=224)]
SQUASHED = [dict(type="Resize", scale=224, backend="pillow", interpolation="bilinear")]


@pytest.mark.parametrize(
    ("steps", "tolerance", "resample"),
    [(CUT, 0.02, Image.Resampling.BICUBIC), (SQUASHED, 0.01, Image.Resampling.BILINEAR)],
)
def test_both_prepare_an_image_as_the_training_did(steps, tolerance, resample, weights, recipe, tmp_path):
    image = Image.effect_mandelbrot((300, 260), (-2, -1.2, 1, 1.2), 80).convert("RGB")
    image.putpixel((150, 130), (255, 0, 60))
    image.save(tmp_path / "image.png")
    pipeline = [dict(type="LoadImageFromFile"), *steps, dict(type="PackInputs")]
    init_default_scope("mmpretrain")
    inputs = Compose(pipeline)({"img_path": str(tmp_path / "image.png")})["inputs"]
    options = {name: value for name, value in recipe.data_preprocessor.items() if name != "type"}
    (expected,) = SelfSupDataPreprocessor(**options)({"inputs": inputs[None], "data_samples": None})["inputs"]
    dataset = dict(type="CustomDataset", pipeline=pipeline)
    meta = description_entry(changed(recipe, test_dataloader=dict(dataset=dataset)))
    for target in ("timm", "hf"):
        assert "otherwise" not in write_export(tmp_path / target, target, weights, meta)
    vit = timm.create_model(f"local-dir:{tmp_path}/timm", pretrained=True)
    by_timm = create_transform(**resolve_model_data_config(vit))(image)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    by_hf = processor(image, return_tensors="pt")["pixel_values"][0]
    assert processor.resample == resample
    # Cutting and resizing in the other order moves edges by a part of a pixel.
    assert (by_timm - expected).abs().mean() < tolerance
    assert (by_hf - expected).abs().mean() < tolerance


@torch.no_grad()
@pytest.mark.parametrize("out_type", ["avg_featmap", "cls_token"])
def test_a_classifier_of_patches_or_of_the_class_token_is_one_in_timm(out_type, images, tmp_path):
    recipe = Config.fromfile(FINETUNED)
    recipe.model.backbone.update(arch=SMALL, out_type=out_type, final_norm=out_type == "cls_token")
    recipe.model.head.in_channels = SMALL["embed_dims"]
    model = randomise(MODELS.build(dict(recipe.model, train_cfg=None)), std=0.1)
    write_export(tmp_path, "timm", model.state_dict(), description_entry(recipe))
    vit = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(vit(images), model(images), rtol=1e-3, atol=1e-3)


def test_a_file_describes_itself_and_converts_later(weights, meta, tmp_path):
    told = write_export(tmp_path / "vit.safetensors", "timm", weights, meta)
    call, prepared = told.splitlines()
    with torch.device("meta"):
        vit = eval(call, {"timm": timm})
    vit.load_state_dict(read_weights(tmp_path / "vit.safetensors"), strict=True, assign=True)
    size = "short side 224 bicubic, central 224 x 224"
    assert prepared == f"images: RGB, {size}, mean {IMAGENET[0]}, std {IMAGENET[1]}"
    header = read_checkpoint(tmp_path / "vit.safetensors")[1]
    assert json.loads(header["description"])["mean"] == list(IMAGENET[0])
    assert read_description(header) == read_description(meta)
    assert write_export(tmp_path / "ours.pth", "mm", weights, meta | {"time": "now"}) == ""
    kept, again = read_checkpoint(tmp_path / "ours.pth")
    assert set(again) == {"cfg", "description"}
    assert "local-dir" in write_export(tmp_path / "folder", "timm", kept, again)
    for target in ("hf", "reference", "torchvision"):
        assert write_export(tmp_path / "vit.pth", target, weights, meta) == prepared


def squares(*steps: dict) -> dict:
    """Options of a config that is trained on stored squares of these steps."""
    dataset = dict(type="mapet_mm.StoredImages", store="tokens", square=list(steps))
    return {"train_dataloader": dict(dataset=dataset), "val_dataloader": None, "test_dataloader": None}


def pipeline(*steps: dict) -> dict:
    """Options of a config whose dataset, inside another one, has this pipeline."""
    dataset = dict(type="RepeatDataset", dataset=dict(type="ImageNet", pipeline=list(steps)))
    return {"test_dataloader": dict(dataset=dataset)}


PILLOW = dict(backend="pillow")
DESCRIBED = [
    (pipeline(), "short side 224 bicubic, central 224 x 224"),
    (pipeline(dict(type="Resize", scale=(224, 224), **PILLOW)), "squashed to 224 x 224 bilinear"),
    (pipeline(dict(type="EfficientNetCenterCrop", crop_size=224, **PILLOW)), "short side 256 bicubic"),
    (
        pipeline(dict(type="ResizeEdge", scale=256, **PILLOW), dict(type="RandomCrop", crop_size=224)),
        "short side 256 bilinear, central 224 x 224",
    ),
    (squares(dict(type="ResizeEdge", scale=256, **PILLOW)), "short side 256 bilinear"),
    (pipeline(dict(type="ResizeEdge", scale=256)), "OpenCV"),
    (pipeline(dict(type="CenterCrop", crop_size=192), dict(type="mine.Blur")), "CenterCrop, Blur"),
    (pipeline(dict(type="MultiView", transforms=[[dict(type="Blur")], [dict(type="Noise")]])), ": Blur$"),
    (dict(val_dataloader=None, test_dataloader=None), "short side 224 bicubic"),
]


@pytest.mark.parametrize(("options", "words"), DESCRIBED)
def test_the_preparation_of_images_is_read_from_the_config(options, words, recipe):
    assert re.search(words, str(description_of(changed(recipe, **options))))


def test_a_training_writes_the_description_into_its_checkpoints(weights, recipe, tmp_path):
    checkpoint = {"state_dict": weights, "meta": {"epoch": 1}}
    runner = SimpleNamespace(cfg=recipe, train_dataloader=SimpleNamespace(dataset=[]))
    PortableCheckpointHook().before_save_checkpoint(runner, checkpoint)
    torch.save(checkpoint, tmp_path / "epoch_1.pth")
    assert read_description(read_checkpoint(tmp_path / "epoch_1.pth")[1]) == description_of(recipe)


UNDESCRIBED = [
    ({"data_preprocessor.to_rgb": False}, "BGR"),
    ({"model.backbone.norm_cfg": dict(type="LN", eps=1e-2)}, "norm_cfg"),
    ({"model.backbone.layer_cfgs": dict(act_cfg=dict(type="ReLU"))}, "layer_cfgs"),
    (pipeline(dict(type="ResizeEdge", scale=256, interpolation="area")), "`area`"),
    ({"data_preprocessor": dict(type="X", to_rgb=True)}, "mean"),
    ({"model.backbone.arch": {"embed_dims": 48}}, "num_heads"),
    ({"test_dataloader": [1, 2]}, "another form"),
]


@pytest.mark.parametrize(("options", "noun"), UNDESCRIBED)
def test_configs_of_other_networks_are_refused_and_leave_no_entry(options, noun, recipe):
    with pytest.raises(ValueError, match=noun):
        description_of(changed(recipe, **options))
    assert description_entry(changed(recipe, **options)) == {}


HEAD = {"head.fc.weight": torch.ones(5, 48), "head.fc.bias": torch.ones(5)}
NORM = {"backbone.ln2.weight": torch.ones(48), "backbone.ln2.bias": torch.ones(48)}
EIGHT = {"backbone.patch_embed.projection.weight": torch.ones(48, 3, 8, 16)}
REFUSED = [
    ("timm", "vit", {"model.backbone.arch": "deit-small"}, {}, "384 wide"),
    ("timm", "vit", {"model.backbone.img_size": 256}, {}, "256 RGB patches"),
    ("timm", "vit", {}, EIGHT, r"\(3, 8, 16\)"),
    ("timm", "vit.pth", {}, NORM, "final norm"),
    ("timm", "vit", {"model.backbone.out_type": "raw"}, HEAD, "classifies raw"),
    ("timm", "vit", {"model.backbone.out_indices": [0]}, HEAD, "of layer 0"),
    ("torchvision", "vit.pth", {}, NORM, "ln2.weight"),
    ("hf", "vit", {"model.backbone.img_size": [112, 448]}, {}, "112 x 448"),
    ("mm", "vit", {}, {}, "to a file"),
    ("onnx", "vit.pth", {}, {}, r"\.onnx"),
]


@pytest.mark.parametrize(("target", "name", "options", "more", "noun"), REFUSED)
def test_a_network_that_a_library_does_not_have_is_refused_before_a_file_is_written(
    target, name, options, more, noun, weights, recipe, tmp_path
):
    meta = description_entry(changed(recipe, **options))
    with pytest.raises(ValueError, match=noun):
        write_export(tmp_path / name, target, weights | more, meta)
    assert not list(tmp_path.iterdir())


def test_without_a_description_a_file_is_written_and_a_folder_is_not(weights, recipe, tmp_path):
    with pytest.raises(ValueError, match="--config"):
        write_export(tmp_path / "vit", "timm", weights, {})
    assert "--config" in write_export(tmp_path / "vit.pth", "timm", weights, {})
    assert [path.name for path in tmp_path.iterdir()] == ["vit.pth"]


def test_the_tool_takes_the_description_from_the_checkpoint_or_the_config(
    weights, meta, tmp_path, monkeypatch, capsys
):
    write_weights(tmp_path / "epoch_1.pth", weights, meta)
    write_weights(tmp_path / "bare.pth", weights)
    (tmp_path / "recipe.py").write_text(meta["cfg"])
    run_tool(monkeypatch, "convert.py", "mm", "hf", tmp_path / "epoch_1.pth", tmp_path / "a")
    assert f'transformers.AutoModel.from_pretrained("{tmp_path}/a")' in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: .*bare.pth: .*--config"):
        run_tool(monkeypatch, "convert.py", "mm", "hf", tmp_path / "bare.pth", tmp_path / "b")
    config = "--config", tmp_path / "recipe.py"
    run_tool(monkeypatch, "convert.py", "mm", "hf", tmp_path / "bare.pth", tmp_path / "b", *config)
    for name in ("config.json", "preprocessor_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@torch.no_grad()
def test_the_tool_takes_the_backbone_of_a_segmentor_without_its_head(
    weights, meta, images, tmp_path, monkeypatch
):
    """Its features are not normalised: timm makes a network without the final norm."""
    segmentor = {name: v for name, v in weights.items() if "ln1" not in name or "layers" in name}
    write_weights(tmp_path / "in.pth", segmentor | {"decode_head.weight": torch.ones(1)}, meta)
    with pytest.raises(SystemExit, match=r"error: .*in.pth: `decode_head.weight`"):
        run_tool(monkeypatch, "convert.py", "mm", "timm", tmp_path / "in.pth", tmp_path / "vit")
    run_tool(monkeypatch, "convert.py", "mm", "timm", tmp_path / "in.pth", tmp_path / "vit", "--backbone")
    vit = timm.create_model(f"local-dir:{tmp_path}/vit", pretrained=True).eval()
    ours = MaPeTViT(SMALL, out_type="raw", final_norm=False).eval()
    ours.load_state_dict({name.removeprefix("backbone."): value for name, value in segmentor.items()})
    torch.testing.assert_close(vit.forward_features(images), ours(images)[0], rtol=1e-4, atol=1e-4)
