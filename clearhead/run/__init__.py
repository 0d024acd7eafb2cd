"""A training run: how it starts, its components, and when it stops.

start.py        decides how a run starts, and completes its config
build.py        builds the components of a run
run.py          the components as one dataclass
evaluation.py   validation and text samples
lens_runner.py  attention snapshots, and prompts that are not given
tokenizer.py    the tokenizer of a run
stop.py         how far a run is, and when it stops: steps, time limit
signals.py      signals that stop a run
"""
