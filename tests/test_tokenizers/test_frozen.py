"""MMPretrain's VQ-KD and DALL-E, frozen: the same tokens as their own, never learning, weights checked."""

from collections.abc import Sequence

import pytest
import torch
from mmpretrain.models.selfsup.beit import VQKD
from mmpretrain.models.selfsup.cae import DALLEEncoder
from mmpretrain.registry import MODELS
from pretended_gpu import pretended_gpu
from torch import nn
from torch.nn import functional as F

from mapet_mm.tokenizers import FrozenTokenizer, TokenizerError

ENCODER = dict(
    arch=dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=48),
    img_size=24,
    patch_size=4,
    final_norm=True,
    out_type="featmap",
    use_abs_pos_emb=True,
    use_rel_pos_bias=False,
    layer_scale_init_value=0.0,
)
VQKD_CONFIG = dict(
    type="VQKD", encoder_config=ENCODER, num_embed=16, embed_dims=8, quantize_kmeans_init=False
)
DALLE_CONFIG = dict(type="DALL-E", n_hid=8, n_blk_per_group=1, vocab_size=16)


def without_type(config: dict) -> dict:
    return {key: value for key, value in config.items() if key != "type"}


@pytest.fixture
def vqkd(tmp_path) -> tuple[VQKD, dict]:
    """MMPretrain's own tokenizer, and a config that loads its weights from a file."""
    theirs = VQKD(**without_type(VQKD_CONFIG)).eval()
    weights = {**theirs.state_dict(), "decoder.weight": torch.ones(2)}
    torch.save({"state_dict": weights}, tmp_path / "vqkd.pth")
    pretrained = dict(type="Pretrained", checkpoint=str(tmp_path / "vqkd.pth"))
    return theirs, dict(VQKD_CONFIG, init_cfg=pretrained)


def test_vqkd_gives_its_own_tokens(vqkd):
    """Of a checkpoint with more in it than the tokenizer needs."""
    theirs, config = vqkd
    ours = FrozenTokenizer(config, image_size=24, vocab_size=16)
    images = torch.randn(3, 3, 24, 24)
    tokens = ours(images)
    assert torch.equal(tokens, theirs(images))
    assert (tokens.dtype, tokens.shape, ours.grid) == (torch.int64, (3, 36), (6, 6))
    assert len(tokens.unique()) > 3


def test_dalle_gives_the_maxima_of_its_own_logits(tmp_path):
    theirs = DALLEEncoder(**without_type(DALLE_CONFIG))
    torch.save(theirs.state_dict(), tmp_path / "dalle.pth")
    pretrained = dict(type="Pretrained", checkpoint=str(tmp_path / "dalle.pth"))
    ours = FrozenTokenizer(dict(DALLE_CONFIG, init_cfg=pretrained), image_size=48, vocab_size=16)
    images = torch.rand(2, 3, 48, 48)
    with torch.no_grad():
        expected = theirs(images).argmax(1).flatten(1)
    assert torch.equal(ours(images), expected)
    assert ours.grid == (6, 6)


def test_a_model_in_training_leaves_the_codebook_alone(vqkd):
    """MMPretrain's VQ-KD alone would move it at every batch of the training."""
    theirs, config = vqkd
    ours = FrozenTokenizer(config, image_size=24, vocab_size=16)
    holder = torch.nn.ModuleDict({"target_generator": ours})
    images = torch.randn(8, 3, 24, 24)
    before, digest = ours.model.quantize.embedding.weight.clone(), ours.digest
    for _ in range(2):
        holder.train()
        ours(images)
    assert torch.equal(ours.model.quantize.embedding.weight, before)
    assert FrozenTokenizer(config, image_size=24, vocab_size=16).digest == digest

    theirs.train()
    theirs(images)
    assert not torch.equal(theirs.quantize.embedding.weight, before)


def test_it_is_in_no_checkpoint_and_follows_its_model(vqkd):
    ours = FrozenTokenizer(vqkd[1], image_size=24, vocab_size=16)
    holder = torch.nn.ModuleDict({"target_generator": ours}).to("meta")
    assert not holder.state_dict()
    assert not list(holder.parameters())
    assert ours.model.quantize.embedding.weight.device.type == "meta"


def test_digest_is_that_of_the_weights_and_the_configuration():
    one, same, other = (FrozenTokenizer(VQKD_CONFIG, 24, 16, random_seed=seed) for seed in (0, 0, 1))
    assert one.digest == same.digest != other.digest
    same(torch.randn(2, 3, 24, 24))  # updates VQ-KD's usage statistics
    assert FrozenTokenizer(VQKD_CONFIG, 24, 16, random_seed=0).digest == one.digest
    assert FrozenTokenizer(VQKD_CONFIG, 24, 17, random_seed=0).digest != one.digest


