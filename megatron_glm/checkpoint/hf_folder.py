"""The files of a Hugging Face folder: which of them hold the weights, and what must not lie beside them.

All of it is known from names, links and headers, before a weight is read or a file written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ..config.quantization import refuse_files
from ..config.source import describe, require_content, require_folder, unique
from .files import check_side_files, visible_files
from .safetensors_io import INDEX_NAME, SINGLE_NAME, Entry, read_header

SHARD = re.compile(r".*-\d+-of-\d+\.safetensors")
# Endings of tensors that only quantised weights have, and the format they tell. The first that fits counts: NVFP4 has
# a weight_scale, too.
FORMATS = (
    (r"\.weight_(scale_2|global_scale)$", "NVFP4"),
    (r"\.weight_packed$", "compressed-tensors, several numbers in a byte"),
    (r"_(blocks|scales)$", "MXFP4"),
    (r"\.(qweight|qzeros|g_idx|scales)$", "GPTQ or AWQ"),
    (r"\.SCB$|\.weight\.(absmax|quant_map|quant_state\b.*|nested_.*)$", "bitsandbytes"),
    (r"\.(W_q|weight_offset|weight_zero_point|zeros)$", "integers with an offset"),
    (r"\.(weight_scale|weight_shape|input_scale|act_scale|k_scale|v_scale)$", "a scale for each tensor or channel"),
)


def check_folder(folder: Path) -> None:
    """Refuses a folder that is no Hugging Face model, or holds a file that is not whole.

    Raises: ValueError naming the file: a link to nothing or a Git LFS pointer, whichever file it stands for; a .json
    file that is none; adapters instead of weights, or beside them; the config of a quantisation that is not read.
    """
    require_folder(folder)
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).is_file():
            raise ValueError(
                f"{folder / name} is of an adapter: merge it into its base model first "
                "(tools/export_adapter.py --from-peft reads it, --merge merges)"
            )
    config = folder / "config.json"
    if not config.exists() and not config.is_symlink():
        raise ValueError(f"{folder} holds no config.json{describe(folder)}")
    for file in visible_files(folder):
        require_content(folder / file)
    check_side_files(folder)
    refuse_files(folder)


class SafetensorsFolder:
    """The tensors of a Hugging Face folder by key: of the files that its index names, or of its single file.

    Other safetensors files in it (such as mtp.safetensors) are read, too, if none of their tensors is there already.
    Only headers are read here; `headers_only` allows files that end behind them.
    Raises ValueError naming tensor and file for whatever does not fit together: an index that names a missing file or
    tensor, a tensor that the index does not know or that two files hold, a single file beside an index, a file cut off.
    """

    def __init__(self, folder: Path, headers_only: bool = False) -> None:
        self.entries: dict[str, Entry] = {}
        listed: dict[str, set[str]] = {}
        for key, name in _listed(folder).items():
            listed.setdefault(name, set()).add(key)
        for name, keys in sorted(listed.items()):
            self._add_listed(folder / name, keys, headers_only)
        if not listed:
            self.entries = read_header(folder / SINGLE_NAME, headers_only)
        for file in _outside(folder, set(listed) or {SINGLE_NAME}):
            entries = read_header(file, headers_only)
            if twice := entries.keys() & self.entries.keys():
                key = min(twice)
                raise ValueError(f"{file} and {self.entries[key].file} both hold {key}: remove one of them")
            self.entries |= entries

    def _add_listed(self, file: Path, keys: set[str], headers_only: bool) -> None:
        """Adds a file in which the index places `keys`."""
        if not file.is_file():
            raise ValueError(f"{file} is missing; {INDEX_NAME} places {min(keys)} in it")
        entries = read_header(file, headers_only)
        if unlisted := entries.keys() - keys:
            raise ValueError(f"{file} holds {min(unlisted)}, which {INDEX_NAME} does not place there")
        if lacking := keys - entries.keys():
            raise ValueError(f"{file} lacks {min(lacking)}, which {INDEX_NAME} places in it")
        self.entries |= entries


def format_of(keys: list[str]) -> str | None:
    """The quantisation that tensors of these names tell of, with the first such name; None if they tell of none."""
    for ending, name in FORMATS:
        if (key := next((key for key in keys if re.search(ending, key)), None)) is not None:
            return f"{name} ({key})"
    return None


def _listed(folder: Path) -> dict[str, str]:
    """{key: file name} of the index; empty where a single file holds all."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    others = sorted(path.name for path in folder.glob("*.safetensors.index*.json") if path != index)
    if index.is_file() and others:
        raise ValueError(f"{folder} holds two indices, {INDEX_NAME} and {others[0]}: remove one, and its weights")
    if index.is_file():
        listed = _weight_map(index)
        if single.is_file() and SINGLE_NAME not in listed.values():
            raise ValueError(
                f"{folder} holds both {SINGLE_NAME} and {INDEX_NAME}, which places nothing in it: transformers would "
                "read the former, others the latter; remove one"
            )
        return listed
    if not single.is_file():
        raise ValueError(f"{folder} holds neither {INDEX_NAME} nor {SINGLE_NAME}{_instead(folder, others)}")
    return {}


def _instead(folder: Path, indices: list[str]) -> str:
    """What weights a folder has that are not read, as the end of a message."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if indices:
        return f", only an index of another name, {indices[0]}"
    if shards := [name for name in names if SHARD.fullmatch(name)]:
        return f", only files that need an index, {shards[0]} and others: download {INDEX_NAME}"
    if others := [name for name in names if name.endswith(".safetensors")]:
        return f", only {others[0]}, which transformers would not read either"
    old = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
    for name in [name for name in old if not name.startswith(("training_args", "optimizer"))]:
        return f", only {name}: save the model as safetensors (save_pretrained of transformers does)"
    return describe(folder)


def _outside(folder: Path, listed: set[str]) -> list[Path]:
    """The safetensors files beside the listed ones; a folder in it with a config.json is a model of its own."""
    return [
        folder / file
        for file in visible_files(folder)
        if file.suffix == ".safetensors"
        and str(file) not in listed
        and not any((folder / parent / "config.json").is_file() for parent in file.parents[:-1])
    ]


def _weight_map(index: Path) -> dict[str, str]:
    """{key: file name} of an index; the files lie beside it."""
    try:
        content = json.loads(index.read_text(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} is not a safetensors index: it has no weight_map from tensors to files")
    if not weight_map:
        raise ValueError(f"{index} is not a safetensors index: its weight_map is empty")
    weight_map = {key: str(Path(name)) for key, name in weight_map.items()}  # without ./
    for key, name in weight_map.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{index} places {key} in {name}, outside its folder")
    return weight_map
