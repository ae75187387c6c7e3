"""The authors' fine-tuned weights by name: use `mapet://vit-base-kclip` wherever MMEngine takes a checkpoint.

`init_cfg=dict(type="Pretrained", checkpoint="mapet://vit-base-kclip")`, `load_from`, `mapet-mm test CONFIG
mapet://vit-base-kclip`, and, with `mapet_mm.hub`, `get_model(NAME, pretrained=True)`. Files are downloaded
once, into torch.hub's folder, and converted without running any code in them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from mapet_mm.interop.convert import reference_to_mm
from mapet_mm.utils.errors import UserError, reason_of
from mapet_mm.weight_files import WeightFileError, read_checkpoint, read_weights, write_weights

SCHEME = "mapet://"
ADDRESS = "https://ailb-web.ing.unimore.it/publicfiles/MaPeT_checkpoints/"
FILES = {
    f"vit-{size}-{tokenizer.lower()}": f"vit_standard_{size}_patch16_224_{tokenizer}.tar"
    for size in ("tiny", "small", "base")
    for tokenizer in ("KCLIP", "VQKD")
}


class ReleasedWeightsError(UserError):
    """Weights are not released or cannot be fetched."""


def released_weights(name: str) -> Path:
    """The file of released weights, such as 'vit-base-kclip', fetched and converted if not there yet.

    Raises:
        ReleasedWeightsError: no such weights, they cannot be fetched, or the file is not the authors'.
    """
    name = name.removeprefix(SCHEME)
    if name not in FILES:
        raise ReleasedWeightsError(f"no weights `{SCHEME}{name}`: there are {', '.join(FILES)}")
    folder = Path(torch.hub.get_dir()) / "mapet"
    converted, original = folder / f"{name}.pth", folder / FILES[name]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):  # only one process downloads
        if not converted.is_file():
            address = ADDRESS + FILES[name]
            try:  # the file appears when it is whole
                if not original.is_file():
                    first = os.environ.get("RANK", "0") == "0"
                    torch.hub.download_url_to_file(address, str(original), progress=first)
            except Exception as error:  # the remedy is the same for all errors
                raise ReleasedWeightsError(
                    f"could not fetch {address} ({reason_of(error)[:160]}): check the network, or put the "
                    f"file at {original}"
                ) from None
            try:
                write_weights(converted, reference_to_mm(read_weights(original)))
            except (WeightFileError, ValueError) as error:  # for example a proxy's error page
                raise ReleasedWeightsError(f"{original}: {error}; remove it to fetch it again") from error
    return converted


def load(filename: str, map_location: str | torch.device | Callable | None = None) -> dict[str, Any]:
    """Load released weights for MMEngine's `CheckpointLoader`."""
    weights, meta = read_checkpoint(released_weights(filename))
    if isinstance(map_location, (str, torch.device)):
        weights = {name: value.to(map_location) for name, value in weights.items()}
    return {"state_dict": weights, "meta": meta}
