"""What is recorded of the product."""

import ast
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from tools.witness.measured import measured
from tools.witness.product import LISTS, ROOT, command, forked, found, masked, value_of

WIDTHS = (60, 80, 160)
NAMES = ("sample", "speedups", "scaling", "sequences")


def record(target: Path, wanted: Sequence[str]) -> None:
    """Write everything below `target`, or some of `PARTS`."""
    work = Path(
        tempfile.mkdtemp(prefix="witness-", dir="/tmp")
    )  # its length decides where lines break
    for module in ("pandas", "hydra", "rich.console", "scipy.optimize", "pyarrow.parquet"):
        import_module(module)  # once, not in each of the processes that are forked
    try:
        prepare(work)
        for name in wanted or PARTS:
            begin = time.monotonic()
            kind = target / ("measured" if name == "measured" else f"strict/{name}")
            shutil.rmtree(kind, ignore_errors=True)
            PARTS[name](work, kind)
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    finally:
        shutil.rmtree(work)


def put(path: Path, text: str) -> None:
    """Write a text file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def file_name(words: str) -> str:
    """Return a command as the name of a file."""
    return re.sub(r"[^\w=.,+-]+", "_", words).strip("_-")[:100]


def prepare(work: Path) -> None:
    """Make the sweeps: the sample, the sample with a slower and a faster cell, the generated ones."""
    for name, answer in (
        ("sbatch", "Submitted batch job 7"),
        ("srun", ""),
        ("sinfo", LISTS["sinfo"]),
    ):
        put(work / "bin" / name, f"#!/bin/sh\necho '{answer}'")
        (work / "bin" / name).chmod(0o755)
    results = work / "results"
    shutil.copytree(ROOT / "analysis" / "sample", results / "sample")
    shutil.copytree(results / "sample", results / "slower")
    for path in (results / "slower" / "cells").glob("*/cell.yaml"):
        typed = yaml.safe_load(path.read_text())["overrides"]
        factor = (
            0.8 if "optimizer=adamw_fused" in typed else 1.3 if "precision=O1" in typed else 1.0
        )
        for run in path.parent.glob("runs/*.json"):
            document = json.loads(run.read_text())
            if rate := document.get("metrics", {}).get("images_per_second"):
                document["metrics"]["images_per_second"] = rate * factor
                run.write_text(json.dumps(document))
    said = forked(lambda: import_module(LISTS["generated_sweeps"]).write_all(results) and 0, work)
    if not said.startswith("exit code 0"):
        raise RuntimeError(said)


def screens(work: Path, target: Path) -> None:
    """Write what commands on finished sweeps print."""
    for typed in LISTS["screens"]:
        for width in WIDTHS:
            words = [w.replace("==", " == ") for w in typed.split()]
            put(target / f"{file_name(typed)}.{width}.txt", forked(command(words), work, width))


def tables(work: Path, target: Path) -> None:
    """Write every table of every finished sweep, and what its objects show."""
    for name in NAMES:
        said = forked(partial(_tables, name, target / name), work)
        put(target / name / "said.txt", said)


def _tables(name: str, folder: Path) -> None:
    import vitsweep

    context: dict[str, Any] = {"sweep": found(LISTS["open_sweeps"])(f"results/{name}")}
    kept = vitsweep.load("slower" if name == "sample" else name)
    public = vitsweep.load(name)
    for key in ("runs", "cells", "baselines", "evaluations"):
        context[key] = getattr(context["sweep"], key, None)
    context["kept_runs"] = kept.runs
    shown = {
        "cells": lambda: public.cells,
        "runs": lambda: public.runs,
        "speedups": public.speedups,
        "status": public.status,
        "race": public.race,
        "compare": lambda: vitsweep.compare(kept, public),
        "repr": lambda: repr(public),
        "notebook": lambda: "\n".join(page_lines(public._repr_html_())),
        "joined_cells": lambda: context["cells"],
        "joined_runs": lambda: context["runs"],
    }
    for table, places in LISTS["tables"].items():
        shown[table] = partial(value_of, places, context)
    for table, make in shown.items():
        try:
            value = make()
        except Exception as error:
            value = f"{type(error).__name__}: {error}"
        put(folder / f"{table}.{'csv' if hasattr(value, 'to_csv') else 'txt'}", as_text(value))


def as_text(value: Any) -> str:
    """Return a table as CSV with every digit that counts, anything else as text."""
    if hasattr(value, "to_csv"):
        return str(value.to_csv(index=value.index.name is not None, float_format="%.12g"))
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def reports(work: Path, target: Path) -> None:
    """Write text and figures of reports, and the files that `collect` writes."""
    for name in (*NAMES, "slower"):
        forked(command(["collect", name]), work)
    for names in LISTS["reports"]:
        said = forked(command(["report", *names.split()]), work)
        put(target / f"{file_name(names)}.txt", said)
    for folder in sorted((work / "results").iterdir()):
        place = target / folder.name
        for path in sorted(folder.rglob("*")):
            inner = path.relative_to(folder)
            if path.suffix == ".html":
                lines = page_lines(masked(path.read_text(), work))
                put(place / f"{inner}.txt", "\n".join(lines))
            elif path.suffix == ".svg":
                put(place / f"{inner}.txt", "\n".join(figure_lines(path.read_text())))
            elif path.suffix in (".csv", ".md"):
                put(place / inner, masked(path.read_text(), work))
            elif path.suffix == ".parquet":
                import pandas as pd

                put(place / f"{inner}.csv", as_text(pd.read_parquet(path)))
        rows = {p.parent.name: json.loads(p.read_text()) for p in folder.rglob("record.json")}
        ordered = dict(sorted(rows.items()))
        put(place / "records.json", json.dumps(ordered, indent=1, sort_keys=True))


class _Page(HTMLParser):
    """The words of a page without its drawings and code; sort keys too."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        known = dict(attributes)
        if tag in ("svg", "style") or (tag == "script" and "json" not in (known.get("type") or "")):
            self._inside.append(tag)
        self.lines += [f"{k}={known[k]}" for k in ("data-key", "class", "id") if known.get(k)]

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside and data.strip():
            self.lines.append(" ".join(data.split()))


