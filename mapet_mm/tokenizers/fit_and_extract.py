"""From a tokenizer config to a fitted codebook (k-CLIP) and a filled token store (all tokenizers)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import barrier, is_main_process
from mmengine.logging import print_log
from mmengine.registry import init_default_scope
from mmpretrain.models import SelfSupDataPreprocessor
from torch import nn

from mapet_mm.models.data_preprocessors.data_preprocessor import TokenGridDataPreprocessor
from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.models.target_generators.tokenizer import Tokenizer
from mapet_mm.registry import MODELS
from mapet_mm.structures import Codebook, CodebookError, TokenStore
from mapet_mm.structures.image_files import file_digests, require_same_files
from mapet_mm.tokenizers.features import SampledFeatures, draw_images, sample_features
from mapet_mm.tokenizers.fill import GroupLoader
from mapet_mm.tokenizers.images import LARGEST_SKIPPED, NamedImages, note_skipped
from mapet_mm.tokenizers.kmeans import KMeansOptions, RowsOfImages, cluster, require_rows
from mapet_mm.tokenizers.tokens import Extraction, extract_tokens, open_or_create, verify_store
from mapet_mm.utils.config import require_entries, scope_of, type_name
from mapet_mm.utils.dist import print_to_user
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import as_json, explain
from mapet_mm.utils.precision import HALF

TAKES_TOKENIZER = "give the config of a tokenizer, as configs/micro/kclip.py"
# What to do about a codebook of other settings.
OVERWRITE = (
    "add --overwrite to replace it (token stores made by it then need a new extraction), or give another "
    "--out"
)


def run_fit_codebook(
    cfg: Config,
    out: str | None = None,
    overwrite: bool = False,
    join_processes: Callable[[], None] | None = None,
) -> tuple[Path, Codebook]:
    """Sample features, cluster them and save the codebook, as specified in the config.

    A codebook that was made with the same settings, by the same encoder from the same folder of images, is
    returned as it is.

    Args:
        cfg: a tokenizer config: `tokenizer`, `data_preprocessor`, `dataset`, `codebook`, `token_store`, and
            optionally `data_root`, `dataloader`, `on_error`, `max_skipped`. `codebook` has `k`,
            `positions_per_image`, `num_images` (drawn by the seed; None for all), `seed`, the settings of
            `KMeansOptions`, and optionally a `dataset` to sample instead of the config's.
        out: file to write; the config's `tokenizer.codebook` if None.
        overwrite: replace an existing codebook.
        join_processes: called once the features are written. Only clustering needs a process group.

    Raises:
        CodebookError: there is no codebook to fit, one of other settings exists, or there are too few rows.
        UnreadableImagesError: some images cannot be decoded; the features of the others are kept.
    """
    require_entries(cfg, "tokenizer", "data_preprocessor", "dataset", remedy=TAKES_TOKENIZER)
    if "codebook" not in cfg or "codebook" not in cfg.tokenizer:
        raise CodebookError(
            f"tokenizer {type_name(cfg.tokenizer.type)} of `{cfg.filename}` brings its own codebook, there "
            "is none to fit: go on with `mapet-mm extract-tokens`"
        )
    path = Path(out or cfg.tokenizer.codebook)
    plan = CodebookPlan.from_config(cfg)
    if path.exists() and not overwrite:
        return path, existing_codebook(path, cfg, plan)
    tokenizer, features = sample(cfg, plan, features_folder(path))
    if join_processes is not None:
        join_processes()
    skipped = features.skipped
    num_images = len(features.names)
    skipped_paths = {os.path.join(plan.images.data_root, name): why for name, why in skipped.items()}
    max_skipped = cfg.get("max_skipped", LARGEST_SKIPPED)
    note = note_skipped(skipped_paths, num_images, features.folder / "skipped.txt", max_skipped)
    if is_main_process():
        print_log(f"sampled {num_images - len(skipped)} images{note}", "current")
    centroids, fitted = cluster(RowsOfImages(features), plan.options)
    made_from = {**tokenizer.metadata, **plan.settings, "images": num_images - len(skipped)}
    made_from["files"] = file_digests(plan.images.data_root, features.names)
    codebook = Codebook(centroids, {**made_from, **fitted})
    if is_main_process():
        codebook.save(path)
    barrier()
    return path, codebook


@dataclass(frozen=True)
class CodebookPlan:
    """What a codebook is to be made from, besides the encoder.

    Attributes:
        images: to sample.
        preprocessing: of these images, for the encoder.
        positions_per_image: number of features of each image that is drawn.
        num_images: how many images are drawn, by the seed of k-means; None for all.
        options: of k-means.
    """

    images: NamedImages
    preprocessing: dict[str, Any]
    positions_per_image: int
    num_images: int | None
    options: KMeansOptions

    @classmethod
    def from_config(cls, cfg: Config) -> CodebookPlan:
        """Read the plan from a tokenizer config."""
        settings = dict(cfg.codebook)
        dataset = settings.pop("dataset", cfg.dataset)
        positions = settings.pop("positions_per_image", 4)
        num_images = settings.pop("num_images", None)
        preprocessing = preprocessing_of(cfg, dataset)
        images = build_images(cfg, dataset)
        return cls(images, preprocessing, positions, num_images, KMeansOptions(**settings))

    @property
    def settings(self) -> dict[str, Any]:
        """As the codebook's metadata have it."""
        return {
            "preprocessing": self.preprocessing,
            "data_root": os.path.realpath(self.images.data_root),
            "positions_per_image": self.positions_per_image,
            "num_images": self.num_images,
            **asdict(self.options),
        }


