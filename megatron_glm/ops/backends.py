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
from megatron_glm.config import Fp8Config, ModelConfig, RunConfig
from megatron_glm.config.fp8 import MULTIPLE
from megatron_glm.config.parameters import model_parameters
from megatron_glm.ops import dense_mla, indexer, indexer_loss, sparse_mla
from megatron_glm.ops.fp8_products import Fp8Products

MODULES = {"torch": (), "cudnn": ("cudnn", "cutlass", "flash_mla"), "tilelang": ("tilelang", "tvm_ffi", "z3")}
DENSE = "cudnn"  # dense rows run on cuDNN with either GPU backend
HOPPER = "a Hopper GPU"
TRANSFORMER_ENGINE = "transformer-engine[core_cu13,pytorch]==2.20.2"  # tested with torch 2.11


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


def check_fp8(config: RunConfig) -> None:
    """Raises ValueError where a GPU cannot compute the products in FP8 that this run asks for; a CPU can all."""
    fp8, model = config.fp8, config.model
    if not fp8.blockwise or not torch.cuda.is_available():
        return
    if not config.train.bf16:
        raise ValueError("--fp8 blockwise on a GPU computes the rest in bfloat16: give --bf16")
    tested = packages.suited()
    lacks = [] if find_spec("deep_gemm") else [f"{tested.packages['deep_gemm']} ({tested.install})"]
    if fp8.fp8_backend == "te" and not (find_spec("transformer_engine") and find_spec("transformer_engine_torch")):
        lacks.append(f"Transformer Engine (pip install --no-build-isolation '{TRANSFORMER_ENGINE}', built from source)")
    lacks += [] if torch.cuda.get_device_capability() == (9, 0) else [HOPPER]
    if lacks:
        raise ValueError(f"--fp8-backend {fp8.fp8_backend} cannot run here: it lacks {', '.join(lacks)}")
    ranks = config.parallel.context_parallel_size * config.parallel.tensor_model_parallel_size
    rows = config.train.micro_batch_size * config.data.seq_length // ranks
    if fp8.fp8_backend == "te" and rows % MULTIPLE:
        raise ValueError(
            f"--fp8-backend te takes multiples of {MULTIPLE} tokens, and --micro-batch-size x --seq-length over the "
            f"context- and tensor-parallel ranks is {rows}; --fp8-backend deepgemm takes any"
        )
    for parameter in model_parameters(model).values():
        if not fp8.computes(parameter, model.num_hidden_layers):
            continue
        ranks = config.parallel.tensor_model_parallel_size
        shape = list(parameter.shape)
        if parameter.tp_dim is not None:
            shape[parameter.tp_dim] //= ranks
        if any(size % MULTIPLE for size in shape[-2:]):
            raise ValueError(
                f"--fp8 blockwise on a GPU: {parameter.name} is {shape} on each of {ranks} tensor-parallel ranks, and "
                f"its rows and columns must be multiples of {MULTIPLE}; --num-layers-at-start-in-bf16 and "
                "--num-layers-at-end-in-bf16 leave layers out"
            )


def fp8_kernels(config: Fp8Config) -> str:
    """What computes the products in FP8, for the log."""
    if not torch.cuda.is_available():
        return "plain torch"
    return "te, experts by deepgemm" if config.fp8_backend == "te" else config.fp8_backend


def fp8_products(config: Fp8Config, part: str) -> Fp8Products:
    """What computes the products in FP8 of the weights of this part of the model (`Parameter.part`)."""
    weight_gradients = config.weight_gradients(experts=part == "experts")
    if not torch.cuda.is_available():
        return Fp8Products(weight_gradients)
    if config.fp8_backend == "te":
        from megatron_glm.ops.fp8_te import TransformerEngineProducts  # needs packages that a CPU has not

        return TransformerEngineProducts(weight_gradients)
    from megatron_glm.ops.fp8_deepgemm import DeepGemmProducts

    return DeepGemmProducts(weight_gradients)


def _choices(dense_rows: str) -> str:
    lacks = {name: lacking(name, dense_rows) for name in MODULES}
    return "; ".join(f"{name} lacks {', '.join(lack) if lack else 'nothing'}" for name, lack in lacks.items())


def _repair() -> str:
    """What differs from the set that was tested with this torch, and the command that installs it."""
    if differing := packages.differing(packages.suited()):
        return f"with torch {torch.__version__}, {', '.join(differing)}: {packages.repair()}"
    return "the packages are those tested with this torch; `python tools/doctor.py` shows what else is missing"