def test_random_weights_leave_the_callers_generator_alone():
    state = torch.get_rng_state()
    FrozenTokenizer(DALLE_CONFIG, 48, 16, random_seed=0)
    assert torch.equal(state, torch.get_rng_state())


def save(tmp_path, change) -> dict:
    weights = VQKD(**without_type(VQKD_CONFIG)).state_dict()
    change(weights)
    torch.save(weights, tmp_path / "changed.pth")
    return dict(VQKD_CONFIG, init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "changed.pth")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("encoder.pos_embed"),
            r"lacks 1 of the tokenizer's \d+ tensors, `encoder.pos_embed`",
        ),
        (
            lambda w: w.update({"quantize.embedding.weight": torch.zeros(9, 8)}),
            "has other shapes for 1 .*`quantize.embedding.weight` first",
        ),
        (lambda w: w["quantize.embedding.initted"].zero_(), "codebook is not initialised"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message, tmp_path):
    """MMEngine's own loading would leave them random, or make a codebook from the first batch."""
    with pytest.raises(TokenizerError, match=message):
        FrozenTokenizer(save(tmp_path, change), image_size=24, vocab_size=16)


@pytest.mark.parametrize(
    ("init_cfg", "message"),
    [
        (None, "has no weights: give it init_cfg.*or random_seed"),
        (dict(type="Pretrained", checkpoint=""), "`init_cfg.checkpoint` is empty"),
        (dict(type="Pretrained", checkpoint="no/file.pth"), "`no/file.pth` do not exist: give a local file"),
        (
            dict(type="Pretrained", checkpoint="http://127.0.0.1:9/vqkd.pth"),
            r"could not read the tokenizer's weights `http.*URLError.*give a local file",
        ),
    ],
)
def test_weights_that_cannot_be_had_say_what_to_do(init_cfg, message):
    with pytest.raises(TokenizerError, match=message):
        FrozenTokenizer(dict(VQKD_CONFIG, init_cfg=init_cfg), image_size=24, vocab_size=16)


def test_weights_that_nothing_loads_are_refused(vqkd):
    """Before: the tokenizer had the seed's random weights."""
    start = vqkd[1]["init_cfg"]
    nested = dict(VQKD_CONFIG, encoder_config=dict(ENCODER, init_cfg=start))
    message = r"`encoder_config\.init_cfg` of the tokenizer .* nothing loads, and random_seed=0"
    with pytest.raises(TokenizerError, match=message):
        FrozenTokenizer(nested, 24, 16, random_seed=0)
    with pytest.raises(TokenizerError, match=r"`init_cfg` of .* loads nothing: .* into `tokenizer`"):
        FrozenTokenizer(VQKD_CONFIG, 24, 16, random_seed=0, init_cfg=start)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (float("nan"), "encoder.ln1.weight"),
        (float("inf"), "encoder.ln1.weight"),
        (float("nan"), "quantize.embedding.weight"),
    ],
)
def test_weights_of_a_training_that_diverged_are_refused(vqkd, value, name):
    """Before: all tokens were 0, and a verification confirmed them."""
    checkpoint = vqkd[1]["init_cfg"]["checkpoint"]
    weights = torch.load(checkpoint)["state_dict"]
    weights[name].view(-1)[5] = value
    torch.save(weights, checkpoint)
    with pytest.raises(TokenizerError) as error:
        FrozenTokenizer(vqkd[1], image_size=24, vocab_size=16)
    assert str(error.value) == (
        f"checkpoint `{checkpoint}` holds NaN or infinity, in `{name}` first: its training diverged; give "
        "another by `init_cfg.checkpoint`"
    )


def test_a_checkpoint_replaces_the_seed(vqkd):
    """As in configs/micro/vqkd.py, whose weights are random until the tokenizer is trained."""
    theirs, config = vqkd
    ours = FrozenTokenizer(config, 24, 16, random_seed=0)
    images = torch.randn(2, 3, 24, 24)
    assert torch.equal(ours(images), theirs(images))


class GreyLevels(nn.Module):
    """A rule: no parameter, only buffers, if any."""

    def __init__(self, levels: Sequence[float] = ()) -> None:
        super().__init__()
        if levels:
            self.register_buffer("levels", torch.tensor(levels))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        levels = getattr(self, "levels", torch.tensor([-0.5, 0.5], device=images.device))
        return torch.bucketize(F.avg_pool2d(images.mean(1), 4), levels).flatten(1)


