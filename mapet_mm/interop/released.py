"""The authors' fine-tuned weights by name: use `mapet://vit-base-kclip` wherever MMEngine takes a checkpoint.

`init_cfg=dict(type="Pretrained", checkpoint="mapet://vit-base-kclip")`, `load_from`, `tools/test.py CONFIG
mapet://vit-base-kclip`, and, with `mapet_mm.hub`, `get_model(NAME, pretrained=True)`. Files are downloaded
once, into torch.hub's folder, and converted without running any code in them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from mmengine.logging import print_log
from torch import Tensor

from mapet_mm.interop.convert import reference_to_mm
from mapet_mm.utils.atomic_files import partial_path, replace_file
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import digest_of_file
from mapet_mm.weight_files import WeightFileError, read_checkpoint, read_weights, write_weights

SCHEME = "mapet://"
ADDRESS = "https://ailb-web.ing.unimore.it/publicfiles/MaPeT_checkpoints/"
FILES = {
    f"vit-{size}-{tokenizer.lower()}": f"vit_standard_{size}_patch16_224_{tokenizer}.tar"
    for size in ("tiny", "small", "base")
    for tokenizer in ("KCLIP", "VQKD")
}
# SHA-256 of the authors' files, by name, as far as known. Other digests are recorded beside the file on the
# first download and checked from then on.
DIGESTS: dict[str, str] = {}


class ReleasedWeightsError(UserError):
    """Weights are not released, cannot be fetched, or have changed."""


def released_weights(name: str) -> Path:
    """The released weights under this package's names, downloaded and converted if not there yet.

    Args:
        name: for example 'vit-base-kclip', with or without 'mapet://'.

    Raises:
        ReleasedWeightsError: there are no such weights, they cannot be fetched, or the file does not have the
            recorded digest.
    """
    name = name.removeprefix(SCHEME)
    if name not in FILES:
        raise ReleasedWeightsError(f"no weights `{SCHEME}{name}`: there are {', '.join(FILES)}")
    folder = Path(torch.hub.get_dir()) / "mapet"
    converted, original = folder / f"{name}.pth", folder / FILES[name]
    if converted.is_file():
        return converted
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):  # only one process downloads
        if not converted.is_file():
            if not original.is_file():
                _fetch(ADDRESS + FILES[name], original)
            weights = _read(original)
            _check(name, original)
            write_weights(converted, weights)
    return converted


def _fetch(address: str, file: Path) -> None:
    partial = partial_path(file)
    try:
        torch.hub.download_url_to_file(address, str(partial), progress=os.environ.get("RANK", "0") == "0")
        _read(partial)  # fails if it is a proxy's error page
        os.replace(partial, file)
    except Exception as error:  # the remedy is the same for all errors
        reason = str(error).replace(str(partial), "it").split("\n", 1)[0][:160]
        raise ReleasedWeightsError(
            f"could not fetch {address} ({type(error).__name__}: {reason}): check the network, or put the "
            f"file at {file}"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def _check(name: str, file: Path) -> None:
    """Compare the file with its known digest, or record its digest."""
    found = digest_of_file(file)
    record = file.with_suffix(".sha256")
    known = DIGESTS.get(name) or (record.read_text().split()[0] if record.is_file() else None)
    if known is None:
        replace_file(record, f"{found}  {file.name}\n".encode())
        print_log(f"the SHA-256 of {file.name} is not known here; recorded this one's: {found}", "current")
    elif found != known:
        raise ReleasedWeightsError(
            f"{file} has the SHA-256 {found[:12]}…, not {known[:12]}… as recorded: remove it to fetch it "
            f"again, and {record} too if the authors have replaced it"
        )


def _read(original: Path) -> dict[str, Tensor]:
    try:
        return reference_to_mm(read_weights(original))
    except (WeightFileError, ValueError) as error:
        raise ReleasedWeightsError(f"{original}: {error}") from error


def load(filename: str, map_location: str | torch.device | Callable | None = None) -> dict[str, Any]:
    """Load released weights for MMEngine's `CheckpointLoader`."""
    weights, meta = read_checkpoint(released_weights(filename))
    if isinstance(map_location, (str, torch.device)):
        weights = {name: value.to(map_location) for name, value in weights.items()}
    return {"state_dict": weights, "meta": meta}
