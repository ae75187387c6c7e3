"""The model card of an export: a README.md in its folder, with the front matter that Hugging Face reads.

The front matter and the text around two marks are the user's: of a card that exists, only what is between the
marks is written again.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mmengine.utils import to_2tuple
from safetensors import safe_open

from mapet_mm.datasets.look import load_in_training
from mapet_mm.interop.record import NUM_IMAGES
from mapet_mm.structures import Codebook, TokenStore
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.run_folder import CODEBOOK, EXPORT_FOLDERS, VERDICT, Run
from mapet_mm.utils.tables import Column, Table
from mapet_mm.weight_files import read_checkpoint

CARD = "README.md"
TEMPLATE = "model_card.md.jinja"
BEGIN = "<!-- mapet_mm writes what follows, again with each export -->"
END = "<!-- mapet_mm writes no further -->"
LIBRARIES = {"timm": "timm", "hf": "transformers"}
SHOWN_BY_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|&~$])")


def write_model_card(folder: Path, target: str, meta: Mapping[str, Any]) -> None:
    """Write the card of an export.

    In a folder of `mapet-mm pretrain`, it has the command and the verdict, too. A README.md without the marks
    is the user's own and stays as it is.

    Args:
        folder: of the export, with `config.json` and `model.safetensors`.
        target: 'timm' | 'hf'.
        meta: metadata of the checkpoint that was exported.
    """
    card = folder / CARD
    text = card_text(folder.resolve(), target, meta)
    if card.exists():
        before, mark, rest = card.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not mark or not end:
            print(f"{card} is your own and stays as it is")
            return
        written = text.partition(BEGIN)[2].partition(END)[0]
        text = before + BEGIN + written + END + after
    replace_file(card, text.encode())


def add_verdict(run: Run) -> None:
    """Write the cards of a `mapet-mm pretrain` again if there is a verdict on its checkpoint."""
    if not run.verdict:
        return
    _, meta = read_checkpoint(run.result)
    for target in EXPORT_FOLDERS:
        folder = run.export(target)
        if (folder / CARD).is_file():
            write_model_card(folder, target, meta)


def card_text(folder: Path, target: str, meta: Mapping[str, Any]) -> str:
    """The whole card of an export that has none."""
    # PyTorch needs it, too; imported here because a backbone's user does not.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from mapet_mm.dependencies import version_report

    environment = Environment(
        loader=PackageLoader("mapet_mm", "interop"),
        autoescape=False,  # Markdown; `plain` is for names
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["plain"] = plain
    config = json.loads((folder / "config.json").read_text())
    run = run_of(folder, meta)
    return environment.get_template(TEMPLATE).render(
        begin=BEGIN,
        end=END,
        name=run.folder.name if run else folder.name,
        library=LIBRARIES[target],
        is_classifier=bool(config.get("num_classes")),
        num_bands=num_bands_of(config),
        facts=Table([Column("what"), Column("value")], facts_of(folder, config, meta, run)),
        command=command_of(run) if run else None,
        verdict=verdict_of(run, meta) if run else None,
        versions=version_report(),
    )


def plain(text: str) -> str:
    """A text on one line that Markdown and HTML show as it is."""
    return SHOWN_BY_MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))


def run_of(folder: Path, meta: Mapping[str, Any]) -> Run | None:
    """The `mapet-mm pretrain` that trained these weights, if the export is in it."""
    run = Run(folder.parent)
    if not (run.options and run.store.exists()):
        return None
    store = TokenStore.open(run.store)
    is_its_own = meta.get("tokenizer") == (store.tokenizer if store.has_tokens else None)
    return run if is_its_own else None


def facts_of(
    folder: Path, config: Mapping[str, Any], meta: Mapping[str, Any], run: Run | None
) -> list[tuple[str, str]]:
    """What is known about the weights and their training, a line each."""
    facts = [("network", network_words(folder, config))]
    load = load_in_training(run.config) if run and run.exists else None
    if load:
        options = ", ".join(f"{name}={value}" for name, value in load.items() if name != "type")
        facts.append(("images are read by", f"mapet_mm.LoadPicture({options})"))
    if NUM_IMAGES in meta:
        facts.append(("training images", f"{meta[NUM_IMAGES]:,}"))
    if "epoch" in meta and "iter" in meta:
        facts.append(("epochs", f"{meta['epoch']:,}"))
        facts.append(("steps", f"{meta['iter']:,}"))
    if "change" in meta:
        facts.append(("kept of the change of the start", f"{meta['change']:g}"))
    if "experiment_name" in meta:
        name = re.sub(r"_\d{8}_\d{6}$", "", meta["experiment_name"])  # MMEngine adds the time
        facts.append(("config", f"{name}.py"))
    if "seed" in meta:
        facts.append(("seed", str(meta["seed"])))
    if run and run.has_tokens:
        codebook = Codebook.load(run / CODEBOOK)
        encoder = f"{codebook.metadata['encoder']} ({codebook.metadata['weights']})"
        facts.append(("tokenizer", f"{codebook.k:,} clusters of the features of {encoder}"))
        facts.append(("codebook, SHA-256", codebook.digest))
    if "tokenizer" in meta:
        facts.append(("tokenizer's digest", meta["tokenizer"]))
    return facts


def network_words(folder: Path, config: Mapping[str, Any]) -> str:
    """'vit_small_patch16_224 of timm, 21.7 M parameters, images of 224 x 224'."""
    if "architecture" in config:
        name = f"{config['architecture']} of timm"
        height, width = config["pretrained_cfg"]["input_size"][1:]
    else:
        architecture = (config.get("architectures") or [config["model_type"]])[0]
        name = f"{architecture} of Hugging Face Transformers"
        height, width = to_2tuple(config["image_size"])
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        count = sum(math.prod(file.get_slice(weight).get_shape()) for weight in file.keys())  # noqa: SIM118
    return f"{name}, {count / 1e6:.1f} M parameters, images of {height} x {width}"


def num_bands_of(config: Mapping[str, Any]) -> int:
    """Number of bands of the images that timm's or Hugging Face's config is for."""
    if "architecture" in config:
        return config["pretrained_cfg"]["input_size"][0]
    return config.get("num_channels", 3)


def command_of(run: Run, full_paths: bool = False) -> str:
    """The command that made a folder of `mapet-mm pretrain`; of paths, the last part by default."""
    shown = str if full_paths else last_part
    options = run.options
    words = ["mapet-mm", "pretrain", shown(options.pop("images")), "--out", shown(str(run.folder.absolute()))]
    if options.get("class_level") == 0:
        options["class_level"] = "none"
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        elif isinstance(value, str):
            words += [option, shown(value)]
        elif isinstance(value, int | float) and value is not False:
            words += [option, str(value)]
    return shlex.join(words)


def last_part(option: str) -> str:
    """An option without the folders of a path in it, which are private: `hf:vit` of `hf:/home/me/vit`."""
    library, colon, name = option.rpartition(":")
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or library.endswith("local-dir")
    if not is_path:  # hf:OWNER/NAME has a slash, too
        return option
    return library + colon + os.path.basename(os.path.normpath(name))


def verdict_of(run: Run, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Sentence, number of images and table of a run's verdict; None without one on these weights."""
    verdict = run.verdict
    if not verdict:
        return None
    saved = datetime.strptime(meta["time"], "%Y%m%d_%H%M%S")
    if (run / VERDICT).stat().st_mtime < saved.timestamp():  # on the weights of a shorter training
        return None
    known = verdict["table"]
    table = Table([Column(*column) for column in known["columns"]], known["rows"], known["notes"])
    return {**verdict, "table": table}
