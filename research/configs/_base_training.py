# Training of a tokenizer's own network, with an algorithm of this building.
custom_imports = dict(imports=["lab.tokenizer_training"])

optim_wrapper = dict(
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=3.0),
)
cosine = dict(type="CosineAnnealingLR", eta_min=0.0, begin=0, by_epoch=True, convert_to_iter_based=True)
