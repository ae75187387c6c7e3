"""Networks and batches of images with other bands than red, green and blue."""

import numpy as np
import pytest
import torch
from mmpretrain.structures import DataSample

from mapet_mm.models import MaPeTPretrainTIMM, MaPeTPretrainViT, MaPeTViT
from mapet_mm.models.data_preprocessors.color_jitter import BatchColorJitter
from mapet_mm.models.data_preprocessors.data_preprocessor import TokenGridDataPreprocessor
from mapet_mm.registry import MODELS

ARCH = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=48)


@pytest.mark.parametrize("num_bands", [1, 2, 4, 7])
def test_bands_are_normalised_by_their_own_statistics_and_jittered(num_bands):
    mean = [10.0 * (band + 1) for band in range(num_bands)]
    std = [2.0 + band for band in range(num_bands)]
    jitter = dict(brightness=0.4, contrast=0.4)
    preprocessor = TokenGridDataPreprocessor(mean=mean, std=std, color_jitter=jitter)
    images = torch.randint(256, (2, num_bands, 8, 8), dtype=torch.uint8)
    samples = [DataSample(token_grid=np.zeros((2, 2), np.uint16)) for _ in images]
    batch = dict(inputs=images, data_samples=samples)
    normalised, _ = preprocessor(batch)["inputs"]
    expected = (images.float() - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(normalised, expected)
    jittered, _ = preprocessor(batch, training=True)["inputs"]
    assert jittered.shape == images.shape
    assert not torch.allclose(jittered, expected)


def test_brightness_and_contrast_mean_the_same_for_any_bands_and_saturation_is_of_rgb():
    """Grey images jitter alike in three bands as RGB and in four."""
    grey = 255 * torch.rand(8, 1, 6, 6)
    jitter = BatchColorJitter(brightness=0.4, contrast=0.4)
    seeds = torch.arange(8)
    of_rgb = jitter(grey.expand(-1, 3, -1, -1), seeds)
    of_four = jitter(grey.expand(-1, 4, -1, -1), seeds)
    torch.testing.assert_close(of_four[:, :3], of_rgb, rtol=0, atol=0.05)  # RGB's weights sum to 0.9999
    with pytest.raises(ValueError, match="saturation is of RGB, not of 4 bands"):
        BatchColorJitter(saturation=0.1)(grey.expand(-1, 4, -1, -1), seeds)


def own(num_bands: int) -> torch.nn.Module:
    return MaPeTPretrainViT(ARCH, img_size=16, patch_size=8, cutting_point=2, in_channels=num_bands)


def plain(num_bands: int) -> torch.nn.Module:
    return MaPeTViT(ARCH, img_size=16, patch_size=8, in_channels=num_bands)


def of_timm(num_bands: int) -> torch.nn.Module:
    sizes = dict(img_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=3)
    return MaPeTPretrainTIMM("vit_tiny_patch16_224", cutting_point=2, in_channels=num_bands, **sizes)


def backbone_of_timm(num_bands: int) -> torch.nn.Module:
    sizes = dict(img_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=3)
    return MODELS.build(
        dict(type="mapet_mm.TIMMViT", model_name="vit_tiny_patch16_224", in_channels=num_bands, **sizes)
    )


@pytest.mark.parametrize("num_bands", [1, 2, 4])
@pytest.mark.parametrize("build", [own, plain, of_timm, backbone_of_timm])
def test_a_start_of_rgb_answers_bands_that_are_alike_as_grey(build, num_bands):
    start, continued = build(3).eval(), build(num_bands).eval()
    continued.load_state_dict(start.state_dict())
    if hasattr(start, "timm_model"):  # an evaluation loads the network inside
        build(num_bands).timm_model.load_state_dict(start.timm_model.state_dict())
    grey = torch.randn(2, 1, 16, 16)
    with torch.no_grad():
        expected = start(grey.expand(-1, 3, -1, -1)) if build is plain else None
        names = [
            name
            for name in start.state_dict()
            if name.endswith(("projection.weight", "patch_embed.proj.weight"))
        ]
        (name,) = names
        weight = start.state_dict()[name]
        given = continued.state_dict()[name]
    assert given.shape[1] == num_bands
    torch.testing.assert_close(given, weight.mean(1, keepdim=True).expand_as(given) * 3 / num_bands)
    if expected is not None:
        torch.testing.assert_close(
            continued(grey.expand(-1, num_bands, -1, -1)), expected, rtol=1e-4, atol=1e-5
        )


def test_other_bands_than_the_starts_are_refused():
    with pytest.raises(ValueError, match="4 bands, the backbone's 2"):
        plain(2).load_state_dict(plain(4).state_dict())
