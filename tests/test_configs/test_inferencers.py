"""Every recipe works in its library's inferencer, with a file and with an array of pixels that is not square.

Models are shrunk in width; recipes with the same parts are one case.
"""

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

# timm does not resize the positions of this backbone.
ONE_SIZE = ("mapet_mm.MaPeTPretrainTIMM",)
CLASSIFIERS = ("ImageClassifier", "mapet_mm.LinearProbe")


def cases() -> dict[tuple, Path]:
    """A recipe of each combination of parts that an inferencer sees."""
    found = {}
    for path in RECIPES:
        cfg = load(path)
        parts = [
            (cfg.model.get(part) or {}).get("type") for part in ("backbone", "neck", "head", "decode_head")
        ]
        if cfg.test_dataloader is None:  # MMPretrain's MAE predicts nothing that is tested
            continue
        steps = [step.type for step in cfg.test_dataloader.dataset.pipeline]
        found.setdefault((cfg.model.type, *parts, *steps, path.parent.name == "micro"), path)
    return found


CASES = cases()


def every(*types: str, tokens: bool = False):
    """Cases of some model types; with stored tokens as input, or with images."""
    found = [
        pytest.param(path, id=path.stem)
        for (kind, backbone, *_), path in CASES.items()
        if kind in types and backbone.startswith("mapet_mm.Token") == tokens
    ]
    assert found
    return pytest.mark.parametrize("files", found, indirect=True)


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


@every(*CLASSIFIERS)
def test_classifiers_classify(files):
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
        with pytest.raises(MissingTokensError, match="img_path"):
            classify(image)


@every("EncoderDecoder")
def test_segmentors_label_every_pixel(files):
    config, weights, file, pixels = files
    segment = MMSegInferencer(config, weights=weights, device="cpu")
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
