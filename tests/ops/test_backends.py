"""The choice of the attention backend: at start, by flag, with the reasons where it cannot run."""

from __future__ import annotations

import dataclasses
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_glm import packages
from megatron_glm.config import (
    DataConfig,
    KernelConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from megatron_glm.config import flags as arguments
from megatron_glm.ops import backends, indexer, multiprocessors
from megatron_glm.ops.indexer import key_segments
from megatron_glm.training.initialize import choose_backend

GPU_MODULES = ("cudnn", "flash_mla", "cutlass", "tilelang", "megatron_glm.ops.cudnn", "megatron_glm.ops.cudnn_dense")


def run_config(**kernels) -> RunConfig:
    return RunConfig(
        model=ModelConfig.from_hf("glm5.2"),
        kernels=KernelConfig(**kernels),
        data=DataConfig(data_path=("x.jsonl",)),
        train=TrainConfig(train_iters=1, bf16=True),
    )


@pytest.mark.parametrize("backend", ["cudnn", "tilelang"])
def test_a_backend_that_cannot_run_is_refused_with_every_choice(backend, monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda module: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(indexer, "BACKENDS", {"torch": indexer.BACKENDS["torch"]})
    with pytest.raises(ValueError, match=f"--attention-backend {backend} cannot run here") as caught:
        backends.load(backend)
    message = str(caught.value)
    assert "torch lacks nothing" in message and "a Hopper GPU" in message
    for name in (packages.suited().packages["flash_mla"], "nvidia-cudnn-frontend", "tilelang lacks"):
        assert name in message
    assert backend not in indexer.BACKENDS


def test_packages_of_other_backends_are_not_imported():
    backends.load("torch")
    assert not [name for name in GPU_MODULES if name in sys.modules] or torch.cuda.is_available()


def test_only_dense_rows_make_tilelang_need_cudnn(monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda module: None if module == "cudnn" else object())
    frontend = packages.SHARED["cudnn"]
    assert frontend in backends.lacking("tilelang", "auto") and frontend in backends.lacking("cudnn", "off")
    assert frontend not in backends.lacking("tilelang", "off")


def test_a_broken_package_is_named(monkeypatch):
    def fail(name: str):
        raise ImportError("libcudnn.so.9 not found")

    monkeypatch.setattr(backends, "lacking", lambda *_: [])
    monkeypatch.setattr(backends.importlib, "import_module", fail)
    with pytest.raises(ValueError, match="fail to import: libcudnn.so.9 not found"):
        backends.load("cudnn")
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    monkeypatch.setattr(packages, "installed_torch", lambda: ("2.14.1+cu130", "13.0"))
    monkeypatch.setattr(packages, "holders", lambda chosen: {"flash_mla": ["pytest"]})
    with pytest.raises(ValueError) as caught:
        backends.load("cudnn")
    assert f"pytest=={pytest.__version__} is installed where sgl-flash-mla==1.0.0 was tested" in str(caught.value)
    assert str(caught.value).endswith("pip uninstall -y pytest && pip install -e '.[gpu-torch214]'")


def test_a_torch_outside_the_table_is_refused_by_name(monkeypatch):
    """On a Hopper GPU, with every package there."""
    monkeypatch.setattr(backends, "find_spec", lambda module: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match=r"torch 2.15.0\+cu130.*pip install -e '.\[gpu\]'"):
        backends.load("tilelang")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert backends.lacking("tilelang") == []


@pytest.mark.parametrize(
    "gpu, given, chosen",
    [
        (False, "--bf16", "torch"),
        (True, "--bf16", "cudnn"),
        (True, "", "torch"),  # its kernels compute in bf16 only
        (True, "--bf16 --attention-backend torch", "torch"),
    ],
)
def test_the_flag_decides_and_its_default_follows_the_machine(monkeypatch, gpu, given, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    flags = ["--hf-config", "glm5.2", *given.split()]
    config = choose_backend(arguments.resolve(arguments.build_parser().parse_args(flags)))
    assert config.kernels.attention_backend == chosen


@pytest.mark.parametrize("field, size", [("kv_lora_rank", 256), ("index_head_dim", 64), ("index_topk", 4096)])
def test_shapes_that_the_kernels_do_not_serve_are_refused_at_start(field, size):
    model = dataclasses.replace(ModelConfig.from_hf("glm5.2"), **{field: size})
    backends.check("torch", model, 1)
    with pytest.raises(ValueError, match=f"--attention-backend cudnn.*{size}"):
        backends.check("cudnn", model, 1)
    backends.check("cudnn", ModelConfig.from_hf("glm5.2"), 8)


def test_fp32_runs_need_the_reference():
    config = dataclasses.replace(run_config(attention_backend="cudnn"), train=TrainConfig(train_iters=1))
    with pytest.raises(ValueError, match="give --bf16, or --attention-backend torch"):
        config.check(8)


@pytest.mark.parametrize(
    "backend, cp, length, flag, used",
    [
        ("torch", 2, 64, "auto", "auto"),
        ("cudnn", 1, 64, "auto", "auto"),
        ("cudnn", 2, 4096, "auto", "off"),
        ("cudnn", 2, 8192, "auto", "short"),
        ("cudnn", 1, 64, "off", "off"),
    ],
)
def test_dense_rows_are_used_where_they_are_faster(backend, cp, length, flag, used):
    config = run_config(attention_backend=backend, dense_rows=flag)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_length=length))
    config = dataclasses.replace(config, parallel=ParallelConfig(context_parallel_size=cp))
    assert config.dense_rows == used


def test_key_segments_are_the_runs_of_rows_that_see_one_key_more():
    start = torch.tensor([0, 0, 0, 7, 5, 5, 5, 9, 9, 0])
    end = torch.tensor([1, 2, 3, 7, 6, 7, 9, 10, 11, 0])
    expected = [(0, 3, 0, 3), (4, 6, 5, 7), (6, 7, 5, 9), (7, 9, 9, 11)]
    assert key_segments(start.int(), end.int()) == [x for segment in expected for x in segment]
    assert key_segments(start[:0], end[:0]) == [] and key_segments(start[-1:], end[-1:]) == []


def test_dense_attention_has_no_limit_of_the_selection():
    model = dataclasses.replace(ModelConfig.from_hf("glm5.2"), index_topk=4096, index_n_heads=8)
    with pytest.raises(ValueError, match="index_n_heads"):
        backends.check("cudnn", model, 1)
    backends.check("cudnn", model, 1, selects=False)


@pytest.mark.parametrize("limit", [None, "4"])
def test_products_and_nccl_share_the_multiprocessors(monkeypatch, limit):
    """132 on an H200. A limit that is set for NCCL stays."""
    seen, device = [], SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(multiprocessors, "plan_with_fewer", seen.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(set_num_sms=seen.append))
    monkeypatch.setenv("NCCL_MAX_CTAS", limit or "")
    if limit is None:
        monkeypatch.delenv("NCCL_MAX_CTAS")
    multiprocessors.leave_free(8, fp8=False)
    multiprocessors.leave_free(8, fp8=True)
    assert seen == [8, 8, 124] and os.environ["NCCL_MAX_CTAS"] == (limit or "8")
