"""The tools behind the commands, and the command lines that run them."""

import json
import os
import sys
from pathlib import Path

# Names the stage in the environment of the tools that `mapet-mm pretrain` runs.
STAGE = "MAPET_MM_STAGE"
# configs/ and tools/, in a wheel or a clone, where `mim` looks for them.
PACKAGE = Path(__file__).parents[1] / ".mim"
GPU = "/dev/nvidiactl"  # where there is one of NVIDIA
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "MALLOC_MMAP_THRESHOLD_": "2147483647",
}
TOOLS = {
    "train": ("train.py", "train the model of a config: pre-training, fine-tuning or a probe"),
    "test": ("test.py", "evaluate a checkpoint"),
    "fit-codebook": ("fit_codebook.py", "images -> codebook, as a tokenizer config says"),
    "extract-tokens": ("extract_tokens.py", "images + codebook -> token store, as a tokenizer config says"),
    "store-images": (
        "store_images.py",
        "images of a token store -> squares, so that training decodes none",
    ),
    "merge-tokens": ("merge_token_stores.py", "several token stores -> one"),
    "visualize-codebook": ("visualize_codebook.py", "show what the tokens stand for, on a page"),
    "evaluate": ("evaluate_features.py", "evaluate frozen features: k-NN, probes, few labels, segmentation"),
    "embed": ("embed.py", "a folder of images -> their features and names, as files"),
    "verdict": ("verdict.py", "tell whether a pre-training helped: beside its start and random weights"),
    "choose-change": ("choose_change.py", "keep as much of a pre-training's change of its start as helps"),
    "convert": ("convert.py", "convert weights to and from timm, Hugging Face, torchvision and ONNX"),
    "digits": ("dataset_converters/digits.py", "write the digits, the small dataset of the examples"),
}


def tool_command(name: str, arguments: list[str], processes: str | int | None = None) -> list[str]:
    """The complete command line of a tool of `TOOLS`, for so many processes; several need torchrun."""
    tools = PACKAGE / "tools"
    tool = [str(tools / TOOLS[name][0]), *arguments]
    if processes in (None, "1", 1):
        return [sys.executable, *tool]
    launch = [str(tools / "torchrun.py"), "--standalone", f"--nproc_per_node={processes}"]
    launcher = ["--launcher", "pytorch"] if name in ("train", "test", "fit-codebook") else []
    return [sys.executable, *launch, *tool, *launcher]


def environment_of_tools() -> dict[str, str]:
    """This process's environment, for those that it starts; on CPUs glibc keeps the memory that they free.

    A training step then waits less for pages: it takes up to a third less time.
    """
    if os.path.exists(GPU):
        return dict(os.environ)
    return {**KEEP_MEMORY, **os.environ}


def next_line(command: str) -> str:
    """A new line with the command to run next; empty where `mapet-mm pretrain` goes on by itself."""
    return "" if STAGE in os.environ else f"\nnext: {command}"


def loading_call(target: str, folder: Path) -> str:
    """The Python call that loads a folder in timm ('timm') or Hugging Face Transformers ('hf').

    Examples:
        >>> loading_call("hf", Path("my run/huggingface"))
        'transformers.AutoModel.from_pretrained("my run/huggingface")'
    """
    name = f"local-dir:{folder}" if target == "timm" else str(folder)
    quoted = json.dumps(name, ensure_ascii=False)
    if target == "timm":
        return f"timm.create_model({quoted}, pretrained=True)"
    return f"transformers.AutoModel.from_pretrained({quoted})"
