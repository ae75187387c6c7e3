"""Hooks and optimizers."""

from mapet_mm.engine.hooks.class_names_check_hook import ClassNamesCheckHook
from mapet_mm.engine.hooks.compile_hook import CompileHook
from mapet_mm.engine.hooks.epoch_seed_hook import EpochSeedHook
from mapet_mm.engine.hooks.interruption_hook import InterruptionHook
from mapet_mm.engine.hooks.knn_probe_hook import KNNProbeHook
from mapet_mm.engine.hooks.label_files_check_hook import LabelFilesCheckHook
from mapet_mm.engine.hooks.late_log_hook import LateLogHook
from mapet_mm.engine.hooks.loader_wait_hook import LoaderWaitHook
from mapet_mm.engine.hooks.non_finite_hook import NonFiniteHook
from mapet_mm.engine.hooks.portable_checkpoint_hook import PortableCheckpointHook
from mapet_mm.engine.hooks.progress_hook import ProgressHook
from mapet_mm.engine.hooks.token_store_check_hook import TokenStoreCheckHook
from mapet_mm.engine.hooks.total_batch_hook import TotalBatchHook
from mapet_mm.engine.optimizers.autocast_optim_wrapper import AutocastOptimWrapper
from mapet_mm.engine.optimizers.layer_decay import LayerDecayOptimWrapperConstructor
