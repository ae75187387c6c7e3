"""From made images to a codebook and a token store, with interruptions, resumption and bad images."""

import os
import runpy
import shutil
import sys
from pathlib import Path

import faiss
import numpy as np
import open_clip
import pytest
import torch
from mmengine.config import Config
from PIL import Image
from sklearn.datasets import load_sample_image

from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import Codebook, CodebookError, TokenStore, TokenStoreError
from mapet_mm.tokenizers.codebook.sampling import sample_positions
from mapet_mm.tokenizers.from_config import features_folder, run_extract_tokens, run_fit_codebook
from mapet_mm.tokenizers.images import NamedImages, UnreadableImagesError

ROOT = Path(__file__).parents[2]
SIZE = 64


@pytest.fixture(autouse=True)
def _one_thread():
    """The images are too small to share."""
    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    faiss.omp_set_num_threads(before[1])


@pytest.fixture
def cfg(tmp_path) -> Config:
    """A tokenizer config over 12 training and 5 validation images."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        lines = []
        for index in range(count):
            path = tmp_path / "data" / split / str(index % 3) / f"{index:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(path)
            lines.append(f"{path.relative_to(tmp_path / 'data' / split)} {index % 3}\n")
        (tmp_path / "data" / f"{split}.txt").write_text("".join(lines))
    pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="ResizeEdge", scale=SIZE, edge="short", backend="pillow", interpolation="bicubic"),
        dict(type="CenterCrop", crop_size=SIZE),
        dict(type="PackInputs"),
    ]
    train, val = (
        dict(
            type="CustomDataset",
            data_root=str(tmp_path / "data"),
            data_prefix=split,
            ann_file=f"{split}.txt",
            pipeline=pipeline,
        )
        for split in ("train", "val")
    )
    return Config(
        dict(
            default_scope="mmpretrain",
            tokenizer=dict(
                type="mapet_mm.KCLIP",
                clip_model=dict(layers=[1, 1, 1, 1], width=8, image_size=SIZE),
                pretrained=dict(type="random", seed=0),
                codebook=str(tmp_path / "out" / "codebook.safetensors"),
            ),
            data_preprocessor=dict(
                type="SelfSupDataPreprocessor", mean=[120.0] * 3, std=[70.0] * 3, to_rgb=True
            ),
            dataset=[train, val],
            dataloader=dict(num_workers=0, group_size=4),
            codebook=dict(dataset=train, positions_per_image=2, k=6, niter=5, nredo=2, seed=0),
            token_store=str(tmp_path / "out" / "tokens"),
        )
    )


def by_hand(cfg: Config, path: Path) -> np.ndarray:
    """The image's tokens without loader, batches or store."""
    image = Image.open(path).convert("RGB").resize((int(SIZE * 50 / 40), SIZE), Image.Resampling.BICUBIC)
    left = round((image.width - SIZE) / 2)
    pixels = np.asarray(image, dtype=np.float32)[:, left : left + SIZE]
    kclip = MODELS.build(cfg.tokenizer)
    return kclip(torch.from_numpy((pixels - 120) / 70).permute(2, 0, 1)[None]).reshape(kclip.grid).numpy()


def test_every_image_of_every_split_gets_its_own_tokens(cfg, tmp_path):
    path, codebook = run_fit_codebook(cfg)
    store, extraction = run_extract_tokens(cfg)
    assert extraction.images == len(store) == 17
    assert store.missing().size == 0
    assert store.tokenizer == Codebook.load(path).digest == codebook.digest
    assert (store.grid, store.vocab_size, store.data_root) == ((2, 2), 6, str(tmp_path / "data"))
    for name in ("train/0/000.png", "train/2/011.png", "val/1/004.png"):
        assert (store[name] == by_hand(cfg, tmp_path / "data" / name)).all()
    assert len(np.unique([store[name] for name in store.names])) > 1


def test_the_codebook_records_what_it_was_made_from(cfg):
    _, codebook = run_fit_codebook(cfg)
    recorded = codebook.metadata
    assert recorded["encoder"] == "ModifiedResNet-1-1-1-1-width8"
    assert recorded["weights"] == "random, seed 0"
    assert (recorded["images"], recorded["rows"], recorded["k"], recorded["dim"]) == (12, 24, 6, 256)
    assert recorded["preprocessing"]["pipeline"][1]["scale"] == SIZE
    assert recorded["preprocessing"]["data_preprocessor"]["std"] == [70.0] * 3
    assert len(recorded["encoder_digest"]) == 64


