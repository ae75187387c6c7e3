"""Parameter names of MMPretrain's BEiT and CAE backbones, turned into those of its plain ViT."""

import re

import torch
from torch import Tensor

LAYER_SCALES = {"gamma_1": "attn.gamma1.weight", "gamma_2": "ffn.gamma2.weight"}
RELATIVE_POSITIONS = ("relative_position_bias_table", "rel_pos_bias.")


def beit_to_vit(state_dict: dict[str, Tensor], prefix: str = "") -> int:
    """Rename a BEiT backbone's parameters in place; weights of a plain ViT are left as they are.

    With absolute position embeddings the two are the same network: LayerScale has other names, and BEiT may
    keep the bias of queries and values apart, with none for the keys.

    Args:
        state_dict: a state dict, changed in place.
        prefix: what the backbone's names start with in it.

    Returns:
        The number of layers renamed; 0 for a plain ViT.

    Raises:
        ValueError: the weights have relative position biases, which a plain ViT has not.
    """
    names = [name for name in state_dict if name.startswith(prefix)]
    if relative := [name for name in names if any(part in name for part in RELATIVE_POSITIONS)]:
        raise ValueError(
            f"the checkpoint has relative position biases (`{relative[0]}`), which a plain ViT cannot take: "
            "use one pre-trained with `use_abs_pos_emb=True` and both `use_rel_pos_bias` and "
            "`use_shared_rel_pos_bias` off, or MMPretrain's BEiTViT as backbone"
        )
    pattern = re.compile(re.escape(prefix) + r"(layers\.\d+\.)(gamma_1|attn\.q_bias)")
    layers = list(dict.fromkeys(match[1] for match in map(pattern.fullmatch, names) if match))
    for layer in layers:
        for old, new in LAYER_SCALES.items():
            if prefix + layer + old in state_dict:  # not with `layer_scale_init_value=0`
                state_dict[prefix + layer + new] = state_dict.pop(prefix + layer + old)
        _join_biases(state_dict, f"{prefix}{layer}attn.")
    return len(layers)


def _join_biases(state_dict: dict[str, Tensor], attention: str) -> None:
    query, value = (state_dict.pop(f"{attention}{which}_bias", None) for which in "qv")
    if query is not None:
        state_dict[f"{attention}qkv.bias"] = torch.cat([query, torch.zeros_like(query), value])
