"""Drawn ground truth and predictions have the colours of the classes that the metric compares."""

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from mmengine.config import Config
from mmseg.apis import init_model
from PIL import Image

from mapet_mm.visualization.segmentation import segmentation_figure


@pytest.fixture
def trained(tmp_path):
    """A config and weights that predict 'sea' everywhere; in the files, 0 is unlabelled and 1 is 'sky'."""
    for kind in ("images", "annotations"):
        (tmp_path / kind).mkdir()
    labels = np.array([[0, 1], [2, 3]], np.uint8).repeat(12, 0).repeat(10, 1)
    for index in range(2):
        Image.new("RGB", (20, 24), (200, 10, 90 * index)).save(tmp_path / f"images/{index}.png")
        Image.fromarray(labels).save(tmp_path / f"annotations/{index}.png")
    load = [dict(type="LoadImageFromFile"), dict(type="Resize", scale=(16, 16), keep_ratio=False)]
    dataset = dict(
        type="BaseSegDataset",
        data_root=str(tmp_path),
        data_prefix=dict(img_path="images", seg_map_path="annotations"),
        img_suffix=".png",
        seg_map_suffix=".png",
        metainfo=dict(classes=("sky", "sea", "land")),
        reduce_zero_label=True,
        pipeline=[*load, dict(type="LoadAnnotations"), dict(type="PackSegInputs")],
    )
    arch = dict(embed_dims=12, num_layers=1, num_heads=2, feedforward_channels=24)
    backbone = dict(type="mapet_mm.MaPeTViT", arch=arch, img_size=16, patch_size=4, out_type="featmap")
    head = dict(type="FCNHead", in_channels=12, channels=12, in_index=0, num_convs=0, concat_input=False)
    model = dict(
        type="EncoderDecoder",
        data_preprocessor=dict(type="SegDataPreProcessor", bgr_to_rgb=True),
        backbone=dict(backbone, init_cfg=dict(type="Pretrained", checkpoint="nowhere.pth")),
        decode_head=dict(head, num_classes=3, norm_cfg=dict(type="BN"), align_corners=False),
        test_cfg=dict(mode="whole"),
    )
    config = Config(dict(default_scope="mmseg", model=model, val_dataloader=dict(dataset=dataset)))
    config.test_pipeline = [*load, dict(type="PackSegInputs")]
    config.dump(tmp_path / "config.py")
    config.model.backbone.init_cfg = None
    model = init_model(config, device="cpu")
    model.decode_head.conv_seg.bias.data = torch.tensor([0.0, 99.0, 0.0])
    meta = dict(dataset_meta=dict(classes=("a", "b", "c"), palette=[[0] * 3] * 3))
    torch.save({"state_dict": model.state_dict(), "meta": meta}, tmp_path / "weights.pth")
    return tmp_path / "config.py", tmp_path / "weights.pth"


def test_rows_show_image_ground_truth_and_prediction(trained):
    figure = segmentation_figure(*trained, count=9, title="fine-tuned")
    assert [axes.get_title() for axes in figure.axes] == ["image", "ground truth", "fine-tuned", "", "", ""]
    image, truth, prediction = (np.asarray(axes.images[0].get_array()) for axes in figure.axes[3:])
    assert np.unique(image.reshape(-1, 3), axis=0).tolist() == [[200, 10, 90]]

    def blended(label):
        colour = [0, 0, 0] if label == 0 else colormaps["hsv"](label / 3, bytes=True)[:3]
        return (0.4 * image[0, 0] + 0.6 * np.asarray(colour)).astype(np.uint8).tolist()

    assert [truth[y, x].tolist() for y, x in ((0, 19), (23, 0), (23, 19))] == [blended(n) for n in range(3)]
    assert (prediction == blended(1)).all()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["sea", "land"]
