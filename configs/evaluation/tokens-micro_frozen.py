# The tokens alone, judged as features are: what a pre-training on them has to add to.
_base_ = "../micro/_base_/images.py"

data_preprocessor = dict(_delete_=True)  # ids stay ids
model = dict(type="mapet_mm.OneHotTokens", vocab_size=_base_.vocab_size)
pipeline = [
    dict(type="mapet_mm.LoadTokenGrid", store=_base_.token_stores[_base_.tokens]),
    dict(type="PackInputs", input_key="token_grid"),
]
evaluation = dict(
    train=dict(dataset=dict(pipeline=pipeline, **_base_.train_images)),
    val=dict(dataset=dict(pipeline=pipeline, **_base_.val_images)),
    protocols=[dict(type="NearestNeighbours"), dict(type="LowShot", shots=[10])],
)
