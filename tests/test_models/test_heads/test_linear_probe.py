"""BEiT's linear probe: what each layer's classifier sees, and that it learns as if it were alone."""

import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.optim import build_optim_wrapper
from mmpretrain.models.heads import LinearClsHead
from mmpretrain.structures import DataSample
from torch import Tensor, nn

from mapet_mm.models import LayerwiseLinearHead
from mapet_mm.registry import MODELS

ARCH = dict(embed_dims=12, num_layers=3, num_heads=2, feedforward_channels=24)
BACKBONES = ["mapet_mm.MaPeTViT", "VisionTransformer", "BEiTViT"]
ADAMW = dict(type="AdamW", lr=4e-3, weight_decay=1e-4)


def pooled(tokens: Tensor) -> Tensor:
    return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1)


def backbone(kind: str = "mapet_mm.MaPeTViT", layers=(0, 1, 2), **options) -> dict:
    options = dict(img_size=(8, 12), patch_size=4, out_type="raw", final_norm=False) | options
    return dict(type=kind, arch=ARCH, out_indices=list(layers), **options)


def probe(kind: str = "mapet_mm.MaPeTViT", head: dict | None = None, **options) -> nn.Module:
    """A probe with random weights, everything far from its initial value."""
    head = dict(type="mapet_mm.LayerwiseLinearHead", num_classes=5, in_channels=12, layers=3) | (head or {})
    model = MODELS.build(dict(type="mapet_mm.LinearProbe", backbone=backbone(kind, **options), head=head))
    for parameter in model.backbone.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def batches(count: int = 4) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 6, 3, 8, 12, generator=generator)
    labels = torch.randint(5, (count, 6), generator=generator).tolist()
    return [
        dict(inputs=batch, data_samples=[DataSample().set_gt_label(label) for label in row])
        for batch, row in zip(images, labels, strict=True)
    ]


def outputs_of_layers(model: nn.Module, images: Tensor) -> list[Tensor]:
    """What comes out of each transformer layer, by hooks: whatever the backbone does with it afterwards."""
    outputs = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: outputs.append(out)) for layer in model.backbone.layers
    ]
    model.backbone(images)
    for hook in hooks:
        hook.remove()
    return outputs


def train(model: nn.Module, steps: list[dict]) -> None:
    wrapper = build_optim_wrapper(model, ConfigDict(optimizer=ADAMW))
    model.train()
    for batch in steps:
        model.train_step(batch, wrapper)


