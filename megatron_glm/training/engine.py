"""The engine: this rank's chunks, and what runs micro-batches through them and through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from megatron_glm.config import RunConfig
from megatron_glm.config.indexer import FROZEN
from megatron_glm.config.training import NEXT_TOKEN
from megatron_glm.data.packing import IGNORE, PackedBatch, ahead
from megatron_glm.model.adapters import without_adapters
from megatron_glm.model.glm import GLMChunk, carry_fields
from megatron_glm.model.micro_batch import Asks, MicroBatch, MtpInput, Pairs
from megatron_glm.model.pack import PackRows, has_sparse_rows
from megatron_glm.model.preference import by_document
from megatron_glm.ops.upload import upload
from megatron_glm.parallel.fsdp import gather_ahead, record_change, reduce_gradients, set_gradient_sync
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.pipeline.carry import Carry, CarryField
from megatron_glm.parallel.pipeline.layout import schedule_of
from megatron_glm.parallel.pipeline.p2p import GroupTransport
from megatron_glm.parallel.pipeline.runner import Losses, Runner
from megatron_glm.parallel.pipeline.schedule import Action
from megatron_glm.training.initialize import current_device, pipeline_layout

DPO = "dpo"  # the preference between two answers
LM = "lm"  # the cross entropy of the next token
INDEXER = "indexer"  # how far the indexers' choices are from the attention
ROUTERS = {"aux": "moe_aux_loss", "z": "moe_z_loss"}  # losses of the routers, and their keys in the log
OF_PAIRS = (  # by the names of TRL
    DPO,
    *(f"rewards/{kind}" for kind in ("chosen", "rejected", "accuracies", "margins")),
    *(f"logps/{kind}" for kind in ("chosen", "rejected")),
)
RECALL = "recall"  # how much of the attention the indexers' choices would keep


def losses_of(config: RunConfig) -> dict[str, Callable[[PackedBatch], int]]:
    """The losses of a step, each with what a pack adds to its count: a loss is a sum divided by the step's count."""
    if config.preference.is_dpo:  # of the cross entropy, the chosen answers'; what is not "dpo" is reported only
        return {LM: lambda batch: int(batch.targets_by_document[0::2].sum())} | dict.fromkeys(OF_PAIRS, _pairs)
    losses: dict[str, Callable[[PackedBatch], int]] = {LM: lambda batch: batch.loss_tokens}
    steps, tv = config.losses.mtp_steps, config.losses.mtp_loss == "tv"
    for step in range(1, 1 + steps):  # "accepted" is no loss, but a share of rows
        losses[f"mtp_{step}"] = partial(_labels_from, position=1 if tv else step, count=steps if tv else 1)
        losses[f"accepted_{step}"] = partial(_labels_from, position=step)
    if config.indexer.indexer_training != "off":
        fewest = config.model.index_topk if config.indexer.indexer_loss_rows == "sparse" else 0
        losses[INDEXER] = lambda batch: sum(max(0, length - fewest) for length in batch.doc_lengths)
    if config.indexer.indexer_training == "warmup":  # a share, too: of the rows that will select, for each indexer
        indexers = sum(map(config.model.has_indexer, range(config.model.num_hidden_layers)))
        losses[RECALL] = partial(_selecting_rows, topk=config.model.index_topk, indexers=indexers)
    if config.losses.moe_aux_loss_coeff:
        losses["aux"] = lambda batch: sum(length > 0 for length in batch.doc_lengths)
    if config.losses.moe_z_loss_coeff:
        losses["z"] = lambda batch: sum(batch.doc_lengths)
    return losses


def _pairs(batch: PackedBatch) -> int:
    return len(batch.doc_lengths) // 2


def _selecting_rows(batch: PackedBatch, topk: int, indexers: int) -> int:
    """The rows that see more keys than are selected, times the number of indexers."""
    return indexers * sum(max(0, length - topk) for length in batch.doc_lengths)


def _labels_from(batch: PackedBatch, position: int, count: int = 1) -> int:
    """The labels that count, with the `count` - 1 behind each, at this position of their documents and behind it.

    MTP step `position` meets these labels alone, and a chain of `count` steps, of which the first is `position`, these.
    """
    last = position + count - 1
    runs = torch.stack([batch.loss_mask.roll(step) for step in range(count)]).all(0)  # that end at a row
    return int((runs & (batch.position_ids >= last)).sum())


# Steps of training before messages are received early. A first kernel of its kind is loaded when it is first called,
# which may wait for the device to rest, and a receive would hold it up until another rank, which may wait for this one,
# has sent.
WARM_STEPS = 2


