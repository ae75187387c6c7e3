# The digits' stored token grids as the only input: no image is read. A tokenizer's file adds the store.
_base_ = "digits.py"

data_preprocessor = dict(_delete_=True, num_classes=10)  # no mean, no deviation: ids stay ids
pack = dict(type="PackInputs", input_key="token_grid")

val_evaluator = dict(type="Accuracy", topk=(1, 5))
test_evaluator = val_evaluator
val_cfg = dict()
test_cfg = dict()

custom_hooks = [dict(type="mapet_mm.TokenStoreCheckHook")]