def page_lines(html: str) -> list[str]:
    """Return the text of a page, one line per element."""
    page = _Page()
    page.feed(html)
    return page.lines


def figure_lines(svg: str) -> list[str]:
    """Return words, lines and markers of a figure, in the order in which they are drawn."""
    builder = ElementTree.TreeBuilder(insert_comments=True)
    root = ElementTree.fromstring(svg, ElementTree.XMLParser(target=builder))
    lines: list[str] = []

    def walk(element: ElementTree.Element, is_glyph: bool) -> None:
        if not isinstance(element.tag, str):
            lines.append(f"text {(element.text or '').strip()}")
            return
        tag = element.tag.rpartition("}")[2]
        shape = [element.get(k, "") for k in ("d", "x", "y", "style", "href") if element.get(k)]
        if shape and tag in ("path", "use") and not is_glyph:
            shape = [re.sub(r"#\w+|url\(.*?\)", "#", text) for text in shape]
            drawn = " ".join(" ".join(shape).split())
            lines.append(f"{tag} " + re.sub(r"-?\d+\.\d+", lambda n: f"{float(n[0]):.1f}", drawn))
        for child in element:
            walk(child, is_glyph or tag == "defs" or element.get("id", "").startswith("text_"))

    walk(root, False)
    return lines


def menu() -> str:
    """Return a sweep of every choice of `conf/` that needs nothing else."""
    folders = sorted(p for p in (ROOT / "conf").iterdir() if p.is_dir())
    groups = [p for p in folders if p.name not in LISTS["no_cells"]]
    choices = [f"{p.name}={c.stem}" for p in groups for c in sorted(p.glob("*.yaml"))]
    cells = ",".join(f"['{choice}']" for choice in choices if choice not in LISTS["not_alone"])
    return f"sweep.cells=[{cells}]"


def sweeps(work: Path, target: Path) -> None:
    """Plan and submit the named sweeps; write what was frozen and what Slurm would get."""
    ids: dict[str, str] = {}
    code: dict[str, Any] = {"cells": {}, "sets": {}}
    for name in (*LISTS["sweeps"], "menu"):
        nodes = LISTS["menu" if name == "menu" else "gpus" if name.endswith("_cluster") else "cpus"]
        grid = menu() if name == "menu" else f"+sweep={name}"
        where = f"{LISTS['cluster']} {nodes} sweep.name={name} sweep.folder=frozen".split()
        planned = forked(command(["plan", "-m", grid, *where, "--no-predict"]), work)
        put(target / name / "plan.txt", planned)
        put(target / name / "submitted.txt", forked(command(["-m", grid, *where]), work))
        frozen(work / "frozen" / name, target / name, work, ids, code)
    for name in LISTS["planned_only"]:
        said = forked(partial(_planned, name, target / name / "planned.csv"), work)
        put(target / name / "planned.txt", said)
    for typed in LISTS["plans"]:
        put(target / f"{file_name(typed)}.txt", forked(command(typed.split()), work, 160))
    for path in sorted((work / "results").glob("sample/cells/*/cell.yaml")):
        ids[f"sample {' '.join(yaml.safe_load(path.read_text())['overrides'])}"] = path.parent.name
    for name, document in (("ids", ids), ("code", code)):
        put(target.parents[1] / f"{name}.json", json.dumps(document, indent=1))


