"""Features in the cache, and the tool: computed once; killed and resumed; bad input in one line."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.registry import DefaultScope
from safetensors.torch import save_file
from torch import nn

from mapet_mm.engine.checkpoints import LaunchError
from mapet_mm.errors import UserError
from mapet_mm.evaluation import features as feature_module
from mapet_mm.evaluation.checkpoints import KeysError, load_checkpoint, load_weights
from mapet_mm.evaluation.extraction import take_features
from mapet_mm.evaluation.image_sets import ImageSetError, check_labels, read_image_sets
from mapet_mm.evaluation.protocols import build_protocols, evaluate
from mapet_mm.registry import DATASETS
from mapet_mm.tokenizers.sharing import SharedTasks
from tests.tiny_training import run_tool

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)
PIPELINE = [dict(type="LoadImageFromFile"), dict(type="PackInputs")]
PROTOCOLS = [
    dict(type="NearestNeighbours", k=3),
    dict(type="LinearProbes", epochs=1, least_steps=1, batch_size=8, rates=[0.1, 1.0]),
    dict(type="BEiTLinearProbes", epochs=1, least_steps=1),
    dict(type="LowShot", shots=[1, 0.5], draws=2),
    dict(type="AttentiveProbe", epochs=1, least_steps=1, batch_size=8),
]


@pytest.fixture
def root(tmp_path) -> Path:
    """Folders `train` and `val` of three classes: random images of 16 px, of another grey each."""
    rng = np.random.default_rng(0)
    for split, number in (("train", 8), ("val", 3)):
        for label, name in enumerate("abc"):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for index in range(number):
                image = rng.integers(0, 60, (16, 16, 3)) + 80 * label
                cv2.imwrite(str(folder / f"{index}.png"), image.astype(np.uint8))
    return tmp_path


@pytest.fixture
def config(root) -> Config:
    def loader(split: str) -> dict:
        dataset = dict(
            type="CustomDataset", data_root=str(root / "data"), data_prefix=split, pipeline=PIPELINE
        )
        return dict(batch_size=5, num_workers=0, dataset=dataset)

    backbone = dict(type="mapet_mm.MaPeTViT", arch=ARCH, img_size=16, patch_size=4, out_type="raw")
    content = dict(
        default_scope="mmpretrain",
        model=dict(type="ImageClassifier", backbone=backbone),
        data_preprocessor=dict(mean=[127.5] * 3, std=[60.0] * 3, to_rgb=True),
        evaluation=dict(train=loader("train"), val=loader("val"), protocols=PROTOCOLS),
    )
    Config(content).dump(root / "config.py")
    model = load_checkpoint(Config.fromfile(root / "config.py"), None).backbone.model
    torch.save({"state_dict": model.state_dict()}, root / "weights.pth")
    return Config.fromfile(root / "config.py")


def take(
    config: Config, cache: Path, kinds=("pooled", "tokens"), name: str = "train", data: str | None = None
):
    checkpoint = load_checkpoint(config, str(Path(config.filename).parent / "weights.pth"))
    return take_features(checkpoint, read_image_sets(config, data)[name], cache, kinds)


def test_features_are_the_models(config, root):
    """Class token, patch mean and tokens of every layer, of each image in the dataset's order."""
    features = take(config, root / "cache")
    checkpoint = load_checkpoint(config, str(root / "weights.pth"))
    images = read_image_sets(config)["train"]
    assert (len(features), features.layers, features.grid) == (24, ["1", "2", "output"], (4, 4))
    assert features.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    inputs = checkpoint.backbone.normalise([images.dataset[index]["inputs"] for index in range(24)])
    with torch.no_grad():
        tokens = checkpoint.backbone(inputs)
        output = checkpoint.backbone.model.backbone(inputs)[-1]
    for place in range(3):
        close = dict(atol=2e-3, rtol=2e-3)  # float16 on disk
        torch.testing.assert_close(
            features.pooled("class token", place), tokens.class_token[:, place], **close
        )
        torch.testing.assert_close(features.pooled("mean", place), tokens.patches[place].mean(1), **close)
    both = torch.cat([output[:, 0], output[:, 1:].mean(1)], 1)
    torch.testing.assert_close(features.pooled("both"), both, **close)
    ((rows, stored),) = features.blocks("tokens")
    assert (rows, stored.shape) == (slice(0, 24), (24, 16, 16))
    torch.testing.assert_close(stored, output[:, 1:], **close)


