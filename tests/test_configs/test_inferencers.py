"""Every recipe works in its library's inferencer, with a file and with an array of pixels that is not square.

Models are shrunk in width. Recipes that then differ only in what an inferencer does not use are one case.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import cv2
import mmcv
import numpy as np
import pytest
import torch
from config_building import RECIPES, in_scope, load
from imagenet_folder import PHOTOGRAPH
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope
from mmpretrain import FeatureExtractor, ImageClassificationInferencer
from mmseg.apis import MMSegInferencer, inference_model, init_model

from mapet_mm.tokenizers import MissingTokensError

WIDTH = 24
# Whose positions the libraries do not resize.
ONE_SIZE = ("mapet_mm.MaPeTPretrainBEiT", "mapet_mm.MaPeTPretrainTIMM")
CLASSIFIERS = ("ImageClassifier", "mapet_mm.LinearProbe")
# What says a width in a decoder; a head behind MLANeck gets its maps.
NECKS = {
    "mapet_mm.BatchNormNeck": dict(channels=WIDTH),
    "Feature2Pyramid": dict(embed_dim=WIDTH),
    "MLANeck": dict(in_channels=[WIDTH] * 4, out_channels=8),
}
HEADS = {
    "DPTHead": dict(in_channels=[WIDTH] * 4, embed_dims=WIDTH, post_process_channels=[8] * 4, channels=8),
    "SegmenterMaskTransformerHead": dict(in_channels=WIDTH, embed_dims=WIDTH, channels=WIDTH, num_heads=3),
    "SETRMLAHead": dict(in_channels=[8] * 4, channels=32, mla_channels=8),
    "SETRUPHead": dict(in_channels=WIDTH, channels=8),
    "UPerHead": dict(in_channels=[WIDTH] * 4, channels=8),
}


def shrink_decoder(model: ConfigDict) -> None:
    """Neck and heads of a segmentor for a ViT of width 24."""
    neck, extra = model.get("neck") or {}, model.get("auxiliary_head") or []
    neck.update(NECKS.get(neck.get("type"), {}))
    width = neck.get("out_channels", WIDTH)
    for head in (model.decode_head, *(extra if isinstance(extra, list) else [extra])):
        head.update(HEADS.get(head.type) or dict(in_channels=width, channels=width))


def shrunk(path: Path) -> Config:
    """The recipe with a ViT of width 24; a tokenizer in the model is left out: features do not need it."""
    cfg = load(path)
    model = cfg.model
    if "arch" in model.backbone:
        depth = 12 if isinstance(model.backbone.arch, str) else model.backbone.arch.num_layers
        model.backbone.arch = dict(
            embed_dims=WIDTH, num_layers=depth, num_heads=3, feedforward_channels=2 * WIDTH
        )
        head = model.get("head") or {}
        head.update({key: WIDTH for key in ("in_channels", "embed_dims") if key in head})
    if "embed_dim" in model.backbone:  # timm's
        model.backbone.embed_dim = model.head.embed_dims = WIDTH
    if model.type == "EncoderDecoder":
        shrink_decoder(model)
        if path.parent.name == "segmentation":  # a quarter of the size
            model.backbone.img_size = 128
            if model.test_cfg.mode == "slide":
                model.test_cfg.update(crop_size=(128, 128), stride=(85, 85))
            for pipeline in (cfg.test_pipeline, cfg.test_dataloader.dataset.pipeline):
                pipeline[1].scale = (512, 128)
    elif "encoder_dims" in (model.get("neck") or {}):
        model.neck.update(encoder_dims=WIDTH, embed_dims=12, num_heads=3)
    if "tokenizer" in cfg:
        model.target_generator = None
    return cfg


def cases() -> dict[str, list[Path]]:
    """The recipes by what an inferencer sees of them."""
    groups = {}
    for path in RECIPES:
        cfg = shrunk(path)
        backbone = {
            key: value
            for key, value in cfg.model.backbone.items()
            if key not in ("cutting_point", "objective", "drop_path_rate", "with_cp")
        }
        pipeline = [
            {key: value for key, value in step.items() if key != "store"}
            for step in cfg.test_dataloader.dataset.pipeline
        ]
        head = {key: value for key, value in cfg.model.get("head", {}).items() if key != "num_classes"}
        preprocessor = {**cfg.get("data_preprocessor", {}), "num_classes": None}
        seen = ({**cfg.model, "backbone": backbone, "head": head}, preprocessor, pipeline)
        groups.setdefault(json.dumps(seen, sort_keys=True), []).append(path)
    return {paths[0].stem: paths for paths in groups.values()}


CASES = cases()


def of(*types: str, tokens: bool = False) -> Iterator:
    """Cases of some model types, as parameters; with stored tokens as input, or with images."""
    for name, (path, *_) in CASES.items():
        cfg = load(path)
        if cfg.model.type in types and cfg.model.backbone.type.startswith("mapet_mm.Token") == tokens:
            yield pytest.param(path, id=name)


@pytest.fixture
def files(request, tmp_path) -> tuple[str, str, str, np.ndarray]:
    """A shrunk recipe, random weights for it, and an image wider than high, as a file and as pixels."""
    cfg = shrunk(request.param)
    model = cfg.model.copy()
    if "data_preprocessor" in cfg:
        model.setdefault("data_preprocessor", cfg.data_preprocessor)
    with in_scope(cfg):
        model = MODELS.build(model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights, config, image = (tmp_path / name for name in ("weights.pth", "recipe.py", "image.png"))
    meta = dict(dataset_meta=dict(classes=["thing"] * 150, palette=[[0, 0, 0]] * 150))
    torch.save(
        dict(state_dict=model.state_dict(), meta=meta if "mmseg" in cfg.default_scope else {}), weights
    )
    cfg.dump(config)
    size = (36, 24) if "micro" in request.param.parts else (160, 100)
    if cfg.model.backbone.type in ONE_SIZE:
        size = (24, 24)
    cv2.imwrite(str(image), cv2.resize(PHOTOGRAPH, size))
    return str(config), str(weights), str(image), mmcv.imread(str(image))


def every(*types: str, **options: bool):
    return pytest.mark.parametrize("files", of(*types, **options), indirect=True)


def test_every_recipe_is_in_a_case():
    assert sorted(path for paths in CASES.values() for path in paths) == sorted(RECIPES)
    types = {load(paths[0]).model.type for paths in CASES.values()}
    assert types == {*CLASSIFIERS, "EncoderDecoder", "mapet_mm.MaPeT", "BEiT", "mapet_mm.ProjectedCAE"}


@every(*CLASSIFIERS)
def test_classifiers_classify(files):
    """Probabilities of the recipe's classes; features too."""
    config, weights, file, pixels = files
    classify = ImageClassificationInferencer(config, pretrained=weights, device="cpu")
    by_file, by_pixels, other = classify([file, pixels, pixels[:, ::-1].copy()])
    scores = by_file["pred_scores"]
    assert scores.shape == (classify.config.model.head.num_classes,)
    assert scores.sum() == pytest.approx(1, abs=1e-5)
    assert by_file["pred_label"] == scores.argmax()
    np.testing.assert_array_equal(by_pixels["pred_scores"], scores)
    assert abs(other["pred_scores"] - scores).max() > 1e-6
    extract = FeatureExtractor(classify.model)
    assert all(torch.isfinite(feature).all() for feature in extract(file)[0])


