"""The options of `mapet-mm pretrain` and of `mapet_mm.pretrain`."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from mapet_mm.cli.command_options import (
    COUNT,
    FLAG,
    PATH,
    SEED,
    TEXT,
    WORKERS,
    Option,
    OptionError,
    Options,
    number,
    one_of,
    options_table,
)
from mapet_mm.cli.data_options import (
    BAND,
    CLASS_LEVEL,
    CLASS_LEVEL_DEFAULT,
    GROUPS,
    GROUPS_WORDS,
    PAGE,
    RANGE,
    TILES,
    class_level_words,
    labels_words,
    range_of,
)
from mapet_mm.cli.methods import METHODS, Method
from mapet_mm.utils.identity import canonical, digest_of_file
from mapet_mm.utils.run_folder import Run

EPOCHS = 300


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(Options):
    """Everything that a pre-training can be told; each field says what it means."""

    images: Annotated[
        Path,
        Option(
            PATH, "folder of images, searched recursively", "", "DIR", is_positional=True, recorded="always"
        ),
    ]
    out: Annotated[Path, Option(PATH, "folder for everything that is made", "", "RUN", recorded="never")]
    arch: Annotated[
        str | None,
        Option(
            one_of("tiny", "small", "base"),
            "size of the ViT",
            "small, or that of --init",
            recorded="always",
        ),
    ] = None
    method: Annotated[
        str,
        Option(
            one_of(*METHODS),
            "visible-mim is an extension: the ViT sees half of the patches, a small predictor the rest, and "
            "a step has a third of the arithmetic; in small trials its frozen features were better than "
            "MaPeT's, and on another domain worse than MIM's; mae is MMPretrain's: it predicts pixels, from "
            "random weights, and has no tokens; in small trials it was better than both where no CLIP "
            "weights fit the images",
        ),
    ] = "mapet"
    init: Annotated[
        str | None,
        Option(
            TEXT,
            "continue a pre-trained ViT: timm:NAME (DINOv2, DINOv3, EVA-02, ...) or timm:local-dir:FOLDER; "
            "hf:NAME_OR_FOLDER (ViT, Dinov2, Dinov2WithRegisters, DINOv3ViT); the RUN of another "
            "pre-training; or a file of a plain ViT's weights (patches of 16: MAE, DeiT, ...)",
            "random weights",
            "START",
            recorded="always",
        ),
    ] = None
    train: Annotated[
        str,
        Option(
            one_of("all", "attention", "lora"),
            "what is trained of the ViT of --init: attention, the output projection of each layer's "
            "attention; lora, low-rank adapters of all its projections, which the exports have in their "
            "weights; beside either what is new (mask token, head, predictor), and the rest stays as it was",
        ),
    ] = "all"
    change: Annotated[
        str,
        Option(
            one_of("all", "knn"),
            "what is kept of the training's change of --init: knn keeps 0, 1/4, 1/2, 3/4 or all of it, as "
            "suits k-NN on a third of the verdict's held-out images, and the verdict takes the others",
        ),
    ] = "all"
    tokenizer: Annotated[
        str,
        Option(
            one_of("auto", "clip", "init", "random"),
            "whose features are clustered into tokens: clip, a CLIP ResNet's; init, the start's own; random, "
            "a network's with random weights",
            "init with --init; else clip if its weights are there or can be downloaded, else random",
            recorded="always",
        ),
    ] = "auto"
    tiles: Annotated[
        tuple[int, int] | None,
        Option(
            TILES,
            "divide each picture into tiles of so many of its pixels, with an overlap, each an image; the "
            "last one of a row or column is moved inward",
            "a picture is one image",
        ),
    ] = None
    range: Annotated[
        tuple[Any, ...] | None,
        Option(
            RANGE,
            "values that become 0 and 255 of images that have more than 8 bits: two numbers, a pair of them "
            "for each band, or percentiles of a sample, 1% 99%",
            "only 8 bits are taken",
            num_values="+",
        ),
    ] = None
    bands: Annotated[
        tuple[int, ...] | None,
        Option(BAND, "bands of the images that are taken, from 1", "red, green and blue", num_values="+"),
    ] = None
    page: Annotated[
        int | None,
        Option(
            PAGE,
            "page of the images that is taken, from 0",
            "only images of one page are taken",
        ),
    ] = None
    teacher_bands: Annotated[
        tuple[int, ...] | None,
        Option(
            BAND,
            "bands that the tokenizer sees as red, green and blue, from 1",
            "the first three that are taken",
            num_values=3,
        ),
    ] = None
    teacher_images: Annotated[
        Path | None,
        Option(
            PATH,
            "folder of photographs of the same names, which the tokenizer sees in place of the images",
            "",
            "FOLDER",
        ),
    ] = None
    image_size: Annotated[
        int | None,
        Option(COUNT, "side of the network's images in pixels", "224, or that of --init", "SIDE"),
    ] = None
    patch_size: Annotated[
        int | None, Option(COUNT, "side of a patch in pixels", "16, or that of --init", "SIDE")
    ] = None
    epochs: Annotated[
        int | None,
        Option(
            COUNT,
            "passes over the images; with more of them, a RUN that has ended goes on",
            str(EPOCHS),
            recorded="always",
        ),
    ] = None
    batch_size: Annotated[int, Option(COUNT, "images per step and process", recorded="always")] = 64
    lr: Annotated[
        float | None,
        Option(
            number("above 0", lambda rate: rate > 0),
            "highest learning rate",
            "for 64 images a step 1.5e-3 with --init of up to 192 channels, 3e-4 with a wider one or MAE, "
            "else 2.65e-4, and with the square root of their number",
            "RATE",
            recorded="always",
        ),
    ] = None
    layer_decay: Annotated[
        float | None,
        Option(
            number("above 0, and at most 1", lambda share: 0 < share <= 1),
            "layer-wise learning-rate decay: each layer learns at this share of the next one's rate",
            "0.75 with --init of more than 192 channels, else 1",
            "SHARE",
            recorded="always",
        ),
    ] = None
    workers: Annotated[int, WORKERS] = min(4, os.cpu_count() or 1)
    processes: Annotated[
        int | None, Option(COUNT, "processes to train in", "one for each GPU", recorded="never")
    ] = None
    seed: Annotated[int, SEED] = 0
    max_skipped: Annotated[
        float | None,
        Option(
            number("between 0 and 1", lambda share: 0 <= share <= 1),
            "stop if more than this share of the images cannot be decoded; 1 trains with whatever is left",
            "0.05",
            "SHARE",
            recorded="never",
        ),
    ] = None
    retry_skipped: Annotated[
        bool,
        Option(
            FLAG,
            "try the images again that were left out, after you have repaired them",
            recorded="never",
        ),
    ] = False
    labels: Annotated[
        Path | None, Option(PATH, labels_words("for the verdict"), "", "FILE", recorded="always")
    ] = None
    class_level: Annotated[
        int | None,
        Option(
            CLASS_LEVEL,
            class_level_words("for the verdict"),
            CLASS_LEVEL_DEFAULT,
        ),
    ] = None
    groups: Annotated[str | None, Option(GROUPS, GROUPS_WORDS)] = None
    no_verdict: Annotated[
        bool, Option(FLAG, "train on all images, without a verdict at the end", recorded="always")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_options_of_method()
        if self.tokenizer == "init" and not self.init:
            raise OptionError("--tokenizer init needs --init START")
        for name in ("train", "change"):
            value = getattr(self, name)
            if value != "all" and not self.init:
                raise OptionError(f"--{name} {value} needs --init START")
        if self.change != "all" and self.no_verdict:
            raise OptionError(f"--change {self.change} takes held-out images: leave --no-verdict out")
        if self.labels and self.class_level is not None:
            raise OptionError("--labels and --class-level exclude each other")
        if self.patch_size and self.init:
            raise OptionError("--patch-size: the patches are those of --init; leave it out")

        if self.teacher_bands and self.teacher_images:
            raise OptionError("--teacher-bands and --teacher-images exclude each other")
        if self.range is not None:
            range_of(self.range)

    def _require_options_of_method(self) -> None:
        """Raise OptionError for an option that means nothing to the method."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in METHODS[self.method].without:
            if getattr(self, name) != defaults[name]:
                flag = name.replace("_", "-")
                reason = "starts from random weights" if name == "init" else "has no tokens"
                raise OptionError(f"--method {self.method} {reason}: leave --{flag} out")

    @property
    def about_method(self) -> Method:
        """What is known of the method."""
        return METHODS[self.method]

    @property
    def value_range(self) -> tuple[Any, ...] | None:
        """The range as `mapet_mm.LoadPicture` takes it: one pair, or one for each band."""
        return None if self.range is None else range_of(self.range)

    @property
    def run(self) -> Run:
        """The folder for everything that is made."""
        return Run(self.out)

    def recorded(self) -> dict[str, Any]:
        """Those that decide what is computed, with whole paths: a RUN keeps them from its first start on."""
        kept = super().recorded()
        for name in self.about_method.without:
            kept.pop(name, None)
        kept["images"] = self.images.resolve()
        if self.init and not self.init.startswith(("timm:", "hf:")):
            kept["init"] = Path(self.init).resolve()
        if self.labels:
            kept["labels"] = self.labels.resolve()
        if self.groups and Path(self.groups).is_file():  # wherever it lies
            kept["groups"] = digest_of_file(self.groups)
        if self.teacher_images:
            kept["teacher_images"] = self.teacher_images.resolve()
        return canonical(kept)


if __name__ == "__main__":  # the table of docs/pretrain.md
    print(options_table(PretrainOptions), end="")
