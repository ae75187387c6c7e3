"""The algorithm: losses, targets in permuted order, validation, wrong configurations."""

import pytest
import torch
from mmengine.model import BaseModule
from mmpretrain.structures import DataSample
from torch.nn import functional as F

from mapet_mm.models import MaPeT, MaPeTViT
from mapet_mm.models.backbones.vit import MaPeTPretrainViT
from mapet_mm.models.selfsup.mapet import image_seeds
from mapet_mm.models.utils.permutation import seeded_permutations
from mapet_mm.registry import MODELS
from mapet_mm.utils.splitmix import DRAW_SEED

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)


@MODELS.register_module()
class GridAsTokens(BaseModule):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, grids: torch.Tensor) -> torch.Tensor:
        return grids.flatten(1)


VIT = dict(type="mapet_mm.MaPeTPretrainViT", arch=ARCH, img_size=20, patch_size=4, cutting_point=8)


def build(
    vocab_size=11, generator_vocab=11, head_dims=24, vit=VIT, train_backbone="all", **backbone
) -> MaPeT:
    model = MODELS.build(
        dict(
            type="mapet_mm.MaPeT",
            backbone=vit | backbone,
            head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=head_dims, vocab_size=vocab_size),
            target_generator=dict(type="mapet_mm.GridAsTokens", vocab_size=generator_vocab),
            train_backbone=train_backbone,
        )
    )
    model.init_weights()
    return model


def test_tokens_follow_their_patch_through_the_permutation():
    model = build()
    grids = torch.arange(25).view(1, 5, 5) + 100 * torch.arange(2).view(2, 1, 1)
    permutation = model.backbone.sample_permutation(2, "cpu")
    tokens = model.target_tokens(grids, permutation)
    expected = permutation[:, 8:] - 1 + torch.tensor([[0], [100]])
    assert torch.equal(tokens, expected)


def test_loss_and_accuracy_are_the_mean_over_all_targets():
    model = build()
    images, grids = torch.randn(3, 3, 20, 20), torch.randint(11, (3, 5, 5))
    torch.manual_seed(1)
    losses = model([images, grids], mode="loss")
    torch.manual_seed(1)
    latents, permutation = model([images, grids], mode="tensor")
    logits, tokens = model.head(latents), grids.flatten(1).gather(1, permutation[:, 8:] - 1)
    log_probabilities = logits.log_softmax(-1).gather(-1, tokens[..., None])
    assert losses["loss"].item() == pytest.approx(-log_probabilities.mean().item(), rel=1e-6)
    expected = 100 * (logits.argmax(-1) == tokens).float().mean().item()
    assert losses["token_accuracy"].item() == pytest.approx(expected, rel=1e-6)
    total, logged = model.parse_losses(losses)
    assert total.item() == losses["loss"].item()
    assert set(logged) == {"loss", "token_accuracy"}


def test_each_image_of_a_batch_is_trained_in_the_order_of_its_own_seed():
    """Whole numbers of 63 bits: those that differ in their highest bits alone have other orders, too."""
    seeds = [5, 5 + 2**8, 5 + 2**32, 5 + 2**62]
    model = build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    images, grids = torch.randn(4, 3, 20, 20), torch.randint(11, (4, 5, 5))
    samples = [DataSample(metainfo=dict(draw_seed=seed)) for seed in seeds]
    losses = model([images, grids], samples, mode="loss")

    permutation = seeded_permutations(torch.tensor(seeds), 26)
    assert len(permutation.unique(dim=0)) == 4
    latents, _ = model.backbone(images, permutation)
    tokens = grids.flatten(1).gather(1, permutation[:, 8:] - 1)
    expected = F.cross_entropy(model.head(latents).flatten(0, 1), tokens.flatten())
    assert losses["loss"].item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_backbone_within_lora_model_is_trained_by_its_adapters():
    """At first they add nothing, so the loss is the plain backbone's; only they and the head learn."""
    plain = build()
    lora = build(vit=dict(type="LoRAModel", module=VIT, rank=2, targets=[dict(type="qkv")]))
    lora.head.load_state_dict(plain.head.state_dict())
    names = {name.replace(".original_layer", ""): name for name, _ in lora.backbone.module.named_parameters()}
    for name, value in plain.backbone.named_parameters():
        lora.backbone.module.get_parameter(names[name]).data.copy_(value)
    inputs, losses = [torch.randn(3, 3, 20, 20), torch.randint(11, (3, 5, 5))], []
    for model in (plain, lora):
        torch.manual_seed(1)
        losses.append(model(inputs, mode="loss")["loss"])
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    losses[1].backward()
    learning = {name for name, value in lora.named_parameters() if value.grad is not None}
    assert len(learning) == 2 * ARCH["num_layers"] + 2
    assert all("lora_" in name or name.startswith("head.") for name in learning)