@every("mapet_mm.MaPeT", "BEiT", "mapet_mm.ProjectedCAE")
def test_pretrained_models_give_features(files):
    """Of the class token and every patch of the image; by themselves and in a batch."""
    config, weights, file, pixels = files
    extract = FeatureExtractor(config, pretrained=weights, device="cpu")
    digits = "digits" in extract.config.test_dataloader.dataset.data_root
    height, width = pixels.shape[:2]
    tokens = (height // 4) * (width // 4) if digits else 14 * 14
    ((by_file,),), ((by_pixels,), (other,)) = extract(file), extract([pixels, 255 - pixels], batch_size=2)
    assert by_file.shape == (1 + tokens, WIDTH)
    assert torch.isfinite(by_file).all()
    torch.testing.assert_close(by_pixels, by_file)
    assert by_file.std(0).mean() > 1e-2  # tokens differ
    assert (other - by_file).abs().max() > 1e-3


@every(*CLASSIFIERS, tokens=True)
def test_classifiers_of_tokens_say_that_an_inferencer_has_none(files):
    config, weights, *images = files
    classify = ImageClassificationInferencer(config, pretrained=weights, device="cpu")
    for image in images:
        with pytest.raises(MissingTokensError, match="without `img_path`, as inferencers hand them over"):
            classify(image)


@every("EncoderDecoder")
def test_segmentors_label_every_pixel(files):
    """MMSegmentation's inferencer, and its `init_model` with `inference_model`."""
    config, weights, file, pixels = files
    segment = MMSegInferencer(config, weights=weights, device="cpu", show_progress=False)
    labels = segment(file)["predictions"]
    assert labels.shape == pixels.shape[:2]
    np.testing.assert_array_equal(segment(pixels)["predictions"], labels)
    init_default_scope("mmseg")
    model = init_model(config, weights, device="cpu")
    for image in (file, pixels):
        sample = inference_model(model, image)
        np.testing.assert_array_equal(sample.pred_sem_seg.data[0].numpy(), labels)
    assert labels.max() < len(sample.seg_logits.data) == model.decode_head.num_classes
    assert sample.seg_logits.data.flatten(1).std(1).max() > 1e-4  # it depends on the place
