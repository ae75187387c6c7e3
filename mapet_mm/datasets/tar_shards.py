"""Images in tar files (WebDataset's layout), read in any order by an index of the files' members."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int64, Shaped
from mmpretrain.datasets import BaseDataset
from tqdm import tqdm

from mapet_mm.datasets.image_folder import EXTENSIONS, is_of_system
from mapet_mm.datasets.pictures import look_at, require_kept
from mapet_mm.datasets.transforms.load_picture import LoadPicture
from mapet_mm.registry import DATASETS, TRANSFORMS
from mapet_mm.structures.image_files import tar_of
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.shared_work import my_blocks

OPEN_FILES = 64  # of a process
MOST_LINKS = 40  # from one to the next, as in Linux
INDICES = 4  # in memory: in the order of their names, the images of a tar file follow each other


@DATASETS.register_module()
class TarShards(BaseDataset):
    """The images of uncompressed tar files, without labels, for tokens and squares.

    Put `mapet_mm.LoadImageFromTar` in place of `LoadImageFromFile` in the pipeline. An image's name is its
    file's and its own: `shard-0001.tar/n01440764/18.jpg`. Each tar file is gone through once, by one of the
    processes that start together; where its images are is then kept in an index beside it, which is made anew
    if the tar file changes. A process holds about 60 bytes of each image, which the workers that it forks
    share.

    Args:
        data_root: folder of the tar files.
        pattern: which of its files, as a glob pattern.
        index_root: folder for the indices, if the tar files' own cannot be written to.
        **kwargs: arguments of MMPretrain's `BaseDataset`, such as `pipeline`.

    Raises:
        UserError: there is no such file or no image, one is compressed or damaged, or its index cannot be
            written.

    Examples:
        >>> images = TarShards("shards", pipeline=[dict(type="mapet_mm.LoadImageFromTar")])
        >>> len(images), images[0]["img_path"]
        (1, 'shards/0.tar/cat.png')
    """

    def __init__(
        self, data_root: str, pattern: str = "*.tar", index_root: str | None = None, **kwargs: Any
    ) -> None:
        self.pattern = pattern
        self.index_root = index_root
        super().__init__(ann_file="", data_root=data_root, **{**kwargs, "serialize_data": False})

    def load_data_list(self) -> TarImages:
        """A record for each image: its path below the tar file, and where its bytes are."""
        shards = sorted(Path(self.data_root).glob(self.pattern))
        if not shards:
            raise UserError(f"no file `{self.pattern}` in data_root `{self.data_root}`: correct either")
        indices = [index_of(shard, self.index_root) for shard in shards]
        # All processes together make those that are not there.
        missing = my_blocks(len(shards), lambda number: indices[number].exists())
        for number in tqdm(missing, desc="reading tar files", unit="file", delay=2):
            read_index(shards[number], indices[number])
        bar = tqdm(shards, desc="reading indices of tar files", unit="file", delay=2)
        images = TarImages.of([str(shard) for shard in shards], map(read_index, bar, indices))
        if not len(images):
            raise UserError(f"the tar files in `{self.data_root}` hold no images ({', '.join(EXTENSIONS)})")
        return images

    def get_subset_(self, indices: Sequence[int] | int) -> None:
        """Keep some images, in this order; of a number, the first or, if it is negative, the last so many."""
        if isinstance(indices, int):
            indices = range(len(self))[:indices] if indices >= 0 else range(len(self))[indices:]
        self.data_list = self.data_list.take(np.asarray(indices, np.int64))


class TarImages(Sequence):
    """Records of images in tar files, as arrays: Python objects took seven times the memory.

    Args:
        shards: paths of the tar files.
        text: the images' names, one after the other, in UTF-8.
        places: for each image, the index of its tar file, where its name and its content begin, and how many
            bytes both have.
    """

    def __init__(self, shards: Sequence[str], text: bytes, places: Shaped[np.ndarray, " images"]) -> None:
        self.shards = shards
        self.text = text
        self.places = places

    @classmethod
    def of(cls, shards: Sequence[str], indices: Iterable[list[tuple[str, int, int]]]) -> TarImages:
        """Images by tar file: name, offset and size of each."""
        kinds = [("shard", "u4"), ("start", "u8"), ("length", "u2"), ("offset", "u8"), ("size", "u8")]
        text = bytearray()
        places = [np.empty(0, kinds)]
        for shard, images in enumerate(indices):
            of_shard = []
            for name, offset, size in images:
                encoded = os.fsencode(name)
                of_shard.append((shard, len(text), len(encoded), offset, size))
                text += encoded
            places.append(np.array(of_shard, kinds))
        return cls(shards, bytes(text), np.concatenate(places))

    def take(self, indices: Int64[np.ndarray, " taken"]) -> TarImages:
        """Some images, in this order."""
        return TarImages(self.shards, self.text, self.places[indices])

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard_index, start, length, offset, size = self.places[index].item()
        shard = self.shards[shard_index]
        path = os.path.join(shard, os.fsdecode(self.text[start : start + length]))
        return dict(img_path=path, shard=shard, offset=offset, size=size)


@TRANSFORMS.register_module()
class LoadImageFromTar(LoadPicture):
    """Load an image of `TarShards`, or one in a tar file by its path alone, as `mapet-mm store-images` does.

    Args:
        index_root: as that of `TarShards`.
        **kwargs: arguments of `LoadPicture`, for images that are no photographs.

    Raises:
        PictureError: an image is no photograph, and no option says how it is read.

    Examples:
        >>> images = TarShards("shards", pipeline=[dict(type="mapet_mm.LoadImageFromTar")])
        >>> images[0]["img"].shape  # (height, width, 3), in BGR
        (20, 30, 3)
    """

    def __init__(self, index_root: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.index_root = index_root

    def content(self, results: dict[str, Any]) -> bytes:
        """The bytes of an image in a tar file."""
        path = results["img_path"]
        if "shard" not in results:
            results.update(find_image(path, self.index_root))
        descriptor = open_file(results["shard"]).fileno()
        content = os.pread(descriptor, results["size"], results["offset"])
        if self.reads_plainly:
            require_kept({path: look_at(BytesIO(content))})
        return content


@lru_cache(maxsize=OPEN_FILES)
def open_file(path: str) -> BinaryIO:
    """A file that stays open; forks may share it, because `pread` moves no position."""
    return open(path, "rb")


def find_image(path: str, index_root: str | None) -> dict[str, Any]:
    """Tar file, offset and size in bytes of the image at a path like `shards/0.tar/n01440764/18.jpg`.

    Raises:
        FileNotFoundError: no tar file has it.
    """
    shard = tar_of(path)
    images = images_in(shard, index_root) if shard else {}
    name = os.path.relpath(path, shard)
    if name not in images:
        raise FileNotFoundError(f"no tar file has the image `{path}`")
    offset, size = images[name]
    return dict(shard=str(shard), offset=offset, size=size)


@lru_cache(maxsize=INDICES)
def images_in(shard: Path, index_root: str | None) -> dict[str, tuple[int, int]]:
    """Offset and size in bytes of each image in a tar file, by its name."""
    images = read_index(shard, index_of(shard, index_root))
    return {os.path.normpath(name): (offset, size) for name, offset, size in images}


def index_of(shard: Path, index_root: str | None) -> Path:
    """The file of a tar file's index."""
    return Path(index_root or shard.parent, f"{shard.name}.index.json")


