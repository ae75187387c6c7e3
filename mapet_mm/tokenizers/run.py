"""From a tokenizer config to a fitted codebook (k-CLIP) and a filled token store (all tokenizers)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import barrier, is_main_process
from mmengine.logging import print_log
from mmengine.registry import init_default_scope
from torch import nn

from mapet_mm.models.target_generators.base import Tokenizer
from mapet_mm.registry import MODELS
from mapet_mm.structures import Codebook, CodebookError, TokenStore
from mapet_mm.structures.codebook import KMeansOptions
from mapet_mm.tokenizers.extract import Extraction, extract_tokens, open_or_create, verify_store
from mapet_mm.tokenizers.image_groups import GroupLoader
from mapet_mm.tokenizers.images import LARGEST_SKIPPED, NamedImages, note_left_out
from mapet_mm.utils.config import scope_of, type_name
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import explain


def run_fit_codebook(
    cfg: Config,
    out: str | None = None,
    overwrite: bool = False,
    join_processes: Callable[[], None] | None = None,
) -> tuple[Path, Codebook]:
    """Sample features, cluster them and save the codebook, as specified in the config.

    A codebook that was made with the same settings is returned as it is.

    Args:
        cfg: a tokenizer config: `tokenizer`, `data_preprocessor`, `dataset`, `codebook`, `token_store`, and
            optionally `data_root`, `dataloader`, `on_error`, `max_skipped`. `codebook` has `k`,
            `positions_per_image`, `seed`, the settings of `KMeansOptions`, and optionally a `dataset` to
            sample instead of the config's.
        out: file to write; the config's `tokenizer.codebook` if None.
        overwrite: replace an existing codebook.
        join_processes: called once the features are written. Only clustering needs a process group.

    Raises:
        CodebookError: there is no codebook to fit, one of other settings exists, or there are too few rows.
        UnreadableImagesError: some images cannot be decoded; the features of the others are kept.
    """
    # Imported here because they need faiss.
    from mapet_mm.tokenizers.kmeans import check_rows, cluster
    from mapet_mm.tokenizers.sampling import sample_features

    if "codebook" not in cfg or "codebook" not in cfg.tokenizer:
        raise CodebookError(
            f"tokenizer {type_name(cfg.tokenizer.type)} of `{cfg.filename}` brings its own codebook, there "
            "is none to fit: go on with tools/extract_tokens.py"
        )
    settings, path = dict(cfg.codebook), Path(out or cfg.tokenizer.codebook)
    dataset = settings.pop("dataset", cfg.dataset)
    positions = settings.pop("positions_per_image", 4)
    options = KMeansOptions(**settings)
    images = build_images(cfg, dataset)
    preprocessing = preprocessing_of(cfg, dataset)
    made_from = {
        "preprocessing": preprocessing,
        "data_root": os.path.realpath(images.data_root),
        "positions_per_image": positions,
        **asdict(options),
    }
    existing = Codebook.load(path) if path.exists() and not overwrite else None
    if existing:
        _require_made_from(existing, path, made_from)  # before loading weights
    else:
        places = images.places()
        check_rows(len(places) * positions, options.k)  # before downloading weights and sampling features
    tokenizer, loader = _load(cfg, images, {"codebook": None})
    if existing:
        _require_made_from(existing, path, {k: v for k, v in tokenizer.metadata.items() if k != "weights"})
        return path, existing
    on_error, most = cfg.get("on_error", "raise"), cfg.get("max_skipped", LARGEST_SKIPPED)
    folder, seed = features_folder(path), options.seed
    blocks = sample_features(tokenizer, loader, places, folder, preprocessing, positions, seed, on_error)
    if join_processes is not None:
        join_processes()
    sizes, skipped = blocks.left_out()
    reasons = {images.path(places[name]): why for name, why in skipped.items()}
    left_out = note_left_out(reasons, len(places), blocks.folder / "skipped.txt", most)
    print_log(f"clustering {sum(sizes)} rows of {tokenizer.dim} channels{left_out}", "current")
    centroids, fitted = cluster(blocks, sizes, options)
    metadata = {
        **tokenizer.metadata,
        **made_from,
        "images": len(places) - len(skipped),
    }
    codebook = Codebook(centroids, {**metadata, **fitted})
    if is_main_process():
        codebook.save(path)
    barrier()
    return path, codebook


def _require_made_from(codebook: Codebook, path: Path, settings: Mapping[str, Any]) -> None:
    """Raise CodebookError if the codebook at a path was made with other settings."""
    recorded = {key: codebook.metadata.get(key) for key in settings}
    if changed := explain(recorded, settings):
        raise CodebookError(
            f"codebook `{path}` exists, made with other settings ({changed}): add --overwrite to replace it "
            "(token stores made by it then need a new extraction), or give another --out"
        )


def run_extract_tokens(cfg: Config, retry_skipped: bool = False) -> tuple[TokenStore, Extraction]:
    """Tokenise the config's images into its token store; returns the store and what this run did.

    With `retry_skipped`, the images that an earlier run skipped are tried again. Raises as `build_tokenizer`,
    `open_or_create` and `extract_tokens`.
    """
    tokenizer, loader = _load(cfg)
    preprocessing = preprocessing_of(cfg, cfg.dataset)
    store, places = open_or_create(cfg.token_store, tokenizer, loader.images, preprocessing)
    on_error, most = cfg.get("on_error", "raise"), cfg.get("max_skipped", LARGEST_SKIPPED)
    return store, extract_tokens(tokenizer, loader, store, places, on_error, retry_skipped, most)


def run_verify_tokens(cfg: Config, count: int) -> tuple[TokenStore, str]:
    """Check the config's token store, and `count` of its images; see `verify_store`."""
    tokenizer, loader = _load(cfg)
    store = TokenStore.open(cfg.token_store)
    return store, verify_store(tokenizer, loader, store, count)


