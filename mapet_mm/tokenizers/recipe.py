"""A tokenizer's config file, taken to a fitted codebook (k-CLIP) and to a filled token store (all)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import barrier, is_main_process
from mmengine.logging import print_log
from mmengine.registry import init_default_scope
from torch import nn

from mapet_mm.registry import MODELS
from mapet_mm.tokenizers.codebook import Codebook, CodebookError
from mapet_mm.tokenizers.extraction import Extraction, Tokenizer, extract_tokens, open_or_create
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.tokenizers.kmeans import KMeansOptions
from mapet_mm.tokenizers.sampling import POSITIONS_PER_IMAGE, sample_features
from mapet_mm.tokenizers.token_store import TokenStore
from mapet_mm.tokenizers.verification import Verification, verify_store

REQUIRED = ("tokenizer", "data_preprocessor", "dataset", "token_store")


def run_fit_codebook(cfg: Config, out: str | None = None, overwrite: bool = False) -> tuple[Path, Codebook]:
    """Sample features as the config says, cluster them and save the codebook.

    Args:
        cfg: a tokenizer config: `tokenizer`, `data_preprocessor`, `dataset`, `codebook`, `token_store`, and
            optionally `data_root`, `dataloader`. `codebook` has `k`, `positions_per_image`, `seed`, the
            k-means settings of `Codebook.fit`, and optionally the `dataset` to sample instead of all.
        out: where to save; the config's `tokenizer.codebook` if None.
        overwrite: replace an existing codebook.

    Raises:
        CodebookError: the tokenizer has no codebook to fit, one exists already, or there are too few rows.
    """
    _check_config(cfg)
    if "codebook" not in cfg or "codebook" not in cfg.tokenizer:
        raise CodebookError(
            f"tokenizer {cfg.tokenizer.type} of `{cfg.filename}` brings its own codebook, there is none to "
            "fit: go on with tools/extract_tokens.py"
        )
    path = Path(out or cfg.tokenizer.codebook)
    if path.exists() and not overwrite:
        raise CodebookError(
            f"codebook `{path}` exists: add --overwrite to replace it (token stores made by it then need a "
            "new extraction), or give another --out"
        )
    settings = dict(cfg.codebook)
    dataset = settings.pop("dataset", cfg.dataset)
    sample = {key: settings.pop(key) for key in ("positions_per_image",) if key in settings}
    options = _kmeans_options(settings)
    init_default_scope(cfg.get("default_scope", "mmpretrain"))
    images = NamedImages(dataset, cfg.get("data_root"))
    _check_rows(len(images), sample.get("positions_per_image", POSITIONS_PER_IMAGE), options.k)
    tokenizer, preprocessor = build_tokenizer(cfg, {"codebook": None})
    folder = features_folder(path)
    shards = sample_features(
        tokenizer, preprocessor, images, folder, seed=options.seed, **sample, **cfg.get("dataloader", {})
    )
    print_log(f"clustering {len(shards)} rows of {tokenizer.dim} channels into {options.k}", "current")
    metadata = {**tokenizer.metadata, "preprocessing": _preprocessing(cfg), "images": len(images), **sample}
    checkpoint = folder / "kmeans.safetensors"
    codebook = Codebook.fit_shards(shards, options, checkpoint, metadata)
    if is_main_process():
        codebook.save(path)
        checkpoint.unlink(missing_ok=True)
    barrier()
    return path, codebook


def run_extract_tokens(cfg: Config) -> tuple[TokenStore, Extraction]:
    """Tokenise the config's images into its token store; returns it and what was done now."""
    (tokenizer, preprocessor), images = build_tokenizer(cfg), build_images(cfg)
    store = open_or_create(cfg.token_store, tokenizer, images)
    done = extract_tokens(tokenizer, preprocessor, images, store, **cfg.get("dataloader", {}))
    return TokenStore.open(cfg.token_store), done


def run_verify_tokens(cfg: Config, count: int) -> tuple[TokenStore, Verification]:
    """Check the config's token store, and the tokens of `count` of its images against fresh ones."""
    (tokenizer, preprocessor), images = build_tokenizer(cfg), build_images(cfg)
    store = TokenStore.open(cfg.token_store)
    return store, verify_store(tokenizer, preprocessor, images, store, count, **cfg.get("dataloader", {}))


def build_images(cfg: Config) -> NamedImages:
    """The images of a tokenizer config."""
    _check_config(cfg)
    init_default_scope(cfg.get("default_scope", "mmpretrain"))
    return NamedImages(cfg.dataset, cfg.get("data_root"))


def build_tokenizer(cfg: Config, changes: Mapping[str, Any] | None = None) -> tuple[Tokenizer, nn.Module]:
    """The tokenizer, with these changes to its config, and the data preprocessor, on the device."""
    _check_config(cfg)
    init_default_scope(cfg.get("default_scope", "mmpretrain"))
    device = torch.device(get_device())
    kind = MODELS.get(cfg.tokenizer.type)
    if kind is None or not issubclass(kind, Tokenizer):
        raise ValueError(
            f"tokenizer type {cfg.tokenizer.type} of `{cfg.filename}` is neither mapet_mm.KCLIP nor "
            "mapet_mm.FrozenTokenizer: put it into dict(type='mapet_mm.FrozenTokenizer', tokenizer=dict(type="
            f"'{cfg.tokenizer.type}', ...), image_size=<pixels>, vocab_size=<ids>)"
        )
    tokenizer = MODELS.build({**cfg.tokenizer, **(changes or {})}).to(device)
    return tokenizer, MODELS.build(cfg.data_preprocessor).to(device)


def features_folder(codebook: Path) -> Path:
    """Where the sampled features of a codebook are kept."""
    return codebook.with_name(f"{codebook.name}.features")


def _check_config(cfg: Config) -> None:
    if missing := [key for key in REQUIRED if key not in cfg]:
        raise ValueError(
            f"config `{cfg.filename}` is no tokenizer config, it lacks {', '.join(missing)}: see "
            "configs/tokenizers"
        )


def _kmeans_options(settings: dict[str, Any]) -> KMeansOptions:
    known = [field.name for field in fields(KMeansOptions)]
    if unknown := [name for name in settings if name not in known]:
        raise CodebookError(
            f"the config's `codebook` has unknown settings {', '.join(unknown)}: it takes dataset, "
            f"positions_per_image, {', '.join(known)}"
        )
    return KMeansOptions(**settings)


def _check_rows(images: int, positions: int, k: int) -> None:
    """Known before weights are fetched and features sampled."""
    if images * positions < k:
        raise CodebookError(
            "k-means needs at least as many feature rows as centroids: "
            f"{images} images x {positions} positions give {images * positions} rows, k = {k}; lower "
            "`codebook.k`, raise `codebook.positions_per_image`, or take more images"
        )


def _preprocessing(cfg: Config) -> dict[str, Any]:
    dataset = cfg.codebook.get("dataset", cfg.dataset)
    first = dataset if isinstance(dataset, dict) else dataset[0]
    plain = Config(dict(pipeline=first["pipeline"], data_preprocessor=cfg.data_preprocessor)).to_dict()
    return {"pipeline": plain["pipeline"], "data_preprocessor": plain["data_preprocessor"]}
