"""The implementations of the attention ops (`--attention-backend`): what each needs, and the import of the chosen one.

The torch reference is always there. The others are imported by `load`, once, at start; an op that is called with a
backend that was not loaded fails.
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec

import torch

from megatron_glm import packages
from megatron_glm.config import ModelConfig
from megatron_glm.ops import dense_mla, indexer, indexer_loss, sparse_mla

MODULES = {"torch": (), "cudnn": ("cudnn", "cutlass", "flash_mla"), "tilelang": ("tilelang", "tvm_ffi", "z3")}
DENSE = "cudnn"  # dense rows run on cuDNN with either GPU backend
HOPPER = "a Hopper GPU"


def lacking(backend: str, dense_rows: str = "off") -> list[str]:
    """What `backend` needs and this machine does not have, in words; empty if it can run."""
    if backend == "torch":
        return []
    modules = MODULES[backend] + (() if dense_rows == "off" or backend == DENSE else (DENSE,))
    tested = packages.suited().packages
    missing = [tested[module] for module in modules if find_spec(module) is None]
    if refused_torch():
        missing.append(f"torch {' or '.join(entry.torch for entry in packages.SETS)} for CUDA {packages.CUDA}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        missing.append(HOPPER)
    return missing


def refused_torch() -> str | None:
    """Why this torch cannot run the GPU backends, with what to install; None if it can."""
    try:
        packages.gpu_set(torch.__version__, torch.version.cuda)
    except ValueError as error:
        return str(error)
    return None


def load(backend: str, dense_rows: str = "auto", deterministic: bool = False) -> None:
    """Import `backend` and enter its functions into the tables of the ops.

    Args:
        deterministic: the same bits of every gradient in every run; cudnn cannot.
    Raises:
        ValueError: if something is missing; it lists every choice and what that lacks.
    """
    if lacks := lacking(backend, dense_rows):
        install = refused_torch() or f"{packages.suited().install} installs the packages"
        hint = "" if lacks == [HOPPER] else f"; {install}"
        raise ValueError(f"--attention-backend {backend} cannot run here: {_choices(dense_rows)}{hint}")
    if backend == "torch":
        return
    if deterministic and backend == "cudnn":
        raise ValueError("--deterministic needs --attention-backend tilelang or torch: cuDNN sums gradients by atomics")
    try:
        module = importlib.import_module(f"megatron_glm.ops.{backend}")
        loss = importlib.import_module("megatron_glm.ops.triton.indexer_loss")
        dense = None if dense_rows == "off" else importlib.import_module("megatron_glm.ops.cudnn_dense")
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        raise ValueError(f"--attention-backend {backend}: its packages fail to import: {error}; {_repair()}") from error
    backward = getattr(module, f"sparse_mla_backward_{backend}")
    if deterministic:
        backward = functools.partial(backward, deterministic=True)
    indexer.BACKENDS[backend] = getattr(module, f"index_topk_{backend}")
    sparse_mla.BACKENDS[backend] = (getattr(module, f"sparse_mla_{backend}"), backward)
    teacher = module.attention_mass_cudnn if backend == "cudnn" else loss.attention_mass_triton
    student_backward = indexer_loss.student_backward_torch if deterministic else loss.student_backward_triton
    indexer_loss.BACKENDS[backend] = (teacher, loss.student_log_probs_triton, student_backward)
    if backend == "cudnn":
        indexer.PLANNED_ON_HOST.add(backend)
    if dense is not None:
        dense_mla.BACKENDS[backend] = (dense.dense_mla_cudnn, dense.dense_mla_backward_cudnn)


def check(backend: str, model: ModelConfig, tensor_parallel: int, selects: bool = True) -> None:
    """Raises ValueError where `backend` cannot serve the model's shape on `tensor_parallel` ranks.

    selects: whether keys are selected, by the indexer, in any row.
    """
    if backend == "torch":
        return
    served = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    served |= {"index_head_dim": 128, "index_n_heads": 32} if selects else {}
    for name, size in served.items():
        if getattr(model, name) != size:
            raise ValueError(
                f"--attention-backend {backend} serves {name} {size}, not {getattr(model, name)}; torch serves any"
            )
    heads = model.num_attention_heads // tensor_parallel
    if heads > 128 or (selects and model.index_topk > 2048):
        raise ValueError(
            f"--attention-backend {backend} serves up to 128 heads a rank and index_topk 2048, not {heads} heads and "
            f"{model.index_topk}; torch serves any"
        )


def _choices(dense_rows: str) -> str:
    lacks = {name: lacking(name, dense_rows) for name in MODULES}
    return "; ".join(f"{name} lacks {', '.join(lack) if lack else 'nothing'}" for name, lack in lacks.items())


def _repair() -> str:
    """What differs from the set that was tested with this torch, and the command that installs it."""
    if differing := packages.differing(packages.suited()):
        return f"with torch {torch.__version__}, {', '.join(differing)}: {packages.repair()}"
    return "the packages are those tested with this torch; `python tools/doctor.py` shows what else is missing"
