"""Multiprocessors of a GPU that matrix products leave to communication."""

from __future__ import annotations

import os

import torch

from megatron_glm.torch_private import private

# Grouped products plan a program for each multiprocessor they may use, all of the same length: where one is taken by a
# kernel of NCCL, a second round of programs begins, and the product takes up to 1.8 times as long.
plan_with_fewer = private(__name__, "torch._C._set_sm_carveout_experimental")


def leave_free(count: int, fp8: bool) -> None:
    """Plans the products of this process with `count` fewer multiprocessors, and NCCL with no more than these.

    NCCL's limit is the variable NCCL_MAX_CTAS, unless it is set; it holds for communicators that are made later.
    fp8: DeepGEMM's products, too.
    """
    os.environ.setdefault("NCCL_MAX_CTAS", str(count))
    plan_with_fewer(count)
    if fp8:
        import deep_gemm  # one of the optional packages

        deep_gemm.set_num_sms(torch.cuda.get_device_properties().multi_processor_count - count)