def test_the_sample_depends_on_neither_workers_nor_order(cfg, tmp_path):
    _, codebook = run_fit_codebook(cfg)
    cfg.dataloader = dict(num_workers=1, group_size=4)
    lines = (tmp_path / "data" / "train.txt").read_text().splitlines()
    (tmp_path / "data" / "train.txt").write_text("\n".join(reversed(lines)))
    _, again = run_fit_codebook(cfg, out=str(tmp_path / "other" / "codebook.safetensors"))
    assert again.digest == codebook.digest


def test_sampled_positions_are_distinct_seeded_and_spread_over_the_grid():
    names = [f"{index}.png" for index in range(400)]
    drawn = np.array([sample_positions(name, 16, 4, seed=0) for name in names])
    assert all(len(set(row)) == 4 for row in drawn.tolist())
    assert (drawn == [sample_positions(name, 16, 4, seed=0) for name in names]).all()
    assert (drawn != [sample_positions(name, 16, 4, seed=1) for name in names]).any()
    counts = np.bincount(drawn.ravel(), minlength=16)
    assert counts.min() > 60  # 100 expected everywhere
    assert counts.max() < 140


def test_a_killed_sampling_goes_on_with_the_shards_that_are_left(cfg, monkeypatch):
    monkeypatch.setattr("mapet_mm.tokenizers.codebook.feature_shards.IMAGES_PER_SHARD", 4)
    encoded = []
    features = MODELS.get("KCLIP").features

    def counted(self, images):
        if len(encoded) == 2:
            raise KeyboardInterrupt
        encoded.append(len(images))
        return features(self, images)

    with monkeypatch.context() as patch:
        patch.setattr(MODELS.get("KCLIP"), "features", counted)
        with pytest.raises(KeyboardInterrupt):
            run_fit_codebook(cfg)
    kept = list(features_folder(Path(cfg.tokenizer.codebook)).rglob("features-*.safetensors"))
    assert kept
    before = {file: file.stat().st_mtime_ns for file in kept}
    _, codebook = run_fit_codebook(cfg)
    assert {file: file.stat().st_mtime_ns for file in kept} == before
    _, undisturbed = run_fit_codebook(cfg, out=f"{cfg.tokenizer.codebook}.other")
    assert codebook.digest == undisturbed.digest


def test_a_truncated_shard_is_named(cfg):
    run_fit_codebook(cfg)
    (shard,) = features_folder(Path(cfg.tokenizer.codebook)).rglob("features-*.safetensors")
    os.truncate(shard, 100)
    with pytest.raises(
        ValueError, match=rf"{shard.name}` is damaged .*: remove it and run tools/fit_codebook"
    ):
        run_fit_codebook(cfg, overwrite=True)
    shard.unlink()
    run_fit_codebook(cfg, overwrite=True)


def test_features_of_other_preprocessing_are_not_used_again(cfg):
    """With another mean the same images give other features, and the codebook says which."""
    _, codebook = run_fit_codebook(cfg)
    cfg.data_preprocessor.mean = [90.0] * 3
    _, other = run_fit_codebook(cfg, overwrite=True)
    assert other.digest != codebook.digest
    assert other.metadata["preprocessing"]["data_preprocessor"]["mean"] == [90.0] * 3
    cfg.data_preprocessor.mean = [120.0] * 3
    assert run_fit_codebook(cfg, overwrite=True)[1].digest == codebook.digest


def test_an_existing_codebook_is_not_overwritten_unasked(cfg):
    path, codebook = run_fit_codebook(cfg)
    cfg.codebook.k = 5
    with pytest.raises(CodebookError, match=r"codebook\.safetensors` exists: add --overwrite"):
        run_fit_codebook(cfg)
    assert Codebook.load(path).digest == codebook.digest
    assert run_fit_codebook(cfg, overwrite=True)[1].k == Codebook.load(path).k == 5


def test_too_few_rows_and_too_many_positions_are_refused(cfg):
    cfg.codebook.k = 25
    with pytest.raises(CodebookError, match="24 rows, k = 25"):
        run_fit_codebook(cfg)
    assert not features_folder(Path(cfg.tokenizer.codebook)).exists()  # nothing was sampled for nothing
    cfg.codebook.positions_per_image = 5
    with pytest.raises(ValueError, match=r"positions_per_image is 5, an image has 4 grid positions"):
        run_fit_codebook(cfg)


