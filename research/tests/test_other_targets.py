"""What tables train beside the suite's objectives: losses against PyTorch's own, and windows of an image."""

import lab.other_targets  # registers its algorithms
import lab.windows  # noqa: F401
import pytest
import torch
from torch.nn import functional as F

from mapet_mm.registry import MODELS

WIDTH, VOCAB, GRID = 24, 11, 2


def test_beits_context_loss_is_the_cross_entropy_of_the_patches_that_are_not_masked():
    torch.manual_seed(0)
    head = dict(type="mapet_mm.BEiTContextHead", embed_dims=WIDTH, vocab_size=VOCAB, max_masked=6)
    head = MODELS.build(dict(head, context_loss=0.25))
    latents = torch.randn(3, 10, WIDTH)  # of the class token and 9 patches
    tokens = torch.randint(VOCAB, (3, 9))
    masked = torch.rand(3, 9).argsort(1) < torch.tensor([[6], [4], [5]])

    logits = head.projection(latents[:, 1:])
    expected = F.cross_entropy(logits[masked], tokens[masked])
    expected = expected + 0.25 * F.cross_entropy(logits[~masked], tokens[~masked])
    loss = head.loss(latents, tokens, masked.view(3, 3, 3))
    torch.testing.assert_close(loss, expected)


@pytest.fixture
def regression():
    """A `VisibleFeatureRegression` on a tower of random weights; 2 of 4 patches are visible."""
    torch.manual_seed(0)
    arch = dict(embed_dims=WIDTH, num_layers=2, num_heads=3, feedforward_channels=48)
    vit = dict(type="mapet_mm.MaPeTPretrainViT", arch=arch, img_size=8, patch_size=4, objective="context")
    tower = dict(image_size=GRID * 16, layers=[1, 1, 1, 1], width=8)
    return MODELS.build(
        dict(
            type="mapet_mm.VisibleFeatureRegression",
            backbone=dict(vit, cutting_point=3),
            neck=dict(type="mapet_mm.CrossAttentionPredictor", embed_dims=WIDTH, num_layers=2, num_heads=3),
            head=dict(type="mapet_mm.FeatureRegressionHead", embed_dims=WIDTH, feature_dims=256),
            target_generator=dict(
                type="mapet_mm.KCLIPFeatures",
                clip_model=tower,
                pretrained=dict(type="random", seed=0),
                stride=16,
            ),
            context_loss=0.5,
        )
    )


def test_features_are_regressed_at_their_own_patches(regression):
    views = [torch.randn(2, 3, 8, 8), torch.randn(2, 3, 32, 32)]
    permutation = torch.tensor([[0, 3, 1, 4, 2], [0, 2, 4, 3, 1]])
    features = regression.target_generator.features(views[1])
    torch.testing.assert_close(
        regression.target_tokens(views[1], permutation),
        torch.stack([features[0, [3, 1]], features[1, [2, 0]]]),
    )
    torch.testing.assert_close(
        regression.target_tokens(views[1], permutation, with_context=True)[1], features[1, [1, 3, 2, 0]]
    )


def test_a_regression_learns_with_all_its_parameters(regression):
    regression.train()
    views = [torch.randn(2, 3, 8, 8), torch.randn(2, 3, 32, 32)]
    losses = regression(views, mode="loss")
    assert losses["loss"].item() == pytest.approx(losses["target_nats"] + 0.5 * losses["context_nats"])
    losses["loss"].backward()
    for name, parameter in regression.named_parameters():
        is_teachers = name.startswith("target_generator.")
        assert (parameter.grad is None) == is_teachers, name


def test_a_permuted_predictor_sees_the_targets_before_a_target_and_no_later_one():
    torch.manual_seed(0)
    vit = dict(type="mapet_mm.MaPeTPretrainViT", img_size=8, patch_size=4, cutting_point=2)
    arch = dict(embed_dims=WIDTH, num_layers=2, num_heads=3, feedforward_channels=48)
    model = MODELS.build(
        dict(
            type="mapet_mm.VisibleMaPeT",
            backbone=dict(vit, arch=arch, objective="context"),
            neck=dict(vit, arch=arch, objective="mapet"),
            head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=WIDTH, vocab_size=VOCAB),
            target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=VOCAB),
        )
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    images = torch.randn(1, 3, 8, 8).requires_grad_()
    permutation = torch.tensor([[0, 3, 1, 4, 2]])  # sees the lower left patch, then predicts three
    latents, _ = model.latents(images, permutation)
    seen = []
    for place in range(3):
        (gradient,) = torch.autograd.grad(latents[0, place].square().sum(), images, retain_graph=True)
        # B C (H h) (W w) -> the patches that it depends on
        of_patches = gradient[0].unflatten(1, (2, 4)).unflatten(3, (2, 4)).abs().sum((0, 2, 4)).flatten()
        seen.append({place + 1 for place in of_patches.nonzero().flatten().tolist()})
    assert seen == [{3}, {3, 1}, {3, 1, 4}]


def test_a_perfect_regression_has_no_loss_and_explains_all():
    head = MODELS.build(dict(type="mapet_mm.FeatureRegressionHead", embed_dims=4, feature_dims=4))
    torch.nn.init.eye_(head.projection.weight)
    torch.nn.init.zeros_(head.projection.bias)
    features = torch.randn(2, 3, 4)
    losses = head.loss(F.layer_norm(features, (4,)), features)
    assert losses["loss"].item() == pytest.approx(0, abs=1e-9)
    assert losses["token_accuracy"].item() == pytest.approx(100)


def test_a_window_has_its_patch_in_its_middle_and_repeats_the_edge():
    encoder = MODELS.build(dict(type="mapet_mm.WindowPixels", window_size=6, patch_size=4))
    images = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8)
    windows = encoder(images).unflatten(2, (3, 6, 6))
    assert windows.shape == (2, 4, 3, 6, 6)
    torch.testing.assert_close(windows[:, 2, :, 1:5, 1:5], images[:, :, 4:8, 0:4])  # the lower left patch
    torch.testing.assert_close(windows[:, 0, :, 0, 1:], images[:, :, 0, :5])  # above the image