OF_TIMM = dict(
    type="mapet_mm.MaPeTPretrainTIMM",
    model_name="vit_tiny_patch16_224",
    img_size=20,
    patch_size=4,
    embed_dim=24,
    depth=2,
    num_heads=3,
    cutting_point=8,
)


@pytest.mark.parametrize(("vit", "layers"), [(VIT, "layers"), (OF_TIMM, "timm_model.blocks")])
def test_of_a_backbone_the_attentions_projections_and_the_mask_token_can_be_trained_alone(vit, layers):
    """They and the head, each with a gradient; all others stay as they are."""
    model = build(vit=dict(vit), train_backbone="attention")
    projections = [f"backbone.{layers}.{index}.attn.proj" for index in range(2)]
    expected = {f"{name}.{part}" for name in projections for part in ("weight", "bias")}
    expected |= {"backbone.mask_token", "head.projection.weight", "head.projection.bias"}
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    inputs = [torch.randn(3, 3, 20, 20), torch.randint(11, (3, 5, 5))]
    model(inputs, mode="loss")["loss"].backward()
    assert {name for name, value in model.named_parameters() if value.grad is not None} == expected
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1).step()
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == expected
    with pytest.raises(ValueError, match="train_backbone='norms': all or attention"):
        build(train_backbone="norms")


def test_validation_repeats_itself_and_leaves_the_training_generator_alone():
    model = build().eval()
    inputs = [torch.randn(3, 3, 20, 20), torch.randint(11, (3, 5, 5))]
    state = torch.get_rng_state()
    first = model(inputs, [DataSample() for _ in range(3)], mode="predict")
    assert torch.equal(state, torch.get_rng_state())
    second = model(inputs, None, mode="predict")
    assert [s.token_loss for s in first] == [s.token_loss for s in second]

    permutation = model.backbone.permutations(image_seeds(inputs[0]))
    logits = model.head(model.backbone(inputs[0], permutation)[0])
    tokens = model.target_tokens(inputs[1], permutation)
    for i, sample in enumerate(first):
        assert sample.token_loss == pytest.approx(F.cross_entropy(logits[i], tokens[i]).item(), rel=1e-5)
        assert sample.token_accuracy == pytest.approx(
            100 * (logits[i].argmax(-1) == tokens[i]).float().mean().item(), rel=1e-5
        )


def validate(model, images, grids, batches):
    """(loss, accuracy) of each image, validated in these batches of indices."""
    figures = {}
    for batch in batches:
        samples = model([images[batch], grids[batch]], mode="predict")
        figures |= {i: (s.token_loss, s.token_accuracy) for i, s in zip(batch, samples, strict=True)}
    return [figures[i] for i in sorted(figures)]


@pytest.mark.parametrize(
    "batches",
    [[[0], [1], [2], [3], [4]], [[0, 1], [2, 3], [4]], [[0, 2, 4], [1, 3]], [[4, 3, 2, 1, 0]]],
    ids=["one by one", "two by two", "over two processes", "in another order"],
)
def test_validation_does_not_depend_on_the_batch(batches):
    model = build().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    images, grids = torch.randn(5, 3, 20, 20), torch.randint(11, (5, 5, 5))
    whole = validate(model, images, grids, [[0, 1, 2, 3, 4]])
    again = validate(model, images, grids, batches)
    for (loss, accuracy), (other_loss, other_accuracy) in zip(whole, again, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-5)
        assert accuracy == other_accuracy


@pytest.mark.parametrize(
    "images",
    [
        torch.arange(64.0).view(64, 1, 1, 1).expand(64, 3, 20, 20),  # each of one colour
        torch.eye(1200).view(1200, 3, 20, 20)[:64],  # one pixel apart
        torch.randint(256, (64, 3, 20, 20), dtype=torch.uint8),
        torch.randn(64, 3, 20, 20, dtype=torch.bfloat16),
        torch.randn(64, 3, 20, 20, dtype=torch.float64).to(memory_format=torch.channels_last),
    ],
    ids=["colours", "pixels", "uint8", "bfloat16", "channels last"],
)
def test_every_image_has_a_permutation_of_its_own(images):
    model = build()
    seeds = image_seeds(images)
    permutations = model.backbone.permutations(seeds)
    assert permutations[:, 0].eq(0).all()
    assert torch.equal(permutations.sort(1).values, torch.arange(26).expand(64, -1))
    assert len({tuple(order) for order in permutations.tolist()}) == 64
    assert torch.equal(image_seeds(images[10:11].clone()), seeds[10:11])
    assert 0 <= seeds.min() < 2**30 < 3 * 2**30 < seeds.max() < 2**32  # over the whole range