@DATASETS.register_module()
class ImagesInMemory(BaseDataset):
    """As CIFAR: the images are in no files of their own."""

    def load_data_list(self) -> list[dict]:
        images = np.random.default_rng(self.metainfo["seed"]).integers(0, 255, (6, 16, 16, 3), np.uint8)
        return [dict(img=image, gt_label=index % 2) for index, image in enumerate(images)]


def test_other_images_in_memory_are_not_taken_for_those_before(config, root):
    """An image without a path is known by what it is."""
    features = []
    for seed in (0, 1, 0):
        config.evaluation.train.dataset = dict(
            type=ImagesInMemory, metainfo=dict(seed=seed), pipeline=[dict(type="PackInputs")]
        )
        features.append(take(config, root / "cache").pooled("mean"))
    assert torch.equal(features[0], features[2])
    assert (features[0] - features[1]).abs().amax() > 0.01
    assert len([*(root / "cache").iterdir()]) == 2
    assert read_image_sets(config)["train"].path(3) == "number 3"


def test_a_killed_run_goes_on_and_gives_the_same(config, root, monkeypatch):
    """What is there is not computed again; claims of the dead hold nobody up."""
    monkeypatch.setattr(feature_module, "BLOCK", 7)  # four blocks
    whole = take(config, root / "whole")
    seen = []
    original = SharedTasks._claim

    def claim_and_die(tasks, task, attempt):
        if len(seen) == 2:
            seen.append(original(tasks, task, attempt))
            raise KeyboardInterrupt
        seen.append(original(tasks, task, attempt))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(SharedTasks, "_claim", claim_and_die)
        with pytest.raises(KeyboardInterrupt):
            take(config, root / "killed")
    (folder,) = (root / "killed").iterdir()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*.safetensors")}
    assert 0 < len(before) < 8
    killed = take(config, root / "killed")
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert not (folder / "claims").exists()
    for kind in ("pooled", "tokens"):
        for block in range(4):
            assert whole.path(kind, block).read_bytes() == killed.path(kind, block).read_bytes()


def test_another_kind_joins_and_a_complete_cache_is_only_read(config, root):
    first = take(config, root / "cache", ["pooled"])
    stamp = first.path("pooled", 0).stat().st_mtime_ns
    second = take(config, root / "cache")
    assert first.folder == second.folder
    assert second.path("pooled", 0).stat().st_mtime_ns != stamp or second.path("tokens", 0).exists()
    times = {path: path.stat().st_mtime_ns for path in (root / "cache").rglob("*")}
    take(config, root / "cache")
    assert times == {path: path.stat().st_mtime_ns for path in (root / "cache").rglob("*")}


def test_whatever_decides_the_features_gives_them_another_folder(config, root):
    folders = {take(config, root / "cache", ["pooled"]).folder}
    weights = torch.load(root / "weights.pth")["state_dict"]
    weights["backbone.layers.0.ln1.bias"] += 1
    torch.save(weights, root / "weights.pth")
    folders.add(take(config, root / "cache", ["pooled"]).folder)
    config.data_preprocessor.std = [30.0] * 3
    folders.add(take(config, root / "cache", ["pooled"]).folder)
    config.evaluation.train.dataset.pipeline.insert(1, dict(type="Resize", scale=20))
    folders.add(take(config, root / "cache", ["pooled"]).folder)
    cv2.imwrite(str(root / "data/train/a/0.png"), np.zeros((16, 16, 3), np.uint8))
    folders.add(take(config, root / "cache", ["pooled"]).folder)
    (root / "data/train/a/0.png").rename(root / "data/train/b/9.png")
    folders.add(take(config, root / "cache", ["pooled"]).folder)
    assert len(folders) == 6


def test_a_damaged_block_is_one_line(config, root):
    features = take(config, root / "cache")
    path = features.path("pooled", 0)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Exception, match=r"is damaged or gone .* remove it and run the same command again"):
        features.pooled("mean")


def table(printed: str) -> str:
    return printed[printed.index("protocol ") :]


