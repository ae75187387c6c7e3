"""The two-stream forward is exactly the method: golden vectors of the authors' code and a naive reference."""

import functools
import io
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.runner.checkpoint import load_state_dict
from mmpretrain.models.backbones.vision_transformer import TransformerEncoderLayer
from mmpretrain.models.peft.lora import LoRALinear
from naive_two_stream import two_stream_forward
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mapet_mm.interop.convert import reference_to_mm
from mapet_mm.models import MaPeTPretrainViT, MaPeTViT, TokenPredictionHead
from mapet_mm.models.losses import linear_cross_entropy as losses
from mapet_mm.models.utils import two_stream
from mapet_mm.models.utils.attention import attend_with_bmm

TOLERANCE = 1e-5  # relative, float32
ARCH = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=48)


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours - reference).norm() / reference.norm()).item()


@pytest.fixture(scope="module")
def golden(data_dir):
    return dict(np.load(data_dir / "mapet_reference_d48.npz"))


@pytest.fixture(scope="module")
def golden_arch(golden):
    return arch_of(golden)


def arch_of(golden):
    """Geometry of the authors' model, its cutting point and vocabulary."""
    image, patch, dim, depth, heads, cutting_point, vocab = golden["meta"].tolist()
    arch = dict(embed_dims=dim, num_layers=depth, num_heads=heads, feedforward_channels=4 * dim)
    return dict(arch=arch, img_size=image, patch_size=patch), cutting_point, vocab


def part(golden: dict[str, np.ndarray], prefix: str) -> dict[str, torch.Tensor]:
    """The authors' arrays (weights or gradients) under the backbone's names."""
    theirs = {k.removeprefix(prefix): torch.from_numpy(v) for k, v in golden.items() if k.startswith(prefix)}
    return {name.removeprefix("backbone."): value for name, value in reference_to_mm(theirs).items()}


def build_golden(golden, golden_arch, kind=MaPeTPretrainViT, **options):
    """Backbone and head with the authors' weights."""
    geometry, cutting_point, vocab = golden_arch
    vit = kind(cutting_point=cutting_point, **geometry, **options)
    head = TokenPredictionHead(vit.embed_dims, vocab)
    weights = part(golden, "w/")
    head.load_state_dict({"projection." + k: weights.pop("head.projection." + k) for k in ("weight", "bias")})
    vit.load_state_dict(weights, strict=True)
    return vit, head


def errors_against_golden(golden, vit, head, device="cpu", autocast=None):
    """Relative errors of logits, loss and each gradient."""
    cutting_point, vocab = vit.cutting_point, head.vocab_size
    vit, head = vit.to(device), head.to(device)
    permutation = torch.from_numpy(golden["permutation"]).to(device)
    targets = permutation[:, cutting_point:] - 1
    tokens = torch.from_numpy(golden["tokens"]).to(device)
    with torch.autocast(device, autocast, enabled=autocast is not None):
        latents, returned = vit(torch.from_numpy(golden["images"]).to(device), permutation)
        loss = head.loss(latents, tokens.gather(1, targets))["loss"]
    loss.backward()
    assert torch.equal(returned, permutation)

    raster = targets.argsort(1)[..., None].expand(-1, -1, vocab)
    logits = head(latents.float()).gather(1, raster).cpu()
    gradients = part(golden, "g/")
    ours = dict(vit.named_parameters()) | {
        f"head.projection.{kind}": getattr(head.projection, kind) for kind in ("weight", "bias")
    }
    assert set(gradients) == set(ours)
    return {
        "logits": relative_error(logits, torch.from_numpy(golden["target_logits_raster"])),
        "loss": relative_error(loss.cpu(), torch.tensor(golden["loss"])),
        **{name: relative_error(ours[name].grad.cpu(), gradients[name]) for name in gradients},
    }


KERNELS = {"math kernel": SDPBackend.MATH, "memory-efficient kernel": SDPBackend.EFFICIENT_ATTENTION}
PATHS = ["plain", "checkpointing", "small blocks", "attention by products"]


