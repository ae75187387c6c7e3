"""A segmentation whose label files are no class indices stops before its first step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mapet_mm.datasets.label_files import Classes, OneClassError
from mapet_mm.engine import LabelFilesCheckHook
from mapet_mm.engine.hooks.label_files_check_hook import classes_of
from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_test, configure_training, load_config

CONFIG = """
default_scope = "mmseg"
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(type="SegDataPreProcessor", size=(16, 16), seg_pad_val=255),
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch=dict(embed_dims=12, num_layers=1, num_heads=2, feedforward_channels=24),
        img_size=16,
        patch_size=8,
        out_type="featmap",
    ),
    decode_head=dict(
        type="FCNHead", in_channels=12, channels=8, num_convs=1, num_classes=3, norm_cfg=dict(type="BN")
    ),
    test_cfg=dict(mode="whole"),
)
dataset = dict(
    type="BaseSegDataset",
    data_prefix=dict(img_path="images", seg_map_path="right"),
    metainfo=dict(classes=("a", "b", "c")),
    pipeline=[dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackSegInputs")],
)
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type="InfiniteSampler", shuffle=True), dataset=dataset
)
val_dataloader = dict(batch_size=1, num_workers=0, sampler=dict(type="DefaultSampler"), dataset=dataset)
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
val_cfg = test_cfg = dict()
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=1e-2))
train_cfg = dict(type="IterBasedTrainLoop", max_iters=2)
default_hooks = dict(
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=2),
    epoch_seed=dict(type="mapet_mm.EpochSeedHook"),
)
log_processor = dict(by_epoch=False)
randomness = dict(seed=0)
"""


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """Makes the runner of a training whose `train` or `val` takes its labels from another folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for folder in ("images", "right", "grey", "binary"):
        (tmp_path / folder).mkdir()
    for number in range(2):
        labels = rng.integers(3, size=(16, 16), dtype=np.uint8)
        grey = labels[..., None].repeat(3, axis=2)
        Image.fromarray(grey * 100).save(f"images/{number}.jpg")
        Image.fromarray(labels).save(f"right/{number}.png")
        Image.fromarray(grey).save(f"grey/{number}.png")
        Image.fromarray(np.where(labels > 0, 255, 0).astype(np.uint8)).save(f"binary/{number}.png")
    (tmp_path / "config.py").write_text(CONFIG)

    def make(work_dir="work", checkpoint=None, **options):
        changes = {}
        for name, value in options.items():
            key = f"{name}_dataloader.dataset.data_prefix.seg_map_path"
            changes[key if name in ("train", "val", "test") else f"default_hooks.{name}"] = value
        cfg = load_config("config.py", changes, work_dir)
        if checkpoint:
            configure_test(cfg, checkpoint)
        else:
            configure_training(cfg)
        return build_runner(cfg, "none")

    return make


def test_labels_of_three_equal_channels_train_as_grey_ones(runner):
    weights = []
    for name in ("right", "grey"):
        runner(name, train=name, val=name).train()
        weights.append(torch.load(f"{name}/iter_2.pth", weights_only=True)["state_dict"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("part", ["train", "val"])
def test_masks_of_0_and_255_stop_a_training_before_its_first_step(runner, part):
    remedy = "--cfg-options default_hooks.label_files_check=None"
    with pytest.raises(OneClassError, match=rf"`binary/0.png`.*class 0 alone.*{remedy}") as found:
        runner(**{part: "binary"}).train()
    assert found.traceback[-1].path.name == "label_files_check_hook.py"


def test_the_check_can_be_left_out_and_a_test_has_it_too(runner):
    runner(train="binary", label_files_check=None).train()
    runner(checkpoint="work/iter_2.pth").test()
    with pytest.raises(OneClassError, match=r"`binary/0.png`"):
        runner(checkpoint="work/iter_2.pth", test="binary").test()


class Part(nn.Module):
    """A head, or a backbone, which have numbers."""

    def __init__(self, **numbers) -> None:
        super().__init__()
        for name, number in numbers.items():
            setattr(self, name, number)


@pytest.mark.parametrize(
    ("head", "dataset", "expected"),
    [
        (dict(num_classes=150, ignore_index=255), {}, Classes(150)),
        (dict(num_classes=150), dict(metainfo=dict(classes=["a", "b", "c"])), Classes(3)),
        (dict(num_classes=3, ignore_index=9), dict(ignore_index=255), Classes(3, ignored=9)),
        (dict(num_classes=3, ignore_index=None), dict(ignore_index=7), Classes(3, ignored=7)),
        (dict(num_classes=1), {}, Classes(2)),
        (dict(num_classes=3), dict(reduce_zero_label=True), Classes(3, reduce_zero_label=True)),
        ({}, {}, Classes(255)),
    ],
)
def test_head_and_dataset_say_which_labels_are_classes(head, dataset, expected):
    model = nn.ModuleDict(dict(backbone=Part(num_classes=2), decode_head=Part(**head)))
    assert classes_of(model, SimpleNamespace(**dataset)) == expected


def test_images_without_label_files_are_left_alone():
    model = nn.ModuleDict(dict(head=Part(num_classes=3)))
    loader = SimpleNamespace(dataset=[1, 2])
    LabelFilesCheckHook().before_test(SimpleNamespace(model=model, test_dataloader=loader))