def test_the_tool_gives_the_same_table_again_from_the_cache(config, root, monkeypatch, capsys):
    arguments = [root / "config.py", root / "weights.pth", "--cache", root / "cache", "--out", root / "out"]
    compare = ["--compare", root / "config.py", "--compare", root / "config.py", root / "weights.pth"]
    run_tool(monkeypatch, "evaluate_features", *arguments, *compare)
    first = table(capsys.readouterr().out)
    rows = json.loads((root / "out" / "results.json").read_text())
    assert list(rows) == ["config, weights", "config", "config, weights (3)"]
    assert rows["config, weights"] == rows["config, weights (3)"]
    protocols = {row["protocol"] for row in rows["config"]}
    assert protocols == {"k-NN", "linear", "linear, BEiT's", "logistic regression", "attentive probe"}
    page = (root / "out" / "report.html").read_text()
    for name in rows:  # each figure has the name that the table has
        assert f"<h2>Linear probe by layer (linear): {name}</h2>" in page
    monkeypatch.setattr("mapet_mm.evaluation.extraction._fill", None)  # nothing is computed again
    monkeypatch.setattr("mapet_mm.evaluation.linear.train_probes", None)
    run_tool(monkeypatch, "evaluate_features", *arguments, *compare)
    assert table(capsys.readouterr().out) == first


def test_models_that_are_compared_get_the_first_ones_images_and_it_says_so(config, root, monkeypatch, capsys):
    """A model of another size gets images of another size than it was made for."""
    config.evaluation.val.dataset.pipeline.insert(1, dict(type="Resize", scale=32))
    config.dump(root / "other.py")
    arguments = [root / "config.py", "--cache", root / "cache", "--protocols", "NearestNeighbours"]
    run_tool(monkeypatch, "evaluate_features", *arguments, "--compare", root / "other.py")
    note = (
        f"{root}/other.py: its own pipeline of the `val` images is another: all models get those of "
        f"{root}/config.py"
    )
    assert note in capsys.readouterr().out.splitlines()
    run_tool(monkeypatch, "evaluate_features", *arguments, "--compare", root / "config.py")
    assert "is another" not in capsys.readouterr().out


def test_a_folder_of_images_takes_the_place_of_the_configs(config, root):
    shutil.copytree(root / "data", root / "other")
    images = read_image_sets(config, str(root / "other"))
    assert (len(images["train"]), len(images["val"])) == (24, 9)
    assert images["val"].path(0).startswith(str(root / "other"))
    flat = root / "flat"
    for split in ("train", "val"):
        shutil.copytree(root / "data" / split / "a", flat / split)
    images = read_image_sets(config, str(flat))
    assert (len(images["train"]), images["train"].labels) == (8, None)
    shutil.rmtree(root / "other" / "val")
    with pytest.raises(ImageSetError, match="has no folder `val`"):
        read_image_sets(config, str(root / "other"))


def test_images_listed_with_their_classes_are_taken_as_listed(config, root):
    (root / "data/meta").mkdir()
    (root / "data/meta/val.txt").write_bytes(b"b/0.png 1\r\na/2.png 0\r\n")  # as Windows writes it
    images = read_image_sets(config, str(root / "data"))
    assert images["val"].labels.tolist() == [1, 0]
    assert [Path(images["val"].path(index)).name for index in (0, 1)] == ["0.png", "2.png"]
    assert len(images["train"]) == 24
    (root / "data/meta/val.txt").write_text("b/0.png\na/2.png\n")
    images = read_image_sets(config, str(root / "data"))
    assert (images["train"].labels is None, images["val"].labels) == (False, None)
    (root / "data/meta/val.txt").write_text("\n")
    with pytest.raises(ImageSetError, match=r"meta/val\.txt is empty: it takes a line `PATH CLASS`"):
        read_image_sets(config, str(root / "data"))


def test_images_are_those_of_the_probe_or_pipelines_those_of_the_test_where_no_section_names_them(
    config, root
):
    loaders = config.pop("evaluation")
    with pytest.raises(ImageSetError, match=r"names no images to evaluate on: give it a section"):
        read_image_sets(config)
    with pytest.raises(ImageSetError, match=r"has no pipeline for the images in .*data: give it a section"):
        read_image_sets(config, str(root / "data"))
    config.test_dataloader = loaders.val
    assert len(read_image_sets(config, str(root / "data"))["train"]) == 24
    of_pixels = Config(dict(config, default_scope="mmseg"), filename=config.filename)
    with pytest.raises(ImageSetError, match=r"has no pipeline for the images in .*data: give it a section"):
        read_image_sets(of_pixels, str(root / "data"))
    config.knn_probe = dict(train_dataloader=loaders.train, val_dataloader=loaders.val)
    assert [len(read_image_sets(config)[name]) for name in ("train", "val")] == [24, 9]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(data_prefix="gone"), "`train` images: .*gone"),
        (dict(indices=0, serialize_data=False), "`train` images: CustomDataset has none"),
    ],
)
def test_a_set_without_images_is_one_line(config, options, match):
    config.evaluation.train.dataset.update(options)
    with pytest.raises(ImageSetError, match=match):
        read_image_sets(config)


