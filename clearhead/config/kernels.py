"""Names of the attention kernels, read from attention.py, whose import takes a second (torch)."""

import ast

from clearhead.files import REPOSITORY


def _assigned(name: str) -> ast.expr:
    """Returns the expression that attention.py assigns to a name."""
    tree = ast.parse((REPOSITORY / "attention.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    return next(node.value for node in assigned if node.target.id == name)


KERNEL_NAMES = tuple(key.value for key in _assigned("KERNELS").keys)
NO_DROPOUT = ast.literal_eval(_assigned("NO_DROPOUT"))
