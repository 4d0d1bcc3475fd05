"""Sweeps: what a job of `--multirun` leaves in its folder, and the table and the picture that are made of all of them.

The command line runs jobs through `job`, Hydra calls `callback` in the parent process before and after them, and
`python -m framework.sweep DIR` does the work at the end again. No engine is known here.
"""
