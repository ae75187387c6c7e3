# ImageNet-1k with k-CLIP tokens, as stored squares: `mapet-mm store-images CONFIG` decodes each image once.
# The loader copies whole batches, and the colours are jittered on the GPU.
_base_ = "imagenet_tokens_kclip.py"

data_preprocessor = dict(color_jitter=dict(brightness=0.4, contrast=0.4, saturation=0.4))

train_dataloader = dict(
    num_workers=4,
    collate_fn=dict(type="mapet_mm.whole_batch"),
    dataset=dict(
        _delete_=True,
        type="mapet_mm.StoredImages",
        store=_base_.load_tokens.store,
        prefix="train/",
        square=_base_.load_square,
    ),
)
