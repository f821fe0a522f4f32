"""What all ranks of a run must have in common, compared before anything is loaded: flags, model, code and data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_glm.checkpoint import sharded
from megatron_glm.config import ModelConfig, RunConfig, flag_name
from megatron_glm.config.flags import MEGATRON_NAMES
from megatron_glm.data.finetuning import PackedDataset
from megatron_glm.data.loader import MicroBatches
from megatron_glm.launch import shown_elsewhere
from megatron_glm.parallel.rendezvous import some
from megatron_glm.training.checkpointing import FINGERPRINT_PACKS, fingerprint

# Folders that a node may have in a place of its own. Whether one is given must agree: the ranks gather for it.
MAY_DIFFER = {"log_file", "tensorboard_dir", "wandb_save_dir", "profile_dir", "data_cache_path"}
SHOWN = 5  # differences in the message


def require_same(group: ProcessGroup, facts: Mapping[str, str]) -> None:
    """Collective: compare facts (name: value) of all ranks of `group`.

    Raises: ValueError on all ranks, naming what differs, both values, the ranks and their hosts.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = torch.empty(group.size(), len(digest), dtype=torch.uint8)
    dist.all_gather(list(digests.unbind()), mine, group=group)
    others = (digests != digests[0]).any(dim=1).nonzero().flatten().tolist()
    if not others:
        return
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (socket.gethostname(), dict(facts)), group=group)
    error = ValueError(f"the ranks of this run differ: {_differences(everyone, others)}")
    raise shown_elsewhere(error, group.rank() not in (0, others[0]))


def _differences(everyone: list[tuple[str, dict[str, str]]], others: list[int]) -> str:
    """What differs, in words. everyone: (host, facts) of each rank; others: the ranks whose facts are not rank 0's."""
    host, expected = everyone[0]
    found: dict[str, list[int]] = {}
    for rank in others:
        facts = everyone[rank][1]
        for name in {**expected, **facts}:
            if expected.get(name) != facts.get(name):
                found.setdefault(name, []).append(rank)
    texts = []
    for name, ranks in found.items():
        where, facts = everyone[ranks[0]]
        value, more = facts.get(name, "not there"), f" (and on {some(ranks[1:])})" if ranks[1:] else ""
        texts.append(
            f"{name} is {expected.get(name, 'not there')} on rank 0 ({host}) and {value} on rank {ranks[0]} "
            f"({where}){more}"
        )
    left = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + left


def facts_of_run(config: RunConfig) -> dict[str, str]:
    """The resolved configuration by flags, and the software that computes it."""
    facts = {}
    for section in dataclasses.fields(config):
        settings = getattr(config, section.name)
        if not dataclasses.is_dataclass(settings):
            facts[section.name] = str(settings)
            continue
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            name = flag_name(field.name)
            if isinstance(settings, ModelConfig):
                name = MEGATRON_NAMES.get(field.name, name)
            elif field.name in MAY_DIFFER:
                name, value = f"{name} (given or not)", value is not None
            facts[name] = str(value)
    if config.checkpoint.load is not None:
        facts["the iteration in --load"] = str(sharded.latest(Path(config.checkpoint.load)))
    facts["the backend"] = "nccl" if torch.cuda.is_available() else "gloo"
    facts["torch"] = torch.__version__
    facts["python"] = ".".join(map(str, sys.version_info[:2]))
    facts["the digest of the code"] = code_digest()
    facts["TORCH_GLOO_LAZY_INIT"] = os.environ.get("TORCH_GLOO_LAZY_INIT", "not set")
    return facts


def code_digest() -> str:
    """12 hex digits that change with any source file of this package and with the script that runs."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    if (script := Path(sys.argv[0])).suffix == ".py" and script.is_file():
        files["script"] = script
    for name in sorted(files):
        digest.update(f"{name}\n".encode() + files[name].read_bytes())
    return digest.hexdigest()[:12]


def require_same_data(group: ProcessGroup, **data: MicroBatches | None) -> None:
    """Collective: as `require_same`, of each part of the data (train, validation …) that there is."""
    facts = {}
    for name, part in data.items():
        if part is not None:
            packs = part.dataset.packs_per_epoch
            facts[f"the number of packs of the {name} data"] = str(packs)
            if isinstance(part.dataset, PackedDataset):  # its folder is named by all that is in it
                facts[f"the digest of the {name} data"] = part.dataset.folder.name
            facts[f"the fingerprint of the {name} data"] = fingerprint(part, min(packs, FINGERPRINT_PACKS))
    require_same(group, facts)