def test_token_grid_of_another_size_is_refused():
    model = build()
    with pytest.raises(ValueError, match=r"\(2, 16\).*25 patches"):
        model([torch.randn(2, 3, 20, 20), torch.zeros(2, 4, 4, dtype=torch.int64)], mode="loss")


def test_the_target_generator_stays_in_evaluation_mode():
    """MMPretrain's VQ-KD goes on learning its codebook in training mode."""
    model = build()
    for _ in range(2):
        model.train()
        assert model.training
        assert model.backbone.training
        assert not model.target_generator.training
        model.eval()


def test_features_are_those_of_the_plain_vit():
    """`extract_feat` shows the backbone whole images: what a downstream ViT with these weights computes."""
    model = build().eval()
    vit = MaPeTViT(ARCH, 20, 4, out_type="raw").eval()
    vit.load_state_dict(model.backbone.state_dict())
    images = torch.randn(2, 3, 20, 20)
    (features,) = model.extract_feat(images)
    assert features.shape == (2, 26, 24)
    assert torch.equal(features, vit(images)[0])


def test_a_target_generator_with_more_tokens_than_the_head_is_refused():
    with pytest.raises(ValueError, match="vocab_size=128"):
        build(generator_vocab=128)


def test_features_come_from_whatever_the_preprocessor_hands_on():
    model = build().eval()
    images, grids = torch.randn(2, 3, 20, 20), torch.randint(11, (2, 5, 5))
    (alone,) = model.extract_feat(images)
    assert torch.equal(alone, model.extract_feat([images, grids])[0])
    model.target_generator = None
    assert torch.equal(model.train().eval().extract_feat(images)[0], alone)


@pytest.mark.parametrize("mode", ["loss", "predict"])
def test_images_without_tokens_are_refused_where_tokens_are_needed(mode):
    model, images = build(), torch.randn(2, 3, 20, 20)
    with pytest.raises(ValueError, match=f"mode '{mode}' needs tokens"):
        model(images, mode=mode)
    model.target_generator = None
    with pytest.raises(ValueError, match=f"mode '{mode}' needs tokens"):
        model([images, torch.zeros(2, 5, 5, dtype=torch.int64)], mode=mode)


class Backwards(MaPeTPretrainViT):
    """Patches in a random order, turned round."""

    def sample_permutation(self, batch_size, device, generator=None):
        drawn = super().sample_permutation(batch_size, device, generator)
        return torch.cat([drawn[:, :1], drawn[:, 1:].flip(1)], dim=1)


def test_a_backbones_own_order_of_tokens_is_the_one_of_training_and_validation(monkeypatch):
    """By each image's seed."""
    arch = dict(embed_dims=12, num_layers=1, num_heads=2, feedforward_channels=12)
    head = dict(type="mapet_mm.TokenPredictionHead", embed_dims=12, vocab_size=8)
    vit = dict(type=Backwards, arch=arch, img_size=16, patch_size=4, cutting_point=6)
    model = MaPeT(vit, head, dict(type="mapet_mm.PrecomputedTokens", vocab_size=8))
    plain = MaPeTPretrainViT(arch, 16, 4, 6)
    inputs = [torch.randn(2, 3, 16, 16), torch.randint(8, (2, 4, 4))]
    given = []
    monkeypatch.setattr(model, "latents", lambda *args: given.append(args[1]) or plain(*args))

    samples = [DataSample(metainfo={DRAW_SEED: seed}) for seed in (3, 5)]
    model.loss(inputs, samples)
    model.predict(inputs)
    for permutation, seeds in zip(given, (torch.tensor([3, 5]), image_seeds(inputs[0])), strict=True):
        for order, seed in zip(permutation, seeds.tolist(), strict=True):
            drawn = plain.sample_permutation(1, "cpu", torch.Generator().manual_seed(seed))[0]
            assert torch.equal(order, torch.cat([drawn[:1], drawn[1:].flip(0)]))
    assert torch.equal(plain.permutations(seeds), seeded_permutations(seeds, 17))


def test_ranks_order_the_patches_instead_of_seeds():
    vit = MaPeTPretrainViT(dict(embed_dims=12, num_layers=1, num_heads=2, feedforward_channels=12), 8, 4, 2)
    ranks = torch.tensor([[0.5, -1.0, 0.5, 0.0], [4.0, 3.0, 2.0, 1.0]])
    assert vit.permutations(ranks=ranks).tolist() == [[0, 2, 4, 1, 3], [0, 4, 3, 2, 1]]
