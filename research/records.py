"""Keep the records of finished runs, or give kept records the identities of today's configs.

    python research/records.py keep      # add those of work_dirs/tables/runs to research/records.jsonl
    python research/records.py rekey     # after a change of configs that changes no result

`rekey` is a claim of whoever runs it: another spelling, the same results. If results change, leave the
records, or raise RECIPES_VERSION in research/lab/identity.py if the configs do not show the change.
"""

import argparse

from lab.plan import current_identity
from lab.records import Record, read_finished, read_kept, write_kept
from lab.runs import Run

from mapet_mm.utils.errors import one_line_errors


def rekeyed(records: dict[str, Record]) -> list[Record]:
    """The same records with the identities that their configs have today."""
    identities: dict[str, str] = {}

    def identity(old: str) -> str:
        if old not in identities:
            record = records[old]
            needs = [f"-{identity(need)}" for need in record["needs"]]
            said = {
                key: record[key]
                for key in ("name", "kind", "config", "data", "options", "seed", "evaluation")
            }
            # Data are known by their converter's name, which the record's name ends with.
            converter = record["name"].removeprefix("data_")
            identities[old] = current_identity(
                Run(id="", command=[converter], outputs=[], needs=needs, **said)
            )
        return identities[old]

    return [
        {**record, "id": identity(old), "needs": [identity(need) for need in record["needs"]]}
        for old, record in records.items()
    ]


@one_line_errors
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["keep", "rekey"])
    action = parser.parse_args().action
    kept = read_kept()
    if action == "keep":
        finished = read_finished()
        write_kept((kept | finished).values())
        print(f"kept {len(finished.keys() - kept.keys())} more records: {len(kept | finished)} in all")
    else:
        records = rekeyed(kept)
        write_kept(records)
        changed = len({record["id"] for record in records} - kept.keys())
        print(f"{changed} of {len(records)} records have another identity than before")


if __name__ == "__main__":
    main()
