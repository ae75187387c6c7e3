# Runtime of pre-training, fine-tuning and linear probe (MMPretrain).
default_scope = "mmpretrain"

default_hooks = dict(
    runtime_info=dict(type="mapet_mm.LateLogHook"),  # reads losses only when the log is written
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=100),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", interval=10, max_keep_ckpts=3),  # and the last; also `latest.pth`
    sampler_seed=dict(type="DistSamplerSeedHook"),
    visualization=dict(type="VisualizationHook", enable=False),
    portable_checkpoint=dict(type="mapet_mm.PortableCheckpointHook"),  # read by torch.load(weights_only=True)
    epoch_seed=dict(type="mapet_mm.EpochSeedHook"),  # draws come from seed, epoch and image: resumes exactly
    interruption=dict(type="mapet_mm.InterruptionHook"),  # saves every 30 minutes, and when told to end
    non_finite=dict(type="mapet_mm.NonFiniteHook"),  # leaves steps without finite gradients out
    total_batch=dict(type="mapet_mm.TotalBatchHook"),  # refuses a rate that is meant for another batch
    loader_wait=dict(type="mapet_mm.LoaderWaitHook"),  # says, once, when steps wait for images
    compile=dict(type="mapet_mm.CompileHook", where_it_pays=True),  # long trainings on a GPU
)

env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="nccl"),
)

vis_backends = [dict(type="LocalVisBackend")]
visualizer = dict(type="UniversalVisualizer", vis_backends=vis_backends)

log_level = "INFO"
load_from = None
resume = False

# Each process draws its own permutations, augmentations and stochastic depth.
randomness = dict(seed=0, diff_rank_seed=True)
