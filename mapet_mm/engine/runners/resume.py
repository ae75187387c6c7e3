"""Which checkpoint a run starts from: whole, safe to read, and of this run."""

import hashlib
import os
import pickle
import re
import shlex
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config

from mapet_mm.engine.hooks.portable_checkpoint_hook import checkpoint_folder
from mapet_mm.interop.released import SCHEME, released_weights
from mapet_mm.utils.config import nodes, plain
from mapet_mm.utils.dist import is_first_process
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import digest_of_file
from mapet_mm.weight_files import only_safe_globals

ZIP = b"PK\x03\x04"
# What may differ between two starts of one training: where it runs, how much it says.
START = {"resume", "launcher", "work_dir", "model_wrapper_cfg", "env_cfg"}
START |= {"default_hooks", "log_level", "log_processor", "visualizer", "vis_backends"}
CONTENT = "content of "
LOADING = ("num_workers", "persistent_workers", "pin_memory")


class LaunchError(UserError):
    """Something that the user can put right before a run starts; the message is one line."""


class BrokenCheckpointError(LaunchError):
    """A checkpoint that is truncated, or none that MMEngine can load."""


def require_file(what: str, path: str) -> None:
    """Raise LaunchError unless `path` is there, or an address that MMEngine can load from."""
    if "://" not in path and not Path(path).expanduser().exists():
        raise LaunchError(f"{what} {path} does not exist")


def require_checkpoint(what: str, path: str, trust: bool = False) -> None:
    """Raise LaunchError unless `path` can be loaded, and without running code that it may hold.

    MMEngine runs what a file holds where reading it safely fails.

    Args:
        what: names the file in the message.
        path: a file; a folder (DeepSpeed's) or an address is left to what loads it.
        trust: read it whatever it holds.
    """
    if path.startswith(SCHEME):
        released_weights(path)
        return
    require_file(what, path)
    if (Path(path).expanduser() / "last_checkpoint").is_file():
        raise LaunchError(f"{what} {path} is a work dir: name a file in it, or --work-dir {path} --resume")
    if "://" in path or Path(path).expanduser().is_dir():
        return
    try:
        _read(Path(path).expanduser())
    except BrokenCheckpointError as error:
        raise BrokenCheckpointError(f"{what} {error}") from None
    except LaunchError as error:
        if not trust:
            raise LaunchError(f"{what} {error}") from None


def find_checkpoint(cfg: Config, trust: bool = False) -> str | None:
    """The last whole checkpoint in the run's own folder, or None if the folder has none.

    MMEngine writes down its path; a run that was copied or moved takes the file of that name in its own
    folder. One that is missing or truncated is passed over with a warning, for the one before.

    Args:
        cfg: a config with its `work_dir`.
        trust: read checkpoints whatever they hold.

    Raises:
        LaunchError: there are checkpoints, but none is whole; or the last one needs `trust`.
    """
    found = list(_candidates(cfg))
    for path in found:
        try:
            require_checkpoint("checkpoint", str(path), trust)
        except LaunchError as error:
            if path.exists() and not isinstance(error, BrokenCheckpointError):
                raise
            say(f"warning: {error}" + (": trying the one before" if path != found[-1] else ""))
        else:
            return str(path)
    if found:
        raise LaunchError(
            f"no checkpoint in {found[0].parent} is whole: remove the folder to train from the beginning, "
            "or name a checkpoint with --resume"
        )
    return None


def later_checkpoints(cfg: Config, checkpoint: str) -> list[str]:
    """Names of the checkpoints in the run's folder that going on from this one will write again."""
    folder, name, steps = _numbered(cfg)
    reached = 0
    if Path(checkpoint).resolve().parent == folder.resolve():
        match = name.fullmatch(Path(checkpoint).name)
        # One within an epoch has no number in its name.
        reached = int(match[1]) if match else _read(Path(checkpoint))["meta"][_unit(cfg)]
    return [steps[step].name for step in sorted(steps) if step > reached]


def recipe(cfg: Config) -> dict[str, str]:
    """Digests of a training: of each entry of its config, and of each file that its model starts from.

    What may differ between two starts of one training is left out.
    """
    entries = cfg.to_dict()
    if entries.get("resume"):  # `load_from` is where it resumes
        entries.pop("load_from", None)
    digests = {name: _digest(repr(_normal(entries[name])).encode()) for name in entries.keys() - START}
    starts = {*_files(entries.get("model")), *_files(entries.get("load_from"))}
    return dict(sorted((digests | {CONTENT + path: content_digest(path) for path in starts}).items()))


