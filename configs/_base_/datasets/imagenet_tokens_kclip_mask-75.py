# Masks 75 of the 196 patches in blocks, as BEiT does. MMPretrain's BEiT and CAE have no validation.
_base_ = "imagenet_tokens_kclip.py"

mask = dict(type="mapet_mm.BlockwiseMask", input_size=14, num_masking_patches=75, min_num_patches=16)
train_pipeline = [*_base_.load_square, _base_.color_jitter, _base_.load_tokens, mask, _base_.pack]

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = val_evaluator = val_cfg = None
test_evaluator = []  # nor a test: the images are for feature extraction