def save(weights: dict, root: Path) -> None:
    torch.save({"state_dict": weights}, root / "weights.pth")


def test_weights_find_their_backbone_whatever_is_around_them(config, root):
    """Of a backbone alone, of a classifier with another head, under a prefix of one's own."""
    digest = load_checkpoint(config, str(root / "weights.pth")).digest
    weights = torch.load(root / "weights.pth")["state_dict"]
    bare = {name.removeprefix("backbone."): value for name, value in weights.items()}
    for form in (
        bare,
        dict(
            weights, **{"backbone.mask_token": torch.ones(1, 1, 16), "backbone.decoder.bias": torch.ones(3)}
        ),
        {f"net.{name}": v for name, v in weights.items()},
        dict(weights, **{"head.fc.bias": torch.ones(7)}),
    ):
        save(form, root)
        assert load_checkpoint(config, str(root / "weights.pth")).digest == digest
    assert load_checkpoint(config, None).digest == digest  # seed 0
    save_file(weights, root / "weights.safetensors")
    assert load_checkpoint(config, str(root / "weights.safetensors")).digest == digest
    bare_config = Config(dict(config, model=config.model.backbone), filename=config.filename)
    save(weights, root)
    load_checkpoint(bare_config, str(root / "weights.pth"))


def test_without_a_checkpoint_weights_are_those_that_the_config_names(config, root):
    weights = torch.load(root / "weights.pth")["state_dict"]
    save({name: value + 1 for name, value in weights.items()}, root)
    config.load_from = str(root / "weights.pth")
    digest = load_checkpoint(config, config.load_from).digest
    assert load_checkpoint(config, None).digest == digest
    config.load_from = None
    assert load_checkpoint(config, None).digest != digest
    config.model.backbone.init_cfg = dict(type="Pretrained", checkpoint="")
    with pytest.raises(LaunchError, match=r"leaves `model.backbone.init_cfg.checkpoint` open"):
        load_checkpoint(config, None)


def test_a_checkpoint_whose_keys_do_not_match_is_one_line(config, root):
    weights = torch.load(root / "weights.pth")["state_dict"]
    save({f"blocks.{index}.w": value for index, value in enumerate(weights.values())}, root)
    with pytest.raises(KeysError, match=r"has no weights of the config's backbone .* tools/convert.py"):
        take(config, root / "cache")
    gone = "backbone.layers.1.ffn.layers.1.weight"
    save({name: value for name, value in weights.items() if name != gone}, root)
    with pytest.raises(Exception, match=f"the checkpoint has no `{re.escape(gone)}` in the config's shape"):
        take(config, root / "cache")
    save(weights | {gone: torch.zeros(3, 3)}, root)
    with pytest.raises(Exception, match=f"the checkpoint has no `{re.escape(gone)}` in the config's shape"):
        take(config, root / "cache")
    save(weights | {"backbone.layers.2.ln1.bias": torch.zeros(16)}, root)
    with pytest.raises(KeysError, match=r"`backbone.layers.2.ln1.bias`, .* another depth"):
        take(config, root / "cache")


LAYER_SCALE = "backbone.layers.0.attn.gamma1.weight"


def test_weights_that_the_backbone_lacks_are_one_line_where_features_depend_on_them(config, root):
    """LayerScale, biases, a class token, registers, positions: features without them are others."""
    weights = torch.load(root / "weights.pth")["state_dict"]
    plain = dict(config.model.backbone, type="VisionTransformer")
    for options, name in (
        (dict(layer_scale_init_value=0.0), LAYER_SCALE),
        (dict(layer_scale_init_value=0.5, qkv_bias=False), "backbone.layers.0.attn.qkv.bias"),
        (dict(layer_scale_init_value=0.5, with_cls_token=False, out_type="raw"), "backbone.cls_token"),
    ):
        config.model.backbone = dict(plain, **options)
        with pytest.raises(KeysError, match=rf"has `{re.escape(name)}`.*, which the config's backbone lacks"):
            load_checkpoint(config, str(root / "weights.pth"))
    config.model.backbone = dict(plain, layer_scale_init_value=0.5)
    load_checkpoint(config, str(root / "weights.pth"))
    for name in ("backbone.reg_token", "backbone.pre_norm.bias", "backbone.patch_embed.norm.bias"):
        save(weights | {name: torch.ones(16)}, root)
        with pytest.raises(KeysError) as error:
            load_checkpoint(config, str(root / "weights.pth"))
        assert str(error.value) == (
            f"checkpoint {root / 'weights.pth'} has `{name}`, which the config's backbone lacks, so its "
            "features would be others: name the config that it was trained with"
        )


