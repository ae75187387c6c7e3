"""Orders of the patches that follow from their tokens."""

import pytest
import torch
from lab.orders import OrderedMaPeT

from mapet_mm.structures import TokenStore
from mapet_mm.tokenizers import Codebook

VIT = dict(type="mapet_mm.MaPeTPretrainViT", arch="deit-tiny", img_size=32, cutting_point=2)


@pytest.mark.parametrize(
    ("order", "share"), [("rare first", 0.75), ("rare last", 0.25), ("salient first", 0.75)]
)
def test_patches_are_drawn_by_their_tokens(tmp_path, order, share):
    """Of three frequent patches and a rare one, which is three times as far from their mean."""
    Codebook([[0.0, 0.0], [4.0, 0.0]]).save(tmp_path / "codebook.safetensors")
    store = TokenStore.create(tmp_path / "store", names=["a"], grid=(2, 2), vocab_size=2, tokenizer="none")
    store.write(rows=[0], grids=[[[0, 0], [0, 1]]])
    model = OrderedMaPeT(
        order=order,
        store=str(tmp_path / "store"),
        codebook=str(tmp_path / "codebook.safetensors"),
        backbone=VIT,
        head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=192, vocab_size=2),
        target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=2),
    )
    torch.manual_seed(0)
    # A frequent patch and one whose token has a third of its frequency: first with 1/4 and 3/4. Standardised,
    # two distances differ as the logarithms of two frequencies do.
    ranks = model.ranks(torch.tensor([[0, 1]]).repeat(20_000, 1))
    assert (ranks[:, 1] < ranks[:, 0]).float().mean() == pytest.approx(share, abs=0.01)
    losses = model([torch.randn(2, 3, 32, 32), torch.zeros(2, 2, 2, dtype=torch.long)], mode="loss")
    assert losses["loss"].isfinite()
