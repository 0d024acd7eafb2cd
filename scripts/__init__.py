"""Commands: python -m scripts.NAME. Ctrl-C during the imports of a command prints no traceback."""

import sys


def _without_traceback(kind, error, traceback) -> None:
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _without_traceback