def sample(cfg: Config, plan: CodebookPlan, folder: Path) -> tuple[GridKMeans, SampledFeatures]:
    """Build the encoder, and sample its features of the plan's images into a folder."""
    names, images = draw_images(*plan.images.distinct_names(), plan.num_images, plan.options.seed)
    # Before weights are downloaded and features computed.
    require_rows(len(names) * plan.positions_per_image, plan.options.k)
    import_module("faiss")
    tokenizer, loader = load_tokenizer(cfg, plan.images, {"codebook": None})
    features = sample_features(
        tokenizer,
        loader,
        names,
        images,
        folder,
        plan.preprocessing,
        plan.positions_per_image,
        plan.options.seed,
        cfg.get("on_error", "raise"),
        cfg.get("max_skipped", LARGEST_SKIPPED),
    )
    return tokenizer, features


def existing_codebook(path: Path, cfg: Config, plan: CodebookPlan) -> Codebook:
    """Load the codebook at a path; CodebookError if other settings, images or encoder made it."""
    codebook = Codebook.load(path)
    settings = plan.settings
    files = codebook.metadata.get("files")
    whose = f"codebook `{path}`"
    if require_same_files(files, plan.images.data_root, whose, OVERWRITE, CodebookError):
        del settings["data_root"]
    require_made_with(codebook, path, settings)  # before weights are loaded
    tokenizer, _ = build_tokenizer(cfg, {"codebook": None})
    require_made_with(codebook, path, {**tokenizer.identity, "precision": tokenizer.precision})
    return codebook


def require_made_with(codebook: Codebook, path: Path, settings: Mapping[str, Any]) -> None:
    """Raise CodebookError if a codebook's metadata have other settings."""
    metadata = {"precision": "float32", **codebook.metadata}  # which codebooks of float32 do not name
    difference = explain({key: metadata.get(key) for key in settings}, settings)
    if difference:
        raise CodebookError(f"codebook `{path}` exists, made with other settings ({difference}): {OVERWRITE}")


def run_extract_tokens(cfg: Config, retry_skipped: bool = False) -> tuple[TokenStore, Extraction]:
    """Tokenise the config's images into its token store; returns the store and what this run did.

    With `retry_skipped`, the images that an earlier run skipped are tried again. Raises as `build_tokenizer`,
    `open_or_create` and `extract_tokens`.
    """
    tokenizer, loader = load_tokenizer(cfg)
    preprocessing = preprocessing_of(cfg, cfg.dataset)
    store, image_of_row = open_or_create(cfg.token_store, tokenizer, loader.images, preprocessing)
    on_error = cfg.get("on_error", "raise")
    max_skipped = cfg.get("max_skipped", LARGEST_SKIPPED)
    extraction = extract_tokens(tokenizer, loader, store, image_of_row, on_error, retry_skipped, max_skipped)
    return store, extraction


