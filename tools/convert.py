"""Convert weights between the names of the authors (reference), this package (mm), timm, Hugging Face (hf)
and torchvision, or write the backbone as an ONNX file.

    python tools/convert.py mm timm work_dirs/RUN/epoch_300.pth vit      # timm.create_model("local-dir:vit")
    python tools/convert.py mm hf work_dirs/RUN/epoch_300.pth dinov2     # AutoModel.from_pretrained("dinov2")
    python tools/convert.py mm timm work_dirs/RUN/epoch_300.pth vit.safetensors
    python tools/convert.py mm torchvision work_dirs/RUN/epoch_300.pth vit.pth
    python tools/convert.py mm onnx work_dirs/RUN/epoch_300.pth vit.onnx    # any number of images of any size
    python tools/convert.py reference mm mapet_small.tar mapet_small.pth

A folder gets the weights and the files that timm or Hugging Face read: architecture, mean and standard
deviation, from the config that MMEngine keeps in its checkpoints, or from --config. A .safetensors file gets
the weights and the same information as metadata; a .pth file gets the weights, for `init_cfg`, `load_from`
and tools/test.py. An .onnx file has the class token and the patch features as outputs. IN is read without
running any code in it.
"""

import argparse
from pathlib import Path

import mapet_mm.utils.logging  # noqa: F401
from mapet_mm.engine.runners.launch import read_config
from mapet_mm.interop.convert import FROM_MM, TO_MM, timm_to_mm
from mapet_mm.interop.description import num_patches
from mapet_mm.interop.export import write_export
from mapet_mm.interop.onnx_export import write_onnx
from mapet_mm.utils.errors import UserError, one_line_errors
from mapet_mm.weight_files import read_checkpoint, read_weights


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(TO_MM)
    parser.add_argument("source", choices=TO_MM, metavar="FROM", help=f"where IN is from: {names}")
    parser.add_argument(
        "target",
        choices=[*FROM_MM, "onnx"],
        metavar="TO",
        help=f"what OUT is for: {', '.join(FROM_MM)} or onnx",
    )
    parser.add_argument("input", type=Path, metavar="IN", help="checkpoint, as .safetensors or by torch.save")
    parser.add_argument(
        "output",
        type=Path,
        metavar="OUT",
        help=".safetensors or .pth file; for timm and hf also a folder; for onnx .onnx",
    )
    parser.add_argument("--config", help="config of the training, if IN does not hold it")
    parser.add_argument(
        "--fold-layerscale",
        action="store_true",
        help="for timm: fold LayerScale into the weights, same outputs (torchvision always is)",
    )
    parser.add_argument(
        "--backbone", action="store_true", help="keep only the backbone of a segmentor or CAE"
    )
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    weights, meta = read_checkpoint(args.input)
    if args.config:
        meta["cfg"] = read_config(args.config).pretty_text
    try:
        if args.source == "timm":
            ours = timm_to_mm(weights, num_patches(meta))
        else:
            ours = TO_MM[args.source](weights)
        if args.backbone:
            ours = {name: value for name, value in ours.items() if name.startswith("backbone.")}
        if args.target == "onnx":
            print(f"wrote {args.output}\n{write_onnx(args.output, ours, meta)}")
            return
        told = write_export(args.output, args.target, ours, meta, args.fold_layerscale)
    except ValueError as error:
        raise UserError(f"{args.input}: {error}") from error
    converted = read_weights(args.output)
    count = sum(value.numel() for value in converted.values())
    print(f"wrote {args.output}: {len(converted)} tensors, {count:,} values, names of {args.target}")
    if told:
        print(told)


if __name__ == "__main__":
    main()
