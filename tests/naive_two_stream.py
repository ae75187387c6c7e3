"""A second, deliberately naive two-stream forward, written from the paper's equations to check ours against.

Nothing is permuted and nothing is shared: tokens stay in raster order, the content and query streams are two
tensors that go through the layers one after the other, and every image and head has its own float mask, built
with loops from the rank of each token in the permutation. Read it beside Section 4.1 of the paper.

What timm's layers do beyond the plain ViT's is a `Library`: names, angles, MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

MINUS_INFINITY = float("-inf")


def content_mask(rank: list[int], cutting_point: int, with_masks: bool) -> torch.Tensor:
    """Rows h: the N tokens, then one mask token a target (if any). Keys: the same. 0 = visible."""
    targets = [i for i in range(len(rank)) if rank[i] >= cutting_point]
    rows = [("token", i) for i in range(len(rank))]
    if with_masks:
        rows += [("mask", i) for i in targets]
    mask = torch.full((len(rows), len(rows)), MINUS_INFINITY)
    for r, (row_kind, i) in enumerate(rows):
        is_target_content = row_kind == "token" and rank[i] >= cutting_point
        for k, (key_kind, j) in enumerate(rows):
            is_context = key_kind == "token" and rank[j] < cutting_point
            if is_target_content:  # h_{z_t} sees x_{z <= t} and M_{z > t}
                visible = rank[j] <= rank[i] if key_kind == "token" else rank[j] > rank[i]
            else:  # context and mask tokens see the context and every mask token
                visible = is_context or key_kind == "mask"
            if visible:
                mask[r, k] = 0.0
    return mask


def query_mask(rank: list[int], cutting_point: int, with_masks: bool) -> torch.Tensor:
    """Rows g: one query a target, in raster order. Keys: the content stream."""
    targets = [i for i in range(len(rank)) if rank[i] >= cutting_point]
    mask = torch.full((len(targets), len(rank) + (len(targets) if with_masks else 0)), MINUS_INFINITY)
    for r, i in enumerate(targets):
        for j in range(len(rank)):  # g_{z_t} sees x_{z < t}
            if rank[j] < rank[i]:
                mask[r, j] = 0.0
        if with_masks:
            for k, j in enumerate(targets):  # and M_{z >= t}
                if rank[j] >= rank[i]:
                    mask[r, len(rank) + k] = 0.0
    return mask


def build_masks(permutation, cutting_point, objective, num_heads):
    """Content and query masks, (B, H, rows, keys) each: the same mask for every head, as a copy."""
    with_masks = objective in ("mapet", "mim")
    return [
        torch.stack([build(rank.tolist(), cutting_point, with_masks) for rank in permutation.argsort(1)])
        .unsqueeze(1)
        .repeat(1, num_heads, 1, 1)
        .to(permutation.device)
        for build in (content_mask, query_mask)
    ]


def linear(weights, name, x, part=slice(None)):
    bias = weights.get(f"{name}.bias")
    return F.linear(x, weights[f"{name}.weight"][part], None if bias is None else bias[part])


def layer_norm(weights, name, x, eps=1e-6):
    if f"{name}.weight" not in weights:
        return x
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps=eps)


def gelu_mlp(first, second):
    """An MLP of two linear layers by these names."""

    def mlp(weights, prefix, x, eps):
        return linear(weights, prefix + second, F.gelu(linear(weights, prefix + first, x)))

    return mlp


def swiglu_mlp(first, norm, out):
    """SwiGLU, with a norm of the hidden channels if there is one; the first layer gives gate and value."""

    def mlp(weights, prefix, x, eps):
        gate, value = linear(weights, prefix + first, x).chunk(2, -1)
        hidden = F.silu(gate) * value
        return linear(weights, prefix + out, layer_norm(weights, prefix + norm, hidden, eps))

    return mlp


PLAIN_MLP = gelu_mlp(".ffn.layers.0.0", ".ffn.layers.1")


@dataclass
class Library:
    """Names of a library's ViT, and what its layers do; the defaults are MMPretrain's plain ViT."""

    patches: str = "patch_embed.projection"
    extra: tuple[str, ...] = ("cls_token",)  # tokens in front of the patches
    positions: str = "pos_embed"
    layer: str = "layers.{}"
    norms: tuple[str, str] = ("ln1", "ln2")
    scales: tuple[str, str] = ("attn.gamma1.weight", "ffn.gamma2.weight")
    mlp: Callable = PLAIN_MLP
    out: str = "ln1"
    eps: float = 1e-6
    angles: torch.Tensor | None = None  # (N, 2 d): of each token in raster order the sines, then the cosines


def turn(x, angles):
    """Rotate neighbouring channels as pairs: (B, H, L, d) by (B, L, 2 d)."""
    sines, cosines = angles[:, None].chunk(2, -1)
    turned = torch.empty_like(x)
    turned[..., 0::2], turned[..., 1::2] = -x[..., 1::2], x[..., 0::2]
    return x * cosines + turned * sines


def split_heads(x, num_heads):
    return x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2)


def attention(weights, prefix, num_heads, library, streams, ids, mask):
    """Multi-head attention of one stream over another, with one float mask an image and head.

    `streams` are the asking rows and those asked, `ids` which token each of them stands for in each image.
    """
    dim = streams[0].shape[-1]
    projected = []
    for i, (kind, source) in enumerate(zip("qkv", (*streams, streams[1]), strict=True)):
        x = linear(weights, f"{prefix}.qkv", source, slice(i * dim, (i + 1) * dim))
        if f"{prefix}.{kind}_bias" in weights:
            x = x + weights[f"{prefix}.{kind}_bias"]
        projected.append(split_heads(x, num_heads))
    queries, keys, values = projected
    if library.angles is not None:
        queries, keys = turn(queries, library.angles[ids[0]]), turn(keys, library.angles[ids[1]])
    scores = queries @ keys.transpose(2, 3) / queries.shape[-1] ** 0.5 + mask
    heads = scores.softmax(-1) @ values
    return linear(weights, f"{prefix}.proj", heads.transpose(1, 2).flatten(2))


def draw_keep(batch_size, drop_rate, device):
    """Stochastic depth: one keep/drop an image and branch, scaled to keep the expectation."""
    if drop_rate == 0:
        return torch.ones(batch_size, 1, 1, device=device)
    return (1 - drop_rate + torch.rand(batch_size, 1, 1, device=device)).floor() / (1 - drop_rate)


def run_layer(weights, i, num_heads, content, query, ids, masks, drop_rate, library):
    """One layer for both streams: the query stream attends to the content stream of the layer below."""
    name = library.layer.format(i)
    norm, mlp_norm = (f"{name}.{norm}" for norm in library.norms)
    scale, mlp_scale = (weights.get(f"{name}.{scale}", 1.0) for scale in library.scales)
    keep_attention, keep_mlp = (draw_keep(len(content), drop_rate, content.device) for _ in range(2))
    normed = layer_norm(weights, norm, content, library.eps)
    streams = []
    for stream, own_ids, mask in zip((content, query), ids, masks, strict=True):
        x = layer_norm(weights, norm, stream, library.eps)
        pair = (own_ids, ids[0])
        out = attention(weights, f"{name}.attn", num_heads, library, (x, normed), pair, mask)
        stream = stream + keep_attention * scale * out
        out = library.mlp(weights, name, layer_norm(weights, mlp_norm, stream, library.eps), library.eps)
        streams.append(stream + keep_mlp * mlp_scale * out)
    return streams


def two_stream_forward(
    weights,
    images,
    permutation,
    *,
    cutting_point,
    objective,
    patch_size,
    num_heads,
    drop_rates,
    masks=None,
    library=None,
    with_context=False,
):
    """Latents of the targets in raster order, (B, n, D), and which tokens are targets, (B, N).

    With the context these are of all patches: the visible ones have their rows of the content stream.

    A data loader that makes the masks hands them on in `masks`.
    """
    library = library or Library()
    batch_size, num_tokens = permutation.shape
    patches = F.conv2d(
        images, weights[f"{library.patches}.weight"], weights[f"{library.patches}.bias"], stride=patch_size
    )
    extra = [weights[name].repeat(batch_size, 1, 1) for name in library.extra]
    x = torch.cat([*extra, patches.flatten(2).transpose(1, 2)], 1)
    positions = weights.get(library.positions, torch.zeros_like(x[:1]))
    x = x + positions
    rank = permutation.argsort(1)
    is_target = rank >= cutting_point
    mask_tokens = torch.stack(
        [weights["mask_token"][0] + positions[0, is_target[b]] for b in range(batch_size)]
    )
    targets = torch.stack([row.nonzero()[:, 0] for row in is_target])
    every = torch.arange(num_tokens, device=images.device).expand(batch_size, -1)
    with_masks = objective in ("mapet", "mim")
    content = torch.cat([x, mask_tokens], 1) if with_masks else x
    ids = [torch.cat([every, targets], 1) if with_masks else every, targets]
    query = mask_tokens
    if masks is None:
        masks = build_masks(permutation, cutting_point, objective, num_heads)
    for i, drop_rate in enumerate(drop_rates):
        content, query = run_layer(weights, i, num_heads, content, query, ids, masks, drop_rate, library)
    predicting = content[:, num_tokens:] if objective == "mim" else query
    if with_context:
        rows = content[:, :num_tokens].masked_scatter(is_target[..., None], predicting)
        num_extra = num_tokens - patches[0, 0].numel()
        predicting = rows[:, num_extra:]
    return layer_norm(weights, library.out, predicting, library.eps), is_target
