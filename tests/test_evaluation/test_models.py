"""Weights and config of an evaluation: found in whatever form, or refused in one line."""

import re

import pytest
import torch
from frozen_features import save, take
from mapet_mm.evaluation.declared_images import read_image_sets
from mmengine.config import Config
from safetensors.torch import save_file
from torch import nn

from mapet_mm.engine.runners.resume import LaunchError
from mapet_mm.evaluation.models import KeysError, load_checkpoint, load_weights
from mapet_mm.utils.errors import UserError


def test_weights_find_their_backbone_whatever_is_around_them(config, root):
    """Of a backbone alone, of a classifier with another head, under a prefix of one's own."""
    digest = load_checkpoint(config, str(root / "weights.pth")).digest
    weights = torch.load(root / "weights.pth")["state_dict"]
    bare = {name.removeprefix("backbone."): value for name, value in weights.items()}
    for form in (
        bare,
        dict(
            weights, **{"backbone.mask_token": torch.ones(1, 1, 16), "backbone.decoder.bias": torch.ones(3)}
        ),
        {f"net.{name}": v for name, v in weights.items()},
        dict(weights, **{"head.fc.bias": torch.ones(7)}),
    ):
        save(form, root)
        assert load_checkpoint(config, str(root / "weights.pth")).digest == digest
    assert load_checkpoint(config, None).digest == digest  # seed 0
    save_file(weights, root / "weights.safetensors")
    assert load_checkpoint(config, str(root / "weights.safetensors")).digest == digest
    bare_config = Config(dict(config, model=config.model.backbone), filename=config.filename)
    save(weights, root)
    load_checkpoint(bare_config, str(root / "weights.pth"))


def test_without_a_checkpoint_weights_are_those_that_the_config_names(config, root):
    weights = torch.load(root / "weights.pth")["state_dict"]
    save({name: value + 1 for name, value in weights.items()}, root)
    config.load_from = str(root / "weights.pth")
    digest = load_checkpoint(config, config.load_from).digest
    assert load_checkpoint(config, None).digest == digest
    config.load_from = None
    assert load_checkpoint(config, None).digest != digest
    config.model.backbone.init_cfg = dict(type="Pretrained", checkpoint="")
    with pytest.raises(LaunchError, match=r"leaves `model.backbone.init_cfg.checkpoint` open"):
        load_checkpoint(config, None)


def test_a_checkpoint_whose_keys_do_not_match_is_one_line(config, root):
    weights = torch.load(root / "weights.pth")["state_dict"]
    save({f"blocks.{index}.w": value for index, value in enumerate(weights.values())}, root)
    with pytest.raises(KeysError, match=r"has no weights of the config's backbone .* tools/convert.py"):
        take(config, root / "cache")
    gone = "backbone.layers.1.ffn.layers.1.weight"
    save({name: value for name, value in weights.items() if name != gone}, root)
    with pytest.raises(Exception, match=f"the checkpoint has no `{re.escape(gone)}` in the config's shape"):
        take(config, root / "cache")
    save(weights | {gone: torch.zeros(3, 3)}, root)
    with pytest.raises(Exception, match=f"the checkpoint has no `{re.escape(gone)}` in the config's shape"):
        take(config, root / "cache")
    save(weights | {"backbone.layers.2.ln1.bias": torch.zeros(16)}, root)
    with pytest.raises(KeysError, match=r"`backbone.layers.2.ln1.bias`, .* another depth"):
        take(config, root / "cache")


LAYER_SCALE = "backbone.layers.0.attn.gamma1.weight"


def test_weights_that_the_backbone_lacks_are_one_line_where_features_depend_on_them(config, root):
    """LayerScale, biases, a class token, registers, positions: features without them are others."""
    weights = torch.load(root / "weights.pth")["state_dict"]
    plain = dict(config.model.backbone, type="VisionTransformer")
    for options, name in (
        (dict(layer_scale_init_value=0.0), LAYER_SCALE),
        (dict(layer_scale_init_value=0.5, qkv_bias=False), "backbone.layers.0.attn.qkv.bias"),
        (dict(layer_scale_init_value=0.5, with_cls_token=False, out_type="raw"), "backbone.cls_token"),
    ):
        config.model.backbone = dict(plain, **options)
        with pytest.raises(KeysError, match=rf"has `{re.escape(name)}`.*, which the config's backbone lacks"):
            load_checkpoint(config, str(root / "weights.pth"))
    config.model.backbone = dict(plain, layer_scale_init_value=0.5)
    load_checkpoint(config, str(root / "weights.pth"))
    for name in ("backbone.reg_token", "backbone.pre_norm.bias", "backbone.patch_embed.norm.bias"):
        save(weights | {name: torch.ones(16)}, root)
        with pytest.raises(KeysError) as error:
            load_checkpoint(config, str(root / "weights.pth"))
        assert str(error.value) == (
            f"checkpoint {root / 'weights.pth'} has `{name}`, which the config's backbone lacks, so its "
            "features would be others: name the config that it was trained with"
        )


