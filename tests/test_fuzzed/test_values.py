"""Masks, permutations, losses and transforms of any shape equal what one would write down by eye."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_two_stream import two_stream_forward
from torch.nn import functional as F

from mapet_mm.datasets.transforms.masking import BlockwiseMask
from mapet_mm.datasets.transforms.token_grid import RandomCropTokenGrid, RandomFlipTokenGrid
from mapet_mm.models import MaPeTPretrainViT
from mapet_mm.models.losses.linear_cross_entropy import linear_cross_entropy
from mapet_mm.models.utils.permutation import seeded_permutations

side = st.integers(1, 5)


@given(st.data(), side, side, st.sampled_from(["mapet", "pim", "mim"]), st.integers(1, 5), st.integers(1, 4))
def test_two_streams_of_any_shape_equal_the_naive_ones(data, rows, columns, objective, heads, batch):
    """Any grid and cutting point, odd numbers of heads and dimensions, one image or several."""
    num_tokens = rows * columns + 1
    cutting_point = data.draw(st.integers(1, num_tokens - 1))
    width, depth = heads * data.draw(st.integers(1, 7)), data.draw(st.integers(1, 3))
    arch = dict(embed_dims=width, num_layers=depth, num_heads=heads, feedforward_channels=width + 3)
    patch = data.draw(st.integers(1, 3))
    size = (rows * patch, columns * patch)
    vit = MaPeTPretrainViT(arch, size, patch, cutting_point, objective)
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    images, permutation = torch.randn(batch, 3, *size), vit.sample_permutation(batch, "cpu")
    latents, _ = vit(images, permutation)
    reference, _ = two_stream_forward(
        dict(vit.named_parameters()),
        images,
        permutation,
        cutting_point=cutting_point,
        objective=objective,
        patch_size=patch,
        num_heads=heads,
        drop_rates=[0.0] * depth,
    )
    raster = permutation[:, cutting_point:].argsort(1)[..., None].expand_as(latents)
    torch.testing.assert_close(latents.gather(1, raster), reference, rtol=1e-3, atol=1e-4)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20), st.integers(2, 300))
def test_permutations_of_any_seed_are_permutations(seeds, num_tokens):
    permutations = seeded_permutations(torch.tensor(seeds), num_tokens)
    assert torch.equal(permutations.sort(1).values, torch.arange(num_tokens).expand(len(seeds), -1))
    assert permutations[:, 0].eq(0).all()
    assert torch.equal(seeded_permutations(torch.tensor(seeds[-1:]), num_tokens), permutations[-1:])


@given(st.data(), st.integers(1, 40), st.integers(1, 9), st.integers(1, 30), st.integers(1, 60))
def test_losses_in_blocks_of_any_size_equal_pytorchs(data, rows, width, classes, elements):
    latents, weight = torch.randn(rows, width, requires_grad=True), torch.randn(classes, width)
    weight.requires_grad_()
    bias, targets = torch.randn(classes, requires_grad=True), torch.randint(classes, (rows,))
    flags = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows).filter(any))
    counted = torch.tensor(flags) if data.draw(st.booleans()) else None
    predictions = torch.empty_like(targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mapet_mm.models.losses.linear_cross_entropy.BLOCK_ELEMENTS", {"cpu": elements})
        loss, hits = linear_cross_entropy(latents, weight, bias, targets, counted, predictions)
    logits = latents @ weight.T + bias
    kept = slice(None) if counted is None else counted
    expected = F.cross_entropy(logits[kept], targets[kept])
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(predictions, logits.argmax(1))
    assert hits == (logits.argmax(1) == targets)[kept].sum()
    inputs = (latents, weight, bias)
    for one, two in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@given(st.data(), side, side, st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_crops_and_flips_keep_each_token_on_its_patch(data, rows, columns, patch, seed):
    """Each patch of the image holds its token's number in all its pixels."""
    tokens = np.arange(rows * columns).reshape(rows, columns)
    image = np.repeat(np.repeat(tokens, patch, 0), patch, 1)[..., None].astype(np.float32)
    crop = (data.draw(side) * patch, data.draw(side) * patch)
    np.random.seed(seed)
    results = RandomFlipTokenGrid(data.draw(st.sampled_from([0.0, 0.5, 1.0])))(
        dict(img=image, token_grid=tokens)
    )
    if crop[0] > rows * patch or crop[1] > columns * patch:
        with pytest.raises(ValueError, match="is larger than the image"):
            RandomCropTokenGrid(crop, patch)(results)
        return
    results = RandomCropTokenGrid(crop, patch)(results)
    grid = results["token_grid"]
    assert results["img"].shape[:2] == crop
    expected = np.repeat(np.repeat(grid, patch, 0), patch, 1)
    same = results["img"][..., 0].reshape(*grid.shape, -1) if patch == 1 else results["img"][..., 0]
    assert np.array_equal(same.reshape(crop), expected)


@given(st.data(), st.integers(1, 16), st.integers(1, 16), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_masks_hide_as_many_patches_as_asked_for(data, rows, columns, smallest, seed):
    """In grids of any shape, also where no block fits into what is left: never a hang."""
    number = data.draw(st.integers(0, rows * columns + 1))
    if not 0 < number < rows * columns:
        with pytest.raises(ValueError, match="num_masking_patches"):
            BlockwiseMask((rows, columns), number, smallest)
        return
    np.random.seed(seed)
    mask = BlockwiseMask((rows, columns), number, smallest)({})["mask"]
    assert mask.shape == (rows, columns)
    assert mask.sum() == number
    assert set(np.unique(mask)) <= {0, 1}
