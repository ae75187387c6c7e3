"""Token stores whose grids follow from the names of their images."""

import numpy as np

from mapet_mm.tokenizers import TokenStore

GRID = (2, 3)


def make(path, names, data_root="data", tokenizer="t" * 64, written=None, **options) -> TokenStore:
    store = TokenStore.create(path, names, GRID, 1000, tokenizer, data_root, **options)
    for row in range(len(names)) if written is None else written:
        store.write([row], [grid_of(names[row])])
    return store


def grid_of(name: str) -> np.ndarray:
    return np.random.default_rng(list(name.encode())).integers(1000, size=GRID).astype(np.uint16)


def fill(store: TokenStore) -> None:
    rows = store.missing()
    store.write(rows, np.array([grid_of(store.names[row]) for row in rows.tolist()]))


def files_of(path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def assert_holds(store: TokenStore, names: list[str]) -> None:
    assert all((store[name] == grid_of(name)).all() for name in names)
