"""Convert weights between the names of the authors (reference), this package (mm), timm, Hugging Face (hf)
and torchvision, or write the backbone as an ONNX file.

    mapet-mm convert mm timm work_dirs/RUN/epoch_310.pth vit      # timm.create_model("local-dir:vit")
    mapet-mm convert mm hf work_dirs/RUN/epoch_310.pth dinov2     # AutoModel.from_pretrained("dinov2")
    mapet-mm convert mm timm work_dirs/RUN/epoch_310.pth vit.safetensors
    mapet-mm convert mm torchvision work_dirs/RUN/epoch_310.pth vit.pth
    mapet-mm convert mm onnx work_dirs/RUN/epoch_310.pth vit.onnx    # any number of images
    mapet-mm convert reference mm mapet_small.tar mapet_small.pth
    mapet-mm convert --show mapet_small.tar     # epoch, metric and args that the training saved

A folder gets the weights and the files that timm or Hugging Face read: architecture and preprocessing, from
the description that a training writes into its checkpoints, or from --config. A .safetensors file gets the
weights and the description; a .pth file gets the weights, for `init_cfg`, `load_from` and mapet-mm test. An
.onnx file has the class token and the patch features as outputs. IN is read without running any code in it.
"""

import argparse
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from command_line import described_parser

from mapet_mm.utils.errors import UserError, one_line_errors

SOURCES = ("mm", "reference", "timm", "hf")
TARGETS = (*SOURCES, "torchvision", "onnx")


def parse_args() -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument(
        "source", nargs="?", choices=SOURCES, metavar="FROM", help=f"origin of IN: {', '.join(SOURCES)}"
    )
    parser.add_argument(
        "target", nargs="?", choices=TARGETS, metavar="TO", help=f"library of OUT: {', '.join(TARGETS)}"
    )
    parser.add_argument(
        "input", nargs="?", type=Path, metavar="IN", help="checkpoint, as .safetensors or by torch.save"
    )
    parser.add_argument(
        "output",
        nargs="?",
        type=Path,
        metavar="OUT",
        help=".safetensors or .pth file; for timm and hf also a folder; for onnx .onnx",
    )
    parser.add_argument("--config", help="config of the training, if IN does not describe its network")
    parser.add_argument("--key", help="entry of IN that has the weights, for example state_dict_ema")
    parser.add_argument(
        "--num-patches", type=int, help="of an image, where timm's positions could be of two grids"
    )
    parser.add_argument(
        "--show",
        type=Path,
        metavar="FILE",
        help="only print the epoch, metric and args that the training of FILE saved in it, as timm does",
    )
    parser.add_argument(
        "--backbone", action="store_true", help="keep only the backbone of a segmentor or CAE"
    )
    args = parser.parse_args()
    if args.output is None and args.show is None:
        parser.error("give FROM TO IN OUT, or --show FILE")
    return args


@one_line_errors
def main() -> None:
    args = parse_args()
    if args.show:
        from mapet_mm.interop.record import training_record

        print(training_record(args.show))
        return
    from mapet_mm.interop.convert import TO_MM, timm_to_mm
    from mapet_mm.interop.description import ENTRY, description_of, read_description
    from mapet_mm.interop.export import write_export
    from mapet_mm.utils.config import read_config
    from mapet_mm.weight_files import read_checkpoint

    weights, meta = read_checkpoint(args.input, args.key)
    try:
        if args.config:
            meta[ENTRY] = asdict(description_of(read_config(args.config)))
        if args.source == "timm":
            with suppress(ValueError):  # a file of this package knows the number of patches
                args.num_patches = args.num_patches or read_description(meta).num_patches
            ours = timm_to_mm(weights, args.num_patches)
        else:
            ours = TO_MM[args.source](weights)
        if args.backbone:
            ours = {name: value for name, value in ours.items() if name.startswith("backbone.")}
        told = write_export(args.output, args.target, ours, meta)
    except ValueError as error:
        raise UserError(f"{args.input}: {error}") from error
    print(f"wrote {args.output}, {len(ours)} tensors read\n{told}".strip())


if __name__ == "__main__":
    main()
