"""Packs and micro-batches: where labels are shifted, what fills a pack, and what a step's batch depends on."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
import torch

from megatron_glm.data.finetuning import Documents, PackedDataset
from megatron_glm.data.loader import MicroBatches, one_ahead
from megatron_glm.data.packing import PackedBatch, best_fit, build_batch, cut


def make_documents(lengths: list[int], seed: int = 0) -> Documents:
    """Documents of random tokens whose first is the document's number + 1000; two in three tokens are targets."""
    random = np.random.default_rng(seed)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = random.integers(0, 1000, offsets[-1]).astype(np.int32)
    tokens[offsets[:-1]] = 1000 + np.arange(len(lengths))
    targets = random.random(offsets[-1]) < 2 / 3
    targets[offsets[1:] - 1] = True
    return Documents(tokens, targets, offsets.astype(np.int64))


def random_documents(count: int = 101, longest: int = 32) -> Documents:
    return make_documents(np.random.default_rng(1).integers(2, longest + 1, count).tolist())


def numbers(dataset: PackedDataset, indices) -> list[int]:
    """The numbers of the documents in these packs."""
    return [int(ids[0]) - 1000 for i in indices for ids, _ in dataset.pack(i)]


def equal(a: list[PackedBatch], b: list[PackedBatch]) -> bool:
    def fields(batch: PackedBatch) -> list:
        return [v.tolist() if isinstance(v, torch.Tensor) else v for v in vars(batch).values()]

    return [fields(batch) for batch in a] == [fields(batch) for batch in b]


def test_labels_are_shifted_once_and_never_across_a_document():
    yes, no = True, False
    documents = [
        (np.array([5, 6, 7]), np.array([yes, no, yes])),
        (np.array([8]), np.array([yes])),
        (np.array([9, 0, 4]), np.array([no, yes, yes])),
    ]
    batch = build_batch(documents, 10)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 0, 4, 0, 0, 0]
    assert batch.labels.tolist() == [6, 7, -100, -100, 0, 4, -100, -100, -100, -100]
    assert batch.loss_mask.tolist() == [no, yes, no, no, yes, yes, no, no, no, no]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 0, 0]
    assert (batch.doc_lengths, batch.padding, batch.loss_tokens) == ((3, 1, 3), 3, 3)
    assert {batch.tokens.dtype, batch.labels.dtype, batch.position_ids.dtype} == {torch.int64}
    assert batch.loss_mask.dtype == torch.bool


def test_a_token_equal_to_the_padding_counts():
    documents = Documents(np.zeros(4, np.int32), np.ones(4, bool), np.array([0, 4]))
    [batch] = MicroBatches(PackedDataset(documents, 6)).batch(0, 1, 1)
    assert (batch.loss_tokens, batch.doc_lengths, batch.padding) == (3, (4,), 2)


def test_documents_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="documents of 5 tokens do not fit into a batch of 4"):
        build_batch([(np.arange(5), np.ones(5, bool))], 4)


def test_best_fit_takes_the_least_room():
    assert best_fit([6, 5, 4, 3, 2], 10).tolist() == [0, 1, 0, 1, 1]
    assert best_fit([7, 8, 2, 3, 10], 10).tolist() == [0, 1, 1, 0, 2]
    assert best_fit([], 10).tolist() == []


def test_best_fit_equals_the_plain_search():
    lengths = np.random.default_rng(0).integers(1, 101, 500).tolist()
    loads: list[int] = []
    for length in lengths:
        fitting = [load for load in loads if load + length <= 100]
        if fitting:
            loads[loads.index(max(fitting))] += length
        else:
            loads.append(length)
    pack_of = best_fit(lengths, 100)
    assert sorted(np.bincount(pack_of, weights=lengths)) == sorted(loads)


def test_best_fit_of_many_documents():
    lengths = -np.sort(-np.random.default_rng(0).integers(10, 4097, 100_000))
    filled = np.bincount(best_fit(lengths.tolist(), 4096), weights=lengths)
    assert filled.max() <= 4096 and filled.sum() == lengths.sum() and filled.mean() > 0.98 * 4096


def test_cut():
    def ranges(length: int, seq_length: int, overlong: str) -> list[tuple[int, int]]:
        """Of the second of two documents."""
        document, start, size = cut(np.array([1, length]), seq_length, overlong)
        return [(a, a + n) for i, a, n in zip(document.tolist(), start.tolist(), size.tolist(), strict=True) if i == 1]

    assert ranges(8, 8, "split") == ranges(8, 8, "truncate") == ranges(20, 8, "truncate") == [(0, 8)]
    assert ranges(20, 8, "split") == [(0, 8), (7, 15), (14, 20)]
    assert ranges(15, 8, "split") == [(0, 8), (7, 15)]
    assert ranges(9, 8, "split") == [(0, 8), (7, 9)]
    assert ranges(1, 8, "split") == ranges(1, 2, "split") == [(0, 1)]


