"""What trainings share."""

from mmengine.dataset import DefaultSampler
from mmengine.hooks import CheckpointHook, DistSamplerSeedHook, IterTimerHook, LoggerHook, ParamSchedulerHook
from mmengine.visualization import LocalVisBackend
from mmpretrain.engine.hooks import VisualizationHook
from mmpretrain.visualization import UniversalVisualizer

from mapet_mm.engine import EpochSeedHook, NonFiniteHook

arch = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=64)
mean, std = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
loader = dict(batch_size=4, num_workers=0, persistent_workers=False)
train_loader = dict(sampler=dict(type=DefaultSampler, shuffle=True), **loader)
val_loader = dict(sampler=dict(type=DefaultSampler, shuffle=False), **loader)

train_cfg = dict(by_epoch=True, max_epochs=2, val_interval=1)
val_cfg, test_cfg = dict(), dict()
default_hooks = dict(
    timer=dict(type=IterTimerHook),
    logger=dict(type=LoggerHook, interval=1),
    param_scheduler=dict(type=ParamSchedulerHook),
    checkpoint=dict(type=CheckpointHook, interval=1),
    sampler_seed=dict(type=DistSamplerSeedHook),
    visualization=dict(type=VisualizationHook, enable=False),
    epoch_seed=dict(type=EpochSeedHook),
    non_finite=dict(type=NonFiniteHook),
)
env_cfg = dict(cudnn_benchmark=False, mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0))
visualizer = dict(type=UniversalVisualizer, vis_backends=[dict(type=LocalVisBackend)])
log_level, load_from, resume = "INFO", None, False
randomness = dict(seed=0, diff_rank_seed=True)
default_scope = None
