"""Images in tar files are those of the folder that the files were made of."""

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from mmengine.registry import init_default_scope
from PIL import Image
from stored_squares import CROP, GRID, JITTER, LOAD, PACK, SIZE, config, fill, named, write_images
from trainings import Noted
from trainings import build as train

from mapet_mm.datasets import tar_shards
from mapet_mm.datasets.alignment import check_alignment
from mapet_mm.datasets.pictures import PictureError
from mapet_mm.datasets.tar_shards import LoadImageFromTar, index_of, read_index
from mapet_mm.registry import DATASETS
from mapet_mm.structures import TokenStore, TokenStoreError
from mapet_mm.structures.names import relative_name
from mapet_mm.tokenizers.squares import SquareLoader, store_images, verify_images
from mapet_mm.utils.errors import UserError

NAMES = ["n01/a.png", "n01/b.png", "n02/c.png", "n02/d.png"]


@pytest.fixture
def shards(tmp_path) -> Path:
    """Two tar files with two images each, and their labels, which do not count."""
    rng = np.random.default_rng(0)
    for name in NAMES:
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(9, 7, 3), dtype=np.uint8)).save(path)
        path.with_suffix(".cls").write_text("3")
    members = [member for name in NAMES for member in (name, name.replace("png", "cls"))]
    write_shards(tmp_path, [members[:4], members[4:]])
    return tmp_path / "shards"


def write_shards(folder: Path, parts: list[list[str]], before: str = "") -> None:
    """Tar files in `shards`, of files in `folder`."""
    (folder / "shards").mkdir()
    for number, names in enumerate(parts):
        with tarfile.open(folder / "shards" / f"{number}.tar", "w") as file:
            for name in names:
                file.add(folder / "folder" / name, before + name)


def build(shards: Path, **options):
    init_default_scope("mmpretrain")
    pipeline = [dict(type="mapet_mm.LoadImageFromTar")]
    return DATASETS.build(
        dict(type="mapet_mm.TarShards", data_root=str(shards), pipeline=pipeline, **options)
    )


def test_images_are_read_in_any_order_under_names_of_file_and_member(shards):
    dataset = build(shards)
    assert len(dataset) == 4
    for index in (3, 0, 2, 1):
        results = dataset[index]
        expected = np.asarray(Image.open(shards.parent / "folder" / NAMES[index]))[..., ::-1]
        assert np.array_equal(results["img"], expected)
        assert results["img_shape"] == (9, 7)
        assert relative_name(results["img_path"], shards) == f"{index // 2}.tar/{NAMES[index]}"


def test_images_are_held_in_arrays_and_may_be_left_out_and_reordered(shards):
    dataset = build(shards)
    infos = [dataset.get_data_info(index) for index in range(4)]
    assert dataset.data_list.places.nbytes + len(dataset.data_list.text) == 4 * (30 + len(NAMES[0]))
    dataset.get_subset_([3, 0, 0])
    assert [info["img_path"] for info in map(dataset.get_data_info, range(3))] == [
        infos[index]["img_path"] for index in (3, 0, 0)
    ]
    dataset.get_subset_(-2)
    assert len(dataset) == 2
    assert dataset[0]["img_path"] == infos[0]["img_path"]
    dataset.get_subset_(1)
    assert len(dataset) == 1
    dataset.get_subset_(0)
    assert len(dataset) == 0


def test_a_tar_file_is_listed_once_until_it_changes(shards, monkeypatch):
    listed = []
    list_images = tar_shards.list_images
    monkeypatch.setattr(tar_shards, "list_images", lambda path: listed.append(path) or list_images(path))
    first = build(shards, index_root=str(shards.parent))
    again = build(shards, index_root=str(shards.parent))
    assert [again.get_data_info(i) for i in range(4)] == [first.get_data_info(i) for i in range(4)]
    os.utime(shards / "1.tar")
    build(shards, index_root=str(shards.parent))
    assert sorted(path.name for path in listed) == ["0.tar", "1.tar", "1.tar"]
    assert sorted(path.name for path in shards.iterdir()) == ["0.tar", "1.tar"]


