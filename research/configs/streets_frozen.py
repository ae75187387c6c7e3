# k-NN segmentation of a dataset's scenes by ViT-micro, alone, learnt from 200 of them.
_base_ = "../../configs/evaluation/vit-micro_frozen.py"

evaluation = dict(
    _delete_=True,
    dense_train=dict(dataset={**_base_.evaluation.dense_train.dataset, "indices": 200}),
    dense_val=dict(dataset={**_base_.evaluation.dense_val.dataset, "indices": None}),
    protocols=[dict(type="SegmentationByNeighbours")],
)
