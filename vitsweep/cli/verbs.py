"""What may be typed after each verb: one parser each, which the shell's completion reads too."""

from vitsweep.cli.compare_options import compare_parser
from vitsweep.cli.gate_options import gate_parser
from vitsweep.cli.options import Options

DESCRIPTIONS = {
    "plan": "Show what a sweep would run, what is invalid and why, what is known. Nothing is trained.",
    "report": "Write the tables, the charts and the HTML page of a sweep.",
    "collect": "Write the parquet and CSV files of a sweep anew and show its table.",
    "status": "Show the jobs and cells of a submitted sweep, from any terminal.",
    "cancel": "End the jobs of a sweep; what was measured stays.",
    "doctor": "Say what this machine can do, what is missing, and how to get it.",
}
"""What a verb does; those with a file of options say it there."""

VERBS = (*DESCRIPTIONS, "retry", "compare", "gate")
OF_A_SWEEP = ("report", "collect", "status", "cancel", "retry", "gate")


def parser_of(verb: str) -> Options:
    """Return the parser of what follows a verb."""
    if verb == "compare":
        return compare_parser()
    if verb == "gate":
        return gate_parser()
    if verb == "retry":
        from vitsweep.cli.retry_options import retry_parser  # brings pandas, with `Status`

        return retry_parser()
    parser = Options(verb, DESCRIPTIONS[verb])
    if verb == "plan":
        parser.add_argument(
            "-m", "--multirun", action="store_true", help="as in the sweep; implied"
        )
        parser.add_argument(
            "overrides",
            nargs="*",
            metavar="override",
            help="what the sweep says: `python -m vitsweep --help` has the menu",
        )
    if verb in OF_A_SWEEP:
        parser.add_sweep()
    if verb == "status":
        parser.add_argument("--watch", action="store_true", help="until nothing runs any more")
    if verb == "collect":
        parser.add_argument("--sync", action="store_true", help="upload its W&B runs")
    return parser
