# Fashion-MNIST, all 60,000 training images.
_base_ = "_base_/micro.py"

data = dict(
    command=["tools/dataset_converters/fashion_mnist.py"],
    outputs=["data/fashion_mnist", "data/fashion_mnist_scenes", "data/fashion_mnist_scenes_unlabelled"],
)
runner = dict(launcher="local", cpus_per_process=1)
