"""Command lines of the tools: help with the lines of a docstring, and changes to a config."""

import argparse

from mmengine.config import DictAction


def described_parser(description: str) -> argparse.ArgumentParser:
    """A parser whose help shows a tool's docstring line by line."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add `--cfg-options`, changes to a config's entries."""
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=DictAction,
        metavar="KEY=VALUE",
        help="change entries of the config, for example train_cfg.max_epochs=5 model.head.num_classes=7",
    )
