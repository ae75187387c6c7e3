"""The table of what continuing changes, and the page that has it."""

import json

from continuing import RECORDS, table, tables


def test_a_row_has_the_mean_change_over_seeds_and_its_interval():
    records = [
        dict(
            **dict(
                start="garments",
                images="photographs",
                way="all, 1.5e-3",
                seed=seed,
                measured="val.txt",
            ),
            by_share={"0": {"knn": 30.0 + seed}, "0.5": {"knn": 31.0 + seed}, "1": {"knn": 32.0 + 2 * seed}},
        )
        for seed in range(3)
    ]
    *_, row = table(records).splitlines()
    # Changes of 2, 3 and 4: 3 and 4.303 * 1 / sqrt(3).
    assert row.split(" | ")[2:] == [
        "all, 1.5e-3",
        "k-NN, top-1",
        "31.0",
        "+3.0 (+0.5 to +5.5)",
        "+1.0 (+1.0 to +1.0)",
        "3 |",
    ]


def test_the_page_has_the_tables_of_the_kept_figures():
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    page = RECORDS.with_name("results").joinpath("continuing.md").read_text()
    for made in tables(records):
        assert made in page
