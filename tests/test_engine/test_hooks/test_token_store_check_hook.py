"""Stored tokens that do not fit are found before the first iteration."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.dataset import BaseDataset, Compose, ConcatDataset, RepeatDataset

from mapet_mm.datasets.skipped import replace_skipped, replace_skipped_as_in
from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid, RandomCropTokenGrid
from mapet_mm.engine.hooks import token_store_check_hook
from mapet_mm.engine.hooks.token_store_check_hook import (
    TokenStoreCheckHook,
    check_normalisation,
)
from mapet_mm.models.target_generators.precomputed_tokens import PrecomputedTokens
from mapet_mm.registry import HOOKS, MODELS
from mapet_mm.structures import Codebook, CodebookError, MissingTokensError, TokenStore, TokenStoreError
from mapet_mm.tokenizers import KCLIP
from mapet_mm.utils.errors import UserError

NAMES = [f"train/{i}.png" for i in range(6)]


class Images(BaseDataset):
    """Image paths and a pipeline that nothing calls."""

    def __init__(self, names, steps, **kwargs):
        self.names = names
        super().__init__(pipeline=[], lazy_init=False, **kwargs)
        self.pipeline = Compose(steps)

    def load_data_list(self):
        return [{"img_path": f"/copy/{name}"} for name in self.names]


@pytest.fixture
def store(tmp_path) -> TokenStore:
    store = TokenStore.create(tmp_path / "tokens", NAMES, (4, 4), 128, "ab" * 32, data_root="/copy")
    store.write(range(6), np.zeros((6, 4, 4), dtype=int))
    return store


def runner(train, val=None, patches=(4, 4), head=128, generator=128, iteration=0):
    model = torch.nn.Module()
    model.backbone = SimpleNamespace(patch_resolution=list(patches))
    model.head = SimpleNamespace(vocab_size=head)
    model.target_generator = PrecomputedTokens(generator)
    loader = SimpleNamespace(dataset=val)
    return SimpleNamespace(
        iter=iteration,
        model=model,
        train_dataloader=SimpleNamespace(dataset=train),
        val_loop=loader if val else None,
        val_dataloader=loader,
    )


def check(*args, codebook=None, **kwargs) -> TokenStoreCheckHook:
    hook = HOOKS.build(dict(type="mapet_mm.TokenStoreCheckHook", alignment=False, codebook=codebook))
    hook.before_train(runner(*args, **kwargs))
    return hook


def test_a_store_that_fits_passes(store, capture_log):
    check(Images(NAMES, [LoadTokenGrid(store.path)]), Images(NAMES[:2], [LoadTokenGrid(store.path)]))
    assert "has tokens for all 6 images" in capture_log()
    assert "has tokens for all 2 images" in capture_log()


@pytest.mark.parametrize(("iteration", "before"), [(5, "ab" * 32), (5, None), (0, "cd" * 32)])
def test_a_training_writes_its_tokenizer_down_and_goes_on(store, iteration, before):
    """It goes on with the same tokens; from an earlier version's checkpoint; or from its weights alone."""
    hook = TokenStoreCheckHook(alignment=False)
    hook.after_load_checkpoint(None, {"meta": {"tokenizer": before}} if before else {})
    hook.before_train(runner(Images(NAMES, [LoadTokenGrid(store.path)]), iteration=iteration))
    checkpoint = {"meta": {"iter": 5}}
    hook.before_save_checkpoint(None, checkpoint)
    assert checkpoint == {"meta": {"iter": 5, "tokenizer": "ab" * 32}}


def test_a_training_does_not_go_on_with_another_tokenizers_tokens(store):
    """A codebook that was fitted anew, at the same path, gives the same ids to other clusters."""
    hook = TokenStoreCheckHook(alignment=False)
    hook.after_load_checkpoint(None, {"meta": {"tokenizer": "cd" * 32}})
    message = r"began with the tokens of another tokenizer \(cdcdcdcdcdcd\) than .* has now \(abababababab\)"
    with pytest.raises(TokenStoreError, match=message):
        hook.before_train(runner(Images(NAMES, [LoadTokenGrid(store.path)]), iteration=5))


def test_a_crop_sets_the_grid_that_the_backbone_must_have(store):
    dataset = Images(NAMES, [LoadTokenGrid(store.path), RandomCropTokenGrid(24, 8)])
    check(dataset, patches=(3, 3))
    with pytest.raises(TokenStoreError, match="grids of 3 x 3 tokens, the backbone has 4 x 4"):
        check(dataset)


class ImagesInMemory(Images):
    """As CIFAR, whose images are in no files of their own."""

    def load_data_list(self):
        return [{"img": np.zeros((32, 32, 3), np.uint8)} for _ in self.names]


def of(names: list[str], kind: type = Images, **options):
    return lambda store: kind(names, [LoadTokenGrid(store.path, **options)])


