"""How the steps of the ladder print their explanation, their code and their tensors."""

import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WORDS = ["The", "old", "ferry", "bell", "rang", "twice"]  # the tokens of the first window


def step(number: int, *classes: type) -> Callable:
    """Returns a decorator: a step prints its docstring, its classes and its code, then runs."""

    def decorate(run: Callable) -> Callable:
        @functools.wraps(run)
        def explained(*arguments):
            print_docstring(f"{'=' * 80}\nStep {number}", run)
            print_code(*map(inspect.getsource, classes), body(run))
            return run(*arguments)

        return explained

    return decorate


def print_docstring(number: str, function: Callable) -> None:
    title, _, explanation = (inspect.getdoc(function) or "").partition("\n")
    print(f"{number}: {title.rstrip('.')}\n{explanation}\n")


def body(function: Callable) -> str:
    """Returns the code of a function below its docstring."""
    return textwrap.dedent(inspect.getsource(function).split('"""\n', 2)[-1])


def print_code(*parts: str) -> None:
    print("\n".join(f"| {line}".rstrip() for line in "\n\n".join(parts).splitlines()), end="\n\n")


def show(name: str, tensor: Tensor, columns: Sequence = (), rows: Sequence = WORDS) -> None:
    """Prints a tensor with its name and shape, a line for each row, one matrix after another."""
    print(f"{name} {tuple(tensor.shape)}")
    if columns:
        print(" " * 10 + "".join(f"{word:>9}" for word in columns))
    matrix = tensor.reshape(-1, tensor.shape[-1])
    for i, row in enumerate(matrix.tolist()):
        if tensor.dim() > 2 and i % tensor.shape[-2] == 0:
            print(f"  [{i // tensor.shape[-2]}]")
        print(f"{rows[i % len(rows)]:<10}" + "".join(f"{number:9.4f}" for number in row))
    print()


def show_equal(name: str, tensor: Tensor, other: Tensor) -> None:
    """Prints whether two tensors are equal up to rounding."""
    print(f"{name}: {torch.allclose(tensor, other, atol=1e-6)}\n")
