"""MMSegmentation's decode heads train and predict on `MaPeTViT` and `TIMMViT`; docs/mixing.md lists them."""

import re
from importlib.util import find_spec
from pathlib import Path

import mmseg
import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.optim import OptimWrapper
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import nn

from mapet_mm.registry import MODELS

PAGE = Path(__file__).parents[2] / "docs/mixing.md"
WIDTH, CLASSES = 32, 5
BN = dict(type="BN")
ARCH = dict(embed_dims=WIDTH, num_layers=4, num_heads=2, feedforward_channels=64)
BACKBONE = dict(type="mapet_mm.MaPeTViT", arch=ARCH, img_size=64, patch_size=16, drop_path_rate=0.1)
BACKBONE |= dict(out_type="featmap", out_indices=[0, 1, 2, 3])
TIMM = dict(type="mapet_mm.TIMMViT", model_name="vit_small_patch16_dinov3", drop_path_rate=0.1)
TIMM |= dict(embed_dim=WIDTH, depth=4, num_heads=2, out_indices=[0, 1, 2, 3])
FOUR = dict(in_channels=[WIDTH] * 4, in_index=[0, 1, 2, 3])
MAPS = dict(in_channels=[16] * 4, in_index=[0, 1, 2, 3])
PYRAMID = dict(type="Feature2Pyramid", embed_dim=WIDTH, norm_cfg=BN)
SIMPLE = dict(type="mapet_mm.SimpleFeaturePyramid", in_channels=WIDTH, out_channels=16)
MLA = dict(type="MLANeck", in_channels=[WIDTH] * 4, out_channels=16, norm_cfg=BN, act_cfg=dict(type="ReLU"))
LEVELS = dict(type="MultiLevelNeck", in_channels=[WIDTH] * 4, out_channels=16)
PAIRS = dict(out_type="featmap_and_cls_token")

# By the name in the page: the head, the neck before it, and options of the backbone.
HEADS = {
    "ANNHead": dict(head=dict(in_channels=[WIDTH] * 2, in_index=[2, 3], project_channels=16)),
    "APCHead": dict(),
    "ASPPHead": dict(),
    "DAHead": dict(head=dict(pam_channels=8)),
    "DepthwiseSeparableASPPHead": dict(head=dict(c1_in_channels=0, c1_channels=0)),
    "DMHead": dict(),
    "DNLHead": dict(head=dict(reduction=2, mode="embedded_gaussian")),
    "DPTHead": dict(
        head=dict(
            **FOUR,
            input_transform="multiple_select",
            embed_dims=WIDTH,
            post_process_channels=[8, 8, 16, 32],
            readout_type="project",
        ),
        backbone=PAIRS,
    ),
    "EMAHead": dict(head=dict(ema_channels=16, num_bases=8, num_stages=2, momentum=0.1)),
    "EncHead": dict(head=dict(in_channels=[WIDTH] * 3, in_index=[1, 2, 3], num_codes=8)),
    "FCNHead": dict(head=dict(num_convs=1)),
    "FCNHead, linear": dict(
        head=dict(num_convs=0, concat_input=False, channels=WIDTH),
        neck=dict(type="mapet_mm.BatchNormNeck", channels=WIDTH),
        backbone=dict(frozen_stages=4),
    ),
    "FPNHead": dict(head=dict(**MAPS, feature_strides=[4, 8, 16, 32]), neck=SIMPLE),
    "GCHead": dict(head=dict(ratio=1 / 4)),
    "ISAHead": dict(head=dict(isa_channels=16, down_factor=(2, 2))),
    "LightHamHead": dict(
        head=dict(**FOUR, ham_channels=16, ham_kwargs=dict(MD_R=4), norm_cfg=dict(type="GN", num_groups=4))
    ),
    "NLHead": dict(head=dict(mode="embedded_gaussian")),
    "PSPHead": dict(head=dict(pool_scales=(1, 2))),
    "SegformerHead": dict(head=MAPS, neck=SIMPLE),
    "SegmenterMaskTransformerHead": dict(
        head=dict(embed_dims=WIDTH, channels=WIDTH, num_layers=2, num_heads=2, norm_cfg=dict(type="LN"))
    ),
    "SETRMLAHead": dict(head=dict(**MAPS, channels=32, mla_channels=8), neck=MLA),
    "SETRUPHead": dict(head=dict(num_convs=4, up_scale=2)),
    "UPerHead": dict(head=dict(**FOUR, pool_scales=(1, 2)), neck=PYRAMID),
    "UPerHead, MultiLevelNeck": dict(head=dict(**MAPS, pool_scales=(1, 2)), neck=LEVELS),
}


