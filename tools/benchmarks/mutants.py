"""Make mutants of the core, each with one changed operator or constant, and count those that tests kill.

A mutant swaps a comparison, an arithmetic or a boolean operator, drops a `not` or a minus, adds one to a
number, negates a boolean, returns nothing, or leaves out a call or an error. A seeded sample is made for each
file. Each mutant is written into a copy of the project, where the file's tests run until one fails. The tests
run in a process forked from one that has imported the libraries, but not `mapet_mm`.
"""

import argparse
import ast
import copy
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    "beartype", "faiss", "jaxtyping", "mmpretrain.apis", "mmseg.apis", "open_clip", "skimage.data", "timm",
)  # fmt: skip
STORE = (
    "test_tokenizers/test_token_store.py test_tokenizers/test_store_seals.py "
    "test_tokenizers/test_store_extensions.py test_tokenizers/test_store_merges.py"
)
# The tests of each file, those likeliest to fail first.
TESTS = {
    "mapet_mm/models/utils/objectives.py": "test_models/test_objectives.py test_models/test_two_stream.py",
    "mapet_mm/models/utils/two_stream.py": "test_models/test_layout.py test_models/test_two_stream.py "
    "test_models/test_mapet.py",
    "mapet_mm/models/backbones/vit.py": "test_models/test_vit.py test_models/test_vit_checkpoints.py "
    "test_models/test_initialisation.py test_models/test_layout.py "
    "test_models/test_position_embedding.py test_models/test_mapet.py test_models/test_two_stream.py "
    "test_models/test_beit_names.py",
    "mapet_mm/models/losses/linear_cross_entropy.py": (
        "test_models/test_losses.py test_models/test_two_stream.py"
    ),
    "mapet_mm/engine/optimizers/layer_decay.py": "test_engine/test_layer_decay.py",
    "mapet_mm/datasets/transforms/token_grid.py": "test_datasets/test_transforms.py",
    "mapet_mm/structures/codebook.py": "test_tokenizers/test_codebook.py test_tokenizers/test_kmeans.py",
    "mapet_mm/tokenizers/kmeans.py": "test_tokenizers/test_kmeans.py",
    **{
        str(path.relative_to(ROOT)): STORE for path in sorted(ROOT.glob("mapet_mm/tokenizers/store/[!_]*.py"))
    },
}
# Slow tests that are left out.
LEFT_OUT = ("one_graph", "hundred_thousand")
PAIRS = (
    "Lt LtE", "Gt GtE", "Eq NotEq", "In NotIn", "Is IsNot", "Add Sub", "Mult Div", "BitAnd BitOr",
    "LShift RShift", "And Or",
)  # fmt: skip
SWAPS = {a: b for pair in PAIRS for a, b in (pair.split(), pair.split()[::-1])}
SWAPS |= dict.fromkeys(("FloorDiv", "Mod", "Pow"), "Mult")
NAMES = ("lt le", "gt ge", "_everything _nothing", "any all", "min max")
NAME_SWAPS = {a: b for pair in NAMES for a, b in (pair.split(), pair.split()[::-1])}


def swapped(operator: ast.AST) -> ast.AST:
    return getattr(ast, SWAPS[type(operator).__name__])()


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """The changed forms of one node of the syntax tree."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[place] = swapped(operator)
            yield changed
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op).__name__ in SWAPS:
        changed = copy.deepcopy(node)
        changed.op = swapped(node.op)
        yield changed
    elif isinstance(node, ast.UnaryOp):
        yield copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Name) and node.id in NAME_SWAPS:
        yield ast.Name(NAME_SWAPS[node.id])
    elif isinstance(node, ast.Attribute) and node.attr in NAME_SWAPS:
        yield ast.Attribute(node.value, NAME_SWAPS[node.attr])
    elif isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
        yield ast.Return(None)
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


def code_nodes(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Each node outside type annotations: its parent, the parent's field, and the index in that field."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns"):
            continue
        for place, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(child, ast.AST):
                yield tree, field, place
                yield from code_nodes(child)


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Descriptions of the changes, each with the changed source."""
    tree = ast.parse(source)
    for parent, field, place in code_nodes(tree):
        holder, key = (getattr(parent, field), place) if place is not None else (parent.__dict__, field)
        node = holder[key]
        for changed in replacements(node):
            holder[key] = changed
            yield f"{node.lineno}: {ast.unparse(node)}  ->  {ast.unparse(changed)}", ast.unparse(tree)
            holder[key] = node


