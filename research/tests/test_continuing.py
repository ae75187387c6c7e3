"""The table of what continuing changes."""

from continuing import table


def test_a_row_has_the_mean_change_over_seeds_and_its_interval():
    records = [
        dict(
            **dict(
                start="garments", images="photographs", way="all", epochs=10, seed=seed, measured="val.txt"
            ),
            by_share={"0": {"knn": 30.0 + seed}, "0.5": {"knn": 31.0 + seed}, "1": {"knn": 32.0 + 2 * seed}},
        )
        for seed in range(3)
    ]
    *_, row = table(records).splitlines()
    # Changes of 2, 3 and 4: 3 and 4.303 * 1 / sqrt(3).
    assert row.split(" | ")[2:] == [
        "all, 10 epochs",
        "knn",
        "31.0",
        "+3.0 (+0.5 to +5.5)",
        "+1.0 (+1.0 to +1.0)",
        "3 |",
    ]