def test_an_interrupted_extraction_reads_only_what_is_left(cfg, monkeypatch):
    run_fit_codebook(cfg)
    write, seen = TokenStore.write, []

    def stop_at_third(self, rows, grids, skipped):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(list(rows))
        write(self, rows, grids, skipped)

    with monkeypatch.context() as patch:
        patch.setattr(TokenStore, "write", stop_at_third)
        with pytest.raises(KeyboardInterrupt):
            run_extract_tokens(cfg)
    partial = TokenStore.open(cfg.token_store)
    assert partial.missing().tolist() == sorted(set(range(17)) - {row for rows in seen for row in rows})
    kept = {name: partial[name] for row, name in enumerate(partial.names) if partial.written()[row]}
    assert len(kept) == 8

    read = []
    getitem = NamedImages.__getitem__
    monkeypatch.setattr(
        NamedImages, "__getitem__", lambda self, i: (read.append(self.name(i)), getitem(self, i))[1]
    )
    store, extraction = run_extract_tokens(cfg)
    assert extraction.images == len(read) == 9
    assert not set(read) & set(kept)
    assert store.missing().size == 0
    assert all((store[name] == grid).all() for name, grid in kept.items())
    assert run_extract_tokens(cfg)[1].images == 0


def test_a_half_filled_store_is_not_completed_with_other_preprocessing(cfg, monkeypatch):
    run_fit_codebook(cfg)
    whole, _ = run_extract_tokens(cfg)
    names = list(whole.names)
    cfg.token_store += "_half"
    preprocessing, root = whole.preprocessing, whole.data_root
    half = TokenStore.create(cfg.token_store, names, (2, 2), 6, whole.tokenizer, root, preprocessing)
    half.write(range(8), np.array([whole[name] for name in names[:8]]))
    for dataset in cfg.dataset:
        dataset.pipeline[1].interpolation = "bilinear"
    message = r"preprocessed in another way \(pipeline\.1\.interpolation: bicubic, now bilinear\): choose"
    with pytest.raises(TokenStoreError, match=message):
        run_extract_tokens(cfg)
    cfg.dataset[0].pipeline[1].interpolation = "bicubic"
    with pytest.raises(ValueError, match="have different pipelines: give them the same"):
        run_extract_tokens(cfg)
    cfg.dataset[1].pipeline[1].interpolation = "bicubic"
    cfg.data_preprocessor.std = [60.0] * 3
    with pytest.raises(TokenStoreError, match=r"\(data_preprocessor\.std\.0: 70\.0, now 60\.0\)"):
        run_extract_tokens(cfg)
    cfg.data_preprocessor.std = [70.0] * 3
    assert run_extract_tokens(cfg)[1].images == 9


def test_the_same_names_of_another_folder_do_not_complete_a_store(cfg, tmp_path):
    run_fit_codebook(cfg)
    whole, _ = run_extract_tokens(cfg)
    names = list(whole.names)
    cfg.token_store += "_half"
    root, preprocessing = str(tmp_path / "data"), whole.preprocessing
    TokenStore.create(cfg.token_store, names, (2, 2), 6, whole.tokenizer, root, preprocessing)
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    os.symlink(tmp_path / "data", tmp_path / "link")
    for folder in ("other", "link"):
        for dataset in cfg.dataset:
            dataset.data_root = str(tmp_path / folder)
        if folder == "other":
            with pytest.raises(
                TokenStoreError, match=r"is of images in `.*/data`, the config's are in `.*/oth"
            ):
                run_extract_tokens(cfg)
    assert run_extract_tokens(cfg)[1].images == 17


def test_a_store_of_another_codebook_is_not_continued(cfg):
    run_fit_codebook(cfg)
    store, _ = run_extract_tokens(cfg)
    before = {file: file.read_bytes() for file in store.path.rglob("*.safetensors")}
    cfg.codebook.k = 5
    run_fit_codebook(cfg, overwrite=True)
    with pytest.raises(
        TokenStoreError, match=r"was made by tokenizer .*, but the config's tokenizer is .*: re-extract"
    ):
        run_extract_tokens(cfg)
    assert {file: file.read_bytes() for file in store.path.rglob("*.safetensors")} == before


def test_new_images_extend_a_store(cfg, tmp_path):
    run_fit_codebook(cfg)
    store, _ = run_extract_tokens(cfg)
    old = {name: store[name] for name in store.names}
    Image.new("RGB", (40, 40)).save(tmp_path / "data" / "val" / "0" / "new.png")
    with open(tmp_path / "data" / "val.txt", "a") as lines:
        lines.write("0/new.png 0\n")
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, len(store), store.sealed) == (1, 18, True)
    assert list(store.names) == [*sorted(old), "val/0/new.png"]
    assert all((store[name] == grid).all() for name, grid in old.items())
    assert (store["val/0/new.png"] == by_hand(cfg, tmp_path / "data" / "val/0/new.png")).all()


