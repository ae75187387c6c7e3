"""The least arithmetic of a step against PyTorch's count while the model runs."""

import pytest
import torch
from config_building import run_tool
from flops import PASSES, complexity, model_step_flops, training_flops
from mmengine.config import Config
from mmengine.registry import DATASETS, MODELS
from mmpretrain.structures import DataSample
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from mapet_mm.models import MaPeTPretrainViT, MaPeTViT, TokenPredictionHead
from mapet_mm.models.utils import two_stream
from mapet_mm.models.utils.attention import attend_with_bmm
from mapet_mm.models.utils.objectives import get_objective, group_sizes, visibility

DIM, DEPTH, CUTTING_POINT, TOKENS, VOCAB = 24, 3, 6, 17, 40
ARCH = dict(embed_dims=DIM, num_layers=DEPTH, num_heads=2, feedforward_channels=4 * DIM)


def surplus_flops(objective, with_context=False) -> int:
    """The part of a step that is computed and not needed: masked scores.

    With the context, the last layer also computes the rows between it and the targets.
    """
    targets = TOKENS - CUTTING_POINT
    sees = visibility(objective, CUTTING_POINT, targets)
    dense = sum(group_sizes(objective.dense_groups, CUTTING_POINT, targets))
    predictions = group_sizes(objective.predicting_group, CUTTING_POINT, targets)[0]
    masked = ~sees
    masked[:dense, dense:] = False  # rows of C and M are not even multiplied with T's keys
    pairs = (DEPTH - 1) * int(masked.sum())
    if not with_context:
        pairs += int(masked[-predictions:].sum())
        return PASSES * 2 * DIM * 2 * pairs
    between = sees[CUTTING_POINT:-predictions]
    pairs += int(masked.sum() + between.sum())
    return PASSES * 2 * DIM * (2 * pairs + 2 * len(between) * (DIM + 4 * DIM))


@pytest.mark.parametrize("name", ["mapet", "pim", "mim"])
def test_the_floor_is_a_steps_count_less_its_surplus(name, monkeypatch):
    # Fused kernels are counted as if they computed their weights again.
    monkeypatch.setattr(two_stream, "attend", attend_with_bmm)
    backbone = MaPeTPretrainViT(ARCH, 16, 4, cutting_point=CUTTING_POINT, objective=name).train()
    head = TokenPredictionHead(DIM, VOCAB)
    targets = torch.randint(VOCAB, (2, TOKENS - CUTTING_POINT))
    with FlopCounterMode(display=False) as counter:
        latents, _ = backbone(torch.randn(2, 3, 16, 16))
        head.loss(latents, targets)["loss"].backward()
    floor = model_step_flops(nn.ModuleDict(dict(backbone=backbone, head=head)))
    assert counter.get_total_flops() == 2 * (floor + surplus_flops(get_objective(name)))


def counted_and_floor(**settings) -> tuple[int, int]:
    """PyTorch's count of an algorithm's step on two images, and twice the floor of one."""
    backbone = dict(type="mapet_mm.MaPeTPretrainViT", arch=ARCH, img_size=16, patch_size=4)
    backbone.update(cutting_point=CUTTING_POINT, **settings.pop("vit", {}))
    head = dict(type="mapet_mm.TokenPredictionHead", embed_dims=DIM, vocab_size=VOCAB)
    target = dict(type="mapet_mm.PrecomputedTokens", vocab_size=VOCAB)
    model = MODELS.build(dict(settings, backbone=backbone, head=head, target_generator=target)).train()
    inputs = [torch.randn(2, 3, 16, 16), torch.randint(VOCAB, (2, 4, 4))]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(inputs, mode="loss")["loss"].backward()
    return counter.get_total_flops(), 2 * model_step_flops(model)


@pytest.mark.parametrize("objective", ["mapet", "pim", "mim"])
def test_a_context_loss_costs_the_contexts_rows_and_logits(objective, monkeypatch):
    monkeypatch.setattr(two_stream, "attend", attend_with_bmm)
    vit = dict(objective=objective)
    counted, floor = counted_and_floor(type="mapet_mm.MaPeT", vit=vit, context_loss=0.5)
    assert counted == floor + 2 * surplus_flops(get_objective(objective), with_context=True)
    _, floor_without = counted_and_floor(type="mapet_mm.MaPeT", vit=vit)
    assert floor > floor_without


@pytest.mark.parametrize("context_loss", [0.0, 0.5])
def test_an_encoder_of_the_visible_patches_computes_nothing_in_vain(context_loss, monkeypatch):
    monkeypatch.setattr(two_stream, "attend", attend_with_bmm)
    neck = dict(type="mapet_mm.CrossAttentionPredictor", embed_dims=DIM, num_layers=2, num_heads=2)
    counted, floor = counted_and_floor(
        type="mapet_mm.VisibleMIM", vit=dict(objective="context"), neck=neck, context_loss=context_loss
    )
    assert counted == floor


