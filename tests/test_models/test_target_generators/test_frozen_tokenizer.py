"""MMPretrain's VQ-KD and DALL-E, frozen: the same tokens as their own, and never learning."""

import pytest
import torch
from mmpretrain.models.selfsup.beit import VQKD
from mmpretrain.structures import DataSample
from small_tokenizers import ARCH, DALLE
from small_tokenizers import vqkd as vqkd_config
from torch import nn

from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import FrozenTokenizer, TokenizerError

VQKD_CONFIG = vqkd_config(24, quantize_kmeans_init=False)


@pytest.fixture
def vqkd(tmp_path) -> tuple[VQKD, dict]:
    """MMPretrain's own tokenizer, and a config that loads its weights from a file with more in it."""
    theirs = MODELS.build(VQKD_CONFIG).eval()
    torch.save({"state_dict": {**theirs.state_dict(), "decoder.weight": torch.ones(2)}}, tmp_path / "w.pth")
    return theirs, dict(VQKD_CONFIG, init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "w.pth")))


def test_vqkd_gives_its_own_tokens(vqkd):
    theirs, config = vqkd
    ours = FrozenTokenizer(config, image_size=24, vocab_size=16, random_seed=0)  # of which nothing is seen
    images = torch.randn(3, 3, 24, 24)
    tokens = ours(images)
    assert torch.equal(tokens, theirs(images))
    assert (tokens.dtype, tokens.shape, ours.grid) == (torch.int64, (3, 36), (6, 6))
    assert len(tokens.unique()) > 3


def test_dalle_gives_the_maxima_of_its_own_logits(tmp_path):
    theirs = MODELS.build(DALLE)
    torch.save(theirs.state_dict(), tmp_path / "dalle.pth")
    pretrained = dict(type="Pretrained", checkpoint=str(tmp_path / "dalle.pth"))
    ours = FrozenTokenizer(dict(DALLE, init_cfg=pretrained), image_size=48, vocab_size=16)
    images = torch.rand(2, 3, 48, 48)
    with torch.no_grad():
        expected = theirs(images).argmax(1).flatten(1)
    assert torch.equal(ours(images), expected)
    assert ours.grid == (6, 6)


def test_a_model_in_training_leaves_the_codebook_alone(vqkd):
    """MMPretrain's VQ-KD alone would move it at every batch of the training."""
    theirs, config = vqkd
    ours = FrozenTokenizer(config, image_size=24, vocab_size=16)
    images = torch.randn(8, 3, 24, 24)
    before = ours.network.quantize.embedding.weight.clone()
    nn.ModuleDict({"target_generator": ours}).train()["target_generator"](images)
    assert torch.equal(ours.network.quantize.embedding.weight, before)
    theirs.train()
    theirs(images)
    assert not torch.equal(theirs.quantize.embedding.weight, before)


def test_digest_is_that_of_the_weights_and_the_configuration():
    one, same, other = (FrozenTokenizer(VQKD_CONFIG, 24, 16, random_seed=seed) for seed in (0, 0, 1))
    same(torch.randn(2, 3, 24, 24))  # updates VQ-KD's usage statistics
    assert one.digest == same.digest != other.digest
    assert FrozenTokenizer(VQKD_CONFIG, 24, 17, random_seed=0).digest != one.digest
    assert FrozenTokenizer(dict(VQKD_CONFIG, type=VQKD), 24, 16, random_seed=0).digest == one.digest


def test_a_codebook_that_the_first_batch_would_make_is_refused(vqkd):
    file = vqkd[1]["init_cfg"]["checkpoint"]
    weights = torch.load(file)["state_dict"]
    weights["quantize.embedding.initted"].zero_()
    torch.save(weights, file)
    with pytest.raises(TokenizerError, match="not initialised"):
        FrozenTokenizer(vqkd[1], image_size=24, vocab_size=16)


@pytest.mark.parametrize(("config", "size"), [(VQKD_CONFIG, 24), (DALLE, 48)], ids=["VQ-KD", "DALL-E"])
def test_they_train_mmpretrains_beit_on_the_fly(config, size):
    """On a second view of the images."""
    positions = dict(use_abs_pos_emb=True, use_shared_rel_pos_bias=False)
    sizes = dict(arch=ARCH, img_size=24, patch_size=4, layer_cfgs=dict(bias=True))
    backbone = dict(type="BEiTPretrainViT", **sizes, **positions)
    head = dict(type="mapet_mm.BEiTTokenHead", embed_dims=24, vocab_size=16)
    options = dict(tokenizer=config, image_size=size, vocab_size=16, random_seed=0)
    generator = dict(type="mapet_mm.FrozenTokenizer", **options)
    model = MODELS.build(dict(type="BEiT", backbone=backbone, head=head, target_generator=generator))
    model.init_weights()
    model.train()
    samples = [DataSample().set_mask(torch.eye(6).long()) for _ in range(2)]
    inputs = [torch.randn(2, 3, 24, 24), torch.randn(2, 3, size, size)]
    loss = model(inputs, samples, mode="loss")["loss"]
    assert loss.item() == pytest.approx(torch.tensor(16.0).log().item(), abs=0.5)
    loss.backward()
    assert not [name for name in model.state_dict() if name.startswith("target_generator")]
