"""Stored tokens that do not fit are found before the first iteration."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmcv.transforms import RandomFlip
from mmengine.dataset import BaseDataset, Compose, ConcatDataset, RepeatDataset
from mmengine.runner import Runner
from mmpretrain.engine import SwitchRecipeHook

from mapet_mm.datasets.samplers import SeededDataset
from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid, RandomCropTokenGrid
from mapet_mm.engine.hooks import token_store_check_hook as token_check
from mapet_mm.engine.hooks.token_store_check_hook import (
    TokenStoreCheckHook,
    leaf_datasets,
    leave_out_as_in,
    pipeline_transforms,
)
from mapet_mm.models.target_generators.precomputed_tokens import PrecomputedTokens
from mapet_mm.registry import HOOKS
from mapet_mm.structures import MissingTokensError, TokenStore, TokenStoreError
from mapet_mm.structures.codebook import Codebook
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


def with_image(results):
    """A step that loads an image of 4 x 4 patches of 8 px."""
    return {**results, "img": np.zeros((32, 32, 3), np.uint8)}


@pytest.fixture
def store(tmp_path) -> TokenStore:
    store = TokenStore.create(tmp_path / "tokens", NAMES, (4, 4), 128, "ab" * 32, data_root="/copy")
    store.write(range(6), np.zeros((6, 4, 4), dtype=int))
    return store


def runner(train, val=None, patches=(4, 4), head=128, generator=128, iteration=0, hooks=()):
    model = torch.nn.Module()
    model.backbone = SimpleNamespace(patch_resolution=list(patches))
    model.head = SimpleNamespace(vocab_size=head)
    model.target_generator = PrecomputedTokens(generator)
    loader = SimpleNamespace(dataset=val)
    return SimpleNamespace(
        iter=iteration,
        model=model,
        hooks=hooks,
        train_dataloader=SimpleNamespace(dataset=train),
        val_loop=loader if val else None,
        val_dataloader=loader,
    )


def check(*args, **kwargs) -> TokenStoreCheckHook:
    hook = HOOKS.build(dict(type="mapet_mm.TokenStoreCheckHook"))
    hook.before_train(runner(*args, **kwargs))
    return hook


def test_a_store_that_fits_passes(store):
    assert check(
        Images(NAMES, [LoadTokenGrid(store.path)]), Images(NAMES[:2], [LoadTokenGrid(store.path)])
    ).checked


@pytest.mark.parametrize(("iteration", "before"), [(5, "ab" * 32), (5, None), (0, "cd" * 32)])
def test_a_training_writes_its_tokenizer_down_and_goes_on(store, iteration, before):
    """It goes on with the same tokens; from an earlier version's checkpoint; or from its weights alone."""
    hook = HOOKS.build(dict(type="mapet_mm.TokenStoreCheckHook"))
    hook.after_load_checkpoint(None, {"meta": {"tokenizer": before}} if before else {})
    hook.before_train(runner(Images(NAMES, [LoadTokenGrid(store.path)]), iteration=iteration))
    checkpoint = {"meta": {"iter": 5}}
    hook.before_save_checkpoint(None, checkpoint)
    assert checkpoint == {"meta": {"iter": 5, "tokenizer": "ab" * 32}}


def test_a_training_does_not_go_on_with_another_tokenizers_tokens(store):
    """A codebook that was fitted anew, at the same path, gives the same ids to other clusters."""
    hook = HOOKS.build(dict(type="mapet_mm.TokenStoreCheckHook"))
    hook.after_load_checkpoint(None, {"meta": {"tokenizer": "cd" * 32}})
    message = r"began with the tokens of another tokenizer \(cdcdcdcdcdcd\) than .* has now \(abababababab\)"
    with pytest.raises(TokenStoreError, match=message):
        hook.before_train(runner(Images(NAMES, [LoadTokenGrid(store.path)]), iteration=5))


def test_another_grid_than_the_backbones_is_refused(store):
    with pytest.raises(TokenStoreError, match="grids of 4 x 4 tokens, the backbone has 14 x 14 patches"):
        check(Images(NAMES, [LoadTokenGrid(store.path)]), patches=(14, 14))


