"""From a tokenizer config to a fitted codebook (k-CLIP) and a filled token store (all tokenizers)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Integral
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
from mapet_mm.structures.codebook import Codebook, CodebookError, KMeansOptions
from mapet_mm.structures.store import TokenStore
from mapet_mm.tokenizers.extraction import Extraction, differences, extract_tokens, left_out, open_or_create
from mapet_mm.tokenizers.image_groups import GroupLoader
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.tokenizers.verification import Verification, verify_store
from mapet_mm.utils.config import class_of, scope_of, type_name, with_type_names
from mapet_mm.utils.errors import UserError

REQUIRED = ("tokenizer", "data_preprocessor", "dataset", "token_store")
# The least value of each setting that is an integer.
LEAST_LOADER = {"group_size": 1, "num_workers": 0}
LEAST_CODEBOOK = {
    "k": 1,
    "positions_per_image": 1,
    "niter": 1,
    "nredo": 1,
    "max_points_per_centroid": 1,
    "seed": 0,
}


def run_fit_codebook(
    cfg: Config,
    out: str | None = None,
    overwrite: bool = False,
    join_processes: Callable[[], None] | None = None,
) -> tuple[Path, Codebook]:
    """Sample features, cluster them and save the codebook, as specified in the config.

    Args:
        cfg: a tokenizer config: `tokenizer`, `data_preprocessor`, `dataset`, `codebook`, `token_store`, and
            optionally `data_root`, `dataloader`, `on_error`. `codebook` has `k`, `positions_per_image`,
            `seed`, the settings of `KMeansOptions`, and optionally a `dataset` to sample instead of the
            config's.
        out: file to write; the config's `tokenizer.codebook` if None.
        overwrite: replace an existing codebook.
        join_processes: called once the features are written. Only clustering needs a process group.

    Raises:
        CodebookError: the tokenizer has no codebook to fit, one exists already, or there are too few rows.
        UnreadableImagesError: some images cannot be decoded; the features of all others are kept.
    """
    # Imported here because they need faiss.
    from mapet_mm.tokenizers.fitting import check_rows, fit_shards
    from mapet_mm.tokenizers.sampling import sample_features

    path, settings = _codebook_settings(cfg, out, overwrite)
    replaces = path.exists()  # a run that was interrupted has left no codebook
    dataset = settings.pop("dataset", cfg.dataset)
    _check_integers(cfg, "codebook", LEAST_CODEBOOK)
    positions = settings.pop("positions_per_image", 4)
    options = _kmeans_options(cfg, settings)
    init_default_scope(scope_of(cfg))
    images = NamedImages(dataset, cfg.get("data_root"))
    places = images.places("reading names")
    check_rows(len(places) * positions, options.k)  # before downloading weights and sampling features
    tokenizer, loader = _load(cfg, images, {"codebook": None})
    folder, preprocessing = features_folder(path), preprocessing_of(cfg, dataset)
    on_error = cfg.get("on_error", "raise")
    shards = sample_features(
        tokenizer, loader, places, folder, preprocessing, positions, options.seed, on_error, replaces
    )
    if join_processes is not None:
        join_processes()
    images_used = len(shards) // positions
    skips = left_out(len(places) - images_used)
    print_log(f"clustering {len(shards)} rows of {tokenizer.dim} channels into {options.k}{skips}", "current")
    metadata = {
        **tokenizer.metadata,
        "preprocessing": preprocessing,
        "images": images_used,
        "positions_per_image": positions,
    }
    checkpoint = folder / "kmeans.pt"
    codebook = fit_shards(shards, options, checkpoint, metadata)
    if is_main_process():
        codebook.save(path)
        checkpoint.unlink(missing_ok=True)
    barrier()
    return path, codebook


def run_extract_tokens(cfg: Config, retry_skipped: bool = False) -> tuple[TokenStore, Extraction]:
    """Tokenise the config's images into its token store; returns the store and what this run did.

    Args:
        cfg: a tokenizer config.
        retry_skipped: try again to decode the images that an earlier run skipped.

    Raises:
        CodebookError: the codebook was fitted on images normalised in another way.
        TokenStoreError: the store is of another tokenizer, or of images prepared in another way.
        UnreadableImagesError: some images cannot be decoded; the tokens of all others are written.
    """
    tokenizer, loader = _load(cfg)
    preprocessing = preprocessing_of(cfg, cfg.dataset)
    _check_normalisation(cfg, tokenizer)
    opened = open_or_create(cfg.token_store, tokenizer, loader.images, preprocessing)
    done = extract_tokens(tokenizer, loader, *opened, cfg.get("on_error", "raise"), retry_skipped)
    return TokenStore.open(cfg.token_store), done


def run_verify_tokens(cfg: Config, count: int) -> tuple[TokenStore, Verification]:
    """Check the config's token store, and `count` of its images against newly computed tokens.

    Raises:
        CodebookError: the codebook was fitted on images normalised in another way.
        TokenStoreError: see `verify_store`.
    """
    tokenizer, loader = _load(cfg)
    _check_normalisation(cfg, tokenizer)
    store = TokenStore.open(cfg.token_store)
    return store, verify_store(tokenizer, loader, store, count)


def build_images(cfg: Config) -> NamedImages:
    """The images of a tokenizer config."""
    _check_config(cfg)
    init_default_scope(scope_of(cfg))
    return NamedImages(cfg.dataset, cfg.get("data_root"))


def build_tokenizer(cfg: Config, changes: Mapping[str, Any] | None = None) -> tuple[Tokenizer, nn.Module]:
    """Build the tokenizer, with these changes to its config, and the data preprocessor, on the device."""
    _check_config(cfg)
    init_default_scope(scope_of(cfg))
    device = torch.device(get_device())
    kind, name = class_of(cfg.tokenizer.type, MODELS), type_name(cfg.tokenizer.type)
    if kind is None or not issubclass(kind, Tokenizer):
        raise ValueError(
            f"tokenizer type {name} of `{cfg.filename}` is none of mapet_mm.KCLIP, "
            "GridKMeans and mapet_mm.FrozenTokenizer: put it into dict(type='mapet_mm.FrozenTokenizer', "
            f"tokenizer=dict(type='{name}', ...), image_size=<pixels>, vocab_size=<ids>)"
        )
    tokenizer = MODELS.build({**cfg.tokenizer, **(changes or {})}).to(device)
    return tokenizer, MODELS.build(cfg.data_preprocessor).to(device)


def preprocessing_of(cfg: Config, dataset: Any) -> dict[str, Any]:
    """How images are prepared for the tokenizer: the datasets' pipeline and the data preprocessor.

    Raises:
        UserError: a dataset has no pipeline.
        ValueError: the datasets have different pipelines, so their tokens could not be compared.
    """
    datasets = [dataset] if isinstance(dataset, Mapping) else list(dataset)
    for one in datasets:
        if "pipeline" not in one:
            name = type_name(one["type"])
            raise UserError(f"dataset {name} of `{cfg.filename}` has no `pipeline`: give it one")
    pipeline, *others = (_plain(one["pipeline"]) for one in datasets)
    if any(other != pipeline for other in others):
        raise ValueError(f"the datasets of `{cfg.filename}` have different pipelines: give them the same")
    return {"pipeline": pipeline, "data_preprocessor": _plain(cfg.data_preprocessor)}


def other_settings(cfg: Config, codebook: str | Path) -> list[str]:
    """Names of the settings of a tokenizer config that an existing codebook was not made with.

    Raises:
        CodebookError: the codebook cannot be read.
    """
    settings = dict(cfg.codebook)
    settings["preprocessing"] = preprocessing_of(cfg, settings.pop("dataset", cfg.dataset))
    recorded = with_type_names(Codebook.load(codebook).metadata)
    found = with_type_names(_plain(settings))
    return [name for name, value in found.items() if recorded.get(name) != value]


def _check_normalisation(cfg: Config, tokenizer: Tokenizer) -> None:
    """Refuse another data preprocessor than the codebook's; its images may have been cut out differently."""
    codebook = getattr(tokenizer, "codebook", None)
    recorded = {} if codebook is None else codebook.metadata.get("preprocessing") or {}
    if "data_preprocessor" not in recorded:  # made by hand or by an early version
        return
    recorded, found = recorded["data_preprocessor"], _plain(cfg.data_preprocessor)
    if different := differences(with_type_names(recorded), with_type_names(found), "data_preprocessor"):
        raise CodebookError(
            f"codebook `{cfg.tokenizer.codebook}` was fitted on images prepared in another way "
            f"({different}): restore `data_preprocessor` of `{cfg.filename}`, or fit a codebook for this one "
            "with tools/fit_codebook.py --overwrite"
        )


