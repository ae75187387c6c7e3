# ADE20K: segmentation of patch tokens by nearest neighbours.
# The linear head that is trained: configs/segmentation/vit-*_linear_*_ade20k-512x512.py
evaluation = dict(
    folder="data/ade/ADEChallengeData2016",
    protocols=[dict(type="SegmentationByNeighbours")],
)