def run_verify_tokens(cfg: Config, count: int) -> tuple[TokenStore, str]:
    """Check the config's token store, and `count` of its images; see `verify_store`."""
    tokenizer, loader = load_tokenizer(cfg)
    store = TokenStore.open(cfg.token_store)
    return store, verify_store(tokenizer, loader, store, count)


def build_images(cfg: Config, dataset: Any = None) -> NamedImages:
    """The images of a tokenizer config, or of another dataset in its place."""
    require_entries(cfg, "dataset", remedy=TAKES_TOKENIZER)
    init_default_scope(scope_of(cfg))
    return NamedImages(dataset or cfg.dataset, cfg.get("data_root"))


def build_tokenizer(cfg: Config, changes: Mapping[str, Any] | None = None) -> tuple[Tokenizer, nn.Module]:
    """Build the tokenizer, with these changes to its config, and the data preprocessor, on the device.

    Raises:
        CodebookError: its codebook was fitted on images normalised in another way.
    """
    require_entries(cfg, "tokenizer", "data_preprocessor", remedy=TAKES_TOKENIZER)
    init_default_scope(scope_of(cfg))
    device = torch.device(get_device())
    tokenizer = MODELS.build({**cfg.tokenizer, **(changes or {})}).to(device)
    if device.type == "cpu" and tokenizer.precision in HALF:
        print_to_user(
            f"note: the tokenizer computes in {tokenizer.precision}, in which a CPU can be 20 times as slow "
            "as in float32; tokenizer.precision=float32 makes other tokens, with another identity"
        )
    codebook = getattr(tokenizer, "codebook", None)
    recorded = {}
    if codebook:
        recorded = codebook.metadata.get("preprocessing") or {}
    now = as_json(cfg.data_preprocessor)
    before = recorded.get("data_preprocessor", now)
    difference = explain(before, now, "data_preprocessor")
    if difference:
        raise CodebookError(
            f"codebook `{cfg.tokenizer.codebook}` was fitted on images prepared in another way "
            f"({difference}): restore `data_preprocessor` of `{cfg.filename}`, or fit a codebook for this "
            "one with `mapet-mm fit-codebook --overwrite`"
        )
    return tokenizer, build_preprocessor(cfg.data_preprocessor).to(device)


def build_preprocessor(config: Mapping[str, Any]) -> nn.Module:
    """A tokenizer's data preprocessor; for MMPretrain's, whose order of channels waits for a GPU, ours."""
    preprocessor = MODELS.build(config)
    if type(preprocessor) is SelfSupDataPreprocessor:
        return MODELS.build({**config, "type": TokenGridDataPreprocessor})  # the same numbers
    return preprocessor


def preprocessing_of(cfg: Config, dataset: Any) -> dict[str, Any]:
    """Preparation of images for the tokenizer; UserError if the datasets' pipelines are not all alike."""
    datasets = [dataset] if isinstance(dataset, Mapping) else list(dataset)
    pipelines = [as_json(each.pipeline) for each in datasets]
    if any(pipeline != pipelines[0] for pipeline in pipelines):
        raise UserError(f"the datasets of `{cfg.filename}` have different pipelines: give all the same")
    return {"pipeline": pipelines[0], "data_preprocessor": as_json(cfg.data_preprocessor)}


def features_folder(codebook: Path) -> Path:
    """Folder of a codebook's sampled features."""
    return codebook.with_name(f"{codebook.name}.features")


def load_tokenizer(
    cfg: Config, images: NamedImages | None = None, changes: Mapping[str, Any] | None = None
) -> tuple[Tokenizer, GroupLoader]:
    """Build the tokenizer, with these changes to its config, and a loader of the images (the config's)."""
    tokenizer, preprocessor = build_tokenizer(cfg, changes)
    if images is None:
        images = build_images(cfg)
    images.require_repeatable()
    return tokenizer, GroupLoader(images, tokenizer.image_size, preprocessor, **cfg.get("dataloader", {}))