REFUSED = [
    (of(NAMES), dict(patches=(14, 14)), "grids of 4 x 4 tokens, the backbone has 14 x 14"),
    (of(NAMES), dict(head=100), "`model.head.vocab_size` is 100: set it to 128"),
    (of(NAMES), dict(generator=100), "`model.target_generator.vocab_size` is 100"),
    (of([*NAMES, "train/new.png"]), {}, "1 of 7 images of Images, the first `/copy/train/new.png`"),
    (of(NAMES, ImagesInMemory), {}, "ImagesInMemory have no `img_path`"),
    (of(NAMES, data_root="/data"), {}, "is not under the data root `/data`"),
    (lambda store: Images(NAMES, []), {}, "has no LoadTokenGrid: add"),
    (of(NAMES), dict(val=of(["val/1.png"])), "`/copy/val/1.png`"),
]


@pytest.mark.parametrize(("train", "options", "noun"), REFUSED, ids=[row[2][:30] for row in REFUSED])
def test_tokens_that_do_not_fit_are_refused(store, train, options, noun):
    options = {name: value(store) if callable(value) else value for name, value in options.items()}
    with pytest.raises(UserError, match=noun):
        check(train(store), **options)


def test_a_store_that_is_not_there_or_not_complete_is_refused(tmp_path):
    with pytest.raises(TokenStoreError, match="none` does not exist"):
        check(Images(NAMES, [LoadTokenGrid(str(tmp_path / "none"))]))
    partial = TokenStore.create(tmp_path / "partial", NAMES, (4, 4), 128, "ab" * 32, "/copy")
    partial.write([0, 1, 3], np.zeros((3, 4, 4), dtype=int))
    with pytest.raises(MissingTokensError, match=r"3 of 6 images of Images, the first `/copy/train/2.png`"):
        check(Images(NAMES, [LoadTokenGrid(partial.path)]))


def test_tokens_that_were_damaged_are_found_before_the_first_step(store):
    (part,) = (store.path / "parts").iterdir()
    content = part.read_bytes()
    part.write_bytes(content[:9000] + b"\1" + content[9001:])
    with pytest.raises(TokenStoreError, match="has changed since it was written"):
        check(Images(NAMES, [LoadTokenGrid(store.path)]))


@pytest.fixture
def holed(tmp_path) -> TokenStore:
    """A store that skipped images 2, 3 and 5."""
    store = TokenStore.create(tmp_path / "holed", NAMES, (4, 4), 128, "ab" * 32, data_root="/copy")
    store.write([0, 1, 4], np.zeros((3, 4, 4), dtype=int), dict.fromkeys((2, 3, 5), "OSError: no image"))
    return store


def shown(dataset) -> list[int]:
    """Numbers of the images that a dataset shows."""
    return [int(dataset.get_data_info(i)["img_path"].split("/")[-1][:-4]) for i in range(len(dataset))]


@pytest.mark.parametrize("serialize", [True, False])
def test_the_image_behind_takes_the_place_of_one_that_the_store_skipped(holed, serialize, capture_log):
    dataset = Images(NAMES, [LoadTokenGrid(holed.path)], serialize_data=serialize)
    check(dataset)
    assert shown(dataset) == [0, 1, 4, 4, 4, 0]
    (line,) = (line for line in capture_log().splitlines() if "skipped" in line)
    assert "skipped 3 of 6 images of Images" in line
    assert "the first is `/copy/train/2.png`" in line
    check(dataset)
    assert "has tokens for all 6 images" in capture_log()


def test_skipped_images_are_left_out_inside_wrappers_whose_lengths_stay(holed, store):
    one, two = Images(NAMES, [LoadTokenGrid(holed.path)]), Images(NAMES, [LoadTokenGrid(store.path)])
    both = ConcatDataset([one, two])
    repeated = RepeatDataset(Images(NAMES[3:], [LoadTokenGrid(holed.path)]), times=2)
    check(both, repeated)
    assert shown(both) == [0, 1, 4, 4, 4, 0, *range(6)]
    assert shown(repeated) == [4, 4, 4] * 2


def test_a_set_without_tokens_leaves_out_what_the_training_set_does(holed):
    probed = RepeatDataset(Images(["train/2.png", "train/1.png", "val/2.png"], []), times=2)
    replace_skipped_as_in(ConcatDataset([Images(NAMES, [LoadTokenGrid(holed.path)])]), probed)
    assert shown(probed) == [1, 1, 2] * 2
    replace_skipped_as_in(Images(NAMES, []), probed)
    assert shown(probed) == [1, 1, 2] * 2


def test_an_image_that_is_missing_stays_an_error_beside_skipped_ones(holed):
    with pytest.raises(MissingTokensError, match=r"no tokens for 1 of 7 images of Images, .*train/new.png"):
        check(Images([*NAMES, "train/new.png"], [LoadTokenGrid(holed.path)]))
    with pytest.raises(MissingTokensError, match="skipped all images of Images"):
        check(Images(NAMES[2:4], [LoadTokenGrid(holed.path)]))