def read_index(shard: Path, index: Path) -> list[tuple[str, int, int]]:
    """Name, offset and size in bytes of each image in a tar file; makes the index if it is not there.

    Of images of one name, as `tar --append` makes them, the first counts, which has the tokens.
    """
    status = shard.stat()
    identity = dict(bytes=status.st_size, modified=status.st_mtime_ns)
    stored = json.loads(index.read_text()) if index.exists() else {}
    images = stored.get("images")
    if stored.get("identity") != identity:
        images = list_images(shard)
        try:
            replace_file(index, json.dumps(dict(identity=identity, images=images)).encode())
        except OSError as error:
            raise UserError(
                f"the list of the images in {shard} cannot be written beside it ({error.strerror}): give "
                "TarShards and LoadImageFromTar an `index_root`, a folder for these lists"
            ) from error
    first: dict[str, tuple[str, int, int]] = {}
    for image in images:
        first.setdefault(os.path.normpath(image[0]), image)
    return list(first.values())


def list_images(shard: Path) -> list[tuple[str, int, int]]:
    """Name, offset and size in bytes of each image in a tar file, which is read from end to end.

    A link has the content of the file that it leads to, as after unpacking.
    """
    try:
        with tarfile.open(shard, "r:") as file:
            members = list(file)
    except tarfile.ReadError as error:
        raise UserError(f"{shard} is not an uncompressed tar file ({error}): unpack or repair it") from error
    by_name = {os.path.normpath(member.name): member for member in reversed(members)}
    found = []
    for member in members:
        is_left_behind = any(is_of_system(part) for part in Path(member.name).parts)
        if is_left_behind or not member.name.lower().endswith(EXTENSIONS):
            continue
        content = _content_of(member, by_name)
        if content is not None:
            found.append((member.name, content.offset_data, content.size))
    return found


def _content_of(member: tarfile.TarInfo, by_name: Mapping[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """The file that a member is, or that it leads to as a link; None if there is none."""
    for _ in range(MOST_LINKS):
        if member.isfile():
            return member
        if not (member.islnk() or member.issym()):
            return None
        # A hard link names a member, a symbolic one a path from its own folder.
        folder = "" if member.islnk() else os.path.dirname(member.name)
        target = os.path.normpath(os.path.join(folder, member.linkname))
        if target not in by_name:
            return None
        member = by_name[target]
    return None
