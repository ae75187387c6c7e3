"""RUN, the folder that `mapet-mm pretrain` makes: the names of its files, and what they hold."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.config import Config

from mapet_mm.utils.config import as_python, read_config, type_name
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import IDENTITY

# Names in RUN, which its configs have, too: the tools run there.
PRETRAINING = "pretrain.py"
TOKENIZER = "tokenizer.py"
IMAGES = "images.txt"  # all that there were at the first start
TEACHER = "teacher_images.json"  # digests of the images that the tokenizer sees, if they are others
INIT = "init.pth"  # the weights of a start
CODEBOOK = "codebook.safetensors"
TOKENS = "tokens"
STORED = "stored_images"  # in place of the three before, of a method without tokens
TRAINED = "train.txt"  # images that are trained on
HELD_OUT = "held_out.txt"  # the others
# Those of them that the verdict takes, with labels if there are any.
VOTING = "verdict_train.txt"
TESTED = "verdict_val.txt"
GROUPS = "groups.txt"  # of all images, in lines `name<tab>group`, if there are any
BEST = "best_knn.pth"  # beside the training's checkpoints: the weights of its best k-NN probe
CHOOSING = "verdict_choose.txt"  # held-out images that choose how much of a start's change is kept
VERDICT = "verdict.json"
REPORT = "report.html"
EXPORT_FOLDERS = {"timm": "timm", "hf": "huggingface"}  # of each library
# Entry of a training's config, and of the metadata of its checkpoints and of its start: the files that timm
# ("timm") and Hugging Face ("hf", "hf_preprocessor"; null if it has no such network) read beside the weights.
EXPORTS = "exports"
# Options of `MaPeTViT` that its weights depend on.
VIT_SIZES = ("arch", "img_size", "patch_size", "in_channels", "layer_scale_init_value", "with_cls_token")


@dataclass(frozen=True)
class Run(os.PathLike):
    """What `pretrain` makes: a folder that timm, Hugging Face and OpenMMLab can read parts of.

    Paths begin with the folder as it was given.
    """

    folder: Path

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def __str__(self) -> str:
        return str(self.folder)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    @property
    def exists(self) -> bool:
        """True once the pre-training is configured."""
        return (self / PRETRAINING).is_file()

    @property
    def options(self) -> dict[str, Any]:
        """The options that it was made with; none before its first start."""
        recorded = self / IDENTITY
        return json.loads(recorded.read_text()) if recorded.exists() else {}

    @property
    def config(self) -> Config:
        """The config of the pre-training, as it is now."""
        return read_config(self / PRETRAINING)

    @property
    def has_tokens(self) -> bool:
        """False of a method without a tokenizer."""
        return (self / TOKENIZER).exists() or (self / TOKENS).exists()

    @property
    def store(self) -> Path:
        """The token store; or that of the images alone."""
        return self / (TOKENS if self.has_tokens else STORED)

    @property
    def images(self) -> str:
        """The folder of the images, as its configs name it; of the tokenizer's, if it sees others."""
        if self.has_tokens:
            return read_config(self / TOKENIZER).data_root
        return self.config.train_dataloader.dataset.data_root

    @property
    def trained_images(self) -> str:
        """The folder of the images that the network sees."""
        dataset = self.config.train_dataloader.dataset
        return dataset.get("data_prefix") or dataset.get("data_root") or self.images

    @property
    def held_out(self) -> Path | None:
        """The list of the images that are not trained on; None if there is no verdict."""
        listed = self / HELD_OUT
        return listed if listed.exists() else None

    @property
    def work_dir(self) -> Path:
        """The folder of the training."""
        return self / self.config.work_dir

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that the training ends with."""
        return self.work_dir / f"epoch_{self.config.train_cfg.max_epochs}.pth"

    @property
    def result(self) -> Path:
        """The weights that it makes: of the checkpoint, or with a part of its change of the start."""
        checkpoint = self.checkpoint
        if (self / CHOOSING).exists():
            return checkpoint.with_name(f"{checkpoint.stem}_kept.pth")
        return checkpoint

    @property
    def newest_checkpoint(self) -> Path:
        """The result if it is there, else the last checkpoint; UserError if there is none yet."""
        found = self._checkpoints()
        if not found:
            raise UserError(f"{self.work_dir} has no epoch_N.pth yet: continue the pre-training")
        has_ended = (self / CHOOSING).exists() and self.result.exists()
        return self.result if has_ended else found[-1]

    def newer_checkpoint(self, export: Path) -> Path | None:
        """The newest checkpoint, if it is of a training that goes on after an export was made."""
        found = self._checkpoints() if self.exists else []
        # In a copy of a RUN that has ended, times say nothing.
        if not found or found[-1] == self.checkpoint:
            return None
        return found[-1] if found[-1].stat().st_mtime > export.stat().st_mtime else None

    def _checkpoints(self) -> list[Path]:
        """The checkpoints that are there, the last one at the end."""
        epochs = {path: path.stem.partition("_")[2] for path in self.work_dir.glob("epoch_*.pth")}
        numbered = [path for path, epoch in epochs.items() if epoch.isdigit()]
        return sorted(numbered, key=lambda path: int(epochs[path]))

    @property
    def libraries(self) -> list[str]:
        """The libraries that have its network, to which it is exported: 'timm' and perhaps 'hf'."""
        exports = self.config.get(EXPORTS)
        return [name for name in EXPORT_FOLDERS if exports is None or exports[name] is not None]

    def export(self, library: str) -> Path:
        """The folder that 'timm' or 'hf' loads."""
        return self / EXPORT_FOLDERS[library]

    @property
    def backbone(self) -> str:
        """The entry of an OpenMMLab config that makes it, once it has ended, the backbone of a model."""
        if self.config.get(EXPORTS):
            backbone = dict(type="mapet_mm.TIMMViT", model_name=str(self))
        else:
            weights = dict(type="Pretrained", checkpoint=str(self.result), prefix="backbone.")
            backbone = dict(**self.plain_vit, out_type="featmap", init_cfg=weights)
        return f"backbone={as_python(backbone)}"

    @property
    def plain_vit(self) -> dict[str, Any]:
        """The entry of the ViT that it trains, if that is no continued one, without the weights."""
        trained = self.config.model.backbone.to_dict()
        vit = {name: trained[name] for name in VIT_SIZES if name in trained}
        if type_name(trained["type"]) == "MAEViT":  # which has its bands elsewhere
            vit.update(trained.get("patch_cfg", {}), layer_scale_init_value=0.0)
        return dict(type="mapet_mm.MaPeTViT", **vit)

    @property
    def verdict(self) -> dict[str, Any] | None:
        """Whether it helped: `sentence`, and `measures` with their intervals; None without a verdict."""
        file = self / VERDICT
        return json.loads(file.read_text()) if file.is_file() else None

    @property
    def report(self) -> Path:
        """The page with the verdict, curves and pictures."""
        return self / REPORT
