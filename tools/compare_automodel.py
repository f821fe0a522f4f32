"""Times a step of NeMo AutoModel's GLM-5.2 and of this trainer in turns, on one GPU: the same widths, layers and packs.

python tools/compare_automodel.py --automodel DIR    DIR holds nemo_automodel, of github.com/NVIDIA-NeMo/Automodel

Forward and backward with random weights and documents; each turn is a process of its own, so that neither trainer has
the memory or the compiled kernels of the other. Prints a line a turn and the ratio of the medians. AutoModel runs as
its GLM recipes set it: torch products, router in fp32, masked cross entropy (in chunks with --recompute full).
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

from megatron_glm.config import ModelConfig  # noqa: E402
from megatron_glm.config.flags import Parser  # noqa: E402

PEER, OURS = "NeMo AutoModel", "megatron_glm"
STEPS, WARMUP, BATCHES = 10, 3, 4
BETWEEN = "\nRESULT "  # before the JSON of a turn


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--automodel", required=True, metavar="DIR", help="folder that holds nemo_automodel")
    parser.add_argument(
        "--backend", choices=("cudnn", "tilelang", "torch"), default="cudnn", help="torch: also on a CPU"
    )
    parser.add_argument("--hf-config", default="glm5.2", help="the widths (default: glm5.2)")
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens of a pack (default: 4096)")
    parser.add_argument(
        "--documents", choices=("one", "short"), default="one", help="of a pack, as benchmark.py has them"
    )
    parser.add_argument("--recompute", choices=("none", "full"), default="none", help="in both trainers")
    parser.add_argument("--turns", type=int, default=2, help="of each trainer (default: 2)")
    parser.add_argument("--one-turn-of-the-peer", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    flags = build_parser().parse_args()
    if flags.one_turn_of_the_peer:
        print(BETWEEN + json.dumps({"tokens_per_second": peer_turn(flags)}))
        return 0
    check(flags)
    found: dict[str, list[float]] = {PEER: [], OURS: []}
    for turn in range(flags.turns):
        for name, command in ((PEER, peer_command()), (OURS, own_command(flags))):
            rate = measured(name, command)
            found[name].append(rate)
            print(f"turn {turn + 1}, {name}: {rate:,.0f} tokens/s", flush=True)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    print(json.dumps({"medians": medians, "ratio": medians[OURS] / medians[PEER], "flags": vars(flags)}))
    return 0


def check(flags: argparse.Namespace) -> None:
    """Ends the program with one line where nothing can be compared."""
    import torch

    folder = Path(flags.automodel)
    fault = None
    if flags.turns < 1:
        fault = f"--turns is {flags.turns}; it must be at least 1"
    elif not (folder / "nemo_automodel" / "__init__.py").is_file():
        fault = f"--automodel {folder} holds no package nemo_automodel: clone https://github.com/NVIDIA-NeMo/Automodel"
    elif flags.backend != "torch" and not torch.cuda.is_available():
        fault = f"--backend {flags.backend} needs a CUDA device, and torch sees none; --backend torch runs on a CPU"
    elif flags.backend == "torch" and flags.documents != "one":
        fault = "--backend torch with --documents short: AutoModel's reference does not see the documents of a pack"
    if fault:
        print(f"error: {fault}", file=sys.stderr)
        raise SystemExit(2)


def peer_command() -> list[str]:
    return [sys.executable, __file__, *sys.argv[1:], "--one-turn-of-the-peer"]


def own_command(flags: argparse.Namespace) -> list[str]:
    script = str(Path(__file__).with_name("benchmark.py"))
    words = ["--hf-config", flags.hf_config, "--seq-length", str(flags.seq_length), "--documents", flags.documents]
    words += ["--attention-backend", flags.backend, "--recompute-granularity", flags.recompute, "--rounds", "5"]
    words += ["--reshard-after-forward", "false", "--reshard-experts-after-forward", "false", "--bf16"]
    return [sys.executable, script, "step", *words]


def measured(name: str, command: list[str]) -> float:
    """Tokens a second of one process. Raises OSError with the end of what it said if it failed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{name} failed: {' | '.join((done.stderr or done.stdout).strip().splitlines()[-3:])}")
    result = json.loads(done.stdout.rsplit(BETWEEN, 1)[-1].strip().splitlines()[-1])
    return result["tokens_per_second" if name == PEER else "tokens_per_second_per_gpu"]


