"""The authors' fine-tuned weights by name: use `mapet://vit-base-kclip` wherever MMEngine takes a checkpoint.

`init_cfg=dict(type="Pretrained", checkpoint="mapet://vit-base-kclip")`, `load_from`, `mapet-mm test CONFIG
mapet://vit-base-kclip`, and, with `mapet_mm.hub`, `get_model(NAME, pretrained=True)`. Files are downloaded
once, into torch.hub's folder, and converted without running any code in them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mapet_mm.interop.convert import reference_to_mm
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.shared_work import shared_lock
from mapet_mm.weight_files import WeightFileError, download, read_checkpoint, read_weights, write_weights

SCHEME = "mapet://"
ADDRESS = "https://ailb-web.ing.unimore.it/publicfiles/MaPeT_checkpoints/"
FILES = {
    f"vit-{size}-{tokenizer.lower()}": f"vit_standard_{size}_patch16_224_{tokenizer}.tar"
    for size in ("tiny", "small", "base")
    for tokenizer in ("KCLIP", "VQKD")
}


class ReleasedWeightsError(UserError):
    """Weights are not released, or a file has others."""


def released_weights(name: str) -> Path:
    """The file of released weights, such as 'vit-base-kclip', fetched and converted if not there yet.

    Raises:
        ReleasedWeightsError: no such weights, or the file is not the authors'.
        WeightFileError: they cannot be fetched.
    """
    name = name.removeprefix(SCHEME)
    if name not in FILES:
        raise ReleasedWeightsError(f"no weights `{SCHEME}{name}`: there are {', '.join(FILES)}")
    folder = Path(torch.hub.get_dir()) / "mapet"
    converted, original = folder / f"{name}.pth", folder / FILES[name]
    folder.mkdir(parents=True, exist_ok=True)
    with shared_lock(folder / f"{name}.lock"):  # only one process downloads
        if not converted.is_file():
            if not original.is_file():
                download(ADDRESS + FILES[name], original)
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
