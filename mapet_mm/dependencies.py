"""Check that the OpenMMLab libraries are installed, and once each.

Each comes in two distributions that overwrite each other's files. No requirement can say "either", so the
package's requirements name none of them, and this check runs when `mapet_mm` is imported. It only reads
metadata, and imports a library only where its metadata say that it may fail.
"""

import os
import platform
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from io import StringIO

INSTALL = 'pip install "mapet_mm[onedl]" (in a clone of the repository: pip install -e ".[onedl]")'

# The extra of this package that brings a module which only some tools need.
EXTRAS = {
    "faiss": "faiss-cpu",
    "sklearn": "evaluation",
    "scipy": "evaluation",
    "matplotlib": "report",
    "transformers": "hf",
    "tifffile": "pictures",
    "imagecodecs": "pictures",
    "pydicom": "pictures",
}

# The distributions of each library by its import name, the maintained one first; the last is not required.
LIBRARIES = {
    "mmengine": ("onedl-mmengine", "mmengine"),
    "mmcv": ("onedl-mmcv", "mmcv", "mmcv-lite"),
    "mmpretrain": ("onedl-mmpretrain", "mmpretrain"),
    "mmseg": ("onedl-mmsegmentation", "mmsegmentation"),
}

# The modules whose versions a bug report needs; several distributions can bring the same module.
REPORTED = ("torch", "torchvision", *LIBRARIES, "mmdet", "mmpose", "timm", "open_clip", "faiss")


def version_report() -> str:
    """Versions of this package and of what it stands on, a line each, to paste into a bug report."""
    from mapet_mm import __version__

    versions = {"mapet_mm": __version__, "Python": f"{platform.python_version()} on {platform.platform()}"}
    distributions = _distributions()
    for module in REPORTED:
        names = sorted(set(distributions.get(module, [])))
        versions[module] = ", ".join(f"{name} {version(name)}" for name in names) or "not installed"
    versions["CUDA"] = _cuda()
    return "\n".join(f"{name:12}{found}" for name, found in versions.items())


@cache
def _distributions() -> Mapping[str, list[str]]:
    """The installed distributions by the modules that they bring; reading them takes half a second."""
    return packages_distributions()


def _cuda() -> str:
    """The CUDA that PyTorch was built for, and the GPUs that it sees."""
    try:
        import torch
    except ImportError as error:
        return f"unknown, because PyTorch cannot be imported: {error}"
    if torch.version.cuda is None:
        return "none: PyTorch was built without it"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}, {', '.join(gpus) or 'no GPU'}"


def import_quietly(module: str) -> None:
    """Import a module of OpenMMLab without "Could not import OneDL".

    The maintained libraries print this debug line, without a logger, where a library of theirs that nothing
    here needs is not installed.
    """
    with redirect_stdout(StringIO()) as printed:
        import_module(module)
    others = [line for line in printed.getvalue().splitlines() if line != "Could not import OneDL"]
    if others:
        print("\n".join(others))


def check_openmmlab() -> None:
    """Raise a one-line ImportError with the command that helps, unless the libraries can be used."""
    missing = [name for name in list(LIBRARIES)[:3] if find_spec(name) is None]
    if missing:
        raise ImportError(f"mapet_mm needs OpenMMLab, and {', '.join(missing)} cannot be imported: {INSTALL}")
    installed = [list(filter(_is_installed, distributions)) for distributions in LIBRARIES.values()]
    doubles = [names for names in installed if len(names) > 1]
    if doubles:
        # Uninstall both and reinstall one, because each may have overwritten the other's files.
        raise ImportError(
            f"{'; '.join(map(' and '.join, doubles))} are installed together and overwrite each other's "
            f"files: pip uninstall -y {' '.join(name for names in doubles for name in names)} && "
            f"pip install {' '.join(names[0] for names in doubles)}"
        )
    _check_multimodal()


def _check_multimodal() -> None:
    """Raise a one-line ImportError if MMPretrain's multimodal models keep it from being imported.

    It imports them where pycocotools is installed, and some versions of them fail on transformers 5.
    """
    if not _is_installed("pycocotools") or not _is_installed("transformers"):
        return
    if int(version("transformers").partition(".")[0]) < 5:
        return
    try:
        import_module("mmpretrain.models")
    except Exception as error:
        raise ImportError(
            f"MMPretrain imports its multimodal models, because pycocotools is installed, and they fail on "
            f'transformers {version("transformers")} ({error}): pip install "transformers<5"'
        ) from error


def forget_missing_backend() -> None:
    """Forget a notebook's Matplotlib backend where this environment lacks its module: nothing could be drawn.

    A notebook sets MPLBACKEND, which a command that it starts inherits, also one of another environment.
    """
    module = os.environ.get("MPLBACKEND", "").partition("module://")[2]
    if module and find_spec(module.partition(".")[0]) is None:
        del os.environ["MPLBACKEND"]


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False
