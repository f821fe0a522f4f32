"""The runner against the schedule and against one process: order, values, deadlocks, lifetimes. Ranks are threads."""

import queue
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glm.ops.grad_sum import GradSum, linear
from megatron_glm.parallel.groups import Edges
from megatron_glm.parallel.pipeline.carry import Carry, CarryField
from megatron_glm.parallel.pipeline.p2p import GroupTransport
from megatron_glm.parallel.pipeline.runner import Losses, Runner
from megatron_glm.parallel.pipeline.schedule import Action, Schedule, build_schedule

TOKENS, HIDDEN, TOPK = 3, 2, 4
PATIENCE = 20  # seconds; a hang fails


class Sent:
    """A send that does not own the memory: the receiver copies it as late as it can."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.left = weakref.ref(tensor), threading.Event()

    def wait(self) -> None:
        assert self.left.wait(PATIENCE), "nobody receives this message"

    def is_completed(self) -> bool:
        return self.left.is_set()


class Receipt:
    def __init__(self, channel: "Channel", buffer: Tensor) -> None:
        self.channel, self.buffer, self.here = channel, buffer, False

    def wait(self) -> None:
        while not self.here:
            self.channel.deliver()

    def is_completed(self) -> bool:
        return self.here


class Channel:
    """Messages match receives by order alone."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        self.posted: deque[Receipt] = deque()
        self.bytes = 0

    def deliver(self) -> None:
        message, receipt = self.sent.get(timeout=PATIENCE), self.posted.popleft()
        source = message.tensor()
        assert source is not None, "an output was freed before its send was done"
        assert (source.shape, source.dtype) == (receipt.buffer.shape, receipt.buffer.dtype)
        receipt.buffer.copy_(source.detach())
        self.bytes += source.nbytes
        receipt.here = True
        del source
        message.left.set()


class MemoryTransport:
    def __init__(self, channels: dict, pp: int, rank: int) -> None:
        self.channels, self.pp, self.rank = channels, pp, rank

    def send(self, kind: str, peer: int, tensor: Tensor) -> Sent:
        assert peer == (self.rank + (1 if kind == "F" else -1)) % self.pp
        sent = Sent(tensor)
        self.channels[kind, self.rank].sent.put(sent)
        return sent

    def receive(self, kind: str, peer: int, buffer: Tensor) -> Receipt:
        assert peer == (self.rank + (-1 if kind == "F" else 1)) % self.pp
        channel = self.channels[kind, peer]
        buffer.fill_(99)
        receipt = Receipt(channel, buffer)
        channel.posted.append(receipt)
        return receipt