def _plain(part: Any) -> Any:
    """A part of a config in JSON's types and in sorted order, independent of the config file's format."""
    content = Config(dict(part=part)).to_dict()["part"]
    return json.loads(json.dumps(content, sort_keys=True, default=str))


def features_folder(codebook: Path) -> Path:
    """Folder of a codebook's sampled features."""
    return codebook.with_name(f"{codebook.name}.features")


def _load(
    cfg: Config, images: NamedImages | None = None, changes: Mapping[str, Any] | None = None
) -> tuple[Tokenizer, GroupLoader]:
    """Build the tokenizer, with these changes to its config, and a loader of the images or the config's.

    Raises:
        UserError: the images' pipeline draws random numbers.
    """
    tokenizer, preprocessor = build_tokenizer(cfg, changes)
    images = build_images(cfg) if images is None else images
    if step := images.random_step():
        raise UserError(
            f"{step}, of the pipeline of `{cfg.filename}` draws random numbers: an image would have other "
            "tokens each time; remove it"
        )
    return tokenizer, GroupLoader(images, tokenizer.image_size, preprocessor, **cfg.get("dataloader", {}))


def _check_config(cfg: Config) -> None:
    if missing := [key for key in REQUIRED if key not in cfg]:
        raise ValueError(
            f"config `{cfg.filename}` is no tokenizer config, it lacks {', '.join(missing)}: see "
            "configs/tokenizers"
        )
    if unknown := sorted(set(cfg.get("dataloader", {})) - set(LEAST_LOADER)):
        raise ValueError(
            f"the config's `dataloader` has {', '.join(unknown)}: it takes num_workers and group_size "
            "(images of one pass of the encoder)"
        )
    _check_integers(cfg, "dataloader", LEAST_LOADER)