def test_weights_that_features_do_not_need_are_dropped(config, root):
    """Parts of pre-trainings and classifiers, another final norm, tables of places."""
    digest = load_checkpoint(config, str(root / "weights.pth")).digest
    weights = torch.load(root / "weights.pth")["state_dict"]
    one = torch.ones(16)
    others = {f"backbone.{name}": one for name in ("head.weight", "decoder_blocks.0.norm.bias", "ln2.bias")}
    others |= {"backbone.layers.0.attn.relative_position_index": one.long()}
    others |= {"neck.decoder.0.bias": one, "head.layers.0.bias": one, "target_generator.encoder.bias": one}
    save(weights | others, root)
    assert load_checkpoint(config, str(root / "weights.pth")).digest == digest
    save({f"module.{name}": value for name, value in (weights | others).items()} | dict(steps=one), root)
    assert load_checkpoint(config, str(root / "weights.pth")).digest == digest
    config.model.backbone.update(out_type="avg_featmap", final_norm=False)  # fine-tuning of a pre-training
    save(weights | {"backbone.mask_token": torch.ones(1, 1, 16)}, root)
    assert take(config, root / "cache").layers == ["1", "2"]


def test_features_of_a_segmentor_are_its_backbones_whatever_its_neck(config, root):
    """So the neck's weights need not be there, and the cache need not know them."""
    neck = dict(type="mmseg.FPN", in_channels=[64, 128, 256, 512], out_channels=32, num_outs=4)
    head = dict(type="mmseg.FPNHead", in_channels=[32] * 4, in_index=[0, 1, 2, 3], num_classes=3)
    config.model = dict(
        type="mmseg.EncoderDecoder",
        backbone=dict(type="ResNet", depth=18, out_indices=(0, 1, 2, 3)),
        neck=neck,
        decode_head=dict(head, feature_strides=[4, 8, 16, 32], channels=32),
    )
    config.evaluation.train.dataset.pipeline.insert(1, dict(type="Resize", scale=64))
    weights = load_checkpoint(config, None).backbone.model.state_dict()
    save({name: value for name, value in weights.items() if name.startswith("backbone.")}, root)
    backbone = load_checkpoint(config, str(root / "weights.pth")).backbone
    images = backbone.normalise([read_image_sets(config)["train"].dataset[0]["inputs"]])
    with torch.no_grad():
        tokens = backbone(images)
        expected = backbone.model.backbone(images)[-1]
    assert tokens.patches[-1].shape == (1, 4, 512)
    assert torch.equal(tokens.patches[-1], expected.flatten(2).mT)


def test_a_missing_weight_is_not_a_number_and_a_missing_table_of_places_is_the_models_own(root):
    model = nn.ModuleDict({"backbone": nn.Linear(2, 3)})
    save({"backbone.weight": torch.ones(3, 2)}, root)
    model.backbone.register_buffer("relative_position_index", torch.arange(3))
    gone = ["backbone.bias", "backbone.relative_position_index"]
    assert load_weights(model, str(root / "weights.pth")) == gone
    assert model.backbone.bias.isnan().all()  # so features that depend on it show it
    assert model.backbone.relative_position_index.tolist() == [0, 1, 2]


def test_a_tokenizer_is_not_built_for_features(config, root):
    """Its codebook may be elsewhere."""
    config.model = dict(
        type="mapet_mm.MaPeT",
        backbone=dict(config.model.backbone, type="mapet_mm.MaPeTPretrainViT", cutting_point=6),
        head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=16, vocab_size=8),
        target_generator=dict(type="mapet_mm.KCLIP", codebook="nowhere"),
    )
    config.model.backbone.pop("out_type")
    assert load_checkpoint(config, str(root / "weights.pth")).backbone.model.target_generator is None


@pytest.mark.parametrize("section", ["model", "data_preprocessor"])
def test_a_config_that_gives_no_features_is_one_line(config, section):
    config.pop(section)
    with pytest.raises(UserError, match=rf"config .*config\.py has no `{section}`"):
        load_checkpoint(config, None)


