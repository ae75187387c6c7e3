# The embedded digits, in three domains, with pixel labels and as scenes.
_base_ = "_base_/micro.py"

data = dict(
    command=["tools/dataset_converters/digits.py"],
    outputs=[
        "data/digits",
        "data/digits_inverted",
        "data/digits_rotated",
        "data/digits_pixels",
        "data/digits_scenes",
        "data/digits_scenes_unlabelled",
    ],
)
unlabelled_scenes = "digits_scenes"
runner = dict(launcher="local", cpus_per_process=1)
tables = ["digits", "micro"]