class Engine:
    """Runs forwards and backwards of the chunks that `build_chunks` has made for this rank."""

    def __init__(self, config: RunConfig, groups: ParallelGroups, chunks: Sequence[GLMChunk]) -> None:
        self.config, self.groups, self.chunks = config, groups, chunks
        self.device = current_device()
        self._layout = pipeline_layout(config, groups.dp.size())
        self._transport = GroupTransport(groups)
        self._steps = 0  # of training
        # of training; a context for each
        self.around_actions: Callable[[Action], AbstractContextManager] = lambda action: nullcontext()

    def forward_backward(self, batches: Sequence[PackedBatch], counts: dict[str, int]) -> list[Losses]:
        """Losses and gradients of this rank's micro-batches; gradients accumulate in the parameters.

        Args:
            counts: what each loss is divided by, over all ranks and micro-batches of the step; 0 counts as 1.
        Returns:
            the losses of this rank's stages by name, one dict a micro-batch: fp32 scalars, divided by their counts.
        """
        batches = self._with_reference(batches)
        parallel = self.config.parallel
        sync = parallel.grad_sync == "every" and not parallel.defers_weights
        for chunk in self.chunks:
            set_gradient_sync(chunk, sync=sync, last=False)
        return self._run(batches, {name: 1 / max(count, 1) for name, count in counts.items()}, training=True)

    def evaluate(self, batches: Sequence[PackedBatch]) -> list[Losses]:
        """The same without gradients, and as plain sums."""
        return self._run(self._with_reference(batches), {}, training=False)

    def ask(self, batches: Sequence[PackedBatch], asks: Asks) -> list[Losses]:
        """The `answers` of every micro-batch on the ranks of the last stage; empty on the others."""
        return self._run(batches, {}, training=False, asks=asks)

    def _run(
        self, batches: Sequence[PackedBatch], scales: dict[str, float], training: bool, asks: Asks = "losses"
    ) -> list[Losses]:
        config = self.config
        schedule = schedule_of(config.parallel, self._layout, len(batches), forward_only=not training)
        changed = record_change()
        inputs: dict[int, MicroBatch] = {}  # of the micro-batches that are between this rank's first and last chunk

        def forward(chunk: int, i: int, carry: Carry) -> tuple[Carry, Losses]:
            if i not in inputs:
                inputs[i] = self._micro_batch(batches[i], scales, asks)
            batch = inputs[i]
            if chunk == len(self.chunks) - 1:
                del inputs[i]
            gather_ahead(self.chunks[chunk], changed)
            return self.chunks[chunk](batch, carry)

        runner = Runner(
            schedule,
            self.groups.pp.rank(),
            self._transport,
            self._fields(len(batches[0].tokens), training, asks),
            self.device,
            early=training and config.parallel.communication_sms > 0 and self._steps >= WARM_STEPS,
        )
        self._steps += training
        sparse = [has_sparse_rows(config.model, batch.doc_lengths, config.dense_rows) for batch in batches]
        around = (self.around_actions,) if training else ()
        return runner.run(forward, self._before_gradients, self._after_weights, sparse, *around)

    def _before_gradients(self, chunk: int) -> None:
        """The next backward of this chunk completes its gradients."""
        set_gradient_sync(self.chunks[chunk], sync=True, last=True)

    def _after_weights(self, chunk: int, last: bool) -> None:
        """The deferred gradients of weights of one micro-batch have been made, the step's `last` one or another."""
        if last or self.config.parallel.grad_sync == "every":
            reduce_gradients(self.chunks[chunk], last)

    def _fields(self, total: int, training: bool, asks: Asks) -> tuple[CarryField, ...]:
        """What crosses between stages, for packs of `total` tokens."""
        indexer = self.config.indexer if training else FROZEN
        losses = self.config.losses if asks == "losses" else NEXT_TOKEN
        rows = total // (self.groups.cp.size() * self.groups.tp.size())
        dtype = torch.bfloat16 if self.config.train.bf16 else torch.float32
        return carry_fields(self.config.model, self._layout.stages, rows, total, dtype, indexer, losses)

    def _micro_batch(self, batch: PackedBatch, scales: dict[str, float], asks: Asks = "losses") -> MicroBatch:
        groups = self.groups
        pack = PackRows.build(
            self.config.model,
            batch.doc_lengths,
            len(batch.tokens),
            cp_rank=groups.cp.rank(),
            cp_size=groups.cp.size(),
            tp_rank=groups.tp.rank(),
            tp_size=groups.tp.size(),
            dense_rows=self.config.dense_rows,
            device=self.device,
        )
        labels = batch.labels.masked_fill(~batch.loss_mask, IGNORE)
        wanted = any(chunk.predicts or chunk.lm_head is not None for chunk in self.chunks)
        count = self.config.losses.mtp_steps if wanted and asks == "losses" else 0
        steps = tuple(self._mtp_input(batch, pack, step) for step in range(1, 1 + count))
        tokens, labels = upload(batch.tokens, self.device), upload(labels, self.device)
        pairs = self._pairs(batch) if self.config.preference.is_dpo and asks == "losses" else None
        return MicroBatch(tokens, labels, pack, scales, steps, asks, pairs)

    def _with_reference(self, batches: Sequence[PackedBatch]) -> Sequence[PackedBatch]:
        """The same packs; pairs without a reference get the one of the model without its adapters, by a forward."""
        if not self.config.preference.is_dpo or all(batch.reference is not None for batch in batches):
            return batches
        with without_adapters(self.chunks):
            found = self.ask(batches, "log-probs")
        for router in (router for chunk in self.chunks for router in chunk.routers()):
            router.counts.zero_()  # the step's own forward counts
        nothing = torch.zeros(len(batches[0].tokens), device=self.device)  # before the last stage, where it is not used
        known = [answers.get("log_probs", nothing) for answers in found]
        return [
            replace(batch, reference=by_document(values, upload(batch.documents, self.device), len(batch.doc_lengths)))
            for batch, values in zip(batches, known, strict=True)
        ]

    def _pairs(self, batch: PackedBatch) -> Pairs:
        assert batch.reference is not None
        documents, tokens = (upload(part, self.device) for part in (batch.documents, batch.targets_by_document))
        return Pairs(documents, tokens, batch.reference.to(self.device))

    def _mtp_input(self, batch: PackedBatch, pack: PackRows, step: int) -> MtpInput:
        model, rope = self.config.model, None
        if step > 1 and model.index_share_for_mtp_iteration and not self.config.losses.mtp_unshifted_queries:
            rope = pack.rope_at(model, step - 1)  # as an engine that drafts: a position more a step, the keys stay
        tokens, labels, there = ahead(batch, step)
        return MtpInput(upload(tokens, self.device), upload(labels, self.device), pack.mtp_step(there, rope))
