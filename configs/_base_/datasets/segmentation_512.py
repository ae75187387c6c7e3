# How segmentation datasets are read, 8 GPUs with two crops each, and measured.
train_dataloader = dict(
    batch_size=2,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type="InfiniteSampler", shuffle=True),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
test_evaluator = val_evaluator

# Test-time augmentation (tools/test.py --tta): the mean over these scales of the test image, flipped and not.
tta_model = dict(type="SegTTAModel")
tta_scales = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
# Views smaller than the window of 512 are whole patches. The ViT would pad others, and its answers, spread
# over the padding, too, would lie up to 20 pixels beside their place.
tta_whole_patches = [dict(type="ResizeToMultiple", size_divisor=16)]
tta_flips = [dict(type="RandomFlip", prob=prob) for prob in (0.0, 1.0)]
