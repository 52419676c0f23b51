"""The process that Slurm starts on every node of a job.

On the first node the same command is also the job's coordinator, with the agent as its child.
"""

import os
import sys
from pathlib import Path

from vitsweep.errors import VitsweepError
from vitsweep.job_environment import slurm_task
from vitsweep.launchers.nodes.agent import ignore_signals, run_agent
from vitsweep.launchers.slurm.node.coordinator import (
    NOT_STARTED,
    JobEnvironment,
    coordinate,
    refuse,
)
from vitsweep.launchers.slurm.state.jobs import JobArray


def main(folder: Path, digest: str) -> int:
    """Do this node's part of a job of the array in `folder`; return the exit code.

    Args:
        folder: of the array.
        digest: of its work, as it was submitted.
    """
    env = JobEnvironment(**slurm_task())
    array = JobArray(folder)
    try:
        work = array.work(digest)
    except VitsweepError as error:
        print(error, file=sys.stderr)
        if not env.node_index:
            refuse(env, array, str(error))
        return NOT_STARTED
    ignore_signals()
    job, key = array.job(env.index, work), env.key(work.secret)
    if env.node_index or os.fork() == 0:
        return run_agent(env.node_index, env.addresses, lambda: key)
    return coordinate(env, job, key)


if __name__ == "__main__":
    array, digest, place, own = [*sys.argv[1:], "", "", ""][:4]
    if own:  # where the command had it, but that the code of the jobs, on PYTHONPATH, comes before
        sys.path.insert(1 if place == "first" else len(sys.path), own)
    code = main(Path(array), digest)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no exit handler may hold up the end of a job
