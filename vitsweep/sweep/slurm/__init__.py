"""Sweeps on a cluster: submitted as job arrays, watched and settled from any terminal.

`launch` submits; in the job `lead` drives one `agent` per node, which forks the `ranks` of each run.
"""
