"""Print parameters and FLOPs of recipes as a Markdown table.

    python tools/get_flops.py configs/mapet/*.py configs/mapet/benchmarks/*.py
    python tools/get_flops.py configs/segmentation/*.py --shape 768
    python tools/get_flops.py configs/mapet/*.py --cfg-options model.context_loss=0.5

FLOPs are for one image of the size that the recipe's backbone is made for, with a multiply-add as one
operation, as in OpenMMLab's metafiles. They count the features (for a segmentor: the prediction), attention
included. For MaPeT, PIM, MIM, VisibleMIM and BEiT, a second column has the least that a pre-training step
needs, forward and backward; it has a "-" for other models and where --shape is not the recipe's own size.
"""

from command_line import add_config_options, described_parser

from mapet_mm.utils.errors import UserError, one_line_errors


@one_line_errors
def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("configs", nargs="+", metavar="CONFIG")
    parser.add_argument("--shape", type=int, nargs="+", help="another side, or height and width")
    add_config_options(parser)
    args = parser.parse_args()
    from flops import complexity
    from mmengine.logging import MMLogger

    from mapet_mm.engine.runners.launch import read_config

    MMLogger.get_instance("mmengine", log_level="WARNING")  # nothing between the table's rows
    print("| recipe | parameters (M) | FLOPs (G) | FLOPs of a step (G) |")
    print("| --- | ---: | ---: | ---: |")
    for config in args.configs:
        cfg = read_config(config, args.cfg_options)
        backbone = cfg.get("model", {}).get("backbone", {})
        if not (backbone.get("patch_size") or backbone.get("model_name")):
            raise UserError(
                f"{config} has no model of images (`model.backbone` with a `patch_size` or `model_name`)"
            )
        cost = complexity(cfg, (args.shape[0], args.shape[-1]) if args.shape else None)
        step = "-" if cost.step is None else f"{cost.step / 1e9:.4g}"
        print(f"| `{config}` | {cost.parameters / 1e6:.1f} | {cost.forward / 1e9:.4g} | {step} |", flush=True)


if __name__ == "__main__":
    main()