def test_a_million_images_are_looked_up_in_a_few_calls(tmp_path, monkeypatch):
    names = [f"train/{number // 1000:04d}/{number:07d}.png" for number in range(3000)]
    store = TokenStore.create(tmp_path / "many", names, (1, 1), 2, "ab" * 32, "/copy")
    store.write(range(3000), np.zeros((3000, 1, 1), int), {})
    calls = []
    for owner, name in ((TokenStore, "row"), (LoadTokenGrid, "name_of")):
        monkeypatch.setattr(owner, name, lambda *_, name=name: calls.append(name))
    images, load = Images(names, []), LoadTokenGrid(store.path)
    tracemalloc.start()
    replace_skipped(images, load)
    (_, peak), _ = tracemalloc.get_traced_memory(), tracemalloc.stop()
    assert not calls
    assert peak < 100 * len(names)  # bytes: no text of each name is kept


def test_a_run_that_only_tests_is_checked(store):
    loader = SimpleNamespace(dataset=Images(["val/1.png"], [LoadTokenGrid(store.path)]))
    with pytest.raises(MissingTokensError):
        TokenStoreCheckHook(alignment=False).before_test(
            SimpleNamespace(model=torch.nn.Module(), test_dataloader=loader)
        )


def test_stores_of_two_tokenizers_are_refused(tmp_path, store):
    other = TokenStore.create(tmp_path / "other", NAMES, (4, 4), 128, "cd" * 32, "/copy")
    other.write(range(6), np.zeros((6, 4, 4), dtype=int))
    train = Images(NAMES, [LoadTokenGrid(store.path)])
    with pytest.raises(TokenStoreError, match="other` was made by tokenizer cdcdcdcdcdcd"):
        check(train, Images(NAMES, [LoadTokenGrid(other.path)]))
    Codebook(np.eye(3)).save(tmp_path / "codebook.safetensors")
    with pytest.raises(TokenStoreError, match="was made by tokenizer abababababab"):
        check(train, codebook=str(tmp_path / "codebook.safetensors"))


def test_a_codebooks_tokens_of_one_precision_fit_it_and_of_two_do_not_fit_each_other(tmp_path):
    codebook = Codebook(np.eye(3))
    path = str(tmp_path / "codebook.safetensors")
    codebook.save(path)
    images = {}
    for precision in ("float32", "float16"):
        digest = codebook.digest_at(precision)
        store = TokenStore.create(tmp_path / precision, NAMES, (4, 4), 128, digest, "/copy")
        store.write(range(6), np.zeros((6, 4, 4), dtype=int))
        images[precision] = Images(NAMES, [LoadTokenGrid(store.path)])
        assert check(images[precision], codebook=path).tokenizer == digest
    with pytest.raises(TokenStoreError, match="first token store"):
        check(images["float32"], images["float16"], codebook=path)


# A tokenizer in the model.
MEAN, STD = [122.7709383, 116.7460125, 104.09373615], [68.5005327, 66.6321579, 70.32316305]
RECORDED = dict(type="SelfSupDataPreprocessor", mean=MEAN, std=STD, to_rgb=True)
RIGHT = dict(preprocessing=dict(data_preprocessor=RECORDED))


def online(metadata: dict | None, **options) -> torch.nn.Module:
    """A model with a tokenizer, whose codebook records this metadata."""
    model = torch.nn.Module()
    clip = dict(layers=[1, 1, 1, 1], width=8, image_size=64)
    model.target_generator = KCLIP(clip, dict(type="random", seed=0), stride=16)
    dim = model.target_generator.dim
    model.target_generator.codebook = None if metadata is None else Codebook(torch.eye(dim), metadata)
    views = dict(mean=[0.0] * 3, std=[255.0] * 3, second_mean=MEAN, second_std=STD, to_rgb=True)
    model.data_preprocessor = MODELS.build(dict(type="mapet_mm.TwoViewDataPreprocessor") | views | options)
    return model


@pytest.mark.parametrize(
    "options",
    [dict(second_mean=MEAN[::-1]), dict(second_std=[60.0] * 3), dict(to_rgb=False)],
    ids=lambda options: next(iter(options)),
)
def test_another_normalisation_than_the_codebooks_is_refused(options):
    with pytest.raises(CodebookError, match=r"fitted on images normalised with mean.* set `second_mean`"):
        check_normalisation(online(RIGHT, **options))


@pytest.mark.parametrize(
    ("metadata", "options"),
    [(RIGHT, {}), (dict(preprocessing=dict(pipeline=[])), dict(second_mean=[0.0] * 3)), (None, {})],
)
def test_the_codebooks_normalisation_passes_and_any_where_it_records_none(metadata, options):
    model = online(metadata, **options)
    check_normalisation(model)
    assert not model.data_preprocessor.pixel_range.is_known  # these images were made up
    check_normalisation(torch.nn.Module())


def test_views_of_an_online_tokenizer_are_compared(monkeypatch):
    looked = []
    monkeypatch.setattr(token_store_check_hook, "check_alignment", lambda *args: looked.append(args))
    model, dataset = online(RIGHT), Images(NAMES, [])
    loader = SimpleNamespace(dataset=dataset)
    run = SimpleNamespace(iter=0, model=model, train_dataloader=loader, val_loop=None)
    TokenStoreCheckHook().before_train(run)
    assert looked == [(dataset, model.target_generator.grid)]
