# Not installed where types are checked: anything may be in it.
from typing import Any

def __getattr__(name: str) -> Any: ...
