"""Every config under configs/ parses, builds its model, and its pipelines work on a real photograph."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from config_building import (
    BUILDABLE,
    CONFIGS,
    LOADERS,
    RECIPES,
    ROOT,
    TOKENIZERS,
    build_model,
    gpus_and_batch,
    in_scope,
    label,
    learning_rates,
    load,
    optim_wrapper_of,
    read,
)
from imagenet_folder import PHOTOGRAPH, write_imagenet
from mmengine.config import Config
from mmengine.registry import DATASETS, EVALUATOR, HOOKS, MODELS, TRANSFORMS
from mmengine.runner import Runner
from PIL import Image
from shrunk_recipes import shrunk
from timm.data.constants import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from mapet_mm.engine.hooks.knn_probe_hook import undisturbed
from mapet_mm.evaluation.tokens import TokenBackbone
from mapet_mm.utils.config import nodes

DATA_SETS = sorted((ROOT / "configs/micro/_base_/data").glob("*.py"))
METHODS = ("mapet", "pim", "mim", "visible_mim", "beit", "cae")
OTHER_LOADERS = re.compile("-(online|stored)_")  # test_stored_recipes.py
PRETRAINING = [path for path in RECIPES if path.parent.name in METHODS]
PRETRAINING = [path for path in PRETRAINING if not OTHER_LOADERS.search(path.stem)]
MASKED = ("BEiT", "mapet_mm.ProjectedCAE")
CLASSIFYING = ("configs/mapet/benchmarks/*_in1k.py", "configs/scratch/*_in1k.py")
COUNTS = (33, 12)  # a pattern that loses recipes shows
ON_IMAGENET = PRETRAINING + [path for path in RECIPES if any(map(path.match, CLASSIFYING))]


def distinct(paths: list[Path], *parts: str) -> list[Path]:
    """The first recipe of each combination of these parts of a config: others with the same are alike."""
    found = {}
    for path in paths:
        found.setdefault(str([read(path).get(part) for part in ("default_scope", *parts)]), path)
    return list(found.values())


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """An ImageNet of one photograph in each split, and a token store for a config's `LoadTokenGrid`."""
    folder = tmp_path_factory.mktemp("imagenet")
    write_imagenet(folder)
    return folder


def with_store(pipeline: list, store) -> list:
    return [dict(step, store=str(store)) if "store" in step else step for step in pipeline]


def first_sample(cfg, loader: str, root):
    """First sample of a config's dataset, read from another data root."""
    dataset = cfg[loader].dataset
    pipeline = with_store(dataset.pipeline, root / "tokens")
    with in_scope(cfg):
        return DATASETS.build(dict(dataset, data_root=str(root), pipeline=pipeline))[0]


