"""Models of MMDetection, MMRotate and MMPose with MaPeTViT for their backbone: the lines of docs/mixing.md.

Each is the library's own config with another backbone and neck. It learns and predicts at odd and non-square
sizes, and the operators of MMCV that it calls on a CPU are those that the page names.
"""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from config_building import ROOT
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, DefaultScope
from torch import nn

ARCH = dict(embed_dims=96, num_layers=4, num_heads=3, feedforward_channels=96)
BACKBONE = dict(type="mapet_mm.MaPeTViT", arch=ARCH, img_size=64, patch_size=16, out_type="featmap")
FOUR_LAYERS = dict(BACKBONE, out_indices=(0, 1, 2, 3))
PYRAMID = dict(type="mapet_mm.SimpleFeaturePyramid", in_channels=96, out_channels=256)
FEATURE2PYRAMID_FPN = [
    dict(type="mmseg.Feature2Pyramid", embed_dim=96, norm_cfg=dict(type="BN")),
    dict(type="mmdet.FPN", in_channels=[96] * 4, out_channels=256, num_outs=5),
]
ONE_MAP = dict(type="mmdet.ChannelMapper", in_channels=[96], out_channels=256, kernel_size=1, num_outs=1)
THREE_LEVELS = dict(PYRAMID, scale_factors=(2, 1, 0.5), num_outs=5)
FOUR_LEVELS = dict(PYRAMID, scale_factors=(2, 1, 0.5), num_outs=4)
ROI = {"nms", "roi_align_forward", "roi_align_backward"}
FOCAL = {"sigmoid_focal_loss_forward", "sigmoid_focal_loss_backward"}
DETECTORS = {
    "Faster R-CNN": ("mmdet", "faster_rcnn/faster-rcnn_r50_fpn_1x_coco", FOUR_LAYERS, FEATURE2PYRAMID_FPN),
    "Mask R-CNN": ("mmdet", "mask_rcnn/mask-rcnn_r50_fpn_1x_coco", FOUR_LAYERS, FEATURE2PYRAMID_FPN),
    "RetinaNet": ("mmdet", "retinanet/retinanet_r50_fpn_1x_coco", BACKBONE, THREE_LEVELS),
    "FCOS": ("mmdet", "fcos/fcos_r50-caffe_fpn_gn-head_1x_coco", BACKBONE, THREE_LEVELS),
    "DETR": ("mmdet", "detr/detr_r50_8xb2-150e_coco", BACKBONE, ONE_MAP),
    "Conditional DETR": ("mmdet", "conditional_detr/conditional-detr_r50_8xb2-50e_coco", BACKBONE, ONE_MAP),
    "Deformable DETR": ("mmdet", "deformable_detr/deformable-detr_r50_16xb2-50e_coco", BACKBONE, FOUR_LEVELS),
    "DINO": ("mmdet", "dino/dino-4scale_r50_8xb2-12e_coco", BACKBONE, FOUR_LEVELS),
    "Mask2Former": ("mmdet", "mask2former/mask2former_r50_8xb2-lsj-50e_coco", BACKBONE, PYRAMID),
    "rotated RetinaNet": (
        "mmrotate",
        "rotated_retinanet/rotated-retinanet-rbox-le90_r50_fpn_1x_dota",
        BACKBONE,
        THREE_LEVELS,
    ),
    "oriented R-CNN": (
        "mmrotate",
        "oriented_rcnn/oriented-rcnn-le90_r50_fpn_1x_dota",
        BACKBONE,
        dict(PYRAMID, num_outs=5),
    ),
}
LAYERS = 2  # of a transformer, each way, instead of six: what is tested is the same in each
IMAGES = [(3, 65, 97), (3, 96, 64)]


def library_model(library: str, name: str, backbone: dict, neck) -> ConfigDict:
    """The model of a library's own config, on another backbone; small where that changes nothing."""
    cfg = Config.fromfile(Path(import_module(library).__file__).parent / ".mim/configs" / f"{name}.py")
    model = cfg.model
    model.backbone, model.neck = backbone, neck
    if model.type == "Mask2Former":
        model.panoptic_head.in_channels = [256] * 4
        model.data_preprocessor.pop("batch_augments")  # to 1024 x 1024
    for part in ("encoder", "decoder"):
        if part in model:
            model[part].num_layers = LAYERS
    if "score_thr" in model.get("test_cfg", {}):
        model.test_cfg.score_thr = 0.0  # untrained, it finds nothing otherwise
    if "num_queries" in model:
        model.num_queries = model.test_cfg.max_per_img = 20
    return model


