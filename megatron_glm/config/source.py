"""Where a model comes from: presets, folders and their files, and what is said when a path is none of them.

A file is checked here before anything reads it: a link whose target is gone, or the small text file that Git leaves in
place of a large one (a Git LFS pointer), would otherwise be found hours later, or copied along.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PRESET_FOLDER = Path(__file__).parents[1] / "presets"
OTHER_CHECKPOINTS = {
    ("common.pt", "mp_rank_*", "iter_*/common.pt", "iter_*/mp_rank_*"): "Megatron-LM",
    ("global_step*", "zero_to_fp32.py", "zero_pp_rank_*"): "DeepSpeed",
}
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# owner/name, also as an address; pathlib makes one slash of two
HUB_ADDRESS = re.compile(
    r"(?:hf:/+|https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/)?(?:datasets/)?([\w.-]+/[\w.-]+?)(?:/|/tree/.*|@.*)?"
)


def preset(name: str) -> Path | None:
    """The preset of this name in any spelling: glm5.2, GLM-5.2, glm52 and glm_5_2 are the same."""
    plain = re.sub(r"[\W_]", "", name).lower()
    return next((path for path in PRESET_FOLDER.glob("*.json") if re.sub(r"[\W_]", "", path.stem) == plain), None)


def locate(source: str | Path) -> Path:
    """The config.json of a model: that of a folder, a JSON file, or a preset.

    Raises: ValueError that says what the path is instead, or how to download it.
    """
    path = Path(source)
    if path.is_dir():
        for candidate in (path / "config.json", path / "hf" / "config.json"):
            if candidate.exists() or candidate.is_symlink():
                return require_content(candidate)
        raise ValueError(f"{path}: the folder holds neither config.json nor hf/config.json{describe(path)}")
    if path.is_symlink() or path.is_file():
        return require_content(path)
    if (found := preset(str(source))) is not None:
        return found
    presets = ", ".join(sorted(p.stem for p in PRESET_FOLDER.glob("*.json")))
    raise ValueError(f"{source}: neither a folder, a config file nor a preset (presets: {presets}){describe(source)}")


def require_model(flag: str, folder: str | Path) -> None:
    """Raises ValueError unless the flag names a folder with a config.json; what it says may still be refused."""
    path = Path(folder) / "config.json"
    if not path.exists() and not path.is_symlink():
        raise ValueError(f"{flag} {folder}: the folder holds no model (config.json is missing){describe(folder)}")
    require_content(path)


def require_folder(folder: Path) -> None:
    """Raises ValueError unless `folder` is one."""
    if not folder.is_dir():
        raise ValueError(f"{folder} {'is no folder' if folder.exists() else 'does not exist'}{describe(folder)}")


def require_outside(flag: str, target: Path, folder: Path) -> None:
    """Raises ValueError if `target` is in the Hugging Face folder, whose files each checkpoint copies."""
    if folder.resolve() in (target.resolve(), *target.resolve().parents):
        raise ValueError(f"{flag} {target} is in {folder}, the folder of the model: choose one outside")


def describe(source: str | Path) -> str:
    """What a path is that lacks a model's files, as the end of a message; empty if nothing is known of it."""
    path = Path(source)
    if path.is_symlink() and not path.exists():
        return f"; it is a link to {path.readlink()}, which does not exist"
    if not path.exists():
        return download_hint(source)
    if path.is_file():
        return f"; it is a file: give its folder, {path.parent}"
    for names, owner in OTHER_CHECKPOINTS.items():
        if any(any(path.glob(name)) for name in names):
            return f"; it is a checkpoint of {owner}, which is not read here: export it as a Hugging Face folder"
    if any(any(path.glob(name)) for name in ("latest_checkpointed_iteration.txt", "iter_*", "*.distcp")):
        return f"; it is a checkpoint: --load {path} reads it"
    if (path / "adapter_config.json").is_file():
        return "; it is a PEFT folder: tools/export_adapter.py --from-peft makes a checkpoint of its adapters"
    if snapshots := sorted(path.glob("snapshots/*/config.json")):
        return f"; it is a download cache, and the model is in {snapshots[-1].parent}"
    if len(inside := sorted(path.glob("*/config.json"))) == 1:
        return f"; a model is in {inside[0].parent}"
    return ""


def download_hint(source: str | Path, data: bool = False) -> str:
    """`; if it is …: hf download …` where a path that does not exist may name a model, or a data set, of the hub."""
    match = HUB_ADDRESS.fullmatch(str(source))
    if match is None or str(source).startswith(".") or Path(source).parent.is_dir():
        return ""
    name = match[1]
    what, options, folder = ("data set", "--repo-type dataset ", "data") if data else ("model", "", "hf")
    command = f"hf download {name} {options}--local-dir {folder}/{name.split('/')[1]}"
    return f"; if it is a {what} of the Hugging Face hub, download it first: {command}"


def require_content(path: Path) -> Path:
    """`path`, a file with content of its own.

    Raises: ValueError if it is missing, a folder, a link to nothing or a Git LFS pointer.
    """
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a link to {path.readlink()}, which does not exist")
    if not path.is_file():
        raise ValueError(f"{path} is {'a folder, not a file' if path.is_dir() else 'missing'}")
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in {path.parent}")
    return path


def require_whole(path: Path) -> Path:
    """`require_content`, and of a .json file that it is JSON: a download that was interrupted seldom is."""
    require_content(path)
    if path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON: {error}") from error
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming the file if it is not that, or says a key twice."""
    require_content(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: a config must be a JSON object, not {type(content).__name__}")
    return content


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its members, for `json.loads`; raises ValueError if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)} is there twice")
    return found


def without_null(value: Any) -> Any:
    """JSON without the members of objects that are null: they count as absent."""
    if isinstance(value, dict):
        return {name: without_null(member) for name, member in value.items() if member is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value
