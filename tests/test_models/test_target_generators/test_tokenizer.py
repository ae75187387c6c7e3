"""Tokenizers stay what they are inside a model; true float32 leaves the caller's switches as they were."""

import copy

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.runner.checkpoint import get_state_dict
from small_tokenizers import DALLE
from torch import nn

from mapet_mm.tokenizers import KCLIP, Codebook, FrozenTokenizer, full_float32

SMALL = dict(layers=[1, 1, 1, 1], width=8, image_size=64)
RANDOM = dict(type="random", seed=0)


@pytest.fixture(params=["KCLIP", "FrozenTokenizer"])
def tokenizer(request):
    if request.param == "KCLIP":
        features = KCLIP(SMALL, RANDOM).features(torch.randn(5, 3, 64, 64))
        return KCLIP(SMALL, RANDOM, Codebook(features.flatten(0, 1)))
    return FrozenTokenizer(DALLE, 64, 16, random_seed=0)


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double"])
def test_a_model_of_another_precision_gets_the_same_tokens(tokenizer, convert):
    images = torch.randn(4, 3, 64, 64)
    tokens = tokenizer(images)
    assert len(tokens.unique()) > 1
    holder = getattr(nn.ModuleDict({"target_generator": tokenizer}), convert)()
    assert torch.equal(holder["target_generator"](images), tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tokenizer(images), tokens)


def test_training_and_the_optimizer_leave_the_network_alone(tokenizer):
    model = nn.ModuleDict({"backbone": nn.Linear(2, 2), "target_generator": tokenizer})
    assert sorted(model.state_dict()) == sorted(get_state_dict(model)) == ["backbone.bias", "backbone.weight"]
    assert not model.load_state_dict(copy.deepcopy(model.state_dict())).missing_keys
    optimizer = build_optim_wrapper(model, dict(optimizer=dict(type="SGD", lr=0.1))).optimizer
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
    model.train()
    assert not any(module.training for module in (tokenizer, *tokenizer.network.modules()))
    assert not any(parameter.requires_grad for parameter in tokenizer.network.parameters())


def test_the_network_moves_to_the_images(tokenizer):
    tokenizer(torch.zeros(1, 3, 64, 64))
    tokenizer.network_for(torch.zeros(1, 3, 64, 64, device="meta"))
    assert {value.device.type for value in tokenizer.network.state_dict().values()} == {"meta"}


def test_images_of_another_size_are_refused(tokenizer):
    with pytest.raises(ValueError, match=r"takes images of 64 x 64 px, got 96 x 64"):
        tokenizer(torch.zeros(1, 3, 96, 64))


NEW_SWITCHES = hasattr(torch.backends.cudnn, "conv")  # not in PyTorch 2.6
if NEW_SWITCHES:
    BACKENDS = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul)


def switches() -> list[str]:
    return [torch.backends.fp32_precision, *(backend.fp32_precision for backend in BACKENDS)]


@pytest.mark.skipif(NEW_SWITCHES, reason="PyTorch has the new switches")
def test_full_float32_puts_the_old_switches_back():
    assert torch.backends.cudnn.allow_tf32
    with full_float32(torch.device("cpu")):
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.skipif(not NEW_SWITCHES, reason="PyTorch has the old switches only")
@pytest.mark.parametrize("setting", ["old", "matmul", "new"])
def test_full_float32_works_beside_either_interface_and_puts_all_switches_back(setting):
    """PyTorch refuses to read its old switches once one of the new is set."""
    before = switches()
    try:
        if setting == "old":
            torch.backends.cuda.matmul.allow_tf32 = True
        elif setting == "matmul":
            torch.set_float32_matmul_precision("high")
        else:
            torch.backends.fp32_precision = "tf32"
        set_by_caller = switches()
        with full_float32(torch.device("cpu")):
            assert switches()[1:] == ["ieee"] * 3
        with pytest.raises(RuntimeError), full_float32(torch.device("cpu")):
            torch.ones(2, 2) @ torch.ones(3, 2)
        assert switches() == set_by_caller
    finally:
        torch.backends.fp32_precision = before[0]
        for backend, value in zip(BACKENDS, before[1:], strict=True):
            backend.fp32_precision = value
