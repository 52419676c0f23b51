"""`vitsweep plan`: what a sweep would run, need and take. Nothing is trained."""

import shlex
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from vitsweep.api.session import NotOursError
from vitsweep.cli.as_json import print_json
from vitsweep.cli.cells import read_line
from vitsweep.cli.verbs import VERBS, Options, require_writable
from vitsweep.errors import BadValueError, ExitCode
from vitsweep.rates.profile import profile_named
from vitsweep.spec.resources import Machine


def add_options(options: Options) -> None:
    """Add what may follow the verb; overrides themselves are read by Hydra."""
    _add_own(options)
    options.add_argument(
        "overrides",
        nargs="*",
        metavar="override",
        help="as for the sweep: `python -m vitsweep show GROUP` lists the choices",
    )


def run(arguments: Sequence[str]) -> int:
    """List the cells; return 0, or 2 where every cell is invalid.

    Raises:
        BadValueError: an option has a wrong value.
    """
    if {"-h", "--help"} & set(arguments):
        VERBS["plan"].parser().print_help()
        return 0
    options = Options(VERBS["plan"])
    _add_own(options)
    known, words = options.parse_known_args(list(arguments))
    for option, file in (("--parquet", known.parquet), ("--html", known.html)):
        if file is not None:
            require_writable(option, file)
    if known.nodes is not None:
        words.append(f"resources.nodes={_nodes(known.nodes)}")
    if known.stack:
        words.append("+sweep=best_stack")
    line = read_line(["--multirun", *words])
    if line.of_hydra.startswith("-"):
        return _show_through_hydra(line.of_hydra, words, options)
    try:
        session = line.session(_smallest(_parts(known.hardware)))
    except NotOursError as error:
        raise BadValueError(
            f"`plan` needs a launcher of vitsweep, such as `hydra/launcher=local`; not `{error.choice}`."
        ) from error
    from vitsweep.api.plan import PlanRequest, plan

    rows = plan(
        session,
        PlanRequest(
            predict=not known.no_predict,
            hardware=_parts(known.hardware),
            columns=_parts(known.columns),
            parquet=known.parquet,
            html=known.html,
        ),
    )
    if known.stack:
        _propose(rows)
    if known.json:
        print_json(sweep=session.settings.name, cells=rows)
    return ExitCode.bad_input if all(row["state"] == "invalid" for row in rows) else ExitCode.ok


def _smallest(hardware: Sequence[str]) -> Machine | None:
    """Return a node of the device with the least memory, whose sizes all plans have; None for none."""
    from vitsweep.api.plan import machine_with

    nodes = [machine_with(profile_named(name)) for name in hardware]
    return min(nodes, key=lambda node: node.least_gib or inf, default=None)


def _propose(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the command of the combination of the shortest predicted step, the later one of equals."""
    own = [row for row in rows if not row["is_baseline"]]
    possible = [row for row in own if row["state"] in ("runnable", "measured")]
    if not possible:
        return
    best = min(reversed(possible), key=lambda row: row.get("step_time_ms") or inf)
    words = [word for word in best["overrides"] if not word.lstrip("+").startswith("sweep")]
    print(f"Proposed: python -m vitsweep {shlex.join(words)}")


def _show_through_hydra(flag: str, words: Sequence[str], options: Options) -> int:
    """Let Hydra show a configuration; refuse flags that neither it nor `plan` knows."""
    from vitsweep.cli.hydra_detour import HYDRA_SHOWS, run_hydra

    if not flag.startswith(("--config-", "--package", "--resolve", *HYDRA_SHOWS)):
        options.error(f"unrecognized arguments: {flag}")
    return run_hydra(words)


def _add_own(options: Options) -> None:
    options.flag("-m", "--multirun", help="as in the sweep; always implied")
    options.add_argument(
        "--hardware", metavar="A,B", help="plan for nodes of these GPUs, or profile files"
    )
    options.flag("--stack", help="propose the best combination, as `+sweep=best_stack`")
    options.add_argument("--nodes", metavar="N,M", help="the same as `resources.nodes=N,M`")
    options.add_argument(
        "--columns", metavar="A,B|all", help="columns of the table; `all` lists them for each cell"
    )
    options.add_argument("--parquet", type=Path, metavar="FILE", help="write all columns to it")
    options.add_argument("--html", type=Path, metavar="FILE", help="write a page")
    options.flag("--no-predict", help="states only, without memory and step time")
    options.add_json()


def _parts(text: str | None) -> tuple[str, ...]:
    """Return the parts of a list, each once."""
    parts = (part.strip() for part in (text or "").split(","))
    return tuple(dict.fromkeys(part for part in parts if part))


def _nodes(text: str) -> str:
    parts = _parts(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BadValueError(
            f"`--nodes {text}` must be whole numbers from 1 on, such as `--nodes 1,8`."
        )
    return ",".join(parts)