def differences(current: dict[str, str], checkpoint: str) -> list[str]:
    """Names of the entries in which a recipe differs from the one that a checkpoint was trained with.

    PortableCheckpointHook writes it into checkpoints; where it is not known, nothing differs. Neither does a
    file that is only in one of them: it may be gone since, and was not written down by earlier versions.
    """
    if Path(checkpoint).is_dir():
        return []
    try:
        before = _read(Path(checkpoint))["meta"]["recipe"]
    except (LaunchError, KeyError, TypeError):
        return []
    names = before.keys() | current.keys()
    known = {name for name in names if not name.startswith(CONTENT)} | (before.keys() & current.keys())
    return sorted(name for name in known if before.get(name) != current.get(name))


def say(text: str) -> None:
    """Tell the user something before there is a log, once for all processes."""
    if is_first_process():
        print(text, file=sys.stderr)


def _read(path: Path) -> Any:
    """What a checkpoint holds, its tensors still in the file.

    Raises:
        BrokenCheckpointError: it cannot be read.
        LaunchError: it can be read in an unsafe way only.
    """
    with path.open("rb") as file:
        start = file.read(9)
    is_zip = start.startswith(ZIP)
    if start[8:] == b"{":
        raise BrokenCheckpointError(
            f"{path} holds safetensors, which MMEngine does not load: `python tools/convert.py mm mm "
            f"{shlex.quote(str(path))} weights.pth` makes a checkpoint of them (`timm mm` of timm's "
            "names, `hf mm` of Hugging Face's)"
        )
    try:
        with only_safe_globals():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # what a broken file raises depends on where it is broken
        found = re.search(r"WeightsUnpickler error: (.*)", str(error))
        reason = found[1] if found else (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
        if isinstance(error, pickle.UnpicklingError) and (is_zip or "global" in reason.lower()):
            named = re.search(r"GLOBAL (\S+)", reason)
            raise LaunchError(
                f"{path} holds more than weights and plain values ({named[1] if named else reason}), which "
                f"can run code when it is read: `python tools/convert.py mm mm {path} weights.pth` keeps the "
                "weights alone, --trust-checkpoint reads it as it is"
            ) from None
        raise BrokenCheckpointError(f"{path} is truncated, or no checkpoint ({reason})") from None


def _candidates(cfg: Config) -> Iterator[Path]:
    """The last checkpoint that the run has written down, then those before it, newest first."""
    folder, name, steps = _numbered(cfg)
    newest = max(steps, default=0)
    record = Path(cfg.work_dir) / "last_checkpoint"
    if record.is_file() and (last := os.path.basename(record.read_text().strip())):
        yield folder / last
        match = name.fullmatch(last)
        newest = int(match[1]) - 1 if match else newest
    yield from (steps[step] for step in sorted(steps, reverse=True) if step <= newest)


def _numbered(cfg: Config) -> tuple[Path, re.Pattern, dict[int, Path]]:
    """Where the run writes checkpoints, under which names, and which are there by epoch or iteration."""
    hook = _checkpoint_hook(cfg)
    folder = Path(checkpoint_folder(str(cfg.work_dir), hook.get("out_dir")))
    before, after = (hook.get("filename_tmpl") or f"{_unit(cfg)}_{{}}.pth").split("{}", 1)
    name = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
    matches = map(name.fullmatch, os.listdir(folder) if folder.is_dir() else ())
    return folder, name, {int(match[1]): folder / match[0] for match in matches if match}


def _checkpoint_hook(cfg: Config) -> dict:
    return (cfg.get("default_hooks") or {}).get("checkpoint") or {}


def _unit(cfg: Config) -> str:
    """What checkpoints are numbered by."""
    return "epoch" if _checkpoint_hook(cfg).get("by_epoch", True) else "iter"


def _files(config: Any) -> Iterator[str]:
    """The local files that a part of a config names, as the weights that a model starts from."""
    for _, node in nodes(config):
        if isinstance(node, str) and os.path.isfile(os.path.expanduser(node)):
            yield node


def content_digest(path: str) -> str:
    """Digest of a file; of a checkpoint by the checksums in its table of contents, without reading it all."""
    file = Path(path).expanduser()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as parts:
            sums = [(part.filename, part.CRC, part.file_size) for part in parts.infolist()]
        return _digest(repr(sums).encode())
    return digest_of_file(file)[:12]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _normal(value: Any) -> Any:
    """The value in a form that is the same in every process."""
    if isinstance(value, dict):
        return sorted((str(key), _normal(one)) for key, one in value.items() if key not in LOADING)
    if isinstance(value, (list, tuple)):
        return [_normal(one) for one in value]
    return plain(value)
