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


def attention(weights, prefix, num_heads, x, context, mask):
    """Multi-head attention of x over context, with one float mask an image and head: (B, H, rows, keys)."""
    dim = x.shape[-1]
    head_dim = dim // num_heads
    weight, bias = weights[f"{prefix}.qkv.weight"], weights[f"{prefix}.qkv.bias"]
    q = x @ weight[:dim].T + bias[:dim]
    k = context @ weight[dim : 2 * dim].T + bias[dim : 2 * dim]
    v = context @ weight[2 * dim :].T + bias[2 * dim :]
    heads = []
    for h in range(num_heads):
        part = slice(h * head_dim, (h + 1) * head_dim)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / head_dim**0.5 + mask[:, h]
        heads.append(scores.softmax(-1) @ v[..., part])
    return torch.cat(heads, -1) @ weights[f"{prefix}.proj.weight"].T + weights[f"{prefix}.proj.bias"]


def layer_norm(weights, name, x):
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-6)


def mlp(weights, prefix, x):
    hidden = F.gelu(x @ weights[f"{prefix}.0.0.weight"].T + weights[f"{prefix}.0.0.bias"])
    return hidden @ weights[f"{prefix}.1.weight"].T + weights[f"{prefix}.1.bias"]


def draw_keep(batch_size, drop_rate):
    """Stochastic depth: one keep/drop an image and branch, scaled to keep the expectation."""
    if drop_rate == 0:
        return torch.ones(batch_size, 1, 1)
    return (1 - drop_rate + torch.rand(batch_size, 1, 1)).floor() / (1 - drop_rate)


def run_layer(weights, i, num_heads, content, query, masks, drop_rate):
    """One layer for both streams: the query stream attends to the content stream of the layer below."""
    name = f"layers.{i}"
    content_masks, query_masks = masks
    keep_attention, keep_mlp = (draw_keep(len(content), drop_rate) for _ in range(2))
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
    weights, images, permutation, *, cutting_point, objective, patch_size, num_heads, drop_rates
):
    """Latents of the targets in raster order, (B, n, D), and which tokens are targets, (B, N)."""
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
    masks = [
        torch.stack(
            [
                torch.stack([build(rank[b].tolist(), cutting_point, with_masks)] * num_heads)
                for b in range(batch_size)
            ]
        )
        for build in (content_mask, query_mask)
    ]
    for i, drop_rate in enumerate(drop_rates):
        content, query = run_layer(weights, i, num_heads, content, query, masks, drop_rate)
    predicting = content[:, num_tokens:] if objective == "mim" else query
    return layer_norm(weights, "ln1", predicting), is_target