def test_a_crop_sets_the_grid_that_the_backbone_must_have(store):
    dataset = Images(NAMES, [with_image, LoadTokenGrid(store.path), RandomCropTokenGrid(24, 8)])
    assert check(dataset, patches=(3, 3)).checked
    with pytest.raises(TokenStoreError, match="grids of 3 x 3 tokens, the backbone has 4 x 4"):
        check(dataset)


@pytest.mark.parametrize("part", ["head", "generator"])
def test_ids_past_the_vocabulary_are_refused_naming_the_option(store, part):
    option = {"head": "head", "generator": "target_generator"}[part]
    with pytest.raises(
        TokenStoreError, match=rf"128 token ids, `model.{option}.vocab_size` is 100: set it to 128"
    ):
        check(Images(NAMES, [LoadTokenGrid(store.path)]), **{part: 100})


def test_images_without_tokens_are_counted_and_the_first_is_named(tmp_path, store):
    partial = TokenStore.create(tmp_path / "partial", NAMES, (4, 4), 128, "ab" * 32, "/copy")
    partial.write([0, 1, 3], np.zeros((3, 4, 4), dtype=int))
    with pytest.raises(
        MissingTokensError, match=r"no tokens for 3 of 6 images of Images, the first `/copy/train/2.png`"
    ):
        check(Images(NAMES, [LoadTokenGrid(partial.path)]))
    with pytest.raises(MissingTokensError, match=r"1 of 7 images of Images, the first `/copy/train/new.png`"):
        check(Images([*NAMES, "train/new.png"], [LoadTokenGrid(store.path)]))


class ImagesInMemory(Images):
    """As CIFAR, whose images are in no files of their own."""

    def load_data_list(self):
        return [{"img": np.zeros((32, 32, 3), np.uint8)} for _ in self.names]


def test_images_in_memory_are_refused_with_what_to_do(store):
    with pytest.raises(
        UserError, match=r"images of ImagesInMemory have no `img_path`: .* into a folder first"
    ):
        check(ImagesInMemory(NAMES, [LoadTokenGrid(store.path)]))


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
    leave_out_as_in(ConcatDataset([Images(NAMES, [LoadTokenGrid(holed.path)])]), probed)
    assert shown(probed) == [1, 1, 2] * 2
    leave_out_as_in(Images(NAMES, []), probed)
    assert shown(probed) == [1, 1, 2] * 2


def test_a_set_that_shows_none_of_the_skipped_images_stays_whole(holed):
    train = Images(NAMES, [LoadTokenGrid(holed.path)])
    probed = Images([name for name in NAMES if name not in holed.skipped], [])
    leave_out_as_in(train, probed)
    assert shown(probed) == [0, 1, 4]


def test_processes_leave_out_what_each_of_them_has_found(holed, monkeypatch):
    """Each looks at its share; the dataset is the same in all."""
    shares = []
    for rank in range(2):
        monkeypatch.setattr(token_check, "get_dist_info", lambda rank=rank: (rank, 2))
        monkeypatch.setattr(token_check, "all_gather_object", lambda mine: shares.append(mine) or [mine])
        check(Images(NAMES, [LoadTokenGrid(holed.path)]))
    assert shares == [([], [2]), ([], [3, 5])]
    monkeypatch.setattr(token_check, "all_gather_object", lambda mine: shares)
    dataset = Images(NAMES, [LoadTokenGrid(holed.path)])
    check(dataset)
    assert shown(dataset) == [0, 1, 4, 4, 4, 0]


def test_an_image_that_is_missing_stays_an_error_beside_skipped_ones(holed):
    with pytest.raises(MissingTokensError, match=r"no tokens for 1 of 7 images of Images, .*train/new.png"):
        check(Images([*NAMES, "train/new.png"], [LoadTokenGrid(holed.path)]))
    with pytest.raises(MissingTokensError, match="skipped all images of Images"):
        check(Images(NAMES[2:4], [LoadTokenGrid(holed.path)]))