@pytest.mark.parametrize(
    ("device", "path"),
    [
        *[("cpu", path) for path in [*PATHS, "math kernel"]],
        *[pytest.param("cuda", path, marks=pytest.mark.gpu) for path in [*PATHS, *KERNELS]],
    ],
)
def test_mapet_equals_the_authors_code(golden, golden_arch, device, path, monkeypatch):
    """Logits, loss and every gradient of MaPeT agree with the authors' implementation, on every path."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of the patch convolution
    if path == "small blocks":  # of 7 targets; the batch has another multiple
        monkeypatch.setattr(losses, "BLOCK_ELEMENTS", {device: 7 * golden_arch[2]})
    if path == "attention by products":
        monkeypatch.setattr(two_stream, "attend", attend_with_bmm)
    vit, head = build_golden(golden, golden_arch, with_cp=path == "checkpointing")
    with sdpa_kernel(KERNELS[path]) if path in KERNELS else nullcontext():
        errors = errors_against_golden(golden, vit, head, device)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mapet_in_bfloat16_is_the_authors_within_its_precision(golden, golden_arch, device):
    """bfloat16 has 8 bits: an error of 2^-8 = 0.4 % an operation, some of which add up over the layers."""
    errors = errors_against_golden(
        golden, *build_golden(golden, golden_arch), device, autocast=torch.bfloat16
    )
    assert errors["loss"] < 5e-3
    assert errors["logits"] < 2e-2
    assert max(errors.values()) < 0.1, errors


COMPILED = """
import sys, numpy as np
sys.path[:0] = sys.argv[1:3]
from test_two_stream import *
from mapet_mm.engine.hooks.compile_hook import CompileHook
from mapet_mm.models.utils import attention
def choose(keys):  # as on a GPU
    return attention.sdpa_kernel(attention.kernels_with_mask(keys.shape[2]), set_priority=True)
