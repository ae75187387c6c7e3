# Stored token grids as the only input, for a batch of 64: no image is read. A recipe names the pipeline.
_base_ = ["images.py", "runtime.py"]

data_preprocessor = dict(_delete_=True, num_classes=_base_.num_classes)  # no mean, no deviation: ids stay ids
pack = dict(type="PackInputs", input_key="token_grid")
kclip_tokens = [dict(type="mapet_mm.LoadTokenGrid", store=_base_.token_stores.kclip), pack]
vqkd_tokens = [dict(type="mapet_mm.LoadTokenGrid", store=_base_.token_stores.vqkd), pack]
grid_tokens = [dict(type="mapet_mm.LoadTokenGrid", store=_base_.token_stores.grid), pack]
dalle_tokens = [dict(type="mapet_mm.LoadTokenGrid", store=_base_.token_stores.dalle), pack]

val_evaluator = dict(type="Accuracy", topk=(1, 5))
test_evaluator = val_evaluator
val_cfg = dict()
test_cfg = dict()

custom_hooks = [dict(type="mapet_mm.TokenStoreCheckHook")]

optim_wrapper = dict(
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    optimizer=dict(type="AdamW", fused=True, lr=3e-3, weight_decay=0.05),
)
warmup = dict(type="LinearLR", start_factor=1e-3, begin=0, by_epoch=True, convert_to_iter_based=True)
cosine = dict(type="CosineAnnealingLR", eta_min=0.0, by_epoch=True, convert_to_iter_based=True)
param_scheduler = [
    dict(end=_base_.warmup_epochs, **warmup),
    dict(begin=_base_.warmup_epochs, end=_base_.token_epochs, **cosine),
]
train_cfg = dict(by_epoch=True, max_epochs=_base_.token_epochs, val_interval=5)
