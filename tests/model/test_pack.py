"""The attention pack: which rows a rank holds, which keys each may see, and how the work is shared."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
import torch

from megatron_glm.model.pack import PackRows, work_per_rank
from megatron_glm.ops.rope import rope_tables
from megatron_glm.parallel.context import pack_order, zigzag_ranges, zigzag_rows
from tests.helpers.reference import small_config

CONFIG = small_config()  # index_topk 8
K, TOTAL = CONFIG.index_topk, 64
PACKS = {
    "one document": (TOTAL,),
    "exactly top-k": (K,) * 8,
    "one more than top-k": (K + 1, K, K + 1, 30),
    "one-token documents": (1,) * 12 + (20, 1),
    "some padding": (30, 2),
    "ranks that hold padding only": (11, 3),
    "padding only": (),
}
LAYOUTS = [(1, 1), (1, 2), (2, 1), (4, 1), (8, 1), (2, 4), (4, 2)]  # CP, TP


def facts(doc_lengths):
    """(first row of its document, position in it) of each row, None for padding."""
    rows = []
    for length in doc_lengths:
        begin = len(rows)
        rows += [(begin, position) for position in range(length)]
    return rows + [None] * (TOTAL - len(rows))


def plans(doc_lengths, cp, tp=1, **options):
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            ranks = dict(cp_rank=cp_rank, cp_size=cp, tp_rank=tp_rank, tp_size=tp)
            yield cp_rank, PackRows.build(CONFIG, doc_lengths, TOTAL, **ranks, **options)


def listed(rows):
    """Rows of a pack as numbers."""
    return list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()


def dense_key_ranges(pack):
    """Local row -> the pack positions of its keys, as the dense kernel reads the segments."""
    rows, keys, seen = listed(pack.dense.rows), listed(pack.dense.keys), {}
    for i in range(0, len(pack.dense.segments), 4):
        row_begin, row_end, key_begin, key_end = pack.dense.segments[i : i + 4]
        for row in range(row_begin, row_end):
            local = rows[row]
            assert local not in seen
            seen[local] = keys[key_begin : key_end - (row_end - 1 - row)]
    assert len(seen) == len(rows)
    return seen


@pytest.mark.parametrize("cp, tp", LAYOUTS)
@pytest.mark.parametrize("lengths", PACKS)
def test_every_row_sees_exactly_its_keys(lengths, cp, tp):
    """Over all ranks each row runs once, dense or sparse, and sees the earlier keys of its own document."""
    expected, dense, sparse, ranges = facts(PACKS[lengths]), [], [], []
    for cp_rank, pack in plans(PACKS[lengths], cp, tp):
        local = zigzag_rows(TOTAL, cp_rank, cp).tolist()
        shard = local[pack.shard]
        if pack.valid is not None:
            assert pack.valid.tolist() == [expected[row] is not None for row in shard]
        if pack.sparse is not None:
            rows = listed(pack.sparse.shard_rows)
            ends = zip(pack.sparse.start.tolist(), pack.sparse.end.tolist(), strict=True)
            ranges += [(shard[row], key_range) for row, key_range in zip(rows, ends, strict=True)]
            if pack.shard.start == 0:
                sparse += [local[row] for row in listed(pack.sparse.rows)]
                assert pack.sparse.length.tolist() == [K] * len(listed(pack.sparse.rows))
        if pack.dense is not None and pack.shard.start == 0:
            for row, keys in dense_key_ranges(pack).items():
                begin, position = expected[local[row]]
                assert keys == list(range(begin, begin + position + 1))
                dense.append(local[row])
    used = [row for row, fact in enumerate(expected) if fact is not None]
    assert sorted(dense) == [row for row in used if expected[row][1] < K]
    assert sorted(sparse) == [row for row in used if expected[row][1] >= K]
    assert sorted(ranges) == [(row, (expected[row][0], row + 1)) for row in sorted(sparse)]


@pytest.mark.parametrize("lengths", PACKS)
def test_without_dense_rows_every_row_is_sparse(lengths):
    expected = [fact for fact in facts(PACKS[lengths]) if fact is not None]
    ((_, pack),) = plans(PACKS[lengths], 1, dense_rows="off")
    assert pack.dense is None
    assert pack.sparse.rows == slice(0, len(expected))
    assert pack.sparse.length.tolist() == [min(position + 1, K) for _, position in expected]
    assert pack.sparse.start.tolist() == [begin for begin, _ in expected]


def test_all_ranks_take_the_same_path_through_the_collectives():
    """A part of the pack is there on every rank or on none, though some ranks hold only padding."""
    for lengths, has_dense, has_sparse in (((11, 3), True, True), ((8, 5), True, False), ((), False, True)):
        found = [pack for _, pack in plans(lengths, 4)]
        assert [(pack.dense is not None, pack.sparse is not None) for pack in found] == [(has_dense, has_sparse)] * 4
        assert not found[3].valid.any()
        if has_dense:
            assert found[3].dense.rows == found[3].dense.keys == slice(0, 0) and not found[3].dense.segments
        if has_sparse:
            assert found[3].sparse.rows == found[3].sparse.shard_rows == slice(0, 0)


def test_rows_that_follow_each_other_are_a_slice():
    ((_, one),), ((_, two),) = plans((TOTAL,), 1), plans((24, 32), 1)
    assert (one.dense.rows, one.dense.keys) == (slice(0, K), slice(0, K))
    assert one.sparse.rows == one.sparse.shard_rows == slice(K, TOTAL)
    assert two.rows[0].tolist() == [*range(K), *range(24, 24 + K)]
    assert two.rows[1].tolist() == [*range(K, 24), *range(24 + K, 56)]


@pytest.mark.parametrize("cp", [1, 4])
def test_few_dense_rows_between_many_sparse_ones_are_not_taken_apart(cp):
    """Bringing the sparse rows of several documents together costs more than the dense ones save."""
    for _, pack in plans((30, 34), cp):
        assert pack.dense is None and listed(pack.sparse.rows) == list(range(TOTAL // cp))


@pytest.mark.parametrize("cp", [1, 4])
def test_dense_rows_of_packs_of_short_documents_alone(cp):
    for lengths, dense in ((K, 3, K), True), ((K, K + 1), False):
        for _, pack in plans(lengths, cp, dense_rows="short"):
            assert (pack.dense is not None, pack.sparse is not None) == (dense, not dense)


def test_a_selection_is_no_wider_than_the_pack():
    assert PackRows.build(CONFIG, (6,), 6).slots == 6 and PackRows.build(CONFIG, (60,), 60).slots == K


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_positions_restart_in_each_document(cp):
    position = torch.tensor([0 if fact is None else fact[1] for fact in facts((20, 1, 30))])
    for rank, pack in plans((20, 1, 30), cp):
        rows = zigzag_rows(TOTAL, rank, cp)
        expected = rope_tables(position[rows], CONFIG.qk_rope_head_dim, CONFIG.rope_theta)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(pack.rope, expected, strict=True))


@pytest.mark.parametrize("size", range(1, 9))
def test_zigzag_holds_every_row_once(size):
    total = 2 * size * 3
    ranks = [zigzag_rows(total, rank, size) for rank in range(size)]
    assert {rows.numel() for rows in ranks} == {total // size}
    assert torch.cat(ranks).sort().values.tolist() == list(range(total))
    for rank, rows in enumerate(ranks):
        assert rows.tolist() == [row for begin, end in zigzag_ranges(total, rank, size) for row in range(begin, end)]
    order = pack_order(total, size)
    if size > 1:
        assert torch.cat(ranks)[order.gathered].tolist() == list(range(total))
        assert torch.equal(order.pack[order.gathered], torch.arange(total))
    else:
        assert order is None


@pytest.mark.parametrize("cp", range(2, 9))
def test_one_long_document_gives_every_rank_the_same_work(cp):
    """A contiguous split gives the last rank twice the mean of the indexer's work."""
    total = 2 * cp * 16384
    work = work_per_rank((total - 5,), total, 2048, cp)
    for kind in zip(*work, strict=True):
        assert max(kind) <= 1.05 * sum(kind) / cp
    assert sum(causal for _, causal in work) == (total - 5) * (total - 4) // 2
    assert sum(selected for selected, _ in work) == 2048 * 2049 // 2 + (total - 5 - 2048) * 2048