@pytest.mark.parametrize("levels", [(), (-0.2, 0.0, 0.2)])
def test_a_tokenizer_may_have_no_parameters(levels):
    """Its seed says that there are no weights to load; it follows a model to a GPU."""
    config = dict(type=GreyLevels, levels=levels)
    tokenizer = FrozenTokenizer(config, image_size=24, vocab_size=4, random_seed=0)
    images = torch.randn(2, 3, 24, 24)
    expected = GreyLevels(levels)(images)
    assert torch.equal(tokenizer(images), expected)
    other = FrozenTokenizer(dict(config, levels=(0.1,)), image_size=24, vocab_size=4, random_seed=0)
    assert other.digest != tokenizer.digest
    with pretended_gpu():
        on_gpu = tokenizer.to("cuda")
        assert on_gpu.grid == (6, 6)
        assert torch.equal(on_gpu(images.to("cuda")).cpu(), expected)


def test_images_and_ids_out_of_range_are_refused():
    tokenizer = FrozenTokenizer(VQKD_CONFIG, 24, 2, random_seed=0)
    with pytest.raises(ValueError, match=r"takes images of 24 x 24 px, got 32 x 32"):
        tokenizer(torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match=r"gives token id \d+, but `vocab_size` is 2"):
        tokenizer(torch.randn(4, 3, 24, 24))


def test_tokens_that_are_no_square_grid_are_refused(monkeypatch):
    tokenizer = FrozenTokenizer(VQKD_CONFIG, 24, 16, random_seed=0)
    monkeypatch.setattr(FrozenTokenizer, "forward", lambda self, images: torch.zeros(1, 35, dtype=torch.long))
    with pytest.raises(TokenizerError, match="gives 35 tokens an image: no square grid"):
        _ = tokenizer.grid


@pytest.mark.parametrize("config", [VQKD_CONFIG, DALLE_CONFIG], ids=["VQ-KD", "DALL-E"])
@pytest.mark.parametrize("algorithm", ["BEiT", "mapet_mm.MaPeT"])
def test_they_train_a_model_on_the_fly(config, algorithm):
    """As target generator of MMPretrain's BEiT and of MaPeT, on a second view of the images."""
    size = 48 if config is DALLE_CONFIG else 24
    arch = dict(arch=ENCODER["arch"], img_size=24, patch_size=4)
    backbone = dict(type="mapet_mm.MaPeTPretrainViT", cutting_point=10, **arch)
    head = dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=16)
    samples = None
    if algorithm == "BEiT":
        from mmpretrain.structures import DataSample

        positions = dict(use_abs_pos_emb=True, use_shared_rel_pos_bias=False)
        backbone = dict(type="BEiTPretrainViT", layer_cfgs=dict(bias=True), **positions, **arch)
        head["type"] = "mapet_mm.BEiTTokenHead"
        samples = [DataSample().set_mask(torch.eye(6).long()) for _ in range(2)]
    generator = dict(
        type="mapet_mm.FrozenTokenizer", tokenizer=config, image_size=size, vocab_size=16, random_seed=0
    )
    model = MODELS.build(dict(type=algorithm, backbone=backbone, head=head, target_generator=generator))
    model.init_weights()
    model.train()
    inputs = [torch.randn(2, 3, 24, 24), torch.randn(2, 3, size, size)]
    loss = model(inputs, samples, mode="loss")["loss"]
    assert loss.item() == pytest.approx(torch.tensor(16.0).log().item(), abs=0.5)
    loss.backward()
    assert not [name for name in model.state_dict() if name.startswith("target_generator")]


def test_ids_are_looked_at_in_the_first_batch_of_a_gpu_only(monkeypatch):
    """Looking waits for the device, in every step of a training with the tokenizer in the model."""
    tokenizer = FrozenTokenizer(VQKD_CONFIG, 24, 16, random_seed=0)
    looked = []
    largest = torch.Tensor.max
    monkeypatch.setattr(torch.Tensor, "max", lambda self, *a: (looked.append(1), largest(self, *a))[1])
    for device, expected in (("cpu", 3), ("cuda", 1)):
        looked.clear()
        tokenizer._checked = False
        for _ in range(3):
            tokenizer._check_ids(torch.zeros(1, 36, dtype=torch.int64), device)
        assert len(looked) == expected