def peer_turn(flags: argparse.Namespace) -> float:
    """Tokens a second of AutoModel's step, in this process."""
    os.environ.setdefault("NO_VCS_VERSION", "1")  # its package asks git for a version otherwise
    sys.path.insert(0, os.path.abspath(flags.automodel))
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model, loss_of = peer_model(flags, device)
    batches = [peer_batch(flags, model.config.vocab_size, device) for _ in range(BATCHES)]

    def step(number: int) -> None:
        inputs, labels, count = batches[number % BATCHES]
        loss_of(logits=model(**inputs).logits, labels=labels, num_label_tokens=count).backward()
        model.zero_grad(set_to_none=True)

    seconds = []
    for number in range(WARMUP + STEPS):
        begin = time.perf_counter()
        step(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return flags.seq_length / statistics.median(seconds[WARMUP:])


def peer_model(flags: argparse.Namespace, device):
    """AutoModel's model and loss in the sizes of `benchmark.py step`: 4 layers, one of them dense, 32 experts."""
    import torch
    from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.glm_moe_dsa.config import GlmMoeDsaConfig
    from nemo_automodel.components.models.glm_moe_dsa.model import GlmMoeDsaForCausalLM
    from nemo_automodel.components.moe.parallelizer import apply_ac
    from step_case import REFERENCE

    sizes = {**REFERENCE, "hf_config": flags.hf_config}
    own = ModelConfig.from_hf(sizes.pop("hf_config"), **sizes)
    shape = own.to_hf() | {"dtype": torch.bfloat16, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
    known = {key: value for key, value in shape.items() if key not in ("architectures", "model_type")}
    attention = "sdpa" if flags.backend == "torch" else flags.backend
    backend = BackendConfig(
        attn=attention,
        linear="torch",
        rms_norm="torch_fp32",
        rope_fusion=False,
        experts="torch_mm",
        dispatcher="torch",
        gate_precision="float32",
        enable_hf_state_dict_adapter=False,
    )
    if flags.backend == "cudnn":
        accept_older_flash_mla()
    with torch.device(device):
        model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**known), backend=backend)
    model.initialize_weights(buffer_device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, own.initializer_range)
    if flags.recompute == "full":
        apply_ac(model, selective=False)
    chunked = flags.recompute == "full"
    return model.train(), ChunkedCrossEntropy(chunk_len=512) if chunked else MaskedCrossEntropy(fp32_upcast=False)


def accept_older_flash_mla() -> None:
    """AutoModel calls FlashMLA with `indexer_topk=0`, an argument that builds for torch 2.11 do not have yet."""
    from nemo_automodel.components.models.glm_moe_dsa.kernels import cudnn_dsa

    kernel = cudnn_dsa._FLASH_MLA_SPARSE_FWD
    if "indexer_topk" not in inspect.signature(kernel).parameters:
        cudnn_dsa._FLASH_MLA_SPARSE_FWD = lambda *args, indexer_topk=0, **named: kernel(*args, **named)


def peer_batch(flags: argparse.Namespace, vocabulary: int, device):
    """(inputs, labels, labels that count) of a pack of random documents, in AutoModel's packed format."""
    import torch
    from measure import documents_of
    from nemo_automodel.components.distributed.thd_utils import process_input_for_thd

    lengths = list(documents_of(flags.seq_length)) if flags.documents == "short" else [flags.seq_length]
    tokens = torch.randint(vocabulary, (1, flags.seq_length), device=device)
    labels = tokens.roll(-1, dims=1)
    sizes = torch.tensor([lengths], device=device)
    labels[0, sizes[0].cumsum(0) - 1] = -100  # a document's last token has no next one
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    if flags.backend != "torch":
        packed = {"seq_lens": sizes, "seq_lens_padded": sizes, "qkv_format": "thd"}
        batch = process_input_for_thd(batch | packed)
    labels = batch.pop("labels")
    return batch, labels, int((labels >= 0).sum())


if __name__ == "__main__":
    from megatron_glm.launch import run_program

    run_program(main)