# Those that need MMCV's compiled operators.
OPERATORS = {"CCHead": dict(head=dict(recurrence=2)), "PSAHead": dict(head=dict(mask_size=(7, 7)))}
# Those that need MMDetection: the library's own configs, with another backbone and a pyramid.
MASKS = {
    "MaskFormerHead": "maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512.py",
    "Mask2FormerHead": "mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py",
}
WINDOWS = dict(mode="slide", crop_size=(64, 64), stride=(43, 43))
PREPROCESSOR = dict(type="SegDataPreProcessor", size=(64, 64), seg_pad_val=255)
needs_operators = pytest.mark.skipif(find_spec("mmcv._ext") is None, reason="MMCV has no operators here")
needs_detection = pytest.mark.skipif(find_spec("mmdet") is None, reason="MMDetection is not installed")
ALL = [
    *HEADS,
    *(pytest.param(name, marks=needs_operators) for name in OPERATORS),
    *(pytest.param(name, marks=needs_detection) for name in MASKS),
]


def build(name: str, vit: dict) -> nn.Module:
    if name in MASKS:
        return mask_classifier(MASKS[name], vit)
    return segmentor(name, vit, **{**HEADS, **OPERATORS}[name])


def mask_classifier(config: str, vit: dict) -> nn.Module:
    """A segmentor of MMSegmentation's that classifies masks, on our backbone."""
    model = Config.fromfile(Path(mmseg.__file__).parent / ".mim/configs" / config).model
    model.decode_head.update(in_channels=[16] * 4, num_classes=CLASSES, num_queries=10)
    model.decode_head.loss_cls.class_weight = [1.0] * CLASSES + [0.1]
    parts = dict(data_preprocessor=PREPROCESSOR, backbone=vit, neck=SIMPLE, test_cfg=ConfigDict(WINDOWS))
    with DefaultScope.overwrite_default_scope("mmseg"):
        return MODELS.build({**model, **parts})


def segmentor(
    name: str, vit: dict, head: dict | None = None, neck: dict | None = None, backbone: dict | None = None
) -> nn.Module:
    """A segmentor with this head on a ViT whose four layers give their maps."""
    head = dict(dict(in_channels=WIDTH, in_index=-1, channels=16, norm_cfg=BN), **head or {})
    head |= dict(type=name.split(",")[0], num_classes=CLASSES)
    backbone = dict(vit, **backbone or {})
    settings = dict(train_cfg=dict(), test_cfg=ConfigDict(WINDOWS), data_preprocessor=PREPROCESSOR)
    with DefaultScope.overwrite_default_scope("mmseg"):
        parts = dict(backbone=backbone, neck=neck, decode_head=head)
        model = MODELS.build(dict(type="mmseg.EncoderDecoder", **parts, **settings))
    model.init_weights()
    return model


def random_batch(count: int, height: int, width: int, classes: int) -> dict[str, list]:
    """A batch of images `(3, height, width)` and their samples, all random."""
    shape = (height, width)
    sizes = dict(ori_shape=shape, img_shape=shape, pad_shape=shape)
    labels = [PixelData(data=torch.randint(classes, (1, *shape))) for _ in range(count)]
    return dict(
        inputs=list(torch.randint(256, (count, 3, *shape), dtype=torch.uint8)),
        data_samples=[SegDataSample(gt_sem_seg=label, metainfo=sizes) for label in labels],
    )


@pytest.mark.slow
@pytest.mark.parametrize("vit", [BACKBONE, TIMM], ids=["MaPeTViT", "TIMMViT"])
@pytest.mark.parametrize("name", ALL)
def test_head_trains_and_predicts(name, vit):
    model = build(name, vit)
    before = {key: value.clone() for key, value in model.named_parameters() if value.requires_grad}
    wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert model.train().train_step(random_batch(2, 64, 64, CLASSES), wrapper)["loss"].isfinite()
    moved = {key.split(".")[0] for key, value in before.items() if not value.equal(model.get_parameter(key))}
    assert moved >= ({"decode_head"} if "linear" in name else {"backbone", "decode_head"})
    model.eval()
    # Mask2Former fails in sliding windows with any backbone.
    for mode in ("whole",) if name == "Mask2FormerHead" else ("whole", "slide"):
        model.test_cfg.mode = mode
        for height, width in ((64, 64), (64, 128), (77, 101)):
            with torch.no_grad():
                (predicted,) = model.test_step(random_batch(1, height, width, CLASSES))
            assert predicted.pred_sem_seg.data.shape == (1, height, width)
            assert predicted.seg_logits.data.isfinite().all()


def test_the_page_lists_the_heads_that_are_run():
    section = PAGE.read_text().split("## MMSegmentation")[1].split("\n## ")[0]
    listed = re.findall(r"`(\w+Head(?:, \w+)?)`", section)
    assert set(listed) == {*HEADS, *OPERATORS, *MASKS}
