"""BEiT and CAE of MMPretrain with heads that take token ids: losses by value, who sees what."""

import numpy as np
import pytest
import torch
from flops import model_step_flops
from mmpretrain.models.heads import BEiTV1Head, CAEHead
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from mapet_mm.datasets.transforms.masking import BlockwiseMask
from mapet_mm.models import BEiTTokenHead, CAETokenHead, TokenPredictionHead
from mapet_mm.models.target_generators.token_ids import token_ids

ARCH = dict(embed_dims=48, num_layers=2, num_heads=3, feedforward_channels=96)
VOCAB, MASKED = 16, 14
BACKBONE = dict(arch=ARCH, img_size=24, patch_size=4, layer_scale_init_value=0.1)
TOKENS = dict(type="mapet_mm.PrecomputedTokens", vocab_size=VOCAB)


def build_beit() -> torch.nn.Module:
    positions = dict(use_abs_pos_emb=True, use_rel_pos_bias=False, use_shared_rel_pos_bias=False)
    return build(
        type="BEiT",
        backbone=dict(type="BEiTPretrainViT", layer_cfgs=dict(bias=True), **positions, **BACKBONE),
        head=dict(type="mapet_mm.BEiTTokenHead", embed_dims=48, vocab_size=VOCAB),
    )


def build_cae(width: int = 32, type: str = "mapet_mm.ProjectedCAE") -> torch.nn.Module:
    neck = dict(
        type="mapet_mm.ProjectedCAENeck",
        encoder_dims=48,
        embed_dims=width,
        num_heads=2,
        regressor_depth=1,
        decoder_depth=1,
        layer_scale_init_value=0.1,
        mask_tokens_num=MASKED,
        num_classes=VOCAB,
    )
    head = dict(type="mapet_mm.CAETokenHead", loss=dict(type="CAELoss", lambd=2))
    backbone = dict(type="CAEPretrainViT", bias=True, **BACKBONE)
    return build(type=type, backbone=backbone, neck=neck, head=head)


def build(**config) -> torch.nn.Module:
    model = MODELS.build(dict(config, target_generator=TOKENS))
    model.init_weights()
    return model


def batch(size: int = 3) -> tuple[torch.Tensor, torch.Tensor, list[DataSample]]:
    np.random.seed(0)
    transform = BlockwiseMask(6, num_masking_patches=MASKED, min_num_patches=3)
    samples = [DataSample().set_mask(transform({})["mask"]) for _ in range(size)]
    return torch.randn(size, 3, 24, 24), torch.randint(VOCAB, (size, 6, 6)), samples


def masks_of(samples: list[DataSample]) -> torch.Tensor:
    return torch.stack([sample.mask for sample in samples])  # B 6 6


def one_hot_logits(tokens: torch.Tensor) -> torch.Tensor:
    """(B, H, W) ids as the logits that DALL-E would give, (B, V, H, W)."""
    return F.one_hot(tokens, VOCAB).permute(0, 3, 1, 2).float()


def test_token_ids_takes_ids_and_logits_and_nothing_else():
    """The id of logits that are not finite is -1, not the place of a NaN."""
    tokens = torch.randint(VOCAB, (2, 3, 4))
    for outputs in (tokens.flatten(1), tokens.flatten(1).int(), one_hot_logits(tokens)):
        ids = token_ids(outputs)
        assert ids.dtype == torch.int64
        assert torch.equal(ids, tokens.flatten(1))
    logits = one_hot_logits(tokens)
    logits[1, 2, 0, 3], logits[0, 1, 2, 2] = torch.nan, torch.inf
    tokens[1, 0, 3] = tokens[0, 2, 2] = -1
    assert torch.equal(token_ids(logits), tokens.flatten(1))
    for outputs in (torch.zeros(2, 36), torch.zeros(2, 6, 6, dtype=torch.long)):
        with pytest.raises(ValueError, match="expected token ids"):
            token_ids(outputs)


