"""Training runs. train.py has the training loop."""

import time

STARTED = time.monotonic()  # when the process started: train.py imports this package first