class WatchedTransport(MemoryTransport):
    """Knows all receives that were posted."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.receipts: list[Receipt] = []
        self.waiting: list[int] = []  # of these, at each forward

    def receive(self, kind: str, peer: int, buffer: Tensor) -> Receipt:
        self.receipts.append(super().receive(kind, peer, buffer))
        return self.receipts[-1]


def fields(topk_stages: tuple[bool, ...]) -> tuple[CarryField, ...]:
    """Hidden states everywhere, the selection where a stage needs it, and a score that all later stages pass on."""
    inner = tuple(stage > 0 for stage in range(len(topk_stages)))
    return (
        CarryField("hidden", (TOKENS, HIDDEN), torch.float32, True, inner),
        CarryField("topk", (TOKENS, TOPK), torch.int32, False, topk_stages),
        CarryField("score", (TOKENS,), torch.float32, True, inner),
    )


class Model:
    """Stages of one matrix each; every stage but those of `topk_stages` makes a new selection, and all use theirs.

    Every third stage has a loss of its own, on the hidden states and the score, which odd stages change.
    """

    def __init__(self, stages: int, topk_stages: tuple[bool, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(HIDDEN, HIDDEN, generator=generator).requires_grad_() for _ in range(stages)]
        self.topk_stages = topk_stages

    def forward(self, stage: int, micro_batch: int, carry: Carry) -> tuple[Carry, Losses]:
        assert ("topk" in carry) == self.topk_stages[stage]
        hidden = carry["hidden"] if stage else torch.full((TOKENS, HIDDEN), 0.1 * (micro_batch + 1))
        topk = carry.get("topk", torch.full((TOKENS, TOPK), 7 * stage + micro_batch, dtype=torch.int32))
        hidden = torch.tanh(hidden @ self.weights[stage] + 0.01 * topk.sum())
        score = carry["score"] if stage else hidden.sum(1)
        score = score * hidden[:, 0] if stage % 2 else score
        losses = {} if stage % 3 else {f"score {stage}": score.mean()}
        if stage == len(self.weights) - 1:
            losses["last"] = hidden.sum()
        return {"hidden": hidden, "topk": topk, "score": score}, losses

    def reference(self, micro_batches: int) -> list[Losses]:
        found = []
        for micro_batch in range(micro_batches):
            carry, losses = {}, {}
            for stage in range(len(self.weights)):
                passed = {n: x for n, x in carry.items() if n != "topk" or self.topk_stages[stage]}
                carry, more = self.forward(stage, micro_batch, passed)
                losses |= more
            sum(losses.values()).backward()
            found.append({name: loss.detach() for name, loss in losses.items()})
        return found


class Run(NamedTuple):
    losses: list[Losses]  # of all stages
    gradients: list[Tensor | None]
    order: list[list]  # per rank, actions and the indices of chunks whose last backward comes next
    channels: dict[tuple[str, int], Channel]
    transports: list


def execute(
    schedule: Schedule,
    topk_stages: tuple[bool, ...],
    transports=None,
    steps: int = 1,
    transport=MemoryTransport,
    early: bool = False,
) -> Run:
    pp = schedule.pp
    model = Model(pp * schedule.chunks, topk_stages)
    channels = {(kind, rank): Channel() for kind in "FB" for rank in range(pp)}
    transports = transports or [transport(channels, pp, rank) for rank in range(pp)]
    order = [[] for _ in range(pp)]

    def work(rank: int) -> list[Losses]:
        def forward(chunk, micro_batch, carry):
            order[rank].append(Action("F", chunk, micro_batch))
            if isinstance(transports[rank], WatchedTransport):
                transports[rank].waiting.append([not receipt.here for receipt in transports[rank].receipts].count(True))
            made, losses = model.forward(chunk * pp + rank, micro_batch, carry)
            if not schedule.forward_only:  # a hook on the output must fire although only its graph is kept
                made["hidden"].register_hook(lambda _: order[rank].append(Action("B", chunk, micro_batch)))
            return made, losses

        runner = Runner(schedule, rank, transports[rank], fields(topk_stages), torch.device("cpu"), early)
        return [losses for _ in range(steps) for losses in runner.run(forward, order[rank].append)]

    with ThreadPoolExecutor(pp) as pool:
        of_ranks = [future.result() for future in [pool.submit(work, rank) for rank in range(pp)]]
    losses = [{n: loss for part in parts for n, loss in part.items()} for parts in zip(*of_ranks, strict=True)]
    return Run(losses, [weight.grad for weight in model.weights], order, channels, transports)


def check_equal_to_one_process(run: Run, schedule: Schedule, topk_stages: tuple[bool, ...], steps: int = 1) -> None:
    model = Model(schedule.pp * schedule.chunks, topk_stages)
    losses = [loss for _ in range(steps) for loss in model.reference(schedule.micro_batches)]
    assert run.losses == losses
    for gradient, weight in zip(run.gradients, model.weights, strict=True):
        assert torch.equal(gradient, weight.grad)


def alternating(stages: int) -> tuple[bool, ...]:
    return tuple(stage % 3 != 0 for stage in range(stages))


@pytest.mark.parametrize("pp", range(1, 9))
def test_every_layout_runs_in_schedule_order_and_equals_one_process(pp):
    for chunks in range(1, 5):
        for micro_batches in (1, pp + 1, 16):  # fewer than ranks, no multiple, many
            schedule = build_schedule(pp, chunks, micro_batches)
            run = execute(schedule, alternating(pp * chunks))
            for rank, actions in enumerate(schedule.actions):
                order = list(actions)
                for chunk in range(chunks):  # the hook comes right before the chunk's last backward
                    order.insert(order.index(Action("B", chunk, micro_batches - 1)), chunk)
                assert run.order[rank] == order
            check_equal_to_one_process(run, schedule, alternating(pp * chunks))
            sent = [channel for channel in run.channels.values() if channel.bytes]
            assert all(channel.sent.empty() and not channel.posted for channel in sent)


@pytest.mark.parametrize("pp, chunks, micro_batches", [(2, 1, 4), (2, 2, 4), (3, 3, 7), (4, 2, 8)])
def test_no_receive_is_on_its_way_while_a_rank_computes(pp, chunks, micro_batches):
    """On a GPU it would hold multiprocessors, and a device that must come to rest, to load a kernel, would hang."""
    schedule, topk_stages = build_schedule(pp, chunks, micro_batches), alternating(pp * chunks)
    run = execute(schedule, topk_stages, transport=WatchedTransport)
    check_equal_to_one_process(run, schedule, topk_stages)
    assert not any(count for transport in run.transports for count in transport.waiting)


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize(
    "pp, chunks, micro_batches", [(2, 1, 4), (2, 2, 4), (3, 3, 7), (4, 2, 8), (4, 1, 1), (1, 2, 3)]
)
def test_early_receives_give_the_same_and_wait_beside_a_forward(pp, chunks, micro_batches, name):
    schedule, topk_stages = build_schedule(pp, chunks, micro_batches, name=name), alternating(pp * chunks)
    run = execute(schedule, topk_stages, transport=WatchedTransport, steps=2, early=True)
    check_equal_to_one_process(run, schedule, topk_stages, steps=2)
    fields_of_a_message = 3
    for rank, transport in enumerate(run.transports):
        assert max(transport.waiting) <= fields_of_a_message, "one message ahead"
        assert pp == 1 or micro_batches == 1 or any(transport.waiting), rank
        assert all(receipt.here for receipt in transport.receipts)


def test_forward_only_needs_no_graph_and_gives_the_same_losses():
    schedule = build_schedule(3, 2, 5, forward_only=True)
    run = execute(schedule, alternating(6))
    assert run.order == [list(actions) for actions in schedule.actions]
    assert run.gradients == [None] * 6
    assert run.losses == Model(6, alternating(6)).reference(5)


def test_selection_is_sent_only_to_stages_that_need_it():
    pp, chunks, micro_batches = 2, 3, 4
    hidden, topk = TOKENS * (HIDDEN + 1) * 4, TOKENS * TOPK * 4  # the score crosses with the hidden states
    for topk_stages in ((False,) * 6, (False, True, False, False, True, True)):
        run = execute(build_schedule(pp, chunks, micro_batches), topk_stages)
        for sender in range(pp):
            receivers = [stage for stage in range(1, 6) if (stage - 1) % pp == sender]
            expected = sum(hidden + topk * topk_stages[stage] for stage in receivers)
            assert run.channels["F", sender].bytes == micro_batches * expected
            gradients = [stage for stage in range(5) if (stage + 1) % pp == sender]
            assert run.channels["B", sender].bytes == micro_batches * hidden * len(gradients)


@pytest.mark.parametrize("pp, chunks, micro_batches", [(2, 1, 4), (2, 2, 3), (3, 3, 5)])
def test_over_gloo(pp, chunks, micro_batches):
    """Real, untagged messages; with two ranks the next one is the previous one too. Two steps in a row."""
    store = dist.HashStore()

    def transport(rank: int) -> GroupTransport:
        def edge(kind: str, sender: int) -> dist.ProcessGroupGloo:
            receiver = (sender + (1 if kind == "F" else -1)) % pp
            own = dist.PrefixStore(f"{kind}{sender}", store)
            return dist.ProcessGroupGloo(own, int(rank == receiver), 2, timedelta(seconds=PATIENCE))

        # In one order for all, as a group is there only when both of its ranks have joined.
        made = {
            (kind, sender): edge(kind, sender)
            for kind, step in (("F", 1), ("B", -1))
            for sender in range(pp)
            if rank in (sender, (sender + step) % pp)
        }
        forward = Edges(inbound=made["F", (rank - 1) % pp], outbound=made["F", rank])
        backward = Edges(inbound=made["B", (rank + 1) % pp], outbound=made["B", rank])
        own = SimpleNamespace(rank=lambda: rank, size=lambda: pp)
        return GroupTransport(SimpleNamespace(pp_forward=forward, pp_backward=backward, pp=own))

    with ThreadPoolExecutor(pp) as pool:
        transports = list(pool.map(transport, range(pp)))
    schedule, topk_stages = build_schedule(pp, chunks, micro_batches), alternating(pp * chunks)
    run = execute(schedule, topk_stages, transports, steps=2)
    check_equal_to_one_process(run, schedule, topk_stages, steps=2)


def test_output_is_freed_once_its_send_is_done():
    """The first of two ranks alone: its values live while they travel, only their graph until the backward."""
    works, storages = [], []

    class Transport:
        def send(self, kind, peer, tensor):
            works.append(SimpleNamespace(left=False, wait=lambda: None))
            works[-1].is_completed = lambda work=works[-1]: work.left
            return works[-1]

        def receive(self, kind, peer, buffer):
            buffer.fill_(1)
            return SimpleNamespace(wait=lambda: None)

    def forward(chunk, micro_batch, carry):  # in the order F0 F1 B0 F2 B1 B2
        alive = [storage() is not None for storage in storages]
        assert alive == [[], [True], [False, True]][micro_batch]
        if micro_batch == 1:
            works[0].left = True
        output = torch.ones(TOKENS, HIDDEN, requires_grad=True) + 1
        storages.append(weakref.ref(output.untyped_storage()))
        return {"hidden": output}, {}

    Runner(build_schedule(2, 1, 3), 0, Transport(), fields((False, False))[:1], torch.device("cpu")).run(forward)


def test_wrong_message_is_refused_where_it_is_made():
    schedule = build_schedule(2, 1, 1)
    transport = MemoryTransport({(kind, rank): Channel() for kind in "FB" for rank in range(2)}, 2, 0)
    for topk in (None, torch.zeros(TOKENS, TOPK, dtype=torch.int64), torch.zeros(TOKENS, 1, dtype=torch.int32)):
        made = {"hidden": torch.zeros(TOKENS, HIDDEN)} | ({} if topk is None else {"topk": topk})
        runner = Runner(schedule, 0, transport, fields((False, True))[:2], torch.device("cpu"))
        with pytest.raises(ValueError, match=r"F\(0, 0\) of pipeline rank 0 made topk .* the next stage expects"):
            runner.run(lambda *_, made=made: (made, {}))


def test_deferred_gradients_are_made_by_their_own_action():
    order = [Action(kind, 0, i) for kind, i in (("F", 0), ("F", 1), ("B", 0), ("B", 1), ("W", 0), ("W", 1))]
    plain = build_schedule(1, 1, 2)
    schedule = replace(plain, kinds=("F", "B", "W"), actions=(tuple(order),))
    weight = torch.nn.Parameter(torch.eye(3))
    weight.grad_sum = GradSum(weight, weight, "grad")
    x, made = torch.arange(6.0).view(2, 3), []

    def forward(chunk, micro_batch, carry):
        return {"hidden": x}, {"lm": linear(x, weight).sum() * (1 + micro_batch)}

    def after_weights(chunk, last):
        made.append((chunk, last, weight.grad.clone()))

    runner = Runner(schedule, 0, None, (), torch.device("cpu"))
    runner.run(forward, lambda chunk: pytest.fail("its gradients are complete after the last W"), after_weights)
    one = x.sum(0).expand(3, 3)
    assert [(chunk, last) for chunk, last, _ in made] == [(0, False), (0, True)]
    assert torch.equal(made[0][2], one) and torch.equal(made[1][2], 3 * one)