def test_new_images_of_another_folder_are_refused(cfg, tmp_path):
    run_fit_codebook(cfg)
    run_extract_tokens(cfg)
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    os.rename(tmp_path / "other" / "train" / "0" / "000.png", tmp_path / "other" / "train" / "0" / "a.png")
    lines = (tmp_path / "other" / "train.txt").read_text().replace("0/000.png", "0/a.png")
    (tmp_path / "other" / "train.txt").write_text(lines)
    for dataset in cfg.dataset:
        dataset.data_root = str(tmp_path / "other")
    with pytest.raises(TokenStoreError, match=r"is of images in `.*/data`, the config's are in `.*/other`"):
        run_extract_tokens(cfg)


@pytest.mark.parametrize(
    ("damage", "num_workers"), [("garbage", 0), ("truncated", 0), ("gone", 0), ("garbage", 1)]
)
def test_an_undecodable_image_is_named_after_all_others_are_written(cfg, tmp_path, damage, num_workers):
    run_fit_codebook(cfg)
    cfg.dataloader.num_workers = num_workers
    broken = tmp_path / "data" / "train" / "1" / "004.png"
    whole = broken.read_bytes()
    if damage == "gone":
        broken.unlink()
    else:
        broken.write_bytes(b"no image" if damage == "garbage" else whole[:30])
    with pytest.raises(UnreadableImagesError) as error:
        run_extract_tokens(cfg)
    assert str(broken) in str(error.value)
    assert "\n" not in str(error.value)
    store = TokenStore.open(cfg.token_store)
    assert [store.names[row] for row in store.missing()] == ["train/1/004.png"]
    broken.write_bytes(whole)
    assert run_extract_tokens(cfg)[1].images == 1
    assert (store["train/1/004.png"] == by_hand(cfg, broken)).all()


def test_an_undecodable_image_is_left_out_if_asked_and_costs_nobody_else(cfg, tmp_path):
    """In the sample and in the store, which is complete then; repaired, it is tried again if asked."""
    broken = tmp_path / "data" / "train" / "1" / "004.png"
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    cfg.on_error = "skip"
    _, codebook = run_fit_codebook(cfg)
    assert (codebook.metadata["images"], codebook.metadata["rows"]) == (11, 22)
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, extraction.skipped, store.sealed) == (16, 1, True)
    assert list(store.skipped) == ["train/1/004.png"]
    assert "UnidentifiedImage" in store.skipped["train/1/004.png"] or store.skipped["train/1/004.png"]
    assert "left 1 out that could not be decoded" in str(extraction)
    broken.write_bytes(whole)
    assert run_extract_tokens(cfg)[1].images == 0
    store, extraction = run_extract_tokens(cfg, retry_skipped=True)
    assert (extraction.images, extraction.skipped, store.sealed) == (1, 0, True)
    assert (store["train/1/004.png"] == by_hand(cfg, broken)).all()


def test_an_image_that_is_removed_after_it_stopped_the_sampling_costs_nothing_else(
    cfg, tmp_path, monkeypatch
):
    broken = tmp_path / "data" / "train" / "1" / "004.png"
    broken.write_bytes(b"no image")
    with pytest.raises(
        UnreadableImagesError, match=r"remove it, or leave such images out with --on-error skip"
    ):
        run_fit_codebook(cfg)
    lines = (tmp_path / "data" / "train.txt").read_text().replace("1/004.png 1\n", "")
    (tmp_path / "data" / "train.txt").write_text(lines)
    monkeypatch.setattr(MODELS.get("KCLIP"), "features", None)  # nothing is encoded again
    assert run_fit_codebook(cfg)[1].metadata["images"] == 11


@pytest.mark.parametrize("tool", [run_fit_codebook, run_extract_tokens])
def test_a_mistyped_policy_for_undecodable_images_is_refused(cfg, tool):
    """Before: the sample went on without them, and nobody said so."""
    if tool is run_extract_tokens:
        run_fit_codebook(cfg)
    cfg.on_error = "Skip"
    with pytest.raises(ValueError, match=r"on_error is 'Skip': one of raise, skip"):
        tool(cfg)


