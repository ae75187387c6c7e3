"""A training step of the authors' code, from a clone of their repository, for a comparison on one machine.

Their code has no licence: it is run from where it lies, and nothing of it is here. It was written for timm
0.6, whose modules have other names today.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from timm import layers
from timm.models import _manipulate
from torch import Tensor, nn

VOCABULARY, NUM_TOKENS, SIDE = 8192, 197, 224
SIZES = {"tiny": (192, 3, 50), "small": (384, 6, 50), "base": (768, 12, 60)}  # width, heads, cutting point
DATA_TYPE = {"cuda": torch.float16}  # on a CPU float32


class AuthorsStep:
    """Forward, backward, clipping and AdamW of the authors' MaPeT, on a batch as their loader makes it.

    Args:
        folder: a clone of their repository.
        size: 'tiny' | 'small' | 'base'.
        num_images: images of a step.
        device: where the model is.
        in_loop: copy images, tokens and each image's masks from the host in every step, read the loss and
            wait for the device, as their training does; otherwise all of it is on the device before.
        num_layers: instead of 12.
    """

    def __init__(
        self, folder: Path, size: str, num_images: int, device: str, in_loop: bool, num_layers: int | None
    ) -> None:
        width, heads, cutting_point = SIZES[size]
        model_module, mask_module = load_code(folder)
        torch.manual_seed(0)
        self.model = model_module.XLeiTPositionalAugmented(
            embed_dim=width,
            depth=num_layers or 12,
            num_heads=heads,
            init_values=0.1,
            drop_path_rate=0.1,
            ntoken=VOCABULARY,
            least_number=cutting_point,
        )
        self.model = self.model.to(device).train()
        self.device = device
        self.in_loop = in_loop
        self.data_type = DATA_TYPE.get(device, torch.float32)
        self.optimizer = torch.optim.AdamW(decayed_groups(self.model), lr=1e-4)
        self.scaler = torch.amp.GradScaler(device, enabled=self.data_type is torch.float16)
        self.batch = make_batch(mask_module, num_images, heads, cutting_point)
        if not in_loop:
            self.batch = [one.to(device) for one in self.batch]

    def __call__(self) -> Tensor:
        images, targets, query_masks, content_masks, is_target = self.batch
        if self.in_loop:
            images = images.to(self.device)
            targets = targets.to(self.device)
            query_masks = query_masks.to(self.device)
            content_masks = content_masks.to(self.device)
        with torch.autocast(self.device, self.data_type, enabled=self.scaler.is_enabled()):
            logits = self.model(images, query_masks, content_masks, is_target)  # B V T
            loss = nn.functional.cross_entropy(logits, targets)
        if self.in_loop:
            loss.item()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 3.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.in_loop and self.device == "cuda":
            torch.cuda.synchronize()
        return loss.detach()


def make_batch(masks: ModuleType, num_images: int, heads: int, cutting_point: int) -> list[Tensor]:
    """Images, the tokens of the targets, each image's two masks, and which tokens are targets."""
    drawn = []
    for _ in range(num_images):
        order = torch.cat(
            [torch.tensor([1]), 2 + torch.randperm(NUM_TOKENS - 1)]
        )  # class token first, from 1
        drawn.append(masks.attention_mask_full_mapet_1(order, heads, cutting_point, NUM_TOKENS)[:3])
    query_masks, content_masks, is_target = (torch.stack(column) for column in zip(*drawn, strict=True))
    images = torch.randn(num_images, 3, SIDE, SIDE)
    targets = torch.randint(VOCABULARY, (num_images, NUM_TOKENS - cutting_point))
    return [images, targets, query_masks, content_masks, is_target]


def decayed_groups(model: nn.Module) -> list[dict]:
    """Weight decay on matrices only."""
    matrices = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim <= 1]
    return [dict(params=matrices, weight_decay=0.05), dict(params=others, weight_decay=0.0)]


def load_code(folder: Path) -> tuple[ModuleType, ModuleType]:
    """Their model and their masks, with timm's functions under the names of timm 0.6."""
    unused = dict.fromkeys(("build_model_with_cfg", "resolve_pretrained_cfg", "adapt_input_conv"))
    old_names = {
        "timm.models.helpers": {**unused, **vars(_manipulate)},
        "timm.models.layers": vars(layers),
        "timm.models.layers.helpers": dict(to_2tuple=layers.to_2tuple),
        "timm.models.layers.trace_utils": dict(_assert=lambda *_: None),
        "timm.models.registry": dict(register_model=lambda function: function),
    }
    for name, contents in old_names.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(contents)
    return load_file(folder / "models/mapet/mapet.py"), load_file(folder / "utils/models.py")


def load_file(path: Path) -> ModuleType:
    """A module from a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(f"authors_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
