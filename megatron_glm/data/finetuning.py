"""The packs of a fine-tuning run: rows of files, tokenised once into a cache, and which documents share a pack."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .blend import cache_key, open_array, save_array
from .cache import Once, Say, cache_folder, digests, make_folder
from .files import file_format, find_files
from .indexed import IndexedDataset
from .packing import Piece, best_fit, cut, cut_together
from .report import RowReport
from .rows import RowSettings
from .tokenise import DOCUMENTS, REPORT, TARGETS, write_documents

# Modules that do not decide which tokens a row becomes: when another one changes, all is tokenised anew.
NO_ROW_CODE = frozenset(
    "blend cache finetuning indexed loader packing pretraining prompts reference tokenise workers".split()
)
FORMAT = 1  # of a packing: raise it when the same settings should give another
LOSS_CHUNK = 2**24  # tokens whose targets are counted at a time

Share = tuple[float, float]  # of the documents, from 0 to 1: where a part of --split begins and ends
ALL: Share = (0.0, 1.0)


@dataclass(frozen=True)
class Documents:
    """Tokenised documents in flat arrays, which may be memory-mapped files."""

    tokens: np.ndarray  # [N] int32
    targets: np.ndarray  # [N] bool: is this token to be predicted
    offsets: np.ndarray  # [n + 1] int64: document i is [offsets[i], offsets[i + 1])
    report: RowReport = field(default_factory=RowReport)
    folder: Path | None = None  # where the arrays are mapped from
    mapped: tuple[IndexedDataset, mmap.mmap] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        span = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[span], self.targets[span]

    @classmethod
    def open(cls, folder: Path) -> Documents:
        """Maps what `write_documents` wrote; reads 12 bytes a document. Raises ValueError if it is damaged."""
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is not there: one process made it, and all processes of its node must see it; give a"
                " --data-cache-path that they share"
            )
        try:
            report = RowReport(**json.loads((folder / REPORT).read_text(encoding="utf-8")))
            dataset = IndexedDataset(folder / DOCUMENTS)
            offsets = np.concatenate(([0], np.cumsum(dataset.document_lengths())))
            with (folder / TARGETS).open("rb") as file:
                targets = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(targets) != len(dataset.tokens):
                raise ValueError(f"{len(targets)} targets for {len(dataset.tokens)} tokens")
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"the tokenised data are damaged, remove {folder}: {error}") from error
        targets.madvise(mmap.MADV_RANDOM)
        flags = np.frombuffer(targets, bool)
        return cls(dataset.tokens, flags, offsets, report, folder, (dataset, targets))

    def release(self) -> None:
        """Takes what was read so far out of this process's memory, where it is mapped: IndexedDataset.release."""
        if self.mapped is not None:
            dataset, targets = self.mapped
            dataset.release()
            targets.madvise(mmap.MADV_DONTNEED)


def load_documents(
    data_path: Iterable[str],
    settings: RowSettings,
    cache: str | None = None,
    once: Once = lambda work: work(),
    say: Say = print,
    workers: int | None = None,
) -> Documents:
    """The documents of all rows of files, folders and globs, kinds mixed at will.

    They are tokenised once, into a folder of the cache whose name follows from all that decides what they are: the
    content of the files, the tokenizer and chat template, the settings, and the code that reads rows. Every later start
    maps that folder.

    Args:
        cache: --data-cache-path, see `cache_folder`.
        workers: processes that tokenise, see `write_documents`.
    Raises:
        ValueError: for a malformed row, or one with ids outside the vocabulary, with its file and line, unless bad rows
            are skipped; if no row is left; if the cache cannot be written.
    """
    data_path = list(data_path)
    name = " ".join(map(str, data_path))

    def make() -> dict[str, Any]:
        listing = RowReport()
        files = find_files(data_path, report=listing)
        folder = cache_folder(cache, files[0])
        target = folder / f"{files[0].stem}-{_key(files, settings, folder)}"

        def write(temporary: Path, note: Say) -> None:
            write_documents(temporary, files, settings, workers, lambda progress: note(f"{name}: {progress}"))

        make_folder(target, write, say)
        return {"folder": str(target), "files_left_out": listing.files_left_out}

    made = once(make)
    documents = Documents.open(Path(made["folder"]))
    documents.report.files_left_out = made["files_left_out"]
    return documents


