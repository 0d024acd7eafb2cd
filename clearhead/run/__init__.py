"""A training run: how it starts, its components, and when it stops.

start.py             decides how a run starts, and completes its config
build.py             builds the components of a run
run.py               the components as one dataclass
stop.py              how far a run is, and when it stops; time_limit.py, signals.py
evaluation.py        validation and text samples; lens_runner.py: attention snapshots
tokenizer.py         the tokenizer of a run; prompts.py, init_from.py: prompts and initial weights
translate_errors.py  errors of torch as errors with a message for users
"""