def test_catalogue_lists_every_config_and_no_other():
    listed = re.findall(r"^\| `(?:.*/)?(.+\.py)`", (ROOT / "configs/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in CONFIGS)
    assert (len(PRETRAINING), len(ON_IMAGENET) - len(PRETRAINING)) == COUNTS


@pytest.mark.parametrize("path", CONFIGS, ids=label)
def test_config_survives_a_dump(path):
    cfg = load(path)
    assert Config.fromstring(cfg.pretty_text, ".py").to_dict() == cfg.to_dict()


DECLARED = distinct(RECIPES, "model", "optim_wrapper", "param_scheduler", "custom_hooks", "val_evaluator")


@pytest.mark.parametrize("path", DECLARED, ids=label)
def test_recipe_trains_what_it_declares(path):
    # MMPretrain's CAE cannot be built without memory: with less.
    cfg = shrunk(path) if "CAE" in read(path).model.type else load(path)
    model = build_model(cfg)
    optimizer = optim_wrapper_of(cfg, model)
    optimised = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert {id(parameter) for parameter in model.parameters() if parameter.requires_grad} <= optimised
    assert (learning_rates(cfg, optimizer, steps=2) >= 0).all()
    with in_scope(cfg):
        for hook in cfg.get("custom_hooks", []):
            HOOKS.build(hook)
        for evaluator in filter(None, (cfg.val_evaluator, cfg.test_evaluator)):
            with suppress(FileNotFoundError):  # with MMDetection: COCO's read the annotations
                EVALUATOR.build(dict(type="Evaluator", metrics=evaluator))


@pytest.mark.parametrize("path", RECIPES, ids=label)
def test_name_says_the_batch_and_the_length_and_the_schedule_ends_with_the_training(path):
    """The length of a small recipe is its dataset's."""
    cfg = load(path)
    gpus, batch = gpus_and_batch(path)
    assert cfg.train_dataloader.batch_size == batch
    assert cfg.get("auto_scale_lr", {}).get("base_batch_size", gpus * batch) == gpus * batch
    # timm's curve has a cool-down, detectors' steps have none; test_hyperparameters.py compares timm's rates.
    has_steps = "MultiStepLR" in [scheduler.type for scheduler in cfg.param_scheduler]
    cooldown = 10 if has_steps and path.parent.name not in ("detection", "pose") else 0
    length = cfg.train_cfg.get("max_epochs", cfg.train_cfg.get("max_iters"))
    if path.parent.name != "micro":
        said, unit = re.search(r"-(\d+)(e|k|i)_", path.stem).groups()
        assert length == int(said) * (1000 if unit == "k" else 1) + cooldown
    if cooldown:
        return
    ends = [scheduler.end for scheduler in cfg.param_scheduler if "end" in scheduler]
    assert not ends or ends[-1] == length
    if len({scheduler.get("by_epoch", True) for scheduler in cfg.param_scheduler}) == 1:
        begins = [scheduler.get("begin", 0) for scheduler in cfg.param_scheduler]
        assert begins == [0, *ends][: len(begins)]  # else a warm-up of iterations inside a schedule of epochs


@pytest.mark.parametrize("path", BUILDABLE, ids=label)
def test_transforms_build(path, tmp_path):
    cfg = load(path)
    datasets = [cfg[loader].dataset for loader in LOADERS if cfg.get(loader)] or cfg.dataset
    with in_scope(cfg):
        for dataset in datasets:
            steps = [*dataset.get("square", ()), *dataset.get("pipeline", ())]
            for step in with_store(steps, tmp_path):
                TRANSFORMS.build(step)


def test_only_beit_and_cae_have_no_validation():
    for path in ON_IMAGENET:
        missing = [loader for loader in LOADERS if read(path)[loader] is None]
        assert ("val_dataloader" in missing) == (read(path).model.type in MASKED)
        assert set(missing) <= set(LOADERS[1:])


def datasets_on_imagenet() -> list:
    """A recipe and its loader for each distinct dataset and kind of recipe."""
    found = {}
    for path in ON_IMAGENET:
        cfg = read(path)
        for loader in filter(cfg.get, LOADERS):
            kind = (path in PRETRAINING, cfg.model.type in MASKED, loader == "train_dataloader")
            case = pytest.param(path, loader, id=f"{loader}-{path.stem}")
            found.setdefault(f"{kind} {cfg[loader].dataset}", case)
    return list(found.values())


@pytest.mark.parametrize(("path", "loader"), datasets_on_imagenet())
def test_imagenet_recipe_reads_a_photograph(path, loader, imagenet):
    cfg = load(path)
    sample = first_sample(cfg, loader, imagenet)
    assert tuple(sample["inputs"].shape) == (3, 224, 224)
    assert sample["data_samples"].gt_label.tolist() == [281]
    if path in PRETRAINING:
        masked = cfg.model.type in MASKED and loader == "train_dataloader"
        assert ("mask" in sample["data_samples"]) == masked
        row = 0 if loader == "train_dataloader" else 1
        tokens = np.asarray(sample["data_samples"].token_grid)
        np.testing.assert_array_equal(tokens, np.arange(row * 196, (row + 1) * 196).reshape(14, 14))


PROBED = distinct([path for path in RECIPES if path.parent.name in METHODS], "custom_hooks")


@pytest.mark.parametrize("path", PROBED, ids=label)
def test_pretraining_shows_knn_on_imagenet_ten_times(path, imagenet):
    """Of a network of width 24, on the one photograph of each split."""
    cfg = shrunk(path)
    probe = cfg.custom_hooks[1]
    assert (10 * probe.interval, probe.most_images) == (cfg.train_cfg.max_epochs, 20_000)
    for loader in (probe.train_dataloader, probe.val_dataloader):
        loader.num_workers = 0
        loader.dataset.data_root = str(imagenet)
    model = cfg.model.copy()
    model.setdefault("data_preprocessor", cfg.data_preprocessor)
    with in_scope(cfg):
        hook = HOOKS.build(probe)
        vit = MODELS.build(model)
        runner = SimpleNamespace(
            model=vit,
            seed=0,
            train_dataloader=SimpleNamespace(dataset=[]),
            build_dataloader=Runner.build_dataloader,
        )
        hook.before_train(runner)
        with undisturbed(vit):
            figures = hook.figures(TokenBackbone(vit), hook.build_loaders(runner))
    assert figures["knn/top1"] == 100  # the photograph is its own neighbour


VALIDATED = distinct([path for path in PRETRAINING if read(path).val_dataloader], "val_dataloader")


@pytest.mark.parametrize("path", VALIDATED, ids=label)
def test_pretraining_image_is_the_largest_centred_square(path, imagenet):
    """Cropped first, rounded down as by the authors, then resized; validation shows it without jitter."""
    height, width, _ = PHOTOGRAPH.shape
    left = (width - height) // 2
    square = Image.fromarray(PHOTOGRAPH[:, left : left + height]).resize((224, 224), Image.Resampling.BICUBIC)
    inputs = first_sample(load(path), "val_dataloader", imagenet)["inputs"]
    np.testing.assert_array_equal(inputs.permute(1, 2, 0).numpy()[..., ::-1], np.asarray(square))


# Files of an image and its labels, and the shorter side in evaluation.
SCENES = {
    "ade20k": ("images/validation/cat.jpg", "annotations/validation/cat.png", 512),
    "voc12": ("JPEGImages/cat.jpg", "SegmentationClass/cat.png", 512),
    "cityscapes": (
        "leftImg8bit/val/aachen/cat_leftImg8bit.png",
        "gtFine/val/aachen/cat_gtFine_labelTrainIds.png",
        1024,
    ),
}


@pytest.mark.parametrize("data", SCENES)
def test_segmentation_recipe_reads_a_scene(data, tmp_path):
    """In evaluation the label at its own size, 255 ignored, in ADE20K class 0 too; crops in training."""
    *names, side = SCENES[data]
    labels = np.arange(PHOTOGRAPH[..., 0].size).reshape(PHOTOGRAPH.shape[:2]) % (
        151 if data == "ade20k" else 19
    )
    labels[0] = 255
    for name, pixels in zip(names, (PHOTOGRAPH, labels.astype(np.uint8)), strict=True):
        for file in (tmp_path / name, tmp_path / name.replace("validation", "training")):
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    (tmp_path / "ImageSets/Segmentation").mkdir(parents=True)
    (tmp_path / "ImageSets/Segmentation/val.txt").write_text("cat\n")
    (path,) = (p for p in RECIPES if f"vit-base-p16_linear_8xb2-amp-40k_{data}" in p.name)
    cfg = load(path)
    val = first_sample(cfg, "val_dataloader", tmp_path)
    assert min(val["inputs"].shape[1:]) == side
    shift = data == "ade20k"
    expected = np.where(labels == 255, 255, np.where((labels == 0) & shift, 255, labels - shift))
    np.testing.assert_array_equal(val["data_samples"].gt_sem_seg.data[0].numpy(), expected)
    if data == "ade20k":
        train = first_sample(cfg, "train_dataloader", tmp_path)
        with in_scope(cfg):
            preprocess = MODELS.build(cfg.model.data_preprocessor)
        batch = dict(inputs=[train["inputs"]], data_samples=[train["data_samples"]])
        batch = preprocess(batch, training=True)
        assert tuple(batch["inputs"].shape) == (1, 3, 512, 512)
        assert tuple(batch["data_samples"][0].gt_sem_seg.data.shape) == (1, 512, 512)


@pytest.mark.parametrize("path", TOKENIZERS, ids=label)
def test_tokenizer_config_leads_to_a_recipe_that_reads_its_tokens(path):
    cfg = load(path)
    with in_scope(cfg):
        MODELS.build(cfg.data_preprocessor)
    assert MODELS.get(cfg.tokenizer.type).__name__ == cfg.tokenizer.type.split(".")[1]
    recipe = load(ROOT / cfg.next_config)
    (step,) = (step for step in recipe.train_dataloader.dataset.pipeline if "store" in step)
    assert step.store == cfg.token_store
    vocab_size = cfg.codebook.k if "codebook" in cfg else cfg.tokenizer.vocab_size
    if "target_generator" in recipe.model:
        assert recipe.model.target_generator.vocab_size == recipe.model.head.vocab_size == vocab_size
    else:
        assert recipe.model.backbone.vocab_size == vocab_size


@pytest.mark.parametrize("path", [p for p in RECIPES if read(p).get("next_config")], ids=label)
def test_pretraining_names_a_recipe_that_takes_its_backbone(path):
    cfg, following = load(path), load(ROOT / load(path).next_config)
    assert following.model.backbone.init_cfg.checkpoint == ""
    for key in ("arch", "img_size", "patch_size"):
        assert following.model.backbone[key] == cfg.model.backbone[key]


# Mean and standard deviation of red, green and blue from 0 to 1: timm's and OpenAI's numbers, those of a half
# or a quarter, and the discrete VAE's.
STATISTICS = [
    (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
    ((0.5,) * 3, (0.5,) * 3),
    ((0.5,) * 3, (0.25,) * 3),
    ((-0.125,) * 3, (1.25,) * 3),
]


def statistics_of(cfg: Config) -> Iterator[tuple[list[float], list[float]]]:
    """Mean and standard deviation by which a config normalises its images, and a tokenizer's view of them."""
    for key, node in nodes(cfg.to_dict()):
        if key.endswith("data_preprocessor") and "mean" in node:
            assert node.get("to_rgb") or node.get("bgr_to_rgb"), cfg.filename
            yield node["mean"], node["std"]
            if "second_mean" in node:
                yield node["second_mean"], node["second_std"]


def test_every_config_normalises_rgb_by_numbers_in_the_order_rgb():
    """In the order of BGR they are so similar that features only get a little worse."""
    seen = set()
    for path in CONFIGS:
        for statistics in statistics_of(read(path)):
            (known,) = (
                index
                for index, published in enumerate(STATISTICS)
                if np.allclose(np.divide(statistics, 255), published, atol=1e-4)
            )
            seen.add(known)
    assert len(seen) == len(STATISTICS)


def test_every_base_is_used_by_a_recipe():
    """What nothing inherits is deleted."""
    parsed = {str(path): path.read_text() for path in (ROOT / "configs").rglob("*.py")}
    inherited = {
        os.path.normpath(Path(path).parent / base)
        for path, text in parsed.items()
        for base in re.findall(r'"([^"]+\.py)"', text)
    }
    bases = [path for path in parsed if "_base_" in Path(path).parts and path not in map(str, DATA_SETS)]
    assert not [path for path in bases if os.path.normpath(path) not in inherited]
