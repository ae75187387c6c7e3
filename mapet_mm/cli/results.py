"""Whether a stage's result is there: not only its file, but what it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mapet_mm.engine.runners.launch import load_config
from mapet_mm.engine.runners.resume import differences, recipe
from mapet_mm.tokenizers import TokenStore
from mapet_mm.tokenizers.run import build_images, other_settings
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import digest_of_file

EXPORTS = "exports.json"
# What a training runs with besides its recipe: how it is compiled, and what watches it.
BESIDES = {"compile", "custom_hooks"}


def codebook_there(codebook: Path, config: Path, store: Path, training: Path) -> str | None:
    """Whether the codebook is there.

    Raises:
        UserError: it is, but made with other settings than the tokenizer config has now; or it is not, but
            its tokens are.
    """
    if not codebook.exists():
        if store.exists():
            raise UserError(
                f"{store} has the tokens of a codebook that is gone: bring {codebook} back, or, to make all "
                f"anew, remove {store} and {training}"
            )
        return None
    cfg = read_config(config)
    if "codebook" in cfg and "codebook" in cfg.tokenizer and (other := other_settings(cfg, codebook)):
        raise UserError(
            f"{codebook} was made with another {_listed(other)} than {config} has: restore it there, or, to "
            f"make all anew, remove {codebook}, {store} and {training}"
        )
    return ""


def tokens_there(store: Path, config: Path, checkpoint: Path) -> str | None:
    """Whether the store is complete, and how its images differ from the tokenizer config's of today.

    New images count only before the end of the pre-training, which would be without them.
    """
    if not store.exists():
        return None
    new, gone = changed_images(TokenStore.open(store), config)
    if new and not checkpoint.exists():
        return None
    told = [f"images no longer there: {gone}"] if gone else []
    if new:
        told.append(f"images added since: {new}, which the model has not seen; another --out trains on them")
    return "; ".join(told)


def changed_images(store: TokenStore, config: Path) -> tuple[int, int]:
    """Numbers of the config's images that a store lacks, and of images with tokens that the config lacks."""
    rows = store.rows(build_images(read_config(config)).places("looking names up"))
    unseen, known = store.written(), rows[rows >= 0]
    unseen[known] = False
    lacking = np.isin(known, store.missing()).sum()
    return int(lacking + (rows < 0).sum()), int(np.count_nonzero(unseen))


def training_there(checkpoint: Path, config: Path) -> str | None:
    """Whether the last checkpoint is there, and which entries of the config it was not trained with."""
    if not checkpoint.exists():
        return None
    changed = differences(recipe(load_config(str(config))), str(checkpoint))
    if changed := [name for name in changed if name not in BESIDES]:
        return (
            f"trained with another {_listed(changed)} than {config} has: another `work_dir` there trains anew"
        )
    return ""


def export_there(folder: Path, checkpoint: Path) -> str | None:
    """Whether a folder has all files of an export of this checkpoint."""
    made = _exports(folder).get(folder.name)
    if made is None or not all((folder / name).exists() for name in made["files"]):
        return None
    return "" if made["checkpoint"] == digest_of_file(checkpoint) else None


def note_export(folder: Path, checkpoint: Path) -> None:
    """Write down, beside an export, its files and the content that it was made from."""
    made = dict(checkpoint=digest_of_file(checkpoint), files=sorted(path.name for path in folder.iterdir()))
    replace_json(folder.with_name(EXPORTS), {**_exports(folder), folder.name: made})


def _exports(folder: Path) -> dict[str, Any]:
    file = folder.with_name(EXPORTS)
    return json.loads(file.read_text()) if file.exists() else {}


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
