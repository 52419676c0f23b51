"""What differs between two recordings."""

import csv
import difflib
import fnmatch
import io
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path


def compare(before: Path, after: Path, explained: Sequence[Mapping[str, str]]) -> int:
    """Print what differs between two recordings; return 1 if anything does that must not."""
    ids = renamed(before, after)
    parts = [p.name for p in (after / "strict").iterdir()]
    names = sorted({
        p.relative_to(folder).as_posix()
        for folder in (before, after)
        for part in parts
        for p in (folder / "strict" / part).rglob("*")
        if p.is_file()
    })  # fmt: skip
    differing, applied = 0, Counter[str]()
    for name in names:
        one, two = (f / name for f in (before, after))
        if not (one.exists() and two.exists()):
            print(f"\n{name}: only {'before' if one.exists() else 'after'}")
            differing += 1
            continue
        old = re.sub(r"\b[0-9a-f]{12}\b", lambda m: ids.get(m[0], m[0]), one.read_text())
        for entry in explained:
            if fnmatch.fnmatch(name, f"strict/{entry['files']}"):
                old, times = re.subn(entry["find"], entry["put"], old)
                applied[entry["why"]] += times
        lines = difference(old, two.read_text(), name, in_any_order=bool(ids))
        if lines:
            differing += 1
            print("\n".join(["", name, *lines[:40], *(["..."] if len(lines) > 40 else [])]))
    for why, times in applied.items():
        print(f"\nmeant, {times} times: {why}")
    report_measured(before / "measured", after / "measured")
    report_code(before / "code.json", after / "code.json")
    print(
        f"\n{differing} of {len(names)} files of {', '.join(sorted(parts))} differ; {len(ids)} ids changed"
    )
    return int(differing > 0)


def renamed(before: Path, after: Path) -> dict[str, str]:
    """Return old id -> new id of the cells that both recordings have, where they differ.

    Raises:
        ValueError: two cells became one, or one became two.
    """
    if not (after / "ids.json").exists():
        return {}  # no sweeps were recorded
    old, new = (json.loads((f / "ids.json").read_text()) for f in (before, after))
    pairs = {(old[key], new[key]) for key in old.keys() & new.keys()}
    for side in (0, 1):
        if many := [k for k, n in Counter(pair[side] for pair in pairs).items() if n > 1]:
            raise ValueError(f"ids are not one to one: {many}")
    for key in sorted(old.keys() ^ new.keys()):
        print(f"cell only {'before' if key in old else 'after'}: {key}")
    return {one: two for one, two in pairs if one != two}


def difference(old: str, new: str, name: str, in_any_order: bool) -> list[str]:
    """Return the lines that differ; tables are compared by column, with 9 digits."""
    if old == new:
        return []
    if name.endswith(".csv"):
        return table_difference(old, new, in_any_order)
    one, two = old.splitlines(), new.splitlines()
    if in_any_order and sorted(one) == sorted(two):
        return []  # what is ordered by id has another order where ids are new
    return [line for line in difflib.unified_diff(one, two, "before", "after", n=1, lineterm="")]


def table_difference(old: str, new: str, in_any_order: bool) -> list[str]:
    """Return the columns of a table that came, went or changed."""
    one, two = (list(csv.reader(io.StringIO(text))) for text in (old, new))
    heads = [table[0] if table else [] for table in (one, two)]
    lines = [f"column gone: {c}" for c in heads[0] if c not in heads[1]]
    lines += [f"column new: {c}" for c in heads[1] if c not in heads[0]]
    shared = [c for c in heads[0] if c in heads[1]]
    if shared != [c for c in heads[1] if c in heads[0]]:
        lines.append("columns have another order")
    if len(one) != len(two):
        return [*lines, f"{len(one) - 1} rows became {len(two) - 1}"]
    rows = [[[row[h.index(c)] if len(row) > h.index(c) else "" for c in shared] for row in table[1:]]
            for h, table in zip(heads, (one, two), strict=True)]  # fmt: skip
    if in_any_order:
        rows = [sorted(table) for table in rows]
    for number, column in enumerate(shared):
        cells = [(a[number], b[number]) for a, b in zip(*rows, strict=True)]
        if wrong := [pair for pair in cells if not same(*pair)]:
            lines.append(
                f"{column}: {len(wrong)} of {len(cells)} rows, {wrong[0][0]} -> {wrong[0][1]}"
            )
    return lines


def same(old: str, new: str) -> bool:
    """Whether two entries are the same text, or the same number to nine digits."""
    try:
        return old == new or math.isclose(float(old), float(new), rel_tol=1e-9)
    except ValueError:
        return False


def report_measured(before: Path, after: Path) -> None:
    """Print counts and times of both recordings."""
    for name in ("figures.json", "plan.json", "table_calls.json") if after.exists() else ():
        old, new = (json.loads((f / name).read_text()) for f in (before, after))
        print(f"\n{name}")
        changed = [
            k for k in old | new if old.get(k) != new.get(k) and not isinstance(old.get(k), list)
        ]
        for key in changed:
            print(f"  {key}: {old.get(key)} -> {new.get(key)}")


def report_code(before: Path, after: Path) -> None:
    """Print functions and classes whose edit makes measurements stale that it left valid before."""
    if not after.exists():
        return
    old, new = (json.loads(path.read_text()) for path in (before, after))
    wider: Counter[str] = Counter()
    for cell in old["cells"].keys() & new["cells"].keys():
        covers = [set(code["sets"][code["cells"][cell]]) for code in (old, new)]
        wider.update((covers[1] - covers[0]) & set(old["sets"]["all"]))
    print(
        f"\n{len(wider)} functions and classes newly change a code hash: {dict(wider.most_common(40))}"
    )