def _check_integers(cfg: Config, section: str, least: Mapping[str, int]) -> None:
    for name, value in cfg.get(section, {}).items():
        if name in least and not (isinstance(value, Integral) and value >= least[name]):
            raise UserError(
                f"`{section}.{name}` of `{cfg.filename}` is {value!r}: give an integer of at least "
                f"{least[name]}"
            )


def _codebook_settings(cfg: Config, out: str | None, overwrite: bool) -> tuple[Path, dict[str, Any]]:
    """The path of the codebook, and the config's `codebook`."""
    _check_config(cfg)
    if "codebook" not in cfg or "codebook" not in cfg.tokenizer:
        raise CodebookError(
            f"tokenizer {type_name(cfg.tokenizer.type)} of `{cfg.filename}` brings its own codebook, there "
            "is none to fit: go on with tools/extract_tokens.py"
        )
    path = Path(out or cfg.tokenizer.codebook)
    if path.exists() and not overwrite:
        raise CodebookError(
            f"codebook `{path}` exists: add --overwrite to replace it (token stores made by it then need a "
            "new extraction), or give another --out"
        )
    return path, dict(cfg.codebook)


def _kmeans_options(cfg: Config, settings: dict[str, Any]) -> KMeansOptions:
    known = [field.name for field in fields(KMeansOptions)]
    if unknown := [name for name in settings if name not in known]:
        raise CodebookError(
            f"the config's `codebook` has unknown settings {', '.join(unknown)}: it takes dataset, "
            f"positions_per_image, {', '.join(known)}"
        )
    if "k" not in settings:
        raise CodebookError(f"`codebook` of `{cfg.filename}` has no `k`: give it, the number of centroids")
    return KMeansOptions(**settings)