def test_processes_that_start_together_share_the_tar_files(shards, monkeypatch):
    """The second of two begins with the second file, and meanwhile the first process lists the first file."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    listed = []
    list_images = tar_shards.list_images

    def list_beside_another(shard: Path) -> list:
        listed.append(shard.name)
        if shard.name == "1.tar":
            read_index(shards / "0.tar", index_of(shards / "0.tar", None))
        return list_images(shard)

    monkeypatch.setattr(tar_shards, "list_images", list_beside_another)
    assert len(build(shards)) == 4
    assert listed == ["1.tar", "0.tar"]


def test_an_image_is_found_by_its_path_alone(shards, tmp_path):
    (tmp_path / "indices").mkdir()
    load = LoadImageFromTar(index_root=str(tmp_path / "indices"))
    for index, info in enumerate(map(build(shards).get_data_info, range(4))):
        path = str(shards / f"{index // 2}.tar" / NAMES[index])
        assert np.array_equal(load({"img_path": path})["img"], load(info)["img"])
    assert len(list((tmp_path / "indices").iterdir())) == 2
    for path in (shards / "0.tar/n02/c.png", shards / "n01/a.png"):
        with pytest.raises(FileNotFoundError, match=f"no tar file has the image `{path}`"):
            load({"img_path": str(path)})


def test_of_images_with_the_same_name_the_first_counts(shards):
    """Its tokens are those of the name: the second would be trained on with the first one's."""
    with tarfile.open(shards / "1.tar", "w") as file:
        for name, inside in zip(NAMES, ("n01/same.png", "./n01/same.png", "n02/other.png"), strict=False):
            file.add(shards.parent / "folder" / name, inside)
    images = build(shards)
    assert len(images) == 5 - 1
    expected = np.asarray(Image.open(shards.parent / "folder" / NAMES[0]))[..., ::-1]
    assert np.array_equal(images[2]["img"], expected)
    for same in ("n01/same.png", "./n01/same.png"):
        found = LoadImageFromTar()({"img_path": f"{shards}/1.tar/{same}"})
        assert np.array_equal(found["img"], expected)


def test_links_in_tar_files_have_the_content_that_they_lead_to(shards):
    """As `tar` writes files with several names, and symbolic links."""
    folder = shards.parent / "folder"
    os.link(folder / NAMES[0], folder / "n01/hard.png")
    (folder / "n02/soft.png").symlink_to("../n01/hard.png")
    (folder / "n02/broken.png").symlink_to("nowhere.png")
    (folder / "n02/self.png").symlink_to("self.png")
    with tarfile.open(shards / "0.tar", "w") as file:
        file.add(folder, "./photos")
    images = {Path(info["img_path"]).name: info for info in build(shards, pattern="0.tar")}
    assert sorted(images) == ["a.png", "b.png", "c.png", "d.png", "hard.png", "soft.png"]
    expected = np.asarray(Image.open(folder / NAMES[0]))[..., ::-1]
    for name in ("a.png", "hard.png", "soft.png"):
        assert np.array_equal(images[name]["img"], expected)


def test_pictures_in_tar_files_are_read_with_the_options_of_load_picture(shards):
    deep = np.arange(20 * 30, dtype=np.uint16).reshape(20, 30)
    Image.fromarray(deep).save(shards.parent / "folder/deep.png")
    with tarfile.open(shards / "0.tar", "w") as file:
        file.add(shards.parent / "folder/deep.png", "deep.png")
    path = str(shards / "0.tar/deep.png")
    with pytest.raises(PictureError, match="16 bits"):
        LoadImageFromTar()(dict(img_path=path))
    image = LoadImageFromTar(range=(0, 510), bands=(1,))(dict(img_path=path))["img"]
    assert image[0, :4, 0].tolist() == [0, 0, 1, 2]  # 0.5 is rounded to 0, 1.5 to 2
    assert image[-1, -1] == 255


