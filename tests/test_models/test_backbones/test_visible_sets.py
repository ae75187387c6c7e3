"""Which patches MIM and PIM see and predict, by what changes when pixels or the mask token do."""

import pytest
import torch

from mapet_mm.models import OBJECTIVES, MaPeTPretrainViT

ARCH = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=48)


def build(objective: str, cutting_point: int, img_size: int = 20, **options) -> MaPeTPretrainViT:
    backbone = MaPeTPretrainViT(ARCH, img_size, 4, cutting_point, objective, **options)
    backbone.init_weights()
    return backbone.eval()


@torch.no_grad()
def groups_after_all_layers(
    backbone: MaPeTPretrainViT, images: torch.Tensor, permutation: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The whole layout after the last layer, by group."""
    tokens = backbone.embed(images, permutation)
    for layer in backbone.layers:
        tokens = layer.two_streams(tokens, backbone.layout)
    return {group: tokens[:, backbone.layout.rows_of(group)] for group in backbone.objective.groups}


def test_mim_masks_75_patches_at_random():
    """At 14 x 14 patches and c = 122: 75 masked, each patch and each pair as often as any other."""
    backbone = build("mim", cutting_point=122, img_size=56)
    drawn = backbone.sample_permutation(4000, "cpu", torch.Generator().manual_seed(0))
    masked = torch.zeros(4000, 197).scatter_(1, drawn[:, 122:], 1.0)[:, 1:]
    assert (masked.sum(1) == 75).all()
    share = masked.mean(0)
    # Five standard deviations of a share of 4,000 draws.
    assert (share - 75 / 196).abs().max() < 5 * (0.4 * 0.6 / 4000) ** 0.5
    pairs = (masked.T @ masked / 4000).fill_diagonal_(0)
    expected = 75 * 74 / (196 * 195)
    assert (pairs[pairs > 0] - expected).abs().max() < 6 * (expected * (1 - expected) / 4000) ** 0.5


def test_pim_never_sees_a_mask_token():
    """Context and content stream do not depend on it at all; MaPeT's content stream does."""
    images = torch.randn(2, 3, 20, 20)
    for name, sees_masks in (("pim", False), ("mapet", True)):
        backbone = build(name, cutting_point=8)
        permutation = backbone.sample_permutation(2, "cpu")
        before = groups_after_all_layers(backbone, images, permutation)
        with torch.no_grad():
            backbone.mask_token.add_(1.0)
        after = groups_after_all_layers(backbone, images, permutation)
        for group in "CT":
            assert torch.equal(before[group], after[group]) != sees_masks, (name, group)
        # The query stream starts as mask token plus position.
        assert not torch.equal(before["Q"], after["Q"])


def test_mim_sees_no_pixel_of_a_masked_patch_and_all_others():
    backbone = build("mim", cutting_point=8)
    images = torch.randn(1, 3, 20, 20)
    permutation = backbone.sample_permutation(1, "cpu")
    with torch.no_grad():
        before, _ = backbone(images, permutation)
        for place in range(1, 26):
            patch = permutation[0, place].item() - 1
            row, column = 4 * (patch // 5), 4 * (patch % 5)
            changed = images.clone()
            changed[:, :, row : row + 4, column : column + 4] += 1.0
            after, _ = backbone(changed, permutation)
            assert torch.equal(before, after) == (place >= 8), place


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_prediction_depends_on_its_own_patch_or_on_one_behind_it(objective):
    """Of every objective that there is, through all layers: what it is to predict it has not seen.

    The context, whose tokens a context loss predicts, sees no patch after the cutting point.
    """
    backbone = build(objective, cutting_point=8)
    images = torch.randn(1, 3, 20, 20)
    permutation = backbone.sample_permutation(1, "cpu")
    with torch.no_grad():
        before, _ = backbone(images, permutation, with_context=True)
        for target in range(backbone.num_targets):
            row, column = divmod(permutation[0, 8 + target].item() - 1, 5)
            changed = images.clone()
            changed[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1.0
            after, _ = backbone(changed, permutation, with_context=True)
            num_unchanged = 7 + target + 1  # of 8 tokens of context, one is the class token
            assert torch.equal(before[:, :num_unchanged], after[:, :num_unchanged]), target
