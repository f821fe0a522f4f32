"""What this rank sends: every collective by its group and operation, whatever the backend of the groups."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Key(NamedTuple):
    ranks: tuple[int, ...]  # of the group
    operation: str
    on_host: bool


class Messages:
    """calls and bytes by `Key`; a ring's all-gathers and reduce-scatters send (n - 1) / n of the whole."""

    def __init__(self) -> None:
        self.calls: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()

    def note(self, group: ProcessGroup, operation: str, tensor: Tensor, sent: float) -> None:
        key = Key(tuple(dist.get_process_group_ranks(group)), operation, not tensor.is_cuda)
        self.calls[key] += 1
        self.bytes[key] += round(sent)


def _of_tensor(tensor: Tensor | list, n: int, share: float) -> tuple[Tensor, float]:
    first = tensor[0] if isinstance(tensor, list) else tensor
    return first, share * first.nbytes


def _all_to_all(
    group: ProcessGroup, output: Tensor, tensor: Tensor, received: list, sent: list, *_
) -> tuple[Tensor, float]:
    rows = sent or [len(tensor) // group.size()] * group.size()
    away = sum(rows) - rows[group.rank()]
    return tensor, away * tensor.nbytes / max(len(tensor), 1)


# method of a group -> (operation, what it sends); several names of torch's versions for the same
_ROUND = {
    "allreduce": ("all-reduce", lambda g, x, *_: _of_tensor(x, g.size(), 2 * (g.size() - 1) / g.size())),
    "allgather": ("all-gather", lambda g, _, x, *__: _of_tensor(x, g.size(), g.size() - 1)),
    "_allgather_base": ("all-gather", lambda g, _, x, *__: _of_tensor(x, g.size(), g.size() - 1)),
    "_reduce_scatter_base": ("reduce-scatter", lambda g, _, x, *__: _of_tensor(x, g.size(), (g.size() - 1) / g.size())),
    "alltoall_base": ("all-to-all", _all_to_all),
    "send": ("send", lambda g, x, *_: _of_tensor(x, g.size(), 1)),
}
_NAMES = {"_allgather_base": "all_gather_single", "_reduce_scatter_base": "reduce_scatter_single"}
_NAMES |= {"alltoall_base": "all_to_all_single"}
METHODS = _ROUND | {_NAMES[name]: _ROUND[name] for name in _NAMES}


@contextmanager
def counted(kind: type[ProcessGroup]) -> Iterator[Messages]:
    """The messages that groups of this class send within the context; groups of one rank send none."""
    found = Messages()

    def counting(method: Callable, operation: str, sends: Callable) -> Callable:
        @functools.wraps(method)
        def call(group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
            if group.size() > 1:
                found.note(group, operation, *sends(group, *arguments))
            return method(group, *arguments, **named)

        return call

    with ExitStack() as stack:
        for name, (operation, sends) in METHODS.items():
            if (method := getattr(kind, name, None)) is not None:
                stack.enter_context(mock.patch.object(kind, name, counting(method, operation, sends)))
        yield found
