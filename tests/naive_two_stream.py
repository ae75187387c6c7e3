"""A second, deliberately naive two-stream forward, written from the paper's equations to check ours against.

Nothing is permuted and nothing is shared: tokens stay in raster order, the content and query streams are two
tensors that go through the layers one after the other, and every image and head has its own float mask, built
with loops from the rank of each token in the permutation. Read it beside Section 4.1 of the paper.
"""

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
    return F.linear(x, weights[f"{name}.weight"][part], weights[f"{name}.bias"][part])


def split_heads(x, num_heads):
    return x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2)


def attention(weights, prefix, num_heads, x, context, mask):
    """Multi-head attention of x over context, with one float mask an image and head: (B, H, rows, keys)."""
    dim = x.shape[-1]
    queries, keys, values = (
        split_heads(linear(weights, f"{prefix}.qkv", source, slice(i * dim, (i + 1) * dim)), num_heads)
        for i, source in enumerate((x, context, context))
    )
    scores = queries / queries.shape[-1] ** 0.5 @ keys.transpose(2, 3) + mask
    heads = scores.softmax(-1) @ values
    return linear(weights, f"{prefix}.proj", heads.transpose(1, 2).flatten(2))


def layer_norm(weights, name, x):
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-6)


def mlp(weights, prefix, x):
    return linear(weights, f"{prefix}.1", F.gelu(linear(weights, f"{prefix}.0.0", x)))


def draw_keep(batch_size, drop_rate, device):
    """Stochastic depth: one keep/drop an image and branch, scaled to keep the expectation."""
    if drop_rate == 0:
        return torch.ones(batch_size, 1, 1, device=device)
    return (1 - drop_rate + torch.rand(batch_size, 1, 1, device=device)).floor() / (1 - drop_rate)


def run_layer(weights, i, num_heads, content, query, masks, drop_rate):
    """One layer for both streams: the query stream attends to the content stream of the layer below."""
    name = f"layers.{i}"
    content_masks, query_masks = masks
    keep_attention, keep_mlp = (draw_keep(len(content), drop_rate, content.device) for _ in range(2))
    normed = layer_norm(weights, f"{name}.ln1", content)
    streams = []
    for stream, mask in ((query, query_masks), (content, content_masks)):
        x = layer_norm(weights, f"{name}.ln1", stream)
        out = attention(weights, f"{name}.attn", num_heads, x, normed, mask)
        stream = stream + keep_attention * weights[f"{name}.attn.gamma1.weight"] * out
        out = mlp(weights, f"{name}.ffn.layers", layer_norm(weights, f"{name}.ln2", stream))
        streams.append(stream + keep_mlp * weights[f"{name}.ffn.gamma2.weight"] * out)
    return streams[1], streams[0]


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
):
    """Latents of the targets in raster order, (B, n, D), and which tokens are targets, (B, N).

    A data loader that makes the masks hands them on in `masks`.
    """
    batch_size, num_tokens = permutation.shape
    patches = F.conv2d(
        images,
        weights["patch_embed.projection.weight"],
        weights["patch_embed.projection.bias"],
        stride=patch_size,
    )
    x = torch.cat([weights["cls_token"].repeat(batch_size, 1, 1), patches.flatten(2).transpose(1, 2)], 1)
    x = x + weights["pos_embed"]
    rank = permutation.argsort(1)
    is_target = rank >= cutting_point
    mask_tokens = torch.stack(
        [weights["mask_token"][0] + weights["pos_embed"][0, is_target[b]] for b in range(batch_size)]
    )
    with_masks = objective in ("mapet", "mim")
    content = torch.cat([x, mask_tokens], 1) if with_masks else x
    query = mask_tokens
    if masks is None:
        masks = build_masks(permutation, cutting_point, objective, num_heads)
    for i, drop_rate in enumerate(drop_rates):
        content, query = run_layer(weights, i, num_heads, content, query, masks, drop_rate)
    predicting = content[:, num_tokens:] if objective == "mim" else query
    return layer_norm(weights, "ln1", predicting), is_target
