"""timm and Hugging Face load exports by themselves, with the features and the images of the training."""

from pathlib import Path

import pytest
import timm
import torch
import transformers
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import init_default_scope
from mmpretrain.models import SelfSupDataPreprocessor
from mmpretrain.registry import MODELS
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import nn

from mapet_mm.export import write_export
from mapet_mm.models import MaPeTPretrainViT, MaPeTViT

CONFIGS = Path(__file__).parents[1] / "configs" / "mapet"
TINY = CONFIGS / "mapet_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"
FINETUNED = "vit-tiny-p16_4xb256-amp-coslr-300e_in1k.py"
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def recipe() -> Config:
    return Config.fromfile(TINY)


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
    vit = MaPeTViT("deit-tiny", out_type="raw").eval()
    own = {name.removeprefix("backbone."): value for name, value in weights.items()}
    vit.load_state_dict(own)
    return vit(images)[0]


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


def prepared_by_the_recipe(path: Path) -> torch.Tensor:
    recipe = Config.fromfile(TINY)
    init_default_scope("mmpretrain")
    image = Compose([*recipe.load_square, dict(type="PackInputs")])({"img_path": str(path)})["inputs"]
    options = {name: value for name, value in recipe.data_preprocessor.items() if name != "type"}
    return SelfSupDataPreprocessor(**options)({"inputs": image[None], "data_samples": None})["inputs"][0]


def test_a_fine_tuned_classifier_is_one_in_timm(tmp_path):
    recipe = Config.fromfile(CONFIGS / "benchmarks" / FINETUNED)
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
