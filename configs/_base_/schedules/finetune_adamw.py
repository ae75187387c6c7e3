# The paper's hyper-parameters for fine-tuning, for a batch of 1024; rate, layer-wise decay, epochs and with
# them `param_scheduler` depend on the size of the model. The curve is timm's, as in pre-training: one rate
# for each epoch, the warm-up in place of the cosine's first epochs, ten more epochs at the minimal rate.
#
# The paper's warm-up and minimal rates (1e-6) are the head's. With layer-wise decay, `start_factor` and
# `eta_min_ratio` give each layer its own share of them, as timm and BEiT do. An absolute `eta_min` would be
# the same for all: ViT-B's patch embedding peaks at 5e-4 * 0.65^13 = 1.8e-6 and would hardly decay at all.
optim_wrapper = dict(
    type="mapet_mm.AutocastOptimWrapper",
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    optimizer=dict(type="AdamW", fused=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05),
)

val_cfg = dict()
test_cfg = dict()

auto_scale_lr = dict(base_batch_size=1024)
