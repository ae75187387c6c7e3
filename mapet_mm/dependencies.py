"""Check that the OpenMMLab libraries are installed, once each, and new enough.

Each comes in two distributions that overwrite each other's files. No requirement can say "either", so the
package's requirements name none of them, and this check runs when `mapet_mm` is imported. It only reads
metadata and imports nothing.
"""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

INSTALL = 'pip install "mapet_mm[onedl]" (in a clone of the repository: pip install -e ".[onedl]")'

# The extra of this package that brings a module which only some tools need.
EXTRAS = {"faiss": "faiss-cpu", "sklearn": "evaluation", "scipy": "evaluation", "matplotlib": "report"}


class Library(NamedTuple):
    """An OpenMMLab library: its import name, each distribution that holds it with its lowest version, and
    whether the package needs it to be imported."""

    name: str
    distributions: dict[str, str]
    required: bool = True


# Lower bounds only: an upper bound would be a guess, and an incompatible newer version raises its own error.
# mmengine before 0.11 cannot load a checkpoint on torch >= 2.6, which the package needs.
LIBRARIES = (
    Library("mmengine", {"onedl-mmengine": "0.10.12", "mmengine": "0.11.0rc3"}),
    Library("mmcv", {"onedl-mmcv": "2.3.6", "mmcv": "2.1.0", "mmcv-lite": "2.1.0"}),
    Library("mmpretrain", {"onedl-mmpretrain": "1.3.6", "mmpretrain": "1.2.0"}),
    Library("mmseg", {"onedl-mmsegmentation": "1.4.2", "mmsegmentation": "1.2.2"}, required=False),
)


def check_openmmlab() -> None:
    """Raise a one-line ImportError with the command that helps, unless the libraries can be used."""
    missing = [library.name for library in LIBRARIES if library.required and find_spec(library.name) is None]
    if missing:
        raise ImportError(f"mapet_mm needs OpenMMLab, and {', '.join(missing)} cannot be imported: {INSTALL}")
    installed = {library.name: _installed(library) for library in LIBRARIES}
    _refuse_doubles(installed)
    for library in LIBRARIES:
        for distribution, found in installed[library.name].items():
            lowest = library.distributions[distribution]
            if _release(found) < _release(lowest):
                raise ImportError(
                    f"mapet_mm needs {distribution} >= {lowest}, found {found}: "
                    f'pip install "{distribution}>={lowest}"'
                )


def _installed(library: Library) -> dict[str, str]:
    found = {}
    for distribution in library.distributions:
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return found


def _refuse_doubles(installed: dict[str, dict[str, str]]) -> None:
    doubles = [list(distributions) for distributions in installed.values() if len(distributions) > 1]
    if doubles:
        pairs = "; ".join(" and ".join(distributions) for distributions in doubles)
        # Uninstall both and reinstall one, because each may have overwritten the other's files.
        raise ImportError(
            f"{pairs} are installed together and overwrite each other's files: "
            f"pip uninstall -y {' '.join(name for names in doubles for name in names)} && "
            f"pip install {' '.join(names[0] for names in doubles)}"
        )


def _release(text: str) -> tuple[int, ...]:
    """The release part of a version: "0.11.0rc3" -> (0, 11, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