def test_a_step_is_counted_at_the_recipes_own_size_only():
    """At another size its row would have the features' cost of one size and the step's of another."""
    backbone = dict(type="mapet_mm.MaPeTPretrainViT", arch=ARCH, img_size=16, patch_size=4, cutting_point=5)
    head = dict(type="mapet_mm.TokenPredictionHead", embed_dims=DIM, vocab_size=VOCAB)
    target = dict(type="mapet_mm.PrecomputedTokens", vocab_size=VOCAB)
    model = dict(type="mapet_mm.MaPeT", backbone=backbone, head=head, target_generator=target)
    cfg = Config(dict(default_scope="mmpretrain", model=model))
    own, larger = complexity(cfg, (16, 16)), complexity(cfg, (32, 16))
    assert own == complexity(cfg)
    assert own.step > 0
    assert larger.step is None
    assert larger.forward > own.forward


@DATASETS.register_module()
class FiveImages(Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict:
        return dict(inputs=torch.zeros(3, 16, 16), data_samples=DataSample().set_gt_label(0))


def test_a_trainings_flops_are_those_of_all_its_images():
    backbone = dict(type="VisionTransformer", arch=ARCH, img_size=16, patch_size=4)
    head = dict(type="LinearClsHead", num_classes=10, in_channels=DIM)
    loader = dict(batch_size=2, dataset=dict(type="FiveImages"))
    model = dict(type="ImageClassifier", backbone=backbone, head=head)
    settings = dict(default_scope="mmpretrain", model=model, train_dataloader=loader)
    by_epochs = training_flops(Config(dict(settings, train_cfg=dict(max_epochs=3))))
    by_steps = training_flops(Config(dict(settings, train_cfg=dict(max_iters=6))), processes=4)
    assert by_epochs / (3 * 5) == by_steps / (6 * 2 * 4)
    assert by_epochs / (3 * 5) > 2 * complexity(Config(settings)).forward


def test_a_training_that_takes_stacked_images_is_counted():
    """MMPretrain's MAE, a quarter of whose 16 patches are encoded and all decoded."""
    arch = dict(ARCH, num_layers=1)
    decoder = dict(num_patches=16, patch_size=4, embed_dim=DIM, decoder_embed_dim=DIM, decoder_depth=1)
    model = dict(
        type="MAE",
        backbone=dict(type="MAEViT", arch=arch, img_size=16, patch_size=4, mask_ratio=0.75),
        neck=dict(decoder, type="MAEPretrainDecoder", decoder_num_heads=1),
        head=dict(
            type="MAEPretrainHead", patch_size=4, loss=dict(type="PixelReconstructionLoss", criterion="L2")
        ),
    )
    settings = dict(
        default_scope="mmpretrain",
        model=model,
        data_preprocessor=dict(type="SelfSupDataPreprocessor", mean=[0.0] * 3, std=[1.0] * 3),
        train_dataloader=dict(batch_size=2, dataset=dict(type="FiveImages")),
        train_cfg=dict(max_epochs=1),
    )
    row = 2 * DIM * (4 * DIM + 2 * 4 * DIM)  # of a layer, without its attention
    encoder = 5 * row + 2 * 2 * 5 * 5 * DIM  # the class token and 4 patches
    decoder = 17 * row + 2 * 2 * 17 * 17 * DIM
    ends = 5 * 2 * DIM * DIM + 17 * 2 * DIM * 3 * 4 * 4  # into the decoder, and to pixels
    embedding = 16 * 2 * DIM * 3 * 4 * 4
    step = PASSES * (encoder + decoder + ends) + (PASSES - 1) * embedding
    assert training_flops(Config(settings)) == 5 * step


def test_the_tool_takes_height_before_width(tmp_path, monkeypatch, capsys):
    """In patches of 8 x 2 pixels, 32 x 4 pixels are 8 patches; 4 x 32 would be 16."""
    backbone = dict(type="mapet_mm.MaPeTViT", arch=ARCH, img_size=16, patch_size=(8, 2), out_type="raw")
    config = Config(dict(default_scope="mmpretrain", model=dict(type="ImageClassifier", backbone=backbone)))
    config.dump(tmp_path / "config.py")
    run_tool(monkeypatch, "get_flops.py", tmp_path / "config.py", "--shape", 32, 4)
    printed = capsys.readouterr().out.splitlines()[-1].split(" | ")[2]
    vit = MaPeTViT(ARCH, img_size=16, patch_size=(8, 2), out_type="raw").to("meta")
    with FlopCounterMode(display=False) as counter:
        vit(torch.zeros(1, 3, 32, 4, device="meta"))
    assert printed == f"{counter.get_total_flops() / 2 / 1e9:.4g}"
