"""Names of torch that are not part of its interface and may change with any release: every use in the package is here.

A file that needs some asks for them when it is imported, so that another torch fails at start, by name, and not in the
middle of a step.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron_glm import packages


def private(user: str, *names: str) -> Any:
    """What the dotted names stand for, in a list; of a single name, the thing itself.

    Args:
        user: the file that needs them, its `__name__`.
        names: as in "torch._utils._flatten_dense_tensors". The last part of "…FSDPParam._unsharded_param" may be an
            attribute that only the instances of the class have; it stands for None then.
    Raises:
        ImportError: this torch lacks one: names the file, the name, this torch and those that were tested.
    """
    found = [_find(user, name) for name in names]
    return found if len(found) > 1 else found[0]


def _find(user: str, name: str) -> Any:
    parts = name.split(".")
    try:
        for length in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:length]))
                break
            except ModuleNotFoundError as error:
                if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                    raise
        else:
            raise AttributeError(name)
        for part in parts[length:]:
            found = None if _of_instances(found, part) else getattr(found, part)
        return found
    except AttributeError as error:
        torch = importlib.import_module("torch")
        tested = ", ".join(sorted({packages.CPU_TORCH, *(entry.torch for entry in packages.SETS)}))
        file = f"{user.replace('.', '/')}.py"
        raise ImportError(
            f"{file} needs {name}, which torch {torch.__version__} lacks; tested: torch {tested}"
        ) from error


def _of_instances(owner: Any, name: str) -> bool:
    """Whether a class has no such attribute itself, but declares it or uses it in its methods."""
    if not isinstance(owner, type) or hasattr(owner, name):
        return False
    classes = owner.__mro__
    codes = [getattr(value, "__code__", None) for entry in classes for value in vars(entry).values()]
    declared = any(name in vars(entry).get("__annotations__", {}) for entry in classes)
    return declared or any(name in code.co_names for code in codes if code is not None)