class Workshop:
    """A copy of the project in which one mutant is tested at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        skip = shutil.ignore_patterns("__pycache__", ".*", "work_dirs", "data.*", "docs")
        for name in ("mapet_mm", "tests", "configs", "tools", "pyproject.toml"):
            copy_one = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy_one(ROOT / name, folder / name, **({"ignore": skip} if (ROOT / name).is_dir() else {}))

    @property
    def log(self) -> str:
        """The output of the last pytest run."""
        return (self.folder / "log.txt").read_text()

    def start(self, path: str, source: str, limit: float) -> int:
        """Fork a process that runs the file's tests on the source; returns its id."""
        (self.folder / path).write_text(source)
        process = os.fork()
        if process:
            return process
        os.setsid()
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
        signal.alarm(int(limit))
        log = os.open(self.folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        os.environ["PYTHONPATH"] = str(self.folder)
        tests = [f"tests/{name}" for name in TESTS[path].split()]
        options = ["-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
        options += ["-k", " and ".join(f"not {name}" for name in LEFT_OUT)]
        os._exit(int(pytest.main([*options, *tests])))


def run(path: str, sample: int, workshops: list[Workshop]) -> tuple[int, list[str]]:
    """Test a sample of a file's mutants; returns their number and the survivors."""
    source = (ROOT / path).read_text()
    start = time.monotonic()
    _, status = os.waitpid(workshops[0].start(path, ast.unparse(ast.parse(source)), 600), 0)
    seconds = time.monotonic() - start
    if status:
        sys.exit(f"error: the tests of {path} fail without a mutant:\n{workshops[0].log}")
    every = list(mutants(source))
    waiting = random.Random(0).sample(every, min(sample, len(every)))
    print(f"{path}: {len(waiting)} of {len(every)} mutants, tests of {seconds:.0f} s", flush=True)
    made, survived, running = len(waiting), [], {}
    free = list(workshops)
    while waiting or running:
        while waiting and free:
            what, changed = waiting.pop()
            workshop = free.pop()
            running[workshop.start(path, changed, 4 * seconds + 30)] = workshop, what
        process, status = os.wait()
        workshop, what = running.pop(process)
        free.append(workshop)
        if status == 0:
            survived.append(what)
        elif os.waitstatus_to_exitcode(status) not in (1, 2, 3, -signal.SIGKILL):
            sys.exit(f"error: pytest did not run:\n{workshop.log}")
        print(f"  {'SURVIVED' if status == 0 else 'killed  '} {what}", flush=True)
    for workshop in workshops:
        (workshop.folder / path).write_text(source)
    return made, survived


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", default=list(TESTS), help="files that have an entry in TESTS (default: all)"
    )
    parser.add_argument("--sample", type=int, default=25, help="mutants per file (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: %(default)s)")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        workshops = [Workshop(Path(folder, str(job))) for job in range(args.jobs)]
        results = {path: run(path, args.sample, workshops) for path in args.files}
    made, alive = (
        sum(n) for n in zip(*((made, len(alive)) for made, alive in results.values()), strict=True)
    )
    for path, (number, survived) in results.items():
        print(f"{path}: {number - len(survived)} of {number} killed", *survived, sep="\n    ")
    print(f"in all {made - alive} of {made} killed, {100 * (made - alive) / made:.1f} %")


if __name__ == "__main__":
    main()
