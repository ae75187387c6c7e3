# Pascal VOC 2012: segmentation of patch tokens by nearest neighbours. `--protocols SegmentationByRegression` takes CAPI's
# logistic regression, on CPUs for hours. The linear head that is trained:
# configs/segmentation/vit-*_linear_*_voc12-512x512.py.
evaluation = dict(
    folder="data/VOCdevkit",
    protocols=[dict(type="SegmentationByNeighbours")],
)
