"""The layout by value: where the groups are, which mask each row has, in which precision and alignment."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mapet_mm.models import MaPeTPretrainViT
from mapet_mm.models.utils import two_stream
from mapet_mm.models.utils.layout import build_layout
from mapet_mm.models.utils.objectives import CONTEXT, MAPET, MIM, PIM, visibility

ARCH = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=48)


def build(objective="mapet", cutting_point=9, **options):
    """5 x 5 patches: at c = 9 MaPeT has 17 targets and 43 keys, no multiple of 8."""
    vit = MaPeTPretrainViT(ARCH, 20, 4, cutting_point, objective, **options)
    vit.init_weights()
    return vit.eval()


@pytest.mark.parametrize(
    ("objective", "slices", "dense", "keys"),
    [
        (MAPET, {"C": (0, 4), "M": (4, 10), "T": (10, 16), "Q": (16, 22)}, 10, 16),
        (PIM, {"C": (0, 4), "T": (4, 10), "Q": (10, 16)}, 4, 10),
        (MIM, {"C": (0, 4), "M": (4, 10)}, 10, 10),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_groups_follow_each_other(objective, slices, dense, keys):
    layout = build_layout(objective, 4, 6)
    assert {group: (layout.rows_of(group).start, layout.rows_of(group).stop) for group in slices} == slices
    assert layout.num_dense == dense
    assert layout.num_keys == keys
    assert layout.num_rows == max(stop for _, stop in slices.values())
    assert layout.ranks.tolist() == [*range(4)] + [*range(4, 10)] * (len(slices) - 1)
    sees = visibility(objective, 4, 6)[dense:]
    assert torch.equal(layout.bias == 0, sees)
    assert torch.equal(layout.bias == float("-inf"), ~sees)


def test_the_context_alone_has_no_masked_rows():
    context = build_layout(CONTEXT, 4, 6)
    assert (context.sizes, context.num_rows, context.num_dense, context.num_keys) == ((4,), 4, 4, 4)
    assert context.ranks.tolist() == [0, 1, 2, 3]
    assert len(context.bias) == 0


@pytest.mark.parametrize("objective", ["mapet", "pim", "mim", "context"])
def test_a_layers_last_rows_are_those_of_the_whole(objective):
    """From the first row of each group on, and from the middle of the context."""
    vit = build(objective)
    tokens = vit.embed(torch.randn(2, 3, 20, 20), vit.sample_permutation(2, "cpu"))
    whole = vit.layers[0].two_streams(tokens, vit.layout)
    for first_row in (4, *(vit.layout.rows_of(group).start for group in vit.objective.groups)):
        last_rows = vit.layers[0].two_streams(tokens, vit.layout, first_row)
        torch.testing.assert_close(last_rows, whole[:, first_row:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("objective", "masked", "calls"), [("mapet", 3, 5), ("pim", 3, 5), ("mim", 0, 3)])
def test_attention_runs_for_the_rows_that_are_there_only(objective, masked, calls, monkeypatch):
    """Densely for C and M in all layers but MaPeT's and PIM's last, masked for T and Q; no empty call."""
    seen = attention_calls(build(objective), monkeypatch)
    assert len(seen) == calls
    assert sum(bias is not None for bias in seen) == masked


@pytest.mark.parametrize("training", [True, False])
def test_attention_drops_weights_in_training_only(training, monkeypatch):
    rates, plain = [], two_stream.attend
    monkeypatch.setattr(
        two_stream,
        "attend",
        lambda *args, dropout=0.0: rates.append(args[4] if len(args) > 4 else dropout) or plain(*args[:4]),
    )
    build(layer_cfgs=dict(attn_drop_rate=0.25)).train(training)(torch.randn(1, 3, 20, 20))
    assert rates == [0.25 * training] * 5


def biases_of_a_pass(vit, monkeypatch):
    """The masks that attention gets."""
    return [bias for bias in attention_calls(vit, monkeypatch) if bias is not None]


def attention_calls(vit, monkeypatch):
    """The mask of each call of attention, None without one."""
    seen, plain = [], two_stream.attend

    def watch(queries, keys, values, bias=None, dropout=0.0):
        seen.append(bias)
        return plain(queries, keys, values, bias, dropout)

    with monkeypatch.context() as patch:
        patch.setattr(two_stream, "attend", watch)
        vit(torch.randn(1, 3, 20, 20, dtype=vit.pos_embed.dtype))
    return seen


@pytest.mark.parametrize("autocast", [False, True])
def test_rows_of_the_mask_are_aligned(autocast, monkeypatch):
    """43 keys a row, 48 elements from row to row, from a multiple of 8 on: no kernel has to copy it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        biases = biases_of_a_pass(build(), monkeypatch)
    assert len(biases) == 3
    for bias in biases:
        assert bias.dtype is (torch.bfloat16 if autocast else torch.float32)
        assert bias.shape[1] == 43
        assert bias.stride() == (48, 1)
        assert bias.storage_offset() % 48 == 0


@pytest.mark.parametrize("cutting_point", [2, 9])
def test_a_mask_that_is_aligned_is_not_padded(cutting_point):
    """26 tokens at c = 2 have 2 + 2 x 24 = 50 keys, at c = 9 43; at c = 4 48."""
    assert build(cutting_point=cutting_point).stream_bias.shape[1] == {2: 56, 9: 48}[cutting_point]
    assert build(cutting_point=4).stream_bias.shape[1] == 48


class Casts(TorchDispatchMode):
    """Counts casts of tensors of a shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("autocast", "casts"), [(False, 0), (True, 1)])
def test_the_mask_is_cast_once_in_a_pass(autocast, casts):
    vit = build()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Casts(vit.stream_bias.shape) as counted:
        vit(torch.randn(1, 3, 20, 20))
    assert counted.count == casts


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_mask_follows_the_model(dtype, monkeypatch):
    """Into another precision, and not into the checkpoint."""
    vit = build()
    assert "stream_bias" not in vit.state_dict()
    images, permutation = torch.randn(2, 3, 20, 20), vit.sample_permutation(2, "cpu")
    expected = vit(images, permutation)[0]
    vit.to(dtype)
    assert [bias.dtype for bias in biases_of_a_pass(vit, monkeypatch)] == [dtype] * 3
    actual = vit(images.to(dtype), permutation)[0].float()
    assert (actual - expected).norm() < {torch.float64: 1e-6}.get(dtype, 0.03) * expected.norm()