def test_split_predicts_every_target_once_and_truncate_the_beginning():
    documents = make_documents([3, 29, 8, 40])
    expected = Counter()
    for i in range(4):
        ids, targets = documents[i]
        expected.update((int(a), int(b)) for a, b in zip(ids[:-1][targets[1:]], ids[1:][targets[1:]], strict=True))
    split = PackedDataset(documents, 8, overlong="split")
    found = Counter()
    for batch in MicroBatches(split).batch(0, split.packs_per_epoch, 1):
        found.update(zip(batch.tokens[batch.loss_mask].tolist(), batch.labels[batch.loss_mask].tolist(), strict=True))
    assert found == expected and split.packing.counts[1] == 2
    truncated = PackedDataset(documents, 8, overlong="truncate")
    kept = {int(ids[0]) - 1000: ids for i in range(truncated.packs_per_epoch) for ids, _ in truncated.pack(i)}
    assert {i: ids.tolist() for i, ids in kept.items()} == {i: documents[i][0][:8].tolist() for i in range(4)}


@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_every_epoch_holds_every_document_once_in_a_new_order(packing: str):
    dataset = PackedDataset(random_documents(), 32, packing, seed=3)
    packs = dataset.packs_per_epoch
    epochs = [numbers(dataset, range(e * packs, (e + 1) * packs)) for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(101))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert all(sum(len(ids) for ids, _ in dataset.pack(i)) <= 32 for i in range(3 * packs))
    together = [{frozenset(numbers(dataset, [i])) for i in range(e * packs, (e + 1) * packs)} for e in range(2)]
    assert (together[0] == together[1]) == (packing == "none")
    assert (packs == 101) == (packing == "none")


def test_packs_are_a_function_of_the_seed():
    def order(seed: int) -> list[int]:
        return numbers(PackedDataset(random_documents(), 32, seed=seed), range(100))

    assert order(3) == order(3) != order(4)


def test_packs_do_not_depend_on_what_was_read_before():
    """Resume: a fresh dataset gives pack i of any epoch as one that has come all the way."""
    dataset = PackedDataset(random_documents(), 32, seed=3)
    walked = [numbers(dataset, [i]) for i in range(4 * dataset.packs_per_epoch)]
    for i in (len(walked) - 1, 0, dataset.packs_per_epoch, 2 * dataset.packs_per_epoch - 1):
        assert numbers(PackedDataset(random_documents(), 32, seed=3), [i]) == numbers(dataset, [i]) == walked[i]


def test_resume_by_consumed_samples_across_epochs():
    def steps(consumed: int, count: int) -> list[PackedBatch]:
        micro_batches = MicroBatches(PackedDataset(random_documents(), 32, seed=5))
        return [b for i in range(count) for b in micro_batches.batch(consumed + 12 * i, 12, 2)]

    whole = steps(0, 30)  # several epochs of about 55 packs, so steps straddle their borders
    assert equal(whole[6 * 17 :], steps(12 * 17, 13))


@pytest.mark.parametrize("dp_size, micro_batch_size", [(1, 1), (1, 3), (2, 3), (4, 1), (3, 2), (12, 1)])
def test_ranks_share_the_global_batch(dp_size: int, micro_batch_size: int):
    """Every layout covers the same packs, each once, and finds the same number of loss tokens."""
    dataset = PackedDataset(random_documents(), 32, seed=5)
    micro_batches = MicroBatches(dataset)
    expected = numbers(dataset, range(48, 60))
    ranks = [micro_batches.batch(48, 12, micro_batch_size, rank, dp_size) for rank in range(dp_size)]
    batches = [batch for accumulated in zip(*ranks, strict=True) for batch in accumulated]
    assert {len(batch.tokens) for batch in batches} == {32 * micro_batch_size}
    found = [
        int(t) - 1000
        for b in batches
        for t in b.tokens[: len(b.tokens) - b.padding][b.position_ids[: len(b.tokens) - b.padding] == 0]
    ]
    assert found == expected
    assert sum(batch.loss_tokens for batch in batches) == micro_batches.dataset.loss_tokens(range(48, 60))