def _planned(name: str, path: Path) -> None:
    import vitsweep

    table = vitsweep.plan(f"+sweep={name}")
    put(path, as_text(table) + f"detectable effect,{table.attrs.get('detectable_effect')}\n")


def frozen(store: Path, place: Path, work: Path, ids: dict[str, str], code: dict[str, Any]) -> None:
    """Write the cells of one sweep and its jobs, with cells named by their overrides."""
    cells: list[dict[str, Any]] = []
    typed: dict[str, list[str]] = {}
    for path in sorted(store.glob("cells/*/cell.yaml")):
        document = yaml.safe_load(path.read_text())
        document.pop("code", None)
        reason = path.with_name("record.json")
        if reason.exists():
            document["record"] = json.loads(reason.read_text()) | {"cell_id": None}
        own = [o for o in document["overrides"] if not o.startswith(("sweep.", "hydra"))]
        typed[document.pop("cell_id")] = own
        cells.append(without_modules(document))
    ids |= {f"{store.name} {' '.join(own)}": cell_id for cell_id, own in typed.items()}
    shared = set.intersection(*map(set, typed.values()))
    names = {k: " ".join(o for o in own if o not in shared) or "plain" for k, own in typed.items()}
    cells.sort(key=lambda d: str(d["overrides"]))
    put(place / "cells.yaml", masked(yaml.safe_dump_all(cells), work))
    lines = (store / "commands.jsonl").read_text().splitlines()
    text = masked(json.dumps([json.loads(line) for line in lines], indent=1), work)
    put(place / "commands.json", re.sub(r"\b[0-9a-f]{12}\b", lambda m: names.get(m[0], m[0]), text))
    jobs = []
    for array in (store / "jobs").glob("*/"):
        facts = json.loads((array / "array.json").read_text())
        tasks = [json.loads(line) for line in (array / "tasks.jsonl").read_text().splitlines()]
        [script] = [path.read_text() for path in array.glob("*submission.sh")]
        facts = {k: v for k, v in facts.items() if k not in ("time", "code", "minutes")}
        facts |= work_of(tasks, names)
        jobs.append(f"{json.dumps(facts, indent=1)}\n{script.replace(array.name, 'ARRAY')}")
        for task in tasks:
            for cell_id, cell in task["cells"].items():
                covered(cell["code_hash"], store, f"{store.name} {names[cell_id]}", code)
    put(place / "jobs.txt", masked("\n".join(sorted(jobs)), work))


def work_of(tasks: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, Any]:
    """Return what the jobs of an array run; their parts and the order in a block are drawn anew."""
    blocks = [
        [names[run["cell_id"]] for run in b["runs"]] for task in tasks for b in task["blocks"]
    ]
    cells = {
        names[cell_id]: dict(sorted(how["measurement"].items()))
        for task in tasks
        for cell_id, how in task["cells"].items()
    }
    return {
        "blocks": sorted(", ".join(sorted(b)) for b in blocks),
        "cells": dict(sorted(cells.items())),
    }


def without_modules(node: Any) -> Any:
    """Return a resolved tree with class names in `_target_`: a class that moves stays the same."""
    if isinstance(node, dict):
        return {
            k: str(v).rpartition(".")[2] if k == "_target_" else without_modules(v)
            for k, v in node.items()
        }
    return [without_modules(part) for part in node] if isinstance(node, list) else node


def covered(code_hash: str, store: Path, name: str, code: dict[str, Any]) -> None:
    """Note which functions and classes the code hash of a cell covers, wherever they stand."""
    if code_hash not in code["sets"]:
        files = json.loads((store / "code" / f"{code_hash}.json").read_text())
        code["sets"][code_hash] = sorted({d for f in files for d in definitions(ROOT / f)})
        code["sets"]["all"] = sorted(
            {d for f in (ROOT / "vitsweep").rglob("*.py") for d in definitions(f)}
        )
    code["cells"][name] = code_hash


def definitions(path: Path) -> Iterator[str]:
    """Yield the names of functions and classes of a source file; none of one that is elsewhere."""
    if path.suffix == ".py" and path.is_file():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield node.name


def help_texts(work: Path, target: Path) -> None:
    """Write the help of the command and of every verb."""
    verbs = [f"{verb} --help" for verb in LISTS["verbs"]]
    for typed in ("--help", "--version", *verbs):
        put(target / f"{file_name(typed)}.txt", forked(command(typed.split()), work))


def refused(work: Path, target: Path) -> None:
    """Write what is said to bad input."""
    for typed in LISTS["refused"]:
        said = forked(command(typed.split()), work, 100)
        put(target / f"{file_name(typed)}.txt", f"{typed}\n{said}")


PARTS = {
    "screens": screens,
    "tables": tables,
    "reports": reports,
    "sweeps": sweeps,
    "help": help_texts,
    "refused": refused,
    "measured": measured,
}