@pytest.mark.parametrize("kind", BACKBONES)
def test_each_layer_gives_its_own_tokens_without_a_norm(kind):
    model = probe(kind).eval()
    images = batches(1)[0]["inputs"]
    feats = model.extract_feat(images)
    for classifier, logits, tokens in zip(
        model.head.classifiers, model.head.layer_logits(feats), outputs_of_layers(model, images), strict=True
    ):
        assert tokens.shape == (6, 7, 12)
        torch.testing.assert_close(logits, classifier(pooled(tokens)))
    torch.testing.assert_close(model.head.pre_logits(feats), pooled(tokens))


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("layer", [1, 3])
def test_a_layer_learns_what_it_learns_alone(kind, layer):
    """Against MMPretrain's own head, trained alone on that layer's features from the same weights."""
    model = probe(kind).eval()
    alone = LinearClsHead(num_classes=5, in_channels=2 * 12)
    alone.fc.load_state_dict(model.head.classifiers[layer - 1].state_dict())
    optimizer = torch.optim.AdamW(alone.parameters(), lr=ADAMW["lr"], weight_decay=ADAMW["weight_decay"])
    for batch in batches():
        features = pooled(outputs_of_layers(model, batch["inputs"])[layer - 1])
        optimizer.zero_grad()
        alone.loss((features,), batch["data_samples"])["loss"].backward()
        optimizer.step()
    train(model, batches())
    learnt = model.head.classifiers[layer - 1]
    torch.testing.assert_close(learnt.weight, alone.fc.weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(learnt.bias, alone.fc.bias, rtol=0, atol=1e-6)


def test_classifiers_start_normal_at_a_hundredth_and_from_the_same_weights():
    """BEiT's initialisation; `init_weights` leaves it alone, an `init_cfg` changes it."""
    head = LayerwiseLinearHead(num_classes=1000, in_channels=64)
    head.init_weights()
    assert len(head.classifiers) == 12
    for classifier in head.classifiers:
        assert torch.equal(classifier.weight, head.classifiers[0].weight)
        assert not classifier.bias.any()
    weight = head.classifiers[0].weight
    assert weight.shape == (1000, 128)
    assert weight.std().item() == pytest.approx(0.01, rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=1e-4)
    head = LayerwiseLinearHead(5, 12, init_cfg=[dict(type="Constant", layer="Linear", val=2.0)])
    head.init_weights()
    assert all((classifier.weight == 2).all() for classifier in head.classifiers)


@pytest.mark.parametrize("kind", BACKBONES)
def test_the_backbone_stays_in_eval_mode_and_gets_no_gradient(kind):
    drops = dict(drop_path_rate=0.9, drop_rate=0.9)
    shared = dict(use_shared_rel_pos_bias=True, use_rel_pos_bias=False) if kind == "BEiTViT" else {}
    model = probe(kind, **drops, **shared)
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    batch = batches(1)[0]
    expected = model.eval().extract_feat(batch["inputs"])
    train(model, batches())
    assert model.training
    assert model.head.training
    assert not any(module.training for module in model.backbone.modules())
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
    for mine, other in zip(model.extract_feat(batch["inputs"]), expected, strict=True):
        assert torch.equal(mine, other)
        assert not mine.requires_grad
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_loss_is_the_sum_of_the_layers_losses():
    model = probe()
    batch = batches(1)[0]
    feats = model.extract_feat(batch["inputs"])
    labels = torch.cat([sample.gt_label for sample in batch["data_samples"]])
    losses = [nn.functional.cross_entropy(logits, labels) for logits in model.head.layer_logits(feats)]
    torch.testing.assert_close(model.loss(**batch), {"loss": sum(losses)})


def test_under_autocast_the_classifiers_compute_in_float32():
    """As in BEiT's script: the backbone runs in half precision, the linear layers do not."""
    model = probe().eval()
    batch = batches(1)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        feats = [tokens.bfloat16() for tokens in model.extract_feat(batch["inputs"])]
        logits = [*model.head.layer_logits(feats), model.head(feats)]
    assert {each.dtype for each in logits} == {torch.float32}
    expected = model.head.classifiers[2](pooled(feats[2].float()))
    torch.testing.assert_close(logits[-1], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("inference_layer", "index"), [(None, 2), (3, 2), (1, 0)])
def test_prediction_has_every_layers_class_and_the_scores_of_one(inference_layer, index):
    model = probe(head=dict(inference_layer=inference_layer)).eval()
    images = batches(1)[0]["inputs"]
    logits = model.head.layer_logits(model.extract_feat(images))
    torch.testing.assert_close(model(images, mode="tensor"), logits[index])
    for i, sample in enumerate(model(images, mode="predict")):
        assert sample.layer_labels == {layer + 1: int(each[i].argmax()) for layer, each in enumerate(logits)}
        torch.testing.assert_close(sample.pred_score, logits[index][i].softmax(0))
        assert sample.pred_label.tolist() == [sample.layer_labels[index + 1]]


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize(
    ("options", "noun"), [(dict(final_norm=True), "final_norm"), (dict(with_cls_token=False), "class token")]
)
def test_a_backbone_whose_tokens_are_others_is_refused(kind, options, noun):
    with pytest.raises(ValueError, match=noun):
        probe(kind, **options)


def test_features_of_other_layers_are_refused():
    with pytest.raises(ValueError, match="features of 2 layers"):
        probe(layers=[0, 2]).loss(**batches(1)[0])
