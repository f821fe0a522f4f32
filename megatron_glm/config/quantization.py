"""How the weights of a Hugging Face folder are quantised, as its configs say: FP8 in blocks is read, all else refused.

Three places say it: `quantization_config` in config.json, keys beside it with other names, and files of their own
(`hf_quant_config.json` of ModelOpt, `quantize_config.json` of GPTQ and AWQ).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .source import read_json, without_null

EXPORT_BLOCK = (128, 128)  # of every FP8 release
OTHER_NAMES = ("compression_config", "quantization", "quant_config", "quantize_config", "hf_quant_config")
SERVED = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),  # the scales are stored as numbers either way
    "expert_dtype": ("fp8",),
}
NEUTRAL = ("weight_block_size", "modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize")
NAMES = """
    quant_method quant_algo quantization quant_type model_quant_type bnb_4bit_quant_type format method type _type
""".split()
BITS = ("bits", "num_bits", "w_bit", "wbits", "nbits", "weight_bits")


def weight_block(raw: dict[str, Any], path: Path) -> tuple[int, int]:
    """Rows and columns that share a scale, of a config.json without its null members; 128 x 128 if it does not say.

    Raises: ValueError naming the format if it is none that is read.
    """
    for name in OTHER_NAMES:
        if name in raw:
            raise ValueError(_refusal(f"{path}: {name}", raw[name]))
    quantization = raw.get("quantization_config", {})
    if not isinstance(quantization, dict):
        raise ValueError(f"{path}: quantization_config must be an object, not {quantization!r}")
    for name, value in quantization.items():
        if name not in NEUTRAL and value not in SERVED.get(name, ()):
            detail = f" ({name} is {value!r})" if quantization.get("quant_method") == "fp8" else ""
            raise ValueError(_refusal(f"{path}: quantization_config", quantization, detail))
    block = quantization.get("weight_block_size", EXPORT_BLOCK)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ValueError(f"{path}: weight_block_size must be two whole numbers of at least 1, not {block}")
    return tuple(block)


def refuse_files(folder: Path) -> None:
    """Refuses a folder in which a file of its own describes a quantisation, naming the format."""
    for file in sorted(folder.glob("*quant*.json")):
        if not file.name.endswith(".index.json"):
            raise ValueError(_refusal(str(file), without_null(read_json(file))))


def _refusal(where: str, content: Any, detail: str = "") -> str:
    found = list(dict.fromkeys(_words(content))) or ["of an unknown format"]
    return (
        f"{where} says that the weights are quantised: {', '.join(found)}{detail}. Read are bfloat16, float16, float32 "
        "and FP8 with a scale for each block (quant_method fp8): take the model in one of them"
    )


def _words(content: Any) -> Iterator[str]:
    """What names the format, outermost first: ("modelopt", "NVFP4", "4 bits")."""
    if isinstance(content, list):
        content = dict(enumerate(content))
    if not isinstance(content, dict):
        return
    for name, value in content.items():
        if name in NAMES and isinstance(value, str):
            yield value
        elif name in BITS and isinstance(value, int):
            yield f"{value} bits"
        elif isinstance(name, str) and name.startswith("load_in_") and value is True:
            yield f"bitsandbytes {name.removeprefix('load_in_')}"
        elif name == "producer" and isinstance(value, dict) and isinstance(value.get("name"), str):
            yield value["name"]
    for value in content.values():
        yield from _words(value)
