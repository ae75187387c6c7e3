"""Views of test-time augmentation lie where the image does, at any scale."""

import numpy as np
import pytest
import torch
from config_building import CONFIGS, in_scope, load
from mmcv.cnn.bricks.transformer import PatchEmbed
from mmseg.registry import TRANSFORMS
from PIL import Image
from torch.nn import functional as F

RECIPE = next(path for path in CONFIGS if path.name.startswith("mapet_vit-tiny-p16_upernet"))


def answered(image: torch.Tensor) -> torch.Tensor:
    """Brightness by patch, spread over the image as MMSegmentation spreads a ViT's logits."""
    embed = PatchEmbed(in_channels=1, embed_dims=1, kernel_size=16, stride=16, padding="corner")
    torch.nn.init.constant_(embed.projection.weight, 1 / 256)
    torch.nn.init.zeros_(embed.projection.bias)
    with torch.no_grad():
        patches, grid = embed(image[None, :1].float())
    return F.interpolate(patches.view(1, 1, *grid), image.shape[1:], mode="bilinear")


@pytest.mark.parametrize("size", [(512, 682), (682, 512), (512, 520), (300, 333)])
def test_an_edge_is_where_it_is_in_the_image(size, tmp_path):
    """In views below the window of 512 pixels; a ViT pads sides that are no whole patches."""
    picture = np.zeros((*size, 3), np.uint8)
    picture[: size[0] * 7 // 8, : size[1] * 7 // 8] = 255
    Image.fromarray(picture).save(tmp_path / "image.png")
    cfg = load(RECIPE)
    load_image, augment = cfg.tta_pipeline
    augment.transforms = [steps for steps in augment.transforms if steps[0].type != "LoadAnnotations"]
    with in_scope(cfg):
        read, views = TRANSFORMS.build(load_image), TRANSFORMS.build(augment)
    found = views(read(dict(img_path=str(tmp_path / "image.png"))))
    checked = 0
    for image, sample in zip(found["inputs"], found["data_samples"], strict=True):
        if max(image.shape) > 512 or sample.flip:  # windows of 512 are whole patches
            continue
        checked += 1
        answer = F.interpolate(answered(image), size, mode="bilinear")[0, 0]
        edges = (answer > 127).sum(0).max().item(), (answer > 127).sum(1).max().item()
        for edge, side in zip(edges, size, strict=True):
            assert edge == pytest.approx(side * 7 / 8, abs=size[0] * 4 / 512)
    assert checked >= 1