def _key(files: list[Path], settings: RowSettings, cache: Path) -> str:
    content = zip([file_format(file) for file in files], digests(files, cache), strict=True)
    return cache_key(
        files=list(content),
        tokenizer=digests(_tokenizer_files(settings.tokenizer_path), cache),
        code=_code_digest(),
        settings=asdict(replace(settings, tokenizer_path=None)),
    )


def _code_digest() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    texts = [source.read_bytes() for source in sources if source.stem not in NO_ROW_CODE]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _tokenizer_files(given: str | None) -> list[Path]:
    """The tokenizer and the chat template that rows may need, as far as they are there."""
    if given is None:
        return []
    path = Path(given)
    folder = path if path.is_dir() else path.parent
    named = [path] if path.is_file() else [folder / "tokenizer.json", *sorted(folder.glob("*.model"))]
    named += [folder / "chat_template.jinja", folder / "tokenizer_config.json"]
    return [file for file in named if file.is_file()]


PACKING_DTYPES = (np.int64, np.int32, np.int32, np.int32, np.int64, np.int64)


class Packing(NamedTuple):
    """The pieces of documents, and which places of their falling order of length share a pack."""

    starts: np.ndarray  # [pieces] int64: a piece's first token among all tokens
    lengths: np.ndarray  # [pieces] int32
    losses: np.ndarray  # [pieces] int32: loss tokens
    slots: np.ndarray  # [pieces, or pairs of them] int32: places in the falling order of lengths, pack after pack
    bounds: np.ndarray  # [packs + 1] int64: pack p is slots[bounds[p]:bounds[p + 1]]
    counts: np.ndarray  # [3] int64: documents, overlong ones, and pieces without a loss token, which are left out

    @classmethod
    def plan(
        cls,
        documents: Documents,
        seq_length: int,
        packing: str,
        overlong: str,
        share: Share = ALL,
        together: int = 1,
    ) -> Packing:
        """The packing of a share of the documents.

        Args:
            together: consecutive documents that share a pack: 1, or 2 for pairs, which are then counted.
        Raises: ValueError if no piece has a loss token, or one is too long with "refuse".
        """
        units = _drawn(len(documents) // together, share)
        chosen = (units[:, None] * together + np.arange(together)).ravel()
        lengths = np.diff(documents.offsets)[chosen]
        totals = lengths.reshape(-1, together).sum(1)
        if overlong == "refuse" and (totals > seq_length).any():
            above = f"{(totals > seq_length).sum()} of {len(totals)} {_name(together)}"
            raise ValueError(
                f"{above} are above --seq-length {seq_length}, the longest has {totals.max()} tokens: raise it, or "
                "give --overlong truncate"
            )
        if together == 1:
            document, start, length = cut(lengths, seq_length, "split" if overlong == "split" else "truncate")
        else:
            length = cut_together(lengths.reshape(-1, together), seq_length).ravel()
            document, start = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
        start += documents.offsets[chosen][document]
        losses = _count_losses(documents.targets, start, length)
        kept = np.repeat((losses > 0).reshape(-1, together).all(1), together)
        if not kept.any():
            whole = _count_losses(documents.targets, documents.offsets[chosen], lengths)
            raise ValueError(_without_loss(lengths, seq_length, bool(whole.any())))
        start, length, losses = start[kept], length[kept], losses[kept]
        sizes = length.reshape(-1, together).sum(1)
        pack_of = np.arange(len(sizes))
        if packing == "best-fit":
            pack_of = best_fit((-np.sort(-sizes)).tolist(), seq_length)
        slots = np.argsort(pack_of, kind="stable")
        bounds = np.concatenate(([0], np.cumsum(np.bincount(pack_of))))
        counts = np.array([len(totals), (totals > seq_length).sum(), (~kept).sum() // together])
        arrays = (start, length, losses, slots, bounds, counts)
        return cls(*(array.astype(dtype) for array, dtype in zip(arrays, PACKING_DTYPES, strict=True)))

    @classmethod
    def cached(cls, documents: Documents, once: Once, say: Say, *how: Any) -> Packing:
        """The same with the arguments `how` of `plan`, computed once and kept beside mapped documents."""
        assert documents.folder is not None, "documents in memory are planned each time"
        target = documents.folder / f"packs-{cache_key(format=FORMAT, how=how)}"

        def write(folder: Path, note: Say) -> None:
            for name, array in zip(cls._fields, cls.plan(documents, *how), strict=True):
                save_array(folder / f"{name}.npy", array)

        once(lambda: make_folder(target, write, say))
        dtypes = zip(cls._fields, PACKING_DTYPES, strict=True)
        return cls(*(open_array(target / f"{name}.npy", (None,), dtype) for name, dtype in dtypes))


def _name(together: int) -> str:
    return "documents" if together == 1 else "pairs"


def _drawn(count: int, share: Share) -> np.ndarray:
    """The numbers of the documents of a share, rising. The parts of a split are drawn at random, always the same."""
    begin, end = (int(round(bound * float(count))) for bound in share)
    if begin == end:
        raise ValueError(f"--split: {share[1] - share[0]:.3%} of {count} rows is less than one; give a larger share")
    if end - begin == count:
        return np.arange(count)
    return np.sort(np.random.Generator(np.random.PCG64(0)).permutation(count)[begin:end])


def _without_loss(lengths: np.ndarray, seq_length: int, anywhere: bool) -> str:
    """Why no document of these lengths can be trained on; `anywhere`: some have loss tokens behind seq_length."""
    if not anywhere:
        return f"none of the {len(lengths)} documents has a loss token: no answer in them is trained on"
    return (
        f"none of the {len(lengths)} documents has a loss token within --seq-length {seq_length}: they have"
        f" {lengths.min()} to {lengths.max()} tokens; raise it, or keep what is cut off by --overlong split"
    )


def _count_losses(targets: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Targets of each piece, without its first token's: nothing comes before it. Pieces are in the order of tokens."""
    losses, begin = np.zeros(len(start), np.int64), 0
    while begin < len(start):
        end = max(begin + 1, int(np.searchsorted(start, start[begin] + LOSS_CHUNK)))
        first, last = int(start[begin]), int(start[end - 1] + length[end - 1])
        before = np.concatenate(([0], np.cumsum(targets[first:last], dtype=np.int64)))
        at = start[begin:end] - first
        behind = at + length[begin:end]
        losses[begin:end] = before[behind] - before[np.minimum(at + 1, behind)]
        begin = end
    return losses


class PackedDataset:
    """An endless sequence of packs: pack i is a function of (documents, seq_length, packing, overlong, seed, i).

    Each epoch deals the documents anew. With best-fit they are dealt by falling length, ties shuffled, and the packs
    are shuffled, so an epoch's lengths fall into the same packs every time: all epochs have the same number of packs,
    and only the documents and the order change. Documents, or pieces of them, without a token to predict are dropped.

    Args:
        seq_length: tokens of a pack; packing, overlong: the values of --packing and --overlong.
        planned: the packing of these documents with these settings (`Packing.cached`); None: it is computed.
    Raises: ValueError for a setting that is none, and if no document has a token to predict.
    """

    def __init__(
        self,
        documents: Documents,
        seq_length: int,
        packing: str = "best-fit",
        overlong: str = "truncate",
        seed: int = 0,
        planned: Packing | None = None,
        together: int = 1,
        reference: np.ndarray | None = None,
    ):
        """together: see `Packing.plan`; reference: what a reference model says of each piece, fp64 [pieces]."""
        if seq_length < 2:
            raise ValueError(f"--seq-length is {seq_length}, but to predict a token takes at least 2")
        if packing not in ("best-fit", "none"):
            raise ValueError(f"--packing is {packing!r}, expected 'best-fit' or 'none'")
        if overlong not in ("truncate", "split", "refuse"):
            raise ValueError(f"--overlong is {overlong!r}, expected 'truncate', 'split' or 'refuse'")
        self.documents, self.seq_length, self.seed = documents, seq_length, seed
        self.pieces = "pieces " * (overlong == "split")  # which are then counted in place of documents
        self.packing = planned or Packing.plan(documents, seq_length, packing, overlong, together=together)
        self.together, self.reference = together, reference
        # of the last epochs: a step may straddle two, and evaluation returns to the first
        self._dealt = lru_cache(maxsize=3)(self._deal)

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each piece, or pair of them: int64 [n]."""
        return self.packing.lengths.reshape(-1, self.together).sum(1, dtype=np.int64)

    @property
    def packs_per_epoch(self) -> int:
        return len(self.packing.bounds) - 1

    @property
    def folder(self) -> Path:
        """Where its tokenised documents are kept."""
        assert self.documents.folder is not None
        return self.documents.folder

    def summary(self) -> str:
        """What became of the documents, in one line."""
        documents, overlong, dropped = self.packing.counts.tolist()
        filled = self.packing.lengths.sum(dtype=np.int64) / (self.packs_per_epoch * self.seq_length)
        return (
            f"{documents} {_name(self.together)} ({overlong} overlong, {dropped} {self.pieces}without loss dropped,"
            f" {self.documents.report.skipped} bad rows skipped) in {self.packs_per_epoch} packs of {self.seq_length}"
            f" tokens, {filled:.1%} full, {self.packing.losses.sum(dtype=np.int64)} loss tokens"
        )

    def require(self, samples: int) -> None:
        """Any number of packs is there."""

    def build(self, say: Say) -> None:
        """The packing is planned."""

    def open(self) -> None:
        """The documents are open."""

    def pack(self, index: int) -> list[Piece | tuple[np.ndarray, np.ndarray]]:
        """The documents of pack `index` (of epoch index // packs_per_epoch): (ids [n] int32, is a target [n] bool)."""
        self.documents.release()
        numbers = self._pieces(index).tolist()
        if self.reference is None:
            return [self.piece(i) for i in numbers]
        return [Piece(*self.piece(i), reference=float(self.reference[i])) for i in numbers]

    def piece(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, targets) of piece i."""
        span = slice(self.packing.starts[i], self.packing.starts[i] + self.packing.lengths[i])
        return self.documents.tokens[span], self.documents.targets[span]

    def sample_id(self, index: int) -> str:
        """Where the first document of pack `index` begins: "token+" its place among all tokens of the data."""
        return f"token+{self.packing.starts[self._pieces(index)[0]]}"

    def loss_tokens(self, indices: Iterable[int]) -> int:
        """Loss tokens of these packs together, counted without building them."""
        return int(sum(self.packing.losses[self._pieces(index)].sum() for index in indices))

    def _pieces(self, index: int) -> np.ndarray:
        """The numbers of the pieces in pack `index`."""
        epoch, place = divmod(index, self.packs_per_epoch)
        pieces, order = self._dealt(epoch)
        pack = order[place]
        units = pieces[self.packing.bounds[pack] : self.packing.bounds[pack + 1]]
        return units if self.together == 1 else (units[:, None] * self.together + np.arange(self.together)).ravel()

    def _deal(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the pieces, pack after pack [n]; the order of the packs [packs_per_epoch]) of an epoch.

        Of pairs of pieces, where they share a pack.
        """
        random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        lengths = self.packing.lengths if self.together == 1 else self.sizes
        shuffled = random.permutation(len(lengths))
        descending = shuffled[np.argsort(-lengths[shuffled], kind="stable")].astype(np.int32)
        return descending[self.packing.slots], random.permutation(self.packs_per_epoch)
