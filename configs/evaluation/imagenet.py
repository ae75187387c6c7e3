# ImageNet-1k in data/imagenet: nearest neighbours, linear and attentive probe.
evaluation = dict(
    folder="data/imagenet",
    protocols=[
        dict(type="NearestNeighbours"),
        dict(type="LinearProbes", layers=1),
        dict(type="AttentiveProbe"),
    ],
)
