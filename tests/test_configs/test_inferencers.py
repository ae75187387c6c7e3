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
from mmengine.registry import MODELS, init_default_scope
from mmpretrain import FeatureExtractor, ImageClassificationInferencer
from mmseg.apis import MMSegInferencer, inference_model, init_model
from shrunk_recipes import WIDTH, shrunk

from mapet_mm.tokenizers import MissingTokensError

# Whose positions the libraries do not resize.
ONE_SIZE = ("mapet_mm.MaPeTPretrainBEiT", "mapet_mm.MaPeTPretrainTIMM")
CLASSIFIERS = ("ImageClassifier", "mapet_mm.LinearProbe")


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