def test_beit_head_equals_mmpretrains_on_the_same_tokens():
    """Ids give the loss that MMPretrain's head gives for the logits whose maximum they are."""
    ours = BEiTTokenHead(embed_dims=48, vocab_size=VOCAB)
    theirs = BEiTV1Head(embed_dims=48, num_embed=VOCAB, loss=dict(type="CrossEntropyLoss"))
    theirs.cls_head.load_state_dict(ours.projection.state_dict())
    _, tokens, samples = batch()
    latents, mask = torch.randn(3, 37, 48), masks_of(samples)
    expected = theirs.loss(latents, one_hot_logits(tokens), mask)
    for targets in (tokens.flatten(1), one_hot_logits(tokens)):
        torch.testing.assert_close(ours.loss(latents, targets, mask), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_masked", [MASKED, MASKED + 3, 36, None])
def test_beit_head_computes_the_masked_patches_whatever_their_bound(max_masked):
    exact = BEiTTokenHead(embed_dims=48, vocab_size=VOCAB)
    head = BEiTTokenHead(embed_dims=48, vocab_size=VOCAB, max_masked=max_masked)
    head.load_state_dict(exact.state_dict())
    _, tokens, samples = batch()
    mask, latents = masks_of(samples), torch.randn(3, 37, 48, requires_grad=True)
    mask[0, mask[0].nonzero()[0, 0]] = 0  # a row of one image's mask is not masked
    masked = mask.flatten(1).bool()
    logits = exact(latents[:, 1:][masked])
    expected = F.cross_entropy(logits, tokens.flatten(1)[masked])
    loss = head.loss(latents, tokens.flatten(1), mask)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(loss, [latents, *head.parameters()]),
        torch.autograd.grad(expected, [latents, *exact.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_beit_head_refuses_more_masked_patches_than_its_bound():
    head = BEiTTokenHead(embed_dims=48, vocab_size=VOCAB, max_masked=MASKED - 1)
    _, tokens, samples = batch()
    for _ in range(2):
        with pytest.raises(ValueError, match="max_masked=13"):
            head.loss(torch.randn(3, 37, 48), tokens.flatten(1), masks_of(samples))


def test_cae_head_equals_mmpretrains_on_the_same_tokens():
    ours, theirs = (head(loss=dict(type="CAELoss", lambd=2)) for head in (CAETokenHead, CAEHead))
    _, tokens, samples = batch()
    mask = masks_of(samples).flatten(1).bool()
    logits, latents, targets = torch.randn(3 * MASKED, VOCAB), torch.randn(3, 14, 48), torch.randn(3, 14, 48)
    expected = theirs.loss(logits, one_hot_logits(tokens), latents, targets, mask)
    actual = ours.loss(logits, tokens.flatten(1), latents, targets, mask)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_an_image_without_tokens_makes_losses_nan_and_no_other_images_figures():
    """Not a crash, on a GPU of the whole process: NonFiniteHook leaves the step out."""
    _, tokens, samples = batch()
    mask, latents = masks_of(samples), torch.randn(3, 37, 48)
    tokens = tokens.flatten(1)
    tokens[1] = -1
    head = TokenPredictionHead(48, VOCAB)
    loss = head.loss(latents[:, 1:], tokens)["loss"]
    assert loss.isnan()
    assert all(gradient.isnan().all() for gradient in torch.autograd.grad(loss, [*head.parameters()]))
    losses, accuracies = head.evaluate(latents[:, 1:], tokens)
    assert losses.isnan().tolist() == [False, True, False]
    assert accuracies[1] == 0
    assert head.loss(latents[[0, 2], 1:], tokens[[0, 2]])["loss"].isfinite()
    assert BEiTTokenHead(embed_dims=48, vocab_size=VOCAB).loss(latents, tokens, mask).isnan()
    cae, masked = CAETokenHead(loss=dict(type="CAELoss", lambd=2)), mask.flatten(1).bool()
    logits, predicted = torch.randn(3 * MASKED, VOCAB), torch.randn(3, 14, 48)
    main, align = cae.loss(logits, tokens, predicted, predicted, masked)
    assert (main.isnan(), align.isnan()) == (True, False)


def test_cae_of_the_encoders_width_is_mmpretrains():
    ours, theirs = build_cae(48), build_cae(48, type="CAE")
    theirs.load_state_dict(ours.state_dict())
    images, tokens, samples = batch()
    for model in (ours, theirs):
        model.loss([images, tokens], samples)["loss"].backward()
    gradients = [{name: p.grad for name, p in model.named_parameters()} for model in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_cae_positions_are_sines_and_cosines_at_the_necks_width():
    """Fixed: of row and column, with wavelengths from 2 pi to almost 2 pi 10,000; not in the checkpoint."""
    model = build_cae(32)
    place = torch.arange(36)
    waves = 10000 ** -(torch.arange(8) / 8)
    row, column = ((at[:, None] * waves) for at in (place // 6, place % 6))
    expected = torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], 1)
    torch.testing.assert_close(model.neck_positions[0], expected, rtol=0, atol=1e-6)
    assert not model.neck_positions.requires_grad
    assert "neck_positions" not in model.state_dict()


def losses_by_hand(model, images, tokens, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy and alignment, image by image; the true latents are constants."""
    project, positions = model.neck.encoder_to_neck, model.neck_positions[0]
    logits, predicted, true = [], [], []
    for image, hidden in zip(images, mask, strict=True):
        visible = project(model.backbone(image[None], hidden[None])[:, 1:])
        one, latents = model.neck(visible, positions[hidden][None], positions[~hidden][None])
        logits.append(one[0])
        predicted.append(latents[0])
        with torch.no_grad():
            true.append(project(model.teacher(image[None], ~hidden[None])[0, 1:]))
    assert predicted[0].shape == (MASKED, model.neck.embed_dim)
    main = F.cross_entropy(torch.cat(logits), tokens.flatten(1)[mask])
    return main, 2 * F.mse_loss(torch.stack(predicted), torch.stack(true))


def test_cae_aligns_at_the_necks_width():
    model = build_cae(32)
    images, tokens, samples = batch()
    weight = model.neck.encoder_to_neck[0].weight
    losses = model.loss([images, tokens], samples)
    main, align = losses_by_hand(model, images, tokens, masks_of(samples).flatten(1).bool())
    torch.testing.assert_close(losses["main"], main, rtol=1e-5, atol=0)
    torch.testing.assert_close(losses["align"], align, rtol=1e-5, atol=0)
    torch.testing.assert_close(losses["loss"], main + align, rtol=1e-5, atol=0)
    (actual,), (expected,) = (torch.autograd.grad(loss, weight) for loss in (losses["align"], align))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("make", [build_beit, build_cae, lambda: build_cae(width=48)])
def test_every_trained_parameter_gets_a_gradient(make):
    images, tokens, samples = batch()
    model = make()
    model.loss([images, tokens], samples)["loss"].backward()
    without = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any())
    ]
    assert not without


def test_the_floor_of_beits_step_is_what_it_computes_less_rows_that_predict_nothing():
    model = build_beit().train()
    model.head.max_masked = MASKED
    images, tokens, samples = batch(1)
    with FlopCounterMode(display=False) as counter:
        model.loss([images, tokens], samples)["loss"].backward()
    unused = 37 - MASKED  # rows of the last layer: projections and MLP, scores and sums
    rows = 3 * unused * 2 * (2 * 48 * (48 + 96) + 2 * 37 * 48)
    assert counter.get_total_flops() == model_step_flops(model) + rows
