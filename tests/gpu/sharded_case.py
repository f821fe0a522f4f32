"""--data-parallel-sharding slabs and whole weights, on one GPU: torchrun … sharded_case.py BACKEND FILE.

One process with nccl is made to share its weights with nobody; two with gloo share the GPU. In a second pass each
transfer begins late, and each layer takes long: a wait that is missing then shows in the losses.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_glm.config import LossConfig, ParallelConfig
from megatron_glm.model.layer import DecoderLayer
from megatron_glm.parallel import sharded, streams
from tests.gpu.nccl_layouts import gathers_while_busy
from tests.parity.layouts import parity_model, run_config, train

SLABS = {"data_parallel_sharding": "slabs"}
KEPT = {"reshard_after_forward": False, "reshard_experts_after_forward": False}
CASES = {
    "resharded": {},
    "kept": KEPT,
    "full recompute": {"recompute_granularity": "full"},
    "reduced every time": {"grad_sync": "every"},
}
CYCLES = 3_000_000  # about two milliseconds


def trained(settings: dict, bf16: bool):
    # In bf16 rounding would flip selections, and with them the loss: nothing is left to choose there.
    model = parity_model(4, index_topk=64, num_experts_per_tok=8) if bf16 else parity_model(4)
    config = run_config(model, ParallelConfig(**settings), packs=8, seed=0)
    return train(replace(config, train=replace(config.train, bf16=bf16), losses=LossConfig(2)), copies_agree=False)


class LateTransfer(streams.Transfer):
    def __init__(self, device, issue, finish, after=None) -> None:
        def late(asynchronous: bool):
            torch.cuda._sleep(CYCLES)
            return issue(asynchronous)

        super().__init__(device, late, finish, after)


def slowly(settings: dict):
    """The same, but every transfer starts late, and every layer is behind its work."""
    forward = DecoderLayer._run

    def slow(self, *args):
        torch.cuda._sleep(CYCLES)
        return forward(self, *args)

    with patch.object(sharded, "Transfer", LateTransfer), patch.object(DecoderLayer, "_run", slow):
        return trained(settings, bf16=True)


def main(backend: str, file: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    results = {}
    if alone := dist.get_world_size() == 1:
        results |= {("whole", name, bf16): trained(CASES[name], bf16) for name in CASES for bf16 in (False, True)}
    with patch.object(sharded, "holds_whole", lambda group: group.size() == 1 and not alone):
        for name, settings in CASES.items():
            for bf16 in (False, True):
                results["slabs", name, bf16] = trained(settings | SLABS, bf16)
            results["slowly", name, True] = slowly(settings | SLABS)
            torch.cuda.synchronize()
        if alone:  # gloo waits on the host
            results["gathers while busy"] = [
                gathers_while_busy(ahead, ParallelConfig(**SLABS)) for ahead in (False, True)
            ]
    if dist.get_rank() == 0:
        torch.save(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