def test_a_micro_batch_of_several_packs_has_its_padding_at_the_tail():
    dataset = PackedDataset(make_documents([7, 6, 5]), 8, "none")
    [batch] = MicroBatches(dataset).batch(0, 3, 3)
    assert sorted(batch.doc_lengths) == [5, 6, 7] and batch.padding == 6
    assert (batch.position_ids[:18] > 0).sum() == 15 and not batch.loss_mask[17:].any()


def test_batch_sizes_that_do_not_divide_are_refused():
    micro_batches = MicroBatches(PackedDataset(random_documents(), 32))
    with pytest.raises(ValueError, match=r"--global-batch-size \(10\) must be a multiple of .* \(2 x 3\)"):
        micro_batches.batch(0, 10, 2, 0, 3)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_evaluation_is_one_pass_filled_up_with_empty_packs(dp_size: int):
    dataset = PackedDataset(random_documents(), 32)
    packs = dataset.packs_per_epoch
    assert packs % 8
    ranks = [list(MicroBatches(dataset).evaluation(8, 2, rank, dp_size)) for rank in range(dp_size)]
    assert {len(steps) for steps in ranks} == {-(-packs // 8)}
    assert {len(step) for steps in ranks for step in steps} == {4 // dp_size}
    batches = [batch for steps in ranks for step in steps for batch in step]
    assert sum(len(batch.doc_lengths) for batch in batches) == 101
    assert sum(batch.loss_tokens for batch in batches) == dataset.loss_tokens(range(packs))
    last = ranks[-1][-1][-1]
    assert last.doc_lengths == () and last.padding == 64 and (last.labels == -100).all()
    short = MicroBatches(dataset).evaluation(8, 2, 0, dp_size, max_batches=2)
    assert [equal(a, b) for a, b in zip(short, ranks[0], strict=False)] == [True, True]


def test_documents_without_loss_are_dropped_and_counted():
    """A flag on the first token is none: nothing comes before it. Truncation may cut off all targets."""
    targets = np.zeros(18, bool)
    targets[[0, 5, 17]] = True  # documents of 4 (first token only), 4 (second token), 10 (last token)
    documents = Documents(np.arange(18, dtype=np.int32), targets, np.array([0, 4, 8, 18]))
    dataset = PackedDataset(documents, 8)
    assert (dataset.packing.counts[2], dataset.packs_per_epoch, dataset.loss_tokens([0])) == (2, 1, 1)
    assert dataset.pack(0)[0][0].tolist() == [4, 5, 6, 7]
    assert "3 documents (1 overlong, 2 without loss dropped, 0 bad rows skipped) in 1 packs of 8" in dataset.summary()
    assert PackedDataset(documents, 8, overlong="split").loss_tokens([0]) == 2
    assert "2 pieces without loss dropped" in PackedDataset(documents, 8, overlong="split").summary()
    late = Documents(documents.tokens, np.arange(18) == 17, documents.offsets)
    with pytest.raises(ValueError, match="within --seq-length 8: they have 4 to 10 tokens; raise it, or .* split"):
        PackedDataset(late, 8)
    with pytest.raises(ValueError, match="none of the 3 documents has a loss token: no answer"):
        PackedDataset(Documents(documents.tokens, np.zeros(18, bool), documents.offsets), 8)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"seq_length": 1}, "--seq-length is 1"),
        ({"packing": "first-fit"}, "--packing is 'first-fit'"),
        ({"overlong": "drop"}, "--overlong is 'drop'"),
    ],
)
def test_bad_options(options: dict, match: str):
    with pytest.raises(ValueError, match=match):
        PackedDataset(random_documents(), **{"seq_length": 8, **options})


def test_the_next_step_is_built_meanwhile_and_no_further():
    """In a thread of its own, in order; an error comes in the main thread, where the item would."""
    made, threads, waiting = [], set(), threading.Event()

    def items():
        for i in range(4):
            threads.add(threading.current_thread())
            made.append(i)
            if i == 1:
                waiting.set()
            if i == 3:
                raise ValueError("row 3 is bad")
            yield i

    steps = one_ahead(items())
    assert next(steps) == 0 and waiting.wait(10) and made == [0, 1]
    assert [next(steps), next(steps)] == [1, 2]
    with pytest.raises(ValueError, match="row 3 is bad"):
        next(steps)
    assert threading.main_thread() not in threads and not any(thread.is_alive() for thread in threads)


def test_leaving_early_ends_the_thread():
    steps = one_ahead(iter(range(10**9)))
    assert [next(steps), next(steps)] == [0, 1]
    before = threading.active_count()
    steps.close()
    assert threading.active_count() == before - 1
