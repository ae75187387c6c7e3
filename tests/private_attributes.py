"""Tests of modules that use what other libraries keep private; CONTRIBUTING.md lists the attributes."""

TEST_MODULES = {
    "test_tokens.py",
    "test_checkpoint_hooks.py",
    "test_color_jitter.py",
    "test_compile_hook.py",
    "test_kclip.py",
    "test_linear_probe.py",
    "test_masking.py",
    "test_non_finite_hook.py",
    "test_other_vits.py",
    "test_step_counts.py",
    "test_starts.py",
    "test_vit.py",
}