def test_fitting_names_the_undecodable_images_too(cfg, tmp_path):
    for name in ("0/000.png", "2/005.png"):
        (tmp_path / "data" / "train" / name).write_bytes(b"no image")
    with pytest.raises(
        UnreadableImagesError, match=r"000\.png` could not be decoded .* and 1 more \(`.*005\.png`\)"
    ):
        run_fit_codebook(cfg)


def test_a_mistake_in_the_pipeline_is_not_blamed_on_the_images(cfg):
    run_fit_codebook(cfg)
    for dataset in cfg.dataset:
        dataset.pipeline = [
            step for step in dataset.pipeline if step["type"] not in ("ResizeEdge", "CenterCrop")
        ]
    with pytest.raises(ValueError, match="pipeline gives images of 40 x 50 px, the tokenizer takes 64 x 64"):
        run_extract_tokens(cfg)


def test_an_image_in_two_splits_is_tokenised_once(cfg):
    run_fit_codebook(cfg)
    cfg.dataset = [cfg.dataset[0], cfg.dataset[0]]
    assert run_extract_tokens(cfg)[1].images == 12


def test_data_roots_that_differ_are_refused(cfg, tmp_path):
    cfg.dataset[1].data_root = str(tmp_path / "data" / "val")
    cfg.dataset[1].data_prefix = ""
    cfg.dataset[1].ann_file = "../val.txt"
    run_fit_codebook(cfg)
    with pytest.raises(ValueError, match="set `data_root` in the config"):
        run_extract_tokens(cfg)
    cfg.data_root = str(tmp_path / "data")
    assert run_extract_tokens(cfg)[1].images == 17


def test_a_config_without_tokenizer_is_refused():
    with pytest.raises(
        ValueError, match="is no tokenizer config, it lacks tokenizer, data_preprocessor, dataset"
    ):
        run_extract_tokens(Config(dict(codebook={}, token_store="x")))


def test_the_papers_preprocessing_is_clips_own_on_a_photograph(tmp_path):
    Image.fromarray(load_sample_image("china.jpg")).save(tmp_path / "a.png")
    cfg = Config.fromfile(ROOT / "configs" / "tokenizers" / "kclip_rn50x64-448px_k8192_in1k.py")
    images = NamedImages(
        dict(type="CustomDataset", data_root=str(tmp_path), with_label=False, pipeline=cfg.pipeline), None
    )
    preprocessor = MODELS.build(cfg.data_preprocessor)
    mine = preprocessor(dict(inputs=images[0][1][None], data_samples=None))["inputs"][0]
    clips = open_clip.image_transform(448, is_train=False)(Image.open(tmp_path / "a.png"))
    assert mine.shape == (3, 448, 448)
    # Less than one of 255 grey levels apart: 1 / 255 / 0.26 = 0.015.
    assert (mine - clips).abs().max() < 1e-4


def run_tool(monkeypatch, tool: str, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", [tool, *args])
    runpy.run_path(str(ROOT / "tools" / tool), run_name="__main__")


def test_the_command_lines_say_what_was_written_and_what_comes_next(cfg, tmp_path, monkeypatch, capsys):
    config = str(tmp_path / "tokenizer.py")
    cfg.dump(config)
    run_tool(monkeypatch, "fit_codebook.py", config)
    out, err = capsys.readouterr()
    assert f"wrote {cfg.tokenizer.codebook}: 6 centroids of 256 channels" in out
    assert f"next: python tools/extract_tokens.py {config}" in out
    assert "12/12" in err
    run_tool(monkeypatch, "extract_tokens.py", config, "--cfg-options", "dataloader.num_workers=1")
    out, err = capsys.readouterr()
    assert f"wrote {cfg.token_store}: 2 x 2 tokens of 17 images, 6 ids" in out
    assert "tokenised 17 images in" in out
    assert "next: python tools/train.py" in out
    assert "17/17" in err
    with pytest.raises(SystemExit) as stop:
        run_tool(monkeypatch, "fit_codebook.py", config)
    assert stop.value.code.startswith(f"error: codebook `{cfg.tokenizer.codebook}` exists: add --overwrite")


@pytest.mark.parametrize(
    "config", [*sorted(ROOT.glob("configs/tokenizers/*.py")), ROOT / "configs/micro/kclip.py"]
)
def test_every_tokenizer_config_names_a_next_config_that_reads_its_store(config):
    cfg = Config.fromfile(config)
    following = Config.fromfile(ROOT / cfg.next_config)
    stores = {step.store for step in following.train_dataloader.dataset.pipeline if "store" in step}
    assert stores == {cfg.token_store}