def test_weights_that_features_do_not_need_are_dropped(config, root):
    """Parts of pre-trainings and classifiers, another final norm, tables of places."""
    digest = load_checkpoint(config, str(root / "weights.pth")).digest
    weights = torch.load(root / "weights.pth")["state_dict"]
    one = torch.ones(16)
    others = {f"backbone.{name}": one for name in ("head.weight", "decoder_blocks.0.norm.bias", "ln2.bias")}
    others |= {"backbone.layers.0.attn.relative_position_index": one.long()}
    others |= {"neck.decoder.0.bias": one, "head.layers.0.bias": one, "target_generator.encoder.bias": one}
    save(weights | others, root)
    assert load_checkpoint(config, str(root / "weights.pth")).digest == digest
    save({f"module.{name}": value for name, value in (weights | others).items()} | dict(steps=one), root)
    assert load_checkpoint(config, str(root / "weights.pth")).digest == digest
    config.model.backbone.update(out_type="avg_featmap", final_norm=False)  # fine-tuning of a pre-training
    save(weights | {"backbone.mask_token": torch.ones(1, 1, 16)}, root)
    assert take(config, root / "cache").layers == ["1", "2"]


def test_features_of_a_segmentor_are_its_backbones_whatever_its_neck(config, root):
    """So the neck's weights need not be there, and the cache need not know them."""
    neck = dict(type="mmseg.FPN", in_channels=[64, 128, 256, 512], out_channels=32, num_outs=4)
    head = dict(type="mmseg.FPNHead", in_channels=[32] * 4, in_index=[0, 1, 2, 3], num_classes=3)
    config.model = dict(
        type="mmseg.EncoderDecoder",
        backbone=dict(type="ResNet", depth=18, out_indices=(0, 1, 2, 3)),
        neck=neck,
        decode_head=dict(head, feature_strides=[4, 8, 16, 32], channels=32),
    )
    config.evaluation.train.dataset.pipeline.insert(1, dict(type="Resize", scale=64))
    weights = load_checkpoint(config, None).backbone.model.state_dict()
    save({name: value for name, value in weights.items() if name.startswith("backbone.")}, root)
    backbone = load_checkpoint(config, str(root / "weights.pth")).backbone
    images = backbone.normalise([read_image_sets(config)["train"].dataset[0]["inputs"]])
    with torch.no_grad():
        tokens = backbone(images)
        expected = backbone.model.backbone(images)[-1]
    assert tokens.patches[-1].shape == (1, 4, 512)
    assert torch.equal(tokens.patches[-1], expected.flatten(2).mT)


def test_a_missing_weight_is_not_a_number_and_a_missing_table_of_places_is_the_models_own(root):
    model = nn.ModuleDict({"backbone": nn.Linear(2, 3)})
    save({"backbone.weight": torch.ones(3, 2)}, root)
    model.backbone.register_buffer("relative_position_index", torch.arange(3))
    gone = ["backbone.bias", "backbone.relative_position_index"]
    assert load_weights(model, str(root / "weights.pth")) == gone
    assert model.backbone.bias.isnan().all()  # so features that depend on it show it
    assert model.backbone.relative_position_index.tolist() == [0, 1, 2]


def test_a_tokenizer_is_not_built_for_features(config, root):
    """Its codebook may be elsewhere."""
    config.model = dict(
        type="mapet_mm.MaPeT",
        backbone=dict(config.model.backbone, type="mapet_mm.MaPeTPretrainViT", cutting_point=6),
        head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=16, vocab_size=8),
        target_generator=dict(type="mapet_mm.KCLIP", codebook="nowhere"),
    )
    config.model.backbone.pop("out_type")
    assert load_checkpoint(config, str(root / "weights.pth")).backbone.model.target_generator is None


@pytest.mark.parametrize("section", ["model", "data_preprocessor"])
def test_a_config_that_gives_no_features_is_one_line(config, section):
    config.pop(section)
    with pytest.raises(UserError, match=rf"config .*config\.py has no `{section}`"):
        load_checkpoint(config, None)


def test_a_work_dir_is_no_checkpoint(config, root):
    (root / "last_checkpoint").write_text("epoch_1.pth")
    with pytest.raises(Exception, match="is a work dir: name a file in it"):
        load_checkpoint(config, str(root))