@pytest.fixture
def called(monkeypatch) -> set[str]:
    """The names of MMCV's compiled operators that were called so far."""
    names: set[str] = set()
    operators = import_module("mmcv._ext")

    def recorded(name, operator):
        def call(*args, **kwargs):
            names.add(name)
            return operator(*args, **kwargs)

        return call

    for name in dir(operators):
        if not name.startswith("_") and callable(getattr(operators, name)):
            monkeypatch.setattr(operators, name, recorded(name, getattr(operators, name)))
    return names


def samples(library: str) -> dict:
    """Two images of different, odd sizes with two things each: boxes (turned ones in MMRotate) and masks."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    inputs, data_samples = [], []
    for shape in IMAGES:
        height, width = size = shape[1:]
        sizes = dict(img_shape=size, ori_shape=size, pad_shape=size, batch_input_shape=size)
        inputs.append((torch.rand(shape) * 255).to(torch.uint8))
        boxes = torch.tensor([[8.0, 8.0, 40.0, 44.0], [20.0, 16.0, 60.0, 60.0]])
        masks = torch.zeros(2, height, width, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        if library == "mmrotate":
            from mmrotate.structures.bbox import RotatedBoxes

            boxes = RotatedBoxes(
                torch.tensor([[24.0, 26.0, 32.0, 20.0, 0.3], [40.0, 38.0, 40.0, 30.0, -0.5]])
            )
        truth = InstanceData(
            bboxes=boxes, labels=torch.tensor([1, 3]), masks=BitmapMasks(masks.numpy(), height, width)
        )
        sample = DetDataSample(
            gt_instances=truth,
            ignored_instances=InstanceData(bboxes=boxes[:0], labels=truth.labels[:0]),
            metainfo=dict(sizes, scale_factor=(1.0, 1.0), img_id=0),
        )
        data_samples.append(sample)
    return dict(inputs=inputs, data_samples=data_samples)


def page_row(name: str) -> list[str]:
    """The cells of a model's line in docs/mixing.md."""
    text = (ROOT / "docs/mixing.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def learn_and_predict(model: nn.Module, training: dict, test: dict) -> list:
    """The predictions, once the backbone has a gradient."""
    losses = model(**model.data_preprocessor(training, True), mode="loss")
    loss, _ = model.parse_losses(losses)
    loss.backward()
    gradient = model.backbone.patch_embed.projection.weight.grad
    assert torch.isfinite(gradient).all()
    assert gradient.norm() > 0
    model.eval()
    with torch.no_grad():
        return model(**model.data_preprocessor(test, False), mode="predict")


@pytest.mark.parametrize("name", DETECTORS)
def test_detector_learns_and_predicts(name, called):
    library, config, backbone, neck = DETECTORS[name]
    with DefaultScope.overwrite_default_scope(library):
        model = MODELS.build(library_model(library, config, backbone, neck))
        model.init_weights()
        results = learn_and_predict(model, samples(library), samples(library))
    assert len(results) == 2
    assert all(torch.isfinite(one.pred_instances.scores).all() for one in results)
    print(f"{name}: {', '.join(sorted(called)) or 'none'}")
    assert set(re.findall(r"`(\w+)`", page_row(name)[-1])) == called


def test_rotated_fcos_has_no_operator_on_a_cpu():
    library, config = "mmrotate", "rotated_fcos/rotated-fcos-le90_r50_fpn_1x_dota"
    with DefaultScope.overwrite_default_scope(library):
        model = MODELS.build(library_model(library, config, BACKBONE, THREE_LEVELS))
        with pytest.raises(RuntimeError, match=r"sort_vertices.*device cpu not found"):
            model(**model.data_preprocessor(samples(library), True), mode="loss")


def test_vitpose_head_learns_and_predicts(called):
    from mmpose.testing import get_packed_inputs

    config = "body_2d_keypoint/topdown_heatmap/coco/td-hm_ViTPose-base_8xb64-210e_coco-256x192"
    with DefaultScope.overwrite_default_scope("mmpose"):
        model = library_model("mmpose", config, dict(BACKBONE, img_size=(256, 192)), None)
        model["head"]["in_channels"] = 96
        sizes = dict(img_shape=(256, 192), input_size=(192, 256))
        data = get_packed_inputs(2, num_instances=1, with_heatmap=True, **sizes)
        results = learn_and_predict(MODELS.build(model), data, data)
    assert [one.pred_instances.keypoints.shape[-2:] for one in results] == [(17, 2)] * 2
    assert set(re.findall(r"`(\w+)`", page_row("ViTPose head")[-1])) == called
