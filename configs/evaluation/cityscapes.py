# Cityscapes: segmentation of patch tokens by nearest neighbours. `--protocols SegmentationByRegression` takes CAPI's
# logistic regression, on CPUs for hours. The linear head that is trained:
# configs/segmentation/vit-*_linear_*_cityscapes-512x512.py.
evaluation = dict(
    folder="data/cityscapes",
    protocols=[dict(type="SegmentationByNeighbours")],
)