def build_images(cfg: Config, dataset: Any = None) -> NamedImages:
    """The images of a tokenizer config, or of another dataset in its place."""
    init_default_scope(scope_of(cfg))
    return NamedImages(dataset or cfg.dataset, cfg.get("data_root"))


def build_tokenizer(cfg: Config, changes: Mapping[str, Any] | None = None) -> tuple[Tokenizer, nn.Module]:
    """Build the tokenizer, with these changes to its config, and the data preprocessor, on the device.

    Raises:
        CodebookError: its codebook was fitted on images normalised in another way.
    """
    init_default_scope(scope_of(cfg))
    device = torch.device(get_device())
    tokenizer = MODELS.build({**cfg.tokenizer, **(changes or {})}).to(device)
    codebook, found = getattr(tokenizer, "codebook", None), _plain(cfg.data_preprocessor)
    recorded = (codebook.metadata.get("preprocessing") or {}) if codebook else {}
    if changed := explain(recorded.get("data_preprocessor", found), found, "data_preprocessor"):
        raise CodebookError(
            f"codebook `{cfg.tokenizer.codebook}` was fitted on images prepared in another way "
            f"({changed}): restore `data_preprocessor` of `{cfg.filename}`, or fit a codebook for this one "
            "with tools/fit_codebook.py --overwrite"
        )
    return tokenizer, MODELS.build(cfg.data_preprocessor).to(device)


def preprocessing_of(cfg: Config, dataset: Any) -> dict[str, Any]:
    """Preparation of images for the tokenizer; UserError if the datasets' pipelines are not all alike."""
    datasets = [dataset] if isinstance(dataset, Mapping) else list(dataset)
    pipelines = [_plain(one.pipeline) for one in datasets]
    if any(pipeline != pipelines[0] for pipeline in pipelines):
        raise UserError(f"the datasets of `{cfg.filename}` have different pipelines: give all the same")
    return {"pipeline": pipelines[0], "data_preprocessor": _plain(cfg.data_preprocessor)}


def features_folder(codebook: Path) -> Path:
    """Folder of a codebook's sampled features."""
    return codebook.with_name(f"{codebook.name}.features")


def _plain(part: Any) -> Any:
    """A part of a config as JSON has it, independent of the config file's format."""
    part = Config(dict(part=part)).to_dict()["part"]
    return json.loads(json.dumps(part, default=lambda value: getattr(value, "__qualname__", str(value))))


def _load(
    cfg: Config, images: NamedImages | None = None, changes: Mapping[str, Any] | None = None
) -> tuple[Tokenizer, GroupLoader]:
    tokenizer, preprocessor = build_tokenizer(cfg, changes)
    images = build_images(cfg) if images is None else images
    images.require_repeatable()
    return tokenizer, GroupLoader(images, tokenizer.image_size, preprocessor, **cfg.get("dataloader", {}))
