"""Check that the OpenMMLab libraries are installed, and once each.

Each comes in two distributions that overwrite each other's files. No requirement can say "either", so the
package's requirements name none of them, and this check runs when `mapet_mm` is imported. It only reads
metadata and imports nothing.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

INSTALL = 'pip install "mapet_mm[onedl]" (in a clone of the repository: pip install -e ".[onedl]")'

# The extra of this package that brings a module which only some tools need.
EXTRAS = {"faiss": "faiss-cpu", "sklearn": "evaluation", "scipy": "evaluation", "matplotlib": "report"}

# The distributions of each library by its import name, the maintained one first; the last is not required.
LIBRARIES = {
    "mmengine": ("onedl-mmengine", "mmengine"),
    "mmcv": ("onedl-mmcv", "mmcv", "mmcv-lite"),
    "mmpretrain": ("onedl-mmpretrain", "mmpretrain"),
    "mmseg": ("onedl-mmsegmentation", "mmsegmentation"),
}


def check_openmmlab() -> None:
    """Raise a one-line ImportError with the command that helps, unless the libraries can be used."""
    missing = [name for name in list(LIBRARIES)[:3] if find_spec(name) is None]
    if missing:
        raise ImportError(f"mapet_mm needs OpenMMLab, and {', '.join(missing)} cannot be imported: {INSTALL}")
    installed = [list(filter(_is_installed, distributions)) for distributions in LIBRARIES.values()]
    if doubles := [names for names in installed if len(names) > 1]:
        # Uninstall both and reinstall one, because each may have overwritten the other's files.
        raise ImportError(
            f"{'; '.join(map(' and '.join, doubles))} are installed together and overwrite each other's "
            f"files: pip uninstall -y {' '.join(name for names in doubles for name in names)} && "
            f"pip install {' '.join(names[0] for names in doubles)}"
        )


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False