def test_padding_and_documents_count_their_own_keys_only():
    assert work_per_rank((3, 10, 1), 16, 4, 1) == [(6 + (10 + 6 * 4) + 1, 6 + 55 + 1)]
    assert work_per_rank((), 16, 4, 2) == [(0, 0), (0, 0)]


def test_tensors_are_on_the_device_that_was_asked_for():
    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            for part in value:
                yield from tensors(part)
        elif is_dataclass(value):
            for field in fields(value):
                if not field.name.startswith("host_"):
                    yield from tensors(getattr(value, field.name))

    found = list(tensors(PackRows.build(CONFIG, (12, 13, 30), TOTAL, cp_size=2, device="meta")))
    assert len(found) == 13 and all(tensor.is_meta for tensor in found)


@pytest.mark.parametrize(
    "lengths, total, ranks, words",
    [
        ((4,), 30, dict(cp_size=4), "30 tokens .* --context-parallel-size 4 x --tensor-model-parallel-size 1"),
        ((4,), 9, dict(tp_size=2), "9 tokens of a micro-batch .* --tensor-model-parallel-size 2"),
        ((4,), 36, dict(cp_size=4), "36 tokens .* --context-parallel-size 4: .* must be a multiple of 8"),
        ((20, 20), 32, {}, "documents of 40 tokens in a pack of 32"),
    ],
)
def test_packs_that_do_not_split_are_refused_by_flag(lengths, total, ranks, words):
    with pytest.raises(ValueError, match=words):
        PackRows.build(CONFIG, lengths, total, **ranks)
