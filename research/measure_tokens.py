"""Measure how the training images of a recipe use the ids of its token store.

    python research/measure_tokens.py configs/micro/token-mlp_kclip_1xb64-coslr.py --out results.json

tokens/perplexity: the number of ids that, used evenly, would be as hard to guess. tokens/dead: ids that no
image has. tokens/purity: percent of the patches that are in images of their token's most frequent class.
"""

import argparse
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope

from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import one_line_errors
from mapet_mm.visualization.token_statistics import mean_purity, measure_usage


def measure(cfg: Config) -> dict[str, float]:
    """Perplexity, dead tokens and purity of the tokens that a recipe's training images have."""
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        dataset = DATASETS.build(cfg.train_dataloader.dataset)
    load = next(step for step in dataset.pipeline.transforms if isinstance(step, LoadTokenGrid))
    images = [dataset.get_data_info(index) for index in range(len(dataset))]
    labels = {load.name_of(image["img_path"]): int(image["gt_label"]) for image in images}
    usage = measure_usage(load.store, labels)
    return {
        "tokens/perplexity": usage.perplexity,
        "tokens/dead": float(len(usage.counts) - usage.used),
        "tokens/purity": 100 * mean_purity(usage.class_counts),
    }


@one_line_errors
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a recipe that trains on stored tokens")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    figures = measure(read_config(args.config))
    rows = [dict(protocol=name, setting="", value=value) for name, value in figures.items()]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    replace_json(args.out, {args.config: rows})
    print("  ".join(f"{name}: {value:.2f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
