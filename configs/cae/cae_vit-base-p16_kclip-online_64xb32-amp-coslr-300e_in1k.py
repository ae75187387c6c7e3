# The tokenizer runs in the model: at least 246 hours of an A100 for 300 epochs, three times the training,
# computed and not measured (docs/performance.md, "On paper").
_base_ = [
    "../_base_/models/cae_vit-base-p16.py",
    "../_base_/datasets/imagenet_online_kclip.py",
    "../_base_/schedules/pretrain_adamw_coslr-300e.py",
    "../_base_/default_runtime.py",
]

model = dict(target_generator=dict(_delete_=True, **_base_.tokenizer))

mask = dict(type="mapet_mm.BlockwiseMask", input_size=14, num_masking_patches=98, min_num_patches=16)
train_dataloader = dict(
    batch_size=32, dataset=dict(pipeline=[_base_.load, _base_.train_views, mask, _base_.pack])
)
val_dataloader = val_evaluator = val_cfg = None
test_dataloader = dict(dataset=dict(pipeline=[_base_.load, _base_.square, _base_.pack]))
test_evaluator = []  # the images are for feature extraction
