# The cutting point by frozen features, at the recipes' rate, for which none of its values was chosen.
_base_ = "../micro/cutting_point.py"

rows = [
    dict(
        _base_.mapet_usual_rate,
        name=row.name,
        options={**row.get("options", {}), **_base_.mapet_usual_rate.options},
    )
    for row in _base_.rows
]
columns = _base_.every_pooling
baseline = "c = 15 (70 % targets)"
notes = [
    _base_.frozen_note,
    "All at the recipes' rate, 3e-3. Each seed draws CLIP and codebook, too.",
]