def test_the_validation_set_is_checked_before_training_too(store):
    with pytest.raises(MissingTokensError, match=r"val/1\.png"):
        check(Images(NAMES, [LoadTokenGrid(store.path)]), Images(["val/1.png"], [LoadTokenGrid(store.path)]))


def test_a_run_that_only_validates_is_checked_once(store):
    hook = TokenStoreCheckHook()
    with pytest.raises(MissingTokensError):
        hook.before_val(runner(None, Images(["val/1.png"], [LoadTokenGrid(store.path)])))
    hook.before_val(runner(None, Images(NAMES, [LoadTokenGrid(store.path)])))
    assert hook.checked


# --- pipelines that change during training ---------------------------------------------------------------


class WithNoise(Images):
    """Images without files, of 10 px a patch."""

    def load_data_list(self):
        return [{**info, "img": np.zeros((40, 40, 3), np.uint8)} for info in super().load_data_list()]


def flipped(store, *steps) -> list:
    """A pipeline that flips half of the images and not their tokens."""
    return [LoadTokenGrid(store.path), *steps, RandomFlip(prob=0.5)]


REFUSED = (
    r"{}: RandomFlip\(prob=0.5, direction=horizontal\) in the pipeline of WithNoise moves pixels but not the "
    r"grid of token store `.*/tokens`: of an image of 80 x 80 px, \d+% of the patches show what their tokens "
)


def test_pipelines_that_hooks_will_switch_to_are_checked_before_training(store):
    dataset = WithNoise(NAMES, [LoadTokenGrid(store.path)])
    own = dataset.pipeline
    recipes = SwitchRecipeHook([dict(action_epoch=7, train_pipeline=flipped(store)), dict(action_epoch=9)])
    with pytest.raises(TokenStoreError, match=REFUSED.format("SwitchRecipeHook's train_pipeline of epoch 7")):
        check(RepeatDataset(dataset, times=2), hooks=[recipes])
    with pytest.raises(TokenStoreError, match=REFUSED.format("PipelineSwitchHook's switch_pipeline")):
        check(dataset, hooks=[type("PipelineSwitchHook", (), dict(switch_pipeline=flipped(store)))()])
    none = SwitchRecipeHook([dict(action_epoch=2, train_pipeline=[])])
    with pytest.raises(TokenStoreError, match=r"^SwitchRecipeHook.s train_pipeline of epoch 2: the model tr"):
        check(dataset, hooks=[none])
    assert dataset.pipeline is own


@pytest.mark.parametrize("in_place", [False, True])
def test_a_pipeline_that_a_hook_changes_is_checked_before_a_step_is_done_with_it(store, in_place):
    dataset = WithNoise(NAMES, [LoadTokenGrid(store.path)])
    hook, run = TokenStoreCheckHook(), runner(dataset)
    hook.before_train(run)
    run.train_dataloader.dataset = SeededDataset(RepeatDataset(dataset, times=2))  # as EpochSeedHook does
    hook.before_train_epoch(run)
    hook.before_train_iter(run, batch_idx=0)
    run.iter = 5
    if in_place:
        dataset.pipeline.transforms += flipped(store)[1:]
        hook.before_train_epoch(run)
    else:
        dataset.pipeline = Compose(flipped(store))
    pipeline = dataset.pipeline
    changed = "a hook changed the training pipeline before step 6"
    with pytest.raises(TokenStoreError, match=REFUSED.format(changed)):
        hook.before_train_iter(run, batch_idx=2)
    assert dataset.pipeline is pipeline


def test_no_pipeline_is_checked_twice(store, monkeypatch):
    """Neither in each epoch, nor where a hook switches to one that was checked before training."""
    looked = []
    monkeypatch.setattr(token_check, "check_alignment", lambda *_: looked.append("probed"))
    monkeypatch.setattr(token_check, "_check_images", lambda *_: looked.append("images"))
    dataset = WithNoise(NAMES, [LoadTokenGrid(store.path)])
    switch = SwitchRecipeHook([dict(action_epoch=2, train_pipeline=flipped(store))])
    hook, run = TokenStoreCheckHook(), runner(dataset, hooks=[switch])
    hook.before_train(run)
    assert looked == ["images", "probed"] * 2
    for _ in range(3):
        hook.before_train_epoch(run)
        for _ in range(2):
            hook.before_train_iter(run)
        dataset.pipeline = switch.schedule[2]["train_pipeline"]
    assert looked == ["images", "probed"] * 2


