"""Environment variables of the ranks of a cell, and which names nobody may set there."""

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
REFUSED = {
    r"VITSWEEP_\w*|KINETO_LOG_LEVEL": "vitsweep sets it",
    r"\w*(OMP|MKL|OPENBLAS)_NUM_THREADS": "`resources.threads_per_rank` sets it",
    r"\w+_VISIBLE_DEVICES": "`resources` and the launcher say which devices a rank has",
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w*"
    r"|TORCHRUN_\w*|(SLURM|SLURMD|SBATCH|SRUN|PMI|PMIX|OMPI|FLUX|PBS|LSB)_\w*": "the launcher sets it",
    r"LD_\w*|GLIBC_TUNABLES|BASH_ENV|ENV|IFS": "it loads code into every process: put it before the command",
    r"PYTHON\w*|PATH|HOME|TMPDIR|XDG_\w*|USER|SHELL": "it says which code and files a rank finds",
    r"(\w*_)?(TOKEN|SECRET|PASSWORD|KEY)": "a secret would stand in every record",
}
"""Pattern of names -> why a cell cannot set them."""


def _texts(value: Any) -> Any:
    """Write whole numbers as the text that a shell would pass."""
    if not isinstance(value, dict):
        return value
    return {k: str(v) if type(v) is int else v for k, v in value.items()}


def _allowed(variables: dict[str, str]) -> dict[str, str]:
    problems = [problem for pair in variables.items() if (problem := _problem(*pair))]
    if problems or not variables:
        text = "; ".join(problems) or "names no variable: use null"
        raise PydanticCustomError("variables", "{text}", {"text": text})  # a brace in it is text
    return variables


def _problem(name: str, value: Any) -> str:
    if not NAME.fullmatch(name):
        return f"{json.dumps(name)} is no name of a variable"
    for pattern, why in REFUSED.items():
        if re.fullmatch(pattern, name, re.ASCII | re.IGNORECASE):
            return f"`{name}` cannot be set for a cell: {why}"
    if not isinstance(value, str):
        return f"the value of `{name}` must be a text: put it into quotes, as in `{name}:'1.0'`"
    if not value.isprintable():
        return f"the value of `{name}` must be one line of printable characters"
    return ""


Variables = Annotated[dict[str, Any], BeforeValidator(_texts), AfterValidator(_allowed)]
"""Name -> value, both as a shell passes them."""