def test_features_beyond_half_precision_are_one_line(config, root):
    weights = torch.load(root / "weights.pth")["state_dict"]
    weights["backbone.ln1.weight"] *= 1e6
    save(weights, root)
    with pytest.raises(UserError, match=r"features of the backbone reach \d\.\d+e\+06: float16 cannot hold"):
        take(config, root / "cache")


def test_of_several_processes_only_the_first_has_rows_and_says_what_it_does(
    config, root, monkeypatch, capsys
):
    checkpoint, images = load_checkpoint(config, None), read_image_sets(config)
    for module in ("extraction", "protocols"):
        monkeypatch.setattr(f"mapet_mm.evaluation.{module}.process_number", lambda: (1, 2))
    protocols = build_protocols(PROTOCOLS[:1], images)
    evaluated, rows = evaluate(checkpoint, images, protocols, root / "cache")
    assert (len(evaluated.features["val"]), rows) == (9, [])
    assert not capsys.readouterr().out
    assert not (root / "cache" / "results").exists()


def test_a_work_dir_is_no_checkpoint(config, root):
    (root / "last_checkpoint").write_text("epoch_1.pth")
    with pytest.raises(Exception, match="is a work dir: name a file in it"):
        load_checkpoint(config, str(root))


def test_image_sets_are_found_whatever_library_the_model_is_of(config):
    with DefaultScope.overwrite_default_scope("mmengine"):
        assert len(read_image_sets(config)["train"]) == 24


def test_images_of_several_sizes_are_one_line(config, root):
    cv2.imwrite(str(root / "data/train/a/1.png"), np.zeros((20, 16, 3), np.uint8))
    with pytest.raises(ImageSetError, match="images of 16 x 16 and 20 x 16 pixels: end it with one size"):
        take(config, root / "cache")


def test_a_random_pipeline_is_one_line(config, root):
    config.evaluation.train.dataset.pipeline.insert(1, dict(type="RandomCrop", crop_size=8))
    with pytest.raises(ImageSetError, match="pipeline of the `train` images draws at random"):
        take(config, root / "cache")


def test_an_image_that_cannot_be_read_is_one_line(config, root):
    (root / "data/train/b/3.png").write_bytes(b"no image")
    with pytest.raises(ImageSetError, match=r"train/b/3\.png` cannot be read"):
        take(config, root / "cache")


def test_labels_that_cannot_be_learnt_from_are_one_line(config, root):
    def check(match: str) -> None:
        images = read_image_sets(config)
        with pytest.raises(ImageSetError, match=match):
            check_labels(images["train"], images["val"])

    config.evaluation.val.dataset.with_label = False
    check("`val` images have no labels")
    config.evaluation.val.dataset.with_label = True
    shutil.rmtree(root / "data/train/c")
    (root / "data/train/c").mkdir()
    check(r"`train` images have none of class 2( \(c\))?: add some")
    for split in ("train", "val"):
        for name in "bc":
            shutil.rmtree(root / "data" / split / name)
    check("`train` images are all of one class")


def test_no_room_is_said_before_it_is_needed(config, root, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(Exception, match=r"take 0\.0 GB, and .* has 0\.0 GB left: choose another --cache"):
        take(config, root / "cache")


def test_unknown_protocols_and_options_are_one_line(config):
    for wrong, match in (
        (dict(type="Nearest"), "there is no protocol Nearest: one of .*NearestNeighbours"),
        (dict(type="NearestNeighbours", neighbours=3), "protocol NearestNeighbours: .*'neighbours'"),
        (dict(type="FeaturePictures", images=1), "protocol FeaturePictures: images=1: at least 2"),
        (dict(type="LinearProbes", optimizer="LARS"), "protocol LinearProbes: optimizer='LARS' is none of"),
    ):
        with pytest.raises(Exception, match=match):
            build_protocols([wrong], {})


def test_protocols_run_where_their_images_are(config, root):
    images = read_image_sets(config)
    assert len(build_protocols(PROTOCOLS, images)) == 5
    assert build_protocols(PROTOCOLS, {"dense_train": images["train"]}) == []
    checkpoint = load_checkpoint(config, str(root / "weights.pth"))
    _, rows = evaluate(checkpoint, images, build_protocols(PROTOCOLS[:1], images), root / "cache")
    assert [row.setting for row in rows[0]] == ["class token", "mean", "both"]
    assert not list((root / "cache").glob("*/tokens"))  # which k-NN does not need
