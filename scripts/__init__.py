"""Commands: python -m scripts.NAME. Ctrl-C while one of them is imported ends it quietly."""

import sys


def _without_traceback(kind, error, traceback) -> None:
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _without_traceback