@pytest.mark.parametrize(
    ("content", "pattern", "match"),
    [(b"\x1f\x8b compressed", "*.tar", "uncompressed"), (b"", "*.tgz", "no file")],
)
def test_other_files_are_refused(content, pattern, match, tmp_path):
    (tmp_path / "0.tar").write_bytes(content)
    with pytest.raises(UserError, match=match):
        build(tmp_path, pattern=pattern)


def test_tar_files_without_images_and_lists_that_cannot_be_written_are_refused(shards):
    with pytest.raises(UserError, match="an `index_root`, a folder for these lists"):
        build(shards, index_root=str(shards / "nowhere"))
    with tarfile.open(shards / "2.tar", "w") as file:
        file.add(shards.parent / "folder/n01/a.cls", "a.cls")
    with pytest.raises(UserError, match=r"hold no images \(\.jpg, "):
        build(shards, pattern="2.tar")


def test_an_image_that_cannot_be_decoded_is_named(shards):
    dataset = build(shards)
    info = dataset.get_data_info(1)
    with open(info["shard"], "r+b") as file:
        file.seek(info["offset"])
        file.write(bytes(info["size"]))
    with pytest.raises(UserError, match="n01/b"):
        dataset[1]


TRAINED = named("train", 10)
LOAD_FROM_TAR = dict(type="mapet_mm.LoadImageFromTar")


@pytest.fixture
def stores(tmp_path) -> Path:
    """The same images in `folder` and in tar files, as `tar cf FILE .` makes these, with the same tokens."""
    write_images(tmp_path / "folder", TRAINED)
    write_shards(tmp_path, [TRAINED[:6], TRAINED[6:]], before="./")
    in_shards = [f"{int(index >= 6)}.tar/{name}" for index, name in enumerate(TRAINED)]
    for root, names in (("folder", TRAINED), ("shards", in_shards)):
        fill(TokenStore.create(tmp_path / f"{root}_tokens", names, GRID, 8, "digest", tmp_path / root))
    return tmp_path


def decoded(root: Path, *steps: dict, load: dict = LOAD_FROM_TAR, **images) -> dict:
    """Config of a training set whose images, in this folder, are decoded."""
    load_tokens = dict(type="mapet_mm.LoadTokenGrid", store=f"{root}_tokens")
    return dict(data_root=str(root), pipeline=[load, CROP, *steps, load_tokens, PACK], **images)


def losses(work_dir: Path, dataset: dict) -> list[float]:
    """The losses of nine steps, after all checks."""
    runner = train(work_dir, dataset=dataset, custom_hooks=[dict(type="mapet_mm.TokenStoreCheckHook")])
    noted: list[float] = []
    runner.register_hook(Noted(noted))
    runner.train()
    return noted


def test_tokens_and_squares_from_tar_files_train_as_those_from_a_folder(stores):
    from_folder = decoded(stores / "folder", JITTER, load=LOAD, type="CustomDataset", with_label=False)
    from_shards = decoded(stores / "shards", JITTER, type="mapet_mm.TarShards")
    loader = SquareLoader.from_config(config(from_shards))
    store_images(loader)
    verify_images(loader)
    from_squares = dict(
        type="mapet_mm.StoredImages",
        store=str(stores / "shards_tokens"),
        size=SIZE,
        square=[LOAD_FROM_TAR, CROP],
        pipeline=[JITTER, PACK],
    )
    expected = losses(stores / "1", from_folder)
    assert len(expected) == 9
    assert losses(stores / "2", from_shards) == expected
    assert losses(stores / "3", from_squares) == expected


def test_a_flip_of_images_in_tar_files_beside_their_tokens_is_refused(stores):
    flip = dict(type="RandomFlip", prob=0.5)
    dataset = DATASETS.build(decoded(stores / "shards", flip, type="mapet_mm.TarShards"))
    with pytest.raises(TokenStoreError, match="moves pixels and not their tokens"):
        check_alignment(dataset, GRID)
