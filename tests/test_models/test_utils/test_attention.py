"""The attention kernels agree, whichever a device takes."""

import pytest
import torch
from step_counts import fake_gpu
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mapet_mm.models.utils import attention
from mapet_mm.models.utils.attention import attend, attend_with_bmm, kernels_with_mask


def operands(dtype, rows=9, keys=13):
    """Queries, keys and values `(2, 3, L, 8)` laid out as the backbone's: heads beside channels."""
    lengths = (rows, keys, keys)
    made = [torch.randn(2, n, 3, 8, dtype=dtype).transpose(1, 2).requires_grad_() for n in lengths]
    sees = torch.rand(rows, keys) < 0.5
    sees[:, 0] = True
    return made, torch.zeros(rows, keys).masked_fill(~sees, float("-inf"))


@pytest.mark.parametrize("masked", [True, False])
def test_products_are_scaled_dot_product_attention(masked):
    made, bias = operands(torch.float64)
    bias = bias.double() if masked else None
    expected = F.scaled_dot_product_attention(*made, attn_mask=bias)
    actual = attend_with_bmm(*made, bias)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, made, weight), torch.autograd.grad(expected, made, weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_devices_kernel_is_exact_within_its_precision(dtype):
    made, bias = operands(dtype)
    exact = F.scaled_dot_product_attention(*(x.double() for x in made), attn_mask=bias.double())
    error = (attend(*made, bias) - exact).norm() / exact.norm()
    assert error < (1e-6 if dtype is torch.float32 else 1e-2)


def test_bfloat16_on_cpu_uses_bmm(monkeypatch):
    """The faster one there; an output of another kernel would not be this marker."""
    monkeypatch.setattr(attention, "attend_with_bmm", lambda q, *_: torch.full_like(q, 7))
    assert (attend(*operands(torch.bfloat16)[0]) == 7).all()
    assert not (attend(*operands(torch.float32)[0]) == 7).all()


def test_dropout_keeps_the_expectation():
    made, bias = operands(torch.float32)
    mean = torch.stack([attend_with_bmm(*made, bias, 0.3) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, attend_with_bmm(*made, bias), rtol=0, atol=0.12)


def gradients_of(made: list[torch.Tensor], bias: torch.Tensor) -> list[torch.Tensor]:
    rows = attend(*made, bias)
    return torch.autograd.grad(rows.float().square().sum(), made)


H200 = dict(version=91900, capability=(9, 0), deterministic=False, cuda=True)


@pytest.mark.parametrize(
    ("keys", "changed", "expected"),
    [
        (334, {}, True),
        (344, {}, True),
        (320, {}, False),  # 64 remain after a multiple of 128
        (704, {}, False),
        (333, {}, False),  # nobody has looked
        (344, dict(version=92600), False),
        (344, dict(capability=(8, 0)), False),
        (344, dict(deterministic=True), False),
        (344, dict(cuda=False), False),
    ],
)
def test_cudnns_attention_with_a_mask_is_taken_only_where_it_is_right(keys, changed, expected, monkeypatch):
    here = H200 | changed
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: here["version"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: here["capability"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here["cuda"])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: here["deterministic"])
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    assert kernels_with_mask(keys) == ([SDPBackend.CUDNN_ATTENTION] if expected else []) + others
    with sdpa_kernel(SDPBackend.MATH):  # who chooses one kernel gets it
        assert kernels_with_mask(keys) == [SDPBackend.MATH]


def test_one_call_on_a_gpu_only_has_its_kernel_chosen_and_not_the_process(monkeypatch):
    """A notebook's own attention, and the host library's, stay what PyTorch makes of them."""
    allowed = []

    def noted(queries, keys, values, attn_mask=None, dropout_p=0.0):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return queries

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with fake_gpu():
        made = [torch.randn(1, 1, 704, 64, dtype=torch.bfloat16) for _ in range(3)]
        attend(*made, torch.zeros(704, 704))
        attend(*made)
    assert allowed == [False, True]
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
def test_attention_is_right_where_cudnns_is_not():
    """A case of pytorch issue 196678: a mask, 704 keys, and scores of all of them near -120."""
    options = dict(device="cuda", dtype=torch.bfloat16)
    bias = torch.zeros(704, 704, **options)
    made = [0.1 * torch.randn(1, 1, 704, 64, **options) for _ in range(3)]
    made[0][..., 0] = 1
    made[1][..., 0] = -120 * 64**0.5
    for operand in made:
        operand.requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients_of(made, bias)
    for ours, theirs in zip(gradients_of(made, bias), expected, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("lowest_score", [0.0, -90.0, -1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_is_right_at_every_number_of_keys(dtype, lowest_score):
    """All remainders after a multiple of 128, with a mask: the faults of kernels were at some of them."""
    wrong = [keys for keys in range(257, 385) if not worst_error(attend, keys, dtype, lowest_score) < 0.02]
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.parametrize("lowest_score", [0.0, -90.0, -1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_numbers_of_keys_at_which_cudnns_attention_is_right(dtype, lowest_score, capsys):
    """Says which are wrong, and so which `CUDNN_IS_RIGHT` may have for this version and card."""

    def cudnns(queries, keys, values, bias):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)

    wrong, refused = {}, []
    for keys in range(257, 385):
        try:
            error = worst_error(cudnns, keys, dtype, lowest_score)
        except RuntimeError:
            refused.append(keys)
            continue
        if not error < 0.02:  # a NaN is not either
            wrong[keys] = error
    with capsys.disabled():
        here = f"cuDNN {torch.backends.cudnn.version()} on {torch.cuda.get_device_name()}"
        print(f"\n{here}, {dtype}, scores from {lowest_score:g}: wrong {wrong}, refused {refused}")
    assert [keys for keys in wrong if attention.cudnn_is_right(keys)] == []


def worst_error(call, num_keys: int, dtype: torch.dtype, lowest_score: float) -> float:
    """The largest relative error of output and gradients, against float64; a mask, and scores moved down."""
    generator = torch.Generator(device="cuda").manual_seed(num_keys)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, 3, *shape, device="cuda", dtype=dtype, generator=generator)

    rows = num_keys - 60
    made = [draw(n, 64).requires_grad_() for n in (rows, num_keys, num_keys)]
    sees = torch.rand(rows, num_keys, device="cuda", generator=generator) < 0.6
    sees[:, :60] = True
    bias = torch.full((rows, num_keys), lowest_score, device="cuda").masked_fill(~sees, float("-inf"))
    bias = F.pad(bias, (0, -num_keys % 8)).to(dtype)[:, :num_keys]  # kernels want rows of 16 bytes
    weight = draw(rows, 64)

    exact_inputs = [one.detach().double().requires_grad_() for one in made]
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(*exact_inputs, attn_mask=bias.double())
    exact = [exact, *torch.autograd.grad(exact, exact_inputs, weight.double())]
    found = call(*made, bias)
    found = [found, *torch.autograd.grad(found, made, weight)]
    errors = [(one.double() - truth).norm() / truth.norm() for one, truth in zip(found, exact, strict=True)]
    return torch.stack(errors).max().item()