def test_stores_of_two_tokenizers_are_refused(tmp_path, store):
    other = TokenStore.create(tmp_path / "other", NAMES, (4, 4), 128, "cd" * 32, "/copy")
    other.write(range(6), np.zeros((6, 4, 4), dtype=int))
    with pytest.raises(
        TokenStoreError, match=r"other` was made by tokenizer cdcdcdcdcdcd, .* is abababababab"
    ):
        check(Images(NAMES, [LoadTokenGrid(store.path)]), Images(NAMES, [LoadTokenGrid(other.path)]))


def test_a_store_of_another_tokenizer_than_the_hooks_codebook_is_refused(tmp_path, store):
    Codebook(np.eye(3)).save(tmp_path / "codebook.safetensors")
    hook = TokenStoreCheckHook(codebook=str(tmp_path / "codebook.safetensors"))
    with pytest.raises(TokenStoreError, match="was made by tokenizer abababababab"):
        hook.before_train(runner(Images(NAMES, [LoadTokenGrid(store.path)])))


def test_a_pipeline_without_tokens_is_refused_when_the_model_needs_them(store):
    with pytest.raises(TokenStoreError, match="pipeline of Images has no LoadTokenGrid: add"):
        check(Images(NAMES, []))


def test_images_elsewhere_than_under_the_data_root_are_named_at_once(store):
    with pytest.raises(TokenStoreError, match=r"`/copy/train/0.png` is not under LoadTokenGrid's data_root"):
        check(Images(NAMES, [LoadTokenGrid(store.path, data_root="/data")]))


def test_outputs_that_no_token_id_reaches_are_said_in_one_line(store, capture_log):
    dataset = Images(NAMES, [LoadTokenGrid(store.path)])
    check(dataset, dataset)
    assert "never a target" not in capture_log()
    check(dataset, dataset, head=8192)
    (line,) = (line for line in capture_log().splitlines() if "never a target" in line)
    assert "has 128 ids, fewer than `model.head.vocab_size` (8192)" in line
    assert "set 128" in line


def test_a_missing_store_is_found_before_training(tmp_path):
    with pytest.raises(TokenStoreError, match=r"none` does not exist: run tools/extract_tokens\.py"):
        check(Images(NAMES, [LoadTokenGrid(str(tmp_path / "none"))]))


def test_wrapped_datasets_and_nested_transforms_are_found(store):
    inner = [Images(NAMES, [Compose([LoadTokenGrid(store.path)])]) for _ in range(3)]
    both = torch.utils.data.Subset(ConcatDataset(inner[:2]), [0, 1])
    assert list(leaf_datasets(both)) == inner[:2]
    assert list(leaf_datasets(RepeatDataset(inner[2], times=2))) == [inner[2]]
    assert list(leaf_datasets(SeededDataset(both))) == inner[:2]
    assert [type(step) for step in pipeline_transforms(inner[0])] == [LoadTokenGrid]


def test_a_dataset_that_is_cut_to_some_batches_of_an_epoch_is_checked(store):
    """MMEngine's wrapper for `num_batch_per_epoch` passes the pipeline on, but not a new one."""
    whole = WithNoise(NAMES, [LoadTokenGrid(store.path)])
    sampler = dict(type="DefaultSampler", shuffle=True)
    loader = Runner.build_dataloader(
        dict(dataset=whole, sampler=sampler, batch_size=2, num_batch_per_epoch=2)
    )
    (dataset,) = leaf_datasets(SeededDataset(loader.dataset))
    assert (len(loader.dataset), len(dataset)) == (4, 6)
    assert check(loader.dataset).checked
    dataset.pipeline = Compose(flipped(store))
    with pytest.raises(TokenStoreError, match=r"RandomFlip.* moves pixels but not the grid"):
        check(loader.dataset)
