# Not installed where types are checked, and `ops/tilelang` has its name: anything may be in it.
from typing import Any

def __getattr__(name: str) -> Any: ...
