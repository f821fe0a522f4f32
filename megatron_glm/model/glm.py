"""GLMChunk: the layers of one virtual pipeline stage, with the embedding and the head where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_glm.config import IndexerConfig, LossConfig, RunConfig
from megatron_glm.config.indexer import FROZEN
from megatron_glm.config.model import ModelConfig
from megatron_glm.config.parameters import declared
from megatron_glm.config.training import NEXT_TOKEN
from megatron_glm.model.adapters import add_adapters
from megatron_glm.model.answers import answers
from megatron_glm.model.indexer_training import Losses, student_fields
from megatron_glm.model.layer import DecoderLayer, MTPLayer
from megatron_glm.model.micro_batch import MicroBatch
from megatron_glm.model.moe import MoE
from megatron_glm.model.mtp import accepted, draft, predictions
from megatron_glm.model.norm import RMSNorm
from megatron_glm.model.preference import preference_losses
from megatron_glm.model.recompute import run_layer
from megatron_glm.model.router import Router
from megatron_glm.model.trained import freeze
from megatron_glm.ops.backends import fp8_products
from megatron_glm.ops.fp8_casts import forget_casts
from megatron_glm.parallel.collectives import gather_values, sum_over
from megatron_glm.parallel.dispatch.local import Dispatcher
from megatron_glm.parallel.draft_head import DraftHead
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.pipeline.carry import Carry, CarryField
from megatron_glm.parallel.pipeline.layout import Stage
from megatron_glm.parallel.shard import ModelChunk, collect_shards
from megatron_glm.parallel.vocab import Prediction, VocabParallelEmbedding, VocabParallelHead


def carry_fields(
    config: ModelConfig,
    stages: Sequence[Stage],
    rows: int,
    total: int,
    dtype: torch.dtype,
    indexer: IndexerConfig = FROZEN,
    losses: LossConfig = NEXT_TOKEN,
) -> tuple[CarryField, ...]:
    """What crosses between the chunks of these stages.

    Args:
        rows: t/TP, of this rank's sequence shard; total: T, tokens of the pack.
        dtype: of the hidden states; indexer, losses: what is trained.
    """
    inner = tuple(not stage.embedding for stage in stages)
    trains_trunk = indexer.indexer_training != "warmup" and losses.train_only is None
    drafts = tuple(stage.head and not stage.mtp and losses.mtp_steps > 0 for stage in stages)
    shared = tuple(stage.needs_topk(config) for stage in stages)
    slots = min(config.index_topk, total)
    return (
        CarryField("hidden", (rows, config.hidden_size), dtype, trains_trunk, stages=inner),
        CarryField("drafts", (losses.mtp_steps, rows, config.hidden_size), dtype, True, stages=drafts),
        CarryField("topk", (rows, slots), torch.int32, differentiable=False, stages=shared, sparse_only=True),
        *student_fields(indexer, config, shared, rows, total, dtype),
    )


class GLMChunk(ModelChunk):
    """A contiguous run of layers; parameter names are canonical (`layers.5...` is layer 5 of the model).

    Args:
        stage: the layers, and whether the chunk starts with the embedding, ends with final norm, head and loss, and
            holds the MTP layers of the model, if there are any. Where MTP steps run, the final norm is there, because
            they and the head need its output.
        dispatcher: of all MoE layers of this rank.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups, stage: Stage, dispatcher: Dispatcher) -> None:
        super().__init__()
        model = config.model
        self.config, self.groups, self.kernels = model, groups, config.kernels
        self.layer_ids = stage.layers
        # In warm-up the backward needs nothing of the layers: the loss has its gradients when the forward ends.
        warming = config.indexer.indexer_training == "warmup"
        self.recompute = "none" if warming else config.parallel.recompute_granularity
        self.student_names = [field.name for field in student_fields(config.indexer, model, (), 0, 0, torch.float32)]
        vocabulary = (model.vocab_size, model.hidden_size, groups.tp)
        self.losses, self.preference, self.begins = config.losses, config.preference, stage.embedding
        self.predicts = stage.mtp and config.losses.mtp_steps > 0  # its MTP layer runs
        self.embed_tokens = None
        if stage.embedding or self.predicts:  # the MTP layer's stage has a copy
            second = not stage.embedding and groups.embedding is None
            self.embed_tokens = VocabParallelEmbedding(*vocabulary, groups.embedding, copy=second)
        layers: dict[str, nn.Module] = {str(i): DecoderLayer(config, groups, i, dispatcher) for i in stage.layers}
        if stage.mtp:
            layers |= {str(i): MTPLayer(config, groups, i, dispatcher) for i in model.mtp_layer_ids}
        self.layers = nn.ModuleDict(layers)
        normed = stage.mtp if config.losses.mtp_steps else stage.head
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, groups.tp) if normed else None
        self.lm_head = None
        if stage.head:
            variation = config.losses.mtp_loss == "tv"
            self.lm_head = DraftHead(*vocabulary, groups.cp) if variation else VocabParallelHead(*vocabulary)
        add_adapters(self, model, config.lora)
        self.adapted = config.lora.lora_rank > 0
        self.shards = {}
        self.shards = collect_shards(self)
        self.declared = declared(model, {name: info.global_shape for name, info in self.shards.items()}, config.lora)
        freeze(model, self, config.trained_parts)
        for name, parameter in self.declared.items():
            if config.fp8.computes(parameter, model.num_hidden_layers):
                holder: Any = self.get_submodule(name.rpartition(".")[0])
                holder.products = fp8_products(config.fp8, parameter.part)
        for layer in self.layers.values():
            assert isinstance(layer, DecoderLayer)
            layer.share_casts(gathers=groups.tp.size() > 1)

    def forward(self, batch: MicroBatch, carry: Carry) -> tuple[Carry, dict[str, Tensor]]:
        """Run one micro-batch.

        Args:
            carry: what the chunk before has returned, see `carry_fields`; empty for the first one.
                hidden [t/TP, D]; topk [t/TP, K] int32, needed where this chunk starts with a shared layer, and
                so are the tensors of `student_fields`, if indexers are trained.
        Returns:
            the same for the next chunk: topk is this sequence shard's selection, missing where no row needs one. Where
            the MTP steps run before the last chunk, hidden is behind the final norm, and drafts [S, t/TP, D] the
            hidden states of the steps. The last chunk's hidden states are its input to the norm or the head, cut from
            the graph: the loss has it.
            The losses by name, fp32 scalars, each a SUM times its scale: "lm" of the token losses, in the last chunk,
            and "mtp_k" of MTP step k, with "accepted_k", the number of its tokens that the trunk would choose, too;
            "indexer" of the rows' losses, where a layer teaches an indexer, and in warm-up "recall"; "aux" and "z" of
            the routers' losses, see `model.balance`. Where the batch asks for something else, the last chunk's
            `answers` take their place.
        """
        pack = batch.pack
        if self.begins and self.embed_tokens is not None:
            hidden = self.embed_tokens(pack.local(batch.tokens))
            if self.adapted and torch.is_grad_enabled():
                hidden.requires_grad_()  # every stage has a gradient to send, whichever layers have adapters
        else:
            hidden = carry["hidden"]
        topk = gather_values(carry["topk"], self.groups.tp) if "topk" in carry else None
        student = tuple(carry[name] for name in self.student_names if name in carry)
        losses: Losses = {}
        of_layers: list[Losses] = []
        for layer_id in self.layer_ids:
            layer = self.layers[str(layer_id)]
            hidden, topk, expert_ids, student, added = run_layer(self.recompute, layer, hidden, pack, topk, student)
            if expert_ids is not None:
                self.router(layer_id).count(expert_ids)
            of_layers.append(added)
        main = hidden if self.norm is None else self.norm(hidden)
        drafts: Sequence[Tensor] = carry["drafts"].unbind() if "drafts" in carry else ()
        if self.predicts and batch.ahead:
            drafts, of_mtp = self._drafts(main, batch)
            of_layers += of_mtp
        forget_casts()
        for name in dict.fromkeys(name for added in of_layers for name in added):
            values = [added[name] for added in of_layers if name in added]
            losses[name] = self._over_tp(torch.stack(values).sum() * batch.scale(name))
        if self.lm_head is not None and batch.labels is not None:
            losses |= self._predict(main, drafts, batch)
        if self.lm_head is not None:
            # a chunk without layers returns its input, and FSDP2 warns of views with a graph
            carry = {"hidden": hidden.detach()}
        else:
            carry = {"hidden": main} | ({"drafts": torch.stack(tuple(drafts))} if drafts else {})
        carry |= {} if topk is None else {"topk": topk[pack.shard]}
        return carry | dict(zip(self.student_names, student, strict=False)), losses

    def _over_tp(self, loss: Tensor) -> Tensor:
        """The sum over the TP ranks of what each has of its sequence shard; the gradient stays that of the shard."""
        others = sum_over(loss.detach().clone(), self.groups.tp) - loss.detach()
        return loss + others

    def _drafts(self, main: Tensor, batch: MicroBatch) -> tuple[list[Tensor], list[Losses]]:
        """Hidden states [t/TP, D] of each MTP step, from the trunk's behind the last norm; and its losses by name."""
        [number] = self.config.mtp_layer_ids
        layer = self.layers[str(number)]
        assert isinstance(layer, MTPLayer) and isinstance(self.embed_tokens, VocabParallelEmbedding)
        shares = self.config.index_share_for_mtp_iteration
        return draft(self.losses, shares, batch, main, self.embed_tokens, layer, self.recompute)

    def _predict(self, main: Tensor, steps: Sequence[Tensor], batch: MicroBatch) -> Losses:
        """The losses of the last chunk, from normed hidden states [t/TP, D] of the trunk and of the MTP steps."""
        assert self.lm_head is not None and batch.labels is not None
        pack, chunk_size = batch.pack, self.kernels.loss_chunk_size
        labels = pack.local(batch.labels)
        if batch.asks != "losses":
            return answers(self.lm_head, main, labels, pack, self.groups.cp, chunk_size, batch.asks == "next tokens")
        if self.preference.is_dpo:
            return preference_losses(self.lm_head, main, batch, self.groups, self.preference, chunk_size)
        first, further = Prediction(main, labels, batch.scale("lm")), predictions(self.losses, batch, steps)
        found, best = self.lm_head([first, *further], chunk_size, best=bool(further))
        losses = {"lm": found[0]} | {f"mtp_{i}": loss for i, loss in enumerate(found[1:], 1)}
        return losses if best is None else losses | accepted(best, batch, self.groups)

    def router(self, layer_id: int) -> Router:
        """Of a MoE layer."""
        moe = self.layers[str(layer_id)].mlp
        assert isinstance(moe, MoE)
        return moe.gate

    @property
    def routed_layers(self) -> list[int]:
        """Those of the layers that run which have a router."""
        runs = [*self.layer_ids, *(self.config.mtp_layer_ids if self.predicts else ())]
        return [i for i in runs if self.config.is_moe(i)]

    def routers(self) -> list[Router]:
        """The routers of the layers that run, in the order of the layers."""
        return [self.router(i) for i in self.routed_layers]