attention.choosing_kernel = choose
golden = dict(np.load(sys.argv[3]))
vit, head = build_golden(golden, arch_of(golden))
CompileHook(backend=sys.argv[5]).compile(torch.nn.ModuleDict({"backbone": vit}))
print(max(errors_against_golden(golden, vit, head, sys.argv[4]).values()))
"""


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "aot_eager_decomp_partition"),  # the same graphs, run without a C++ compiler
        pytest.param("cpu", "inductor", marks=pytest.mark.slow),
        pytest.param("cuda", "inductor", marks=pytest.mark.gpu),
    ],
)
def test_compiled_mapet_is_one_graph_and_equals_the_authors_code(data_dir, device, backend):
    """In a process of its own: the shape checks of the tests are no part of the graph."""
    assert error_compiled(COMPILED, data_dir, device, backend) < TOLERANCE


def error_compiled(script: str, data_dir: Path, device: str, backend: str) -> float:
    folders = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    command = [sys.executable, "-W", "ignore", "-c", script, *folders]
    command += [str(data_dir / "mapet_reference_d48.npz"), device, backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout.splitlines()[-1])


def test_fine_tuning_network_equals_the_authors_code(golden, golden_arch):
    """Mean of the patch tokens -> LayerNorm -> linear, on the pre-training weights, without a final norm."""
    geometry, _, _ = golden_arch
    vit = MaPeTViT(out_type="avg_featmap", final_norm=False, **geometry)
    weights = part(golden, "w/")
    weights["ln2.weight"], weights["ln2.bias"] = (
        torch.from_numpy(golden[f"cls_w/fc_norm.{k}"]) for k in ("weight", "bias")
    )
    load_state_dict(vit, weights, strict=False)
    head_weight, head_bias = (torch.from_numpy(golden[f"cls_w/head.{k}"]) for k in ("weight", "bias"))
    logits = F.linear(vit(torch.from_numpy(golden["images"]))[0], head_weight, head_bias)
    assert relative_error(logits, torch.from_numpy(golden["cls_logits"])) < TOLERANCE


# (height, width) of the image with patches of 4: square, odd and oblong grids.
GRIDS = [(16, 16), (20, 20), (12, 28)]


@pytest.mark.parametrize("drop_path_rate", [0.0, 0.5], ids=["all-layers", "stochastic-depth"])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"{g[0] // 4}x{g[1] // 4}")
@pytest.mark.parametrize("cut", ["first", "third", "last"])
@pytest.mark.parametrize("objective", ["mapet", "pim", "mim"])
def test_equals_the_naive_reference(objective, cut, grid, drop_path_rate):
    """Latents and gradients equal those of per-image masks and separate streams, for random weights."""
    compare_with_the_naive_reference(objective, cut, grid, drop_path_rate)


@pytest.mark.parametrize("grid", [(4, 4), (4, 20), (20, 4)], ids=lambda g: f"{g[0] // 4}x{g[1] // 4}")
@pytest.mark.parametrize("objective", ["mapet", "pim", "mim"])
def test_one_patch_or_one_row_of_them_equals_the_naive_reference(objective, grid):
    for cut in ("first", "last"):
        compare_with_the_naive_reference(objective, cut, grid, 0.5)


def compare_with_the_naive_reference(objective, cut, grid, drop_path_rate):
    torch.manual_seed(len(objective) + sum(grid))
    num_tokens = grid[0] * grid[1] // 16 + 1
    cutting_point = {"first": 1, "third": num_tokens // 3, "last": num_tokens - 1}[cut]
    arch = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=48)
    vit = MaPeTPretrainViT(
        arch,
        cutting_point=cutting_point,
        objective=objective,
        img_size=grid,
        patch_size=4,
        drop_path_rate=drop_path_rate,
    )
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    vit.train()
    images = torch.randn(3, 3, *grid)
    permutation = vit.sample_permutation(3, "cpu")

    torch.manual_seed(7)
    latents, _ = vit(images, permutation)
    torch.manual_seed(7)
    reference, is_target = two_stream_forward(
        dict(vit.named_parameters()),
        images,
        permutation,
        cutting_point=cutting_point,
        objective=objective,
        patch_size=4,
        num_heads=3,
        drop_rates=np.linspace(0, drop_path_rate, 3).tolist(),
    )
    # Ours come in permuted order, the reference's in raster order.
    raster = permutation[:, cutting_point:].argsort(1)[..., None].expand_as(latents)
    ours = latents.gather(1, raster)
    assert is_target.sum(1).eq(vit.num_targets).all()
    assert relative_error(ours, reference) < TOLERANCE

    direction = torch.randn_like(ours)
    parameters = dict(vit.named_parameters())
    gradients = torch.autograd.grad((ours * direction).sum(), parameters.values(), retain_graph=True)
    expected = torch.autograd.grad((reference * direction).sum(), parameters.values())
    scale = max(g.norm() for g in expected)  # some gradients (key biases) are zero but for rounding
    for name, gradient, other in zip(parameters, gradients, expected, strict=True):
        assert (gradient - other).norm() < TOLERANCE * max(other.norm(), 1e-2 * scale), name


@pytest.mark.parametrize("objective", ["mapet", "pim", "mim"])
@pytest.mark.parametrize("training", [True, False])
def test_a_linear_layer_with_lora_is_called(training, objective):
    """With LoRA at zero nothing changes; each of its matrices gets a gradient; qkv is called on all rows."""
    vit = MaPeTPretrainViT(ARCH, 20, 4, 8, objective).train(training)
    vit.init_weights()
    images, permutation = torch.randn(2, 3, 20, 20), vit.sample_permutation(2, "cpu")
    before, _ = vit(images, permutation)
    for layer in vit.layers:
        layer.attn.qkv, layer.attn.proj = LoRALinear(layer.attn.qkv, 2, 2), LoRALinear(layer.attn.proj, 2, 2)
        layer.ffn.layers[1] = LoRALinear(layer.ffn.layers[1], 2, 2)
    after, _ = vit(images, permutation)
    assert relative_error(after, before) < TOLERANCE
    after.sum().backward()
    adapters = {n: p for n, p in vit.named_parameters() if n.endswith("lora_up.weight")}
    assert len(adapters) == 9
    assert all(p.grad.abs().max() > 0 for p in adapters.values())


@pytest.mark.parametrize("part", ["ln1", "ln2", "ffn.layers.0.0", "ffn.dropout_layer"])
def test_each_part_of_a_layer_without_layer_scale_is_called_once(part):
    """So that hooks of other libraries work; a LayerScale is multiplied into the weights before it."""
    vit, calls = MaPeTPretrainViT(ARCH, 20, 4, 8), Counter()
    for i, layer in enumerate(vit.layers):
        layer.get_submodule(part).register_forward_hook(functools.partial(lambda i, *_: calls.update([i]), i))
    vit(torch.randn(2, 3, 20, 20))[0].sum().backward()
    assert calls == {0: 1, 1: 1, 2: 1}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_can_be_saved():
    """Also with gradients on; the traced network gives the same bits."""
    vit = MaPeTPretrainViT(ARCH, 20, 4, 8).eval()
    vit.init_weights()
    images, permutation = torch.randn(2, 3, 20, 20), vit.sample_permutation(2, "cpu")
    trace, file = torch.jit.trace(vit, (images, permutation), check_trace=False), io.BytesIO()
    torch.jit.save(trace, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(images, permutation)[0], vit(images, permutation)[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer_cfgs": {"ffn_type": "swiglu_fused"}},
        {"layer_cfgs": {"num_fcs": 3}},
        {"layer_scale_init_value": 0.0},
        {"qkv_bias": False},
    ],
    ids=str,
)
def test_any_layer_of_mmpretrain_runs_as_it_does_there(options):
    """MIM's rows see each other in full: MMPretrain's own layer gives the same."""
    arch = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
    vit = MaPeTPretrainViT(arch, 20, 4, 8, "mim", **options)
    tokens = vit.embed(torch.randn(2, 3, 20, 20), vit.sample_permutation(2, "cpu"))
    ours = vit.layers[0].two_streams(tokens, vit.layout)
    torch.testing.assert_close(
        ours, TransformerEncoderLayer.forward(vit.layers[0], tokens), rtol=1e-5, atol=1e-6
    )
