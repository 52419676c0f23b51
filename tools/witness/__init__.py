"""Everything that the product shows, written to text files before and after a change that must keep it.

    python -m tools.witness record FOLDER [PART ...]
    python -m tools.witness compare BEFORE AFTER [--explained FILE]

`record` drives the code of the tree in which it is typed, mostly through the command line and `import
vitsweep`; tables that have no verb are called as `lists.yaml` says. It writes

- `strict/screens`: what commands on finished sweeps print, at 60, 80 and 160 columns
- `strict/tables`, `strict/reports`: tables; the text and the figures of reports, and all other files
- `strict/sweeps`: frozen specs, batch scripts, jobs and plans of named sweeps and of every choice of `conf/`
- `strict/help`, `strict/refused`: help of each verb; messages and exit codes of bad input
- `ids.json`: sweep and overrides -> id of the cell; `code.json`: what the code hash of a cell covers
- `measured`: calls of functions, files entered, modules imported, seconds, lines

`compare` prints what differs in the parts that AFTER has, and exits with 1 if anything under `strict` does.
Where ids changed, cells are told by sweep and overrides. Intended differences stand in a JSON file:
`[{"files": "help/*", "find": REGEX, "put": TEXT, "why": SENTENCE}]`, applied to the texts before.

Run both recordings with the Python whose site-packages hold torch: the code hash of a cell covers what is
not installed.
"""
