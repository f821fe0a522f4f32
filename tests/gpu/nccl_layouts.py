"""Trains every layout that fits the ranks it is started on and saves what came out: torchrun … nccl_layouts.py FILE."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version

from megatron_glm.config import ParallelConfig
from megatron_glm.parallel import streams
from megatron_glm.parallel.fsdp import gather_ahead, record_change, shard_chunk
from megatron_glm.parallel.groups import ParallelGroups
from tests.parity.layouts import parity_model, run_config, train

FEW = "dp2 with one expert"  # which the ranks share along another dim
LAYOUTS = {
    1: {"one": ParallelConfig(), FEW: ParallelConfig()},
    2: {
        "dp2": ParallelConfig(),
        "dp2 reduced every time": ParallelConfig(grad_sync="every"),
        "dp2 kept": ParallelConfig(reshard_after_forward=False, reshard_experts_after_forward=False),
        "tp2": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
        "cp2": ParallelConfig(context_parallel_size=2),
        "ep2": ParallelConfig(expert_model_parallel_size=2),
        "ep2 allgather": ParallelConfig(expert_model_parallel_size=2, moe_token_dispatcher_type="allgather"),
        "pp2": ParallelConfig(pipeline_model_parallel_size=2),
        "pp2 vp2": ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1),
        FEW: ParallelConfig(),
        "dp2 slabs": ParallelConfig(data_parallel_sharding="slabs"),
        "ep2 slabs reduced every time": ParallelConfig(
            expert_model_parallel_size=2, data_parallel_sharding="slabs", grad_sync="every"
        ),
    },
    4: {
        "pp2 ep2": ParallelConfig(pipeline_model_parallel_size=2, expert_model_parallel_size=2),
        "tp2 pp2 vp2": ParallelConfig(
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            pipeline_model_parallel_size=2,
            num_layers_per_virtual_pipeline_stage=1,
        ),
        "cp2 ep4": ParallelConfig(context_parallel_size=2, expert_model_parallel_size=4),
        "pp4": ParallelConfig(pipeline_model_parallel_size=4),
        "ep4 hybrid": ParallelConfig(
            expert_model_parallel_size=4, moe_token_dispatcher_type="hybrid", expert_node_size=2
        ),
    },
}


class Chunk(nn.Module):
    """What `shard_chunk` needs: one layer, no embedding, no head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = self.lm_head = None
        self.layers = nn.ModuleDict({"0": nn.Sequential()})
        self.layers["0"].mlp = nn.Linear(64, 64)

    def forward(self, x):
        return self.layers["0"](x)


def gathers_while_busy(ahead: bool, parallel: ParallelConfig) -> bool:
    """Whether the weights of a forward are gathered before the device has ended what was started before it."""
    chunk = Chunk().cuda()
    shard_chunk(parallel, ParallelGroups.create(parallel), chunk, bf16=False)
    x = torch.ones(4, 64, device="cuda")
    chunk(x)  # connects the ranks
    gathered, asleep = torch.cuda.Event(), torch.cuda.Event()
    if parallel.data_parallel_sharding == "slabs":
        stream = streams._transfers(torch.device("cuda", torch.cuda.current_device()))
        increment_version(list(chunk.parameters()))  # as an optimizer does: what has not changed is not gathered
    else:
        stream = chunk._get_fsdp_state()._comm_ctx.all_gather_stream
    chunk.layers["0"].register_forward_pre_hook(lambda *_: gathered.record(stream))
    torch.cuda.synchronize()
    changed = record_change()
    torch.cuda._sleep(10**9)  # half a second
    asleep.record()
    gather_ahead(chunk, changed if ahead else None)
    chunk(x)
    gathered.synchronize()
    return not asleep.query()


def main(file: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    results = {}
    for bf16 in (False, True):
        for name, parallel in LAYOUTS[dist.get_world_size()].items():
            # In bf16 rounding would flip selections, and with them the loss: nothing is left to choose there.
            model = parity_model(4, index_topk=64, num_experts_per_tok=8) if bf16 else parity_model(4)
            if name == FEW:
                model = replace(model, n_routed_experts=1, num_experts_per_tok=1)
            config = run_config(model, parallel, packs=8, seed=0)
            config = replace(config, train=replace(config.train, bf16=bf16))
            results[name, bf16] = train(config)
            torch.cuda.synchronize()
            if dist.get_rank() == 0:
                print(name, "bf16" if bf16 else "fp32", results[name, bf16].losses, flush=True)
    if dist.get_world_size() > 1:
        results["gathers while busy"] = [gathers_while_busy(ahead, ParallelConfig()) for ahead in (False, True)]
    if dist.get_rank() == 0:
        torch.save(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
