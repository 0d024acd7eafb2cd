"""What attention.py and model.py declare, read without importing torch, which takes a second."""

import ast
from dataclasses import dataclass
from typing import Any

from clearhead.files import REPOSITORY


def _declarations(file: str) -> dict[str, Any]:
    """Returns the classes and the annotated values of a file as syntax trees, by name."""
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    values = {node.target.id: node.value for node in tree.body if isinstance(node, ast.AnnAssign)}
    return values | {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


_attention = _declarations("attention.py")
KERNEL_NAMES = tuple(key.value for key in _attention["KERNELS"].keys)
NO_DROPOUT = ast.literal_eval(_attention["NO_DROPOUT"])
_model_config = ast.Module([_declarations("model.py")["ModelConfig"]], [])
_names = {"dataclass": dataclass}
exec(compile(_model_config, "model.py", "exec"), _names)
ModelConfig: Any = _names["ModelConfig"]
