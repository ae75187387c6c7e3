"""A result's identity: a digest of what decides it, and of nothing else.

Decisive are model, data, optimizer, schedule, training length, seed, the runs before it (codebook, tokens,
pre-training), and the version of the frozen evaluation. The package's version, log intervals, checkpoints,
validation on the way and the number of loading workers are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mapet_mm.utils.identity import digest

# Raise it by hand when the same configs give other results than before: old records then no longer count.
RECIPES_VERSION = 1
# Entries of a config that decide what a training, a tokenizer or an evaluation gives.
DECISIVE = (
    *("model", "data_preprocessor", "train_dataloader", "optim_wrapper", "param_scheduler", "train_cfg"),
    *("auto_scale_lr", "tokenizer", "codebook", "dataset"),
)
# And those of its measurement, which does not change a pre-training.
MEASURED = ("val_dataloader", "val_evaluator", "evaluation")
# Inside of these entries: how images are read, and when a training is looked at.
INDIFFERENT = {
    *("num_workers", "persistent_workers", "pin_memory", "prefetch_factor"),
    *("val_interval", "val_begin", "val_every_stop"),
}


def identity_of(
    kind: str,
    config: Mapping[str, Any],
    needs: Sequence[str] = (),
    seed: int | None = None,
    evaluation: int | None = None,
) -> str:
    """Twelve hexadecimal digits that are the same for equal results.

    Args:
        kind: "data", "tokenizer", "pre-training" or "evaluation".
        config: the merged config; of data, whatever decides them.
        needs: identities of the runs that it needs.
        seed: of its random draws, None for the config's.
        evaluation: version of the protocols, of a frozen evaluation.
    """
    if seed is None:
        seed = (config.get("randomness") or {}).get("seed")
    content = config if kind == "data" else decisive_entries(config, kind == "evaluation")
    return digest([RECIPES_VERSION, kind, content, seed, evaluation, sorted(needs)])[:12]


def decisive_entries(config: Mapping[str, Any], is_measured: bool) -> dict[str, Any]:
    """The part of a config that decides a result."""
    keys = (*DECISIVE, *MEASURED) if is_measured else DECISIVE
    return {key: _without_indifferent(config[key]) for key in keys if config.get(key) is not None}


def _without_indifferent(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    return {key: value for key, value in entry.items() if key not in INDIFFERENT}
