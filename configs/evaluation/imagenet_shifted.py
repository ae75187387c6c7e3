# Classifiers learnt on ImageNet-1k and tested on other images of its classes, or of a part of them.
# real.json is ReaL's list of the right classes of each image of `val`, in the order of their numbers.
answers = "data/imagenet/real.json"
val = dict(type="mapet_mm.ImageFolder", data_prefix="data/imagenet", part="val", with_label=False)

evaluation = dict(
    folder="data/imagenet",
    real=dict(dataset=val, answers=answers),
    v2="data/imagenet-v2",
    a="data/imagenet-a",
    r="data/imagenet-r",
    sketch="data/imagenet-sketch",
    protocols=[dict(type="NearestNeighbours"), dict(type="LinearProbes", layers=1)],
)
