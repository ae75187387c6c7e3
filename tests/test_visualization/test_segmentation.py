"""Overlays colour exactly the labelled pixels."""

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmseg.apis import init_model
from PIL import Image

from mapet_mm.visualization.segmentation import (
    SegmentedImage,
    class_colours,
    overlay,
    predict_images,
    segmentation_figure,
)


def test_overlay_blends_classes_and_leaves_background_and_ignored_pixels():
    image = np.full((1, 4, 3), 100, np.uint8)
    colours = np.array([[0, 0, 0], [200, 0, 100], [0, 200, 200]], np.uint8)
    blended = overlay(image, np.array([[0, 1, 2, 255]]), colours, opacity=0.5)
    assert blended.tolist() == [[[100, 100, 100], [150, 50, 100], [50, 150, 150], [100, 100, 100]]]


def test_overlay_refuses_what_does_not_fit():
    image = np.zeros((2, 2, 3), np.uint8)
    with pytest.raises(ValueError, match="must be one size"):
        overlay(image, np.zeros((2, 3), int), class_colours(3))
    with pytest.raises(ValueError, match="label 3 is past the 3 classes"):
        overlay(image, np.full((2, 2), 3), class_colours(3))


def test_class_colours_are_distinct():
    colours = class_colours(11)
    assert colours.shape == (11, 3)
    assert len({tuple(colour) for colour in colours.tolist()}) == 11


def test_figure_names_the_classes_seen_and_no_others():
    truth, prediction = np.array([[0, 1], [1, 255]]), np.array([[0, 3], [1, 0]])
    one = SegmentedImage(np.zeros((2, 2, 3), np.uint8), truth, prediction)
    figure = segmentation_figure([one, one], ["background", "zero", "one", "two"], "fine-tuned")
    assert [axes.get_title() for axes in figure.axes[:3]] == ["image", "ground truth", "fine-tuned"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["zero", "two"]
    assert len(figure.axes) == 6
    drawn = np.asarray(figure.axes[1].images[0].get_array())
    np.testing.assert_array_equal(drawn, overlay(one.image, truth, class_colours(4)))


def test_images_without_a_class_have_no_legend():
    empty = np.zeros((2, 2), int)
    one = SegmentedImage(np.zeros((2, 2, 3), np.uint8), empty, empty)
    assert not segmentation_figure([one], ["background", "zero"], "fine-tuned").legends


def test_validation_images_are_predicted_and_their_labels_are_the_metrics(tmp_path):
    """In the files, as in ADE20K's, 0 is unlabelled and the classes start at 1; images are resized to 16, and
    one is a photo that lies on its side, one is grey with 16 bits."""
    for kind in ("images", "annotations"):
        (tmp_path / kind).mkdir()
    labels = np.array([[0, 1], [2, 2]], np.uint8).repeat(12, 0).repeat(10, 1)
    for index in range(2):
        pixels = np.full((24, 20, 3), (200, 10, 90 * index), np.uint8)
        pixels[:3] = index
        turned, exif = np.rot90(pixels), Image.Exif()
        exif[0x0112] = 6 if index else 1  # the second one has to be turned back
        Image.fromarray(turned if index else pixels).save(tmp_path / f"images/{index}.png", exif=exif)
        Image.fromarray(labels).save(tmp_path / f"annotations/{index}.png")
    Image.fromarray(np.full((24, 20), 40 << 8, np.uint16)).save(tmp_path / "images/0.png")
    pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="Resize", scale=(16, 16), keep_ratio=False),
        dict(type="LoadAnnotations"),
        dict(type="PackSegInputs"),
    ]
    dataset = dict(
        type="BaseSegDataset",
        data_root=str(tmp_path),
        data_prefix=dict(img_path="images", seg_map_path="annotations"),
        img_suffix=".png",
        seg_map_suffix=".png",
        metainfo=dict(classes=("sky", "sea"), palette=[[0, 0, 0], [9, 9, 9]]),
        reduce_zero_label=True,
        pipeline=pipeline,
    )
    arch = dict(embed_dims=12, num_layers=1, num_heads=2, feedforward_channels=24)
    backbone = dict(type="mapet_mm.MaPeTViT", arch=arch, img_size=16, patch_size=4, out_type="featmap")
    backbone["init_cfg"] = dict(
        type="Pretrained", checkpoint="nowhere.pth"
    )  # all weights are the checkpoint's
    head = dict(type="FCNHead", in_channels=12, channels=12, in_index=0, num_convs=0, concat_input=False)
    config = Config(
        dict(
            default_scope="mmseg",
            model=dict(
                type="EncoderDecoder",
                data_preprocessor=dict(type="SegDataPreProcessor", bgr_to_rgb=True),
                backbone=backbone,
                decode_head=dict(head, num_classes=2, norm_cfg=dict(type="BN"), align_corners=False),
                test_cfg=dict(mode="whole"),
            ),
            val_dataloader=dict(dataset=dataset),
            test_pipeline=pipeline[:2] + pipeline[3:],
        )
    )
    config.dump(tmp_path / "config.py")
    config.model.backbone.init_cfg = None
    model = init_model(config, device="cpu")
    torch.nn.init.constant_(model.decode_head.conv_seg.bias, 0)
    model.decode_head.conv_seg.bias.data[1] = 99.0
    torch.save({"state_dict": model.state_dict(), "meta": {}}, tmp_path / "weights.pth")
    images, classes = predict_images(tmp_path / "config.py", tmp_path / "weights.pth", count=9)
    assert (len(images), classes) == (2, ["sky", "sea"])
    assert np.unique(images[0].image).tolist() == [40]
    assert images[1].image[[0, 3], 19].tolist() == [[1, 1, 1], [200, 10, 90]]
    assert images[1].prediction.shape == images[1].truth.shape == (24, 20)
    assert (images[1].prediction == 1).all()
    assert np.unique(images[1].truth[:12, :10]).tolist() == [255]
    assert np.unique(images[1].truth[12:]).tolist() == [1]
    segmentation_figure(images, classes, "fine-tuned")
