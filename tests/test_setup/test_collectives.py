"""No process waits for the others where the first one is alone: that would never end."""

import ast
from collections.abc import Iterator

import pytest
from config_building import ROOT

COLLECTIVES = {
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_dict",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "collect_results",
    "gather_object",
    "sync_random_seed",
}
SAVING = {"before_save_checkpoint"}
FIRST = {"is_main_process", "is_first_process", "master_only"}


def called(node: ast.AST) -> set[str]:
    """Names of the functions and methods that are called in a piece of code."""
    calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
    return {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}


def parts_of_the_first(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The statements that run in the first process alone."""
    for node in ast.walk(tree):
        # MMEngine saves in the first process, and calls these hooks there.
        is_function = isinstance(node, ast.FunctionDef)
        if is_function and (node.name in SAVING or any(map(_says_first, node.decorator_list))):
            yield node.body
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for index, statement in enumerate(body if isinstance(body, list) else ()):
                if not isinstance(statement, ast.If) or not _says_first(statement.test):
                    continue
                is_negated = isinstance(statement.test, ast.UnaryOp)
                yield statement.orelse if is_negated else statement.body
                if is_negated and isinstance(statement.body[-1], ast.Return):  # the others have left
                    yield body[index + 1 :]


def _says_first(node: ast.AST) -> bool:
    named = {getattr(one, "id", None) or getattr(one, "attr", None) for one in ast.walk(node)}
    return bool(named & FIRST)


def with_collectives(trees: list[ast.AST]) -> set[str]:
    """Collectives, and the functions that call one."""
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return COLLECTIVES | {one.name for one in functions if called(one) & COLLECTIVES}


def collectives_of_the_first(trees: list[ast.AST]) -> list[tuple[int, set[str]]]:
    """Lines at which the first process alone calls what waits for all processes."""
    waiting = with_collectives(trees)
    found = []
    for tree in trees:
        for statements in parts_of_the_first(tree):
            found += [(one.lineno, called(one) & waiting) for one in statements if called(one) & waiting]
    return found


TREES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "mapet_mm").rglob("*.py"))}
TREES |= {path: ast.parse(path.read_text()) for path in sorted((ROOT / "tools").glob("*.py"))}


def test_no_process_waits_for_the_others_where_the_first_is_alone():
    assert sum(len(list(parts_of_the_first(tree))) for tree in TREES.values()) > 10
    assert collectives_of_the_first(list(TREES.values())) == []


@pytest.mark.parametrize(
    "code",
    [
        "def save():\n    if is_main_process():\n        barrier()",
        "def f():\n    if not is_first_process():\n        return\n    wait()\ndef wait():\n    barrier()",
        "def before_save_checkpoint():\n    barrier()",
        "@master_only\ndef save():\n    all_gather(1)",
    ],
)
def test_such_a_wait_is_found(code):
    assert len(collectives_of_the_first([ast.parse(code)])) == 1
