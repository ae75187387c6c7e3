# The paper's ablation of the cutting point (tab:ablation): the same shares of the sequence.
_base_ = "../{{$MAPET_MM_DATA:digits}}.py"

# Of the paper's 197 tokens, and its fine-tuning of ViT-B; 60 is the recipe's.
paper = {30: 84.2, 40: 84.3, 50: 84.3, 60: 84.4, 98: 84.1}
ours = {c: round(c / 197 * (1 + _base_.num_patches)) for c in paper}
names = {c: f"c = {ours[c]} ({100 - c / 1.97:.0f} % targets)" for c in paper}

title = f"Cutting point of MaPeT on {_base_.data_set}"
mapet = dict(method="mapet", pretrain=_base_.pretrain)
rows = [
    dict(name=names[30], options={"model.backbone.cutting_point": ours[30]}, **mapet),
    dict(name=names[40], options={"model.backbone.cutting_point": ours[40]}, **mapet),
    dict(name=names[50], options={"model.backbone.cutting_point": ours[50]}, **mapet),
    dict(name=names[60], **mapet),
    dict(name=names[98], options={"model.backbone.cutting_point": ours[98]}, **mapet),
]
columns = [
    *_base_.frozen_columns,
    dict(name="linear probe, all labels", unit="top-1, %", config=_base_.probe, metric="accuracy/top1"),
    dict(
        name="fine-tuning, all labels",
        unit="top-1, %",
        config=_base_.finetune,
        recipe="coslr",
        metric="accuracy/top1",
        paper={names[c]: top1 for c, top1 in paper.items()},
    ),
]
notes = [
    _base_.frozen_note,
    _base_.probe_note,
    "The paper's numbers are for ViT-B with VQ-KD tokens and c = 30, 40, 50, 60, 98 of 197.",
]
