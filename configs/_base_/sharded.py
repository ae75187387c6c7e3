# Parameters, gradients and optimizer state sharded over the processes, for models larger than ViT-B.
runner_type = "FlexibleRunner"
strategy = dict(type="mapet_mm.FullyShardedStrategy")
