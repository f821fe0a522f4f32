"""Measures the kernels on one GPU (`benchmark.py kernels`) and a whole training step (`step`, also under torchrun).

Kernels: correctness against fp32 first, then the ratio to each peer of the same run; rates count the operations of the
attended keys. A step: one JSON line. The matmul rate of the same run is the ceiling of both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

from megatron_glm.config import PretrainDataConfig  # noqa: E402
from megatron_glm.config.flags import Parser, build_parser  # noqa: E402
from megatron_glm.launch import one_line_errors  # noqa: E402

OPS = ("index_topk", "sparse_forward", "sparse_backward", "dense", "attention", "experts")  # of kernel_cases.CASES
STEP = """\
One training step of a whole stage, with random weights and documents; also under torchrun; prints one JSON line.

Takes the flags of pretrain_glm.py, so that any layout, backend and recompute mode is measured as it is trained. What is
not given is the reference case: --hf-config glm5.2 --num-layers 4 --dense-layers 1 --num-experts 32 --mtp-num-layers 0,
--bf16 on a GPU, and the smallest global batch, a micro-batch for each pipeline stage of each data rank. --profile adds
the milliseconds of each kind of kernel.
"""


def show(row: dict) -> None:
    rate = f"{row['tflops']:7.0f}" if row.get("tflops") else "      -"
    peers = "  ".join(f"{name} {row['ms'] / ms:.3f}x ({ms:.3f} ms)" for name, ms in row.get("peers", {}).items())
    print(f"{row['op']:<16}{row['backend']:<11}{row['case']:<34}{row['ms']:9.3f} ms {rate}  {peers}  {row['check']}")
    sys.stdout.flush()


def run_kernels(arguments: argparse.Namespace) -> int:
    import kernel_cases  # imports torch, a second or more, after the flags are read
    import torch
    from measure import matmul_rate

    from megatron_glm.ops import backends

    if not torch.cuda.is_available():
        print("error: benchmark.py kernels needs a CUDA device, and torch sees none", file=sys.stderr)
        return 1
    chosen = arguments.backend or [name for name in ("cudnn", "tilelang") if not backends.lacking(name)]
    try:
        for name in chosen:
            backends.load(name)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rate = matmul_rate()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, bf16 matmul 8192^3: {rate:.0f} TFLOP/s")
    print("time, TFLOP/s, time over each peer's in the same run, relative errors against fp32")
    results = []
    for row in rows(kernel_cases.CASES, arguments.op or list(OPS), chosen, arguments.tokens):
        show(row)
        if row.get("tflops"):
            row["peer_tflops"] = {name: row["tflops"] * row["ms"] / ms for name, ms in row["peers"].items()}
        results.append(row)
        torch.cuda.empty_cache()
    if arguments.json:
        content = {"device": device, "torch": torch.__version__, "matmul_tflops": rate, "results": results}
        arguments.json.write_text(json.dumps(content, indent=1))
    return int(any("WRONG" in row["check"] for row in results))


def rows(cases: dict, ops: list[str], chosen: list[str], tokens: list[int]) -> Iterator[dict]:
    for op in ops:
        for case in cases[op](chosen, tokens):
            yield {"op": op, **case}


def run_step(words: list[str]) -> int:
    flags = step_parser().parse_args(words)
    import step_case  # imports torch, a second or more, after the flags are read
    import torch.distributed as dist

    with one_line_errors():
        with contextlib.redirect_stdout(sys.stderr):  # what the run itself says
            result = step_case.measure_step(step_case.configured(flags), flags)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    return 0


def step_parser() -> Parser:
    """The flags of a pre-training run, and the benchmark's own."""
    parser = build_parser(STEP, PretrainDataConfig)
    parser.prog, parser.usage = f"{parser.prog} step", "%(prog)s [flags of pretrain_glm.py] [benchmark's own, below]"
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--documents", choices=["one", "short"], help="one that fills the pack (default), or 200 to 2,000"
    )
    group.add_argument(
        "--routing", choices=["natural", "balanced"], help="the router's choice (default), or each alike"
    )
    group.add_argument("--dense-layers", type=int, metavar="N", help="leading layers without experts (default: 1)")
    group.add_argument("--with-optimizer", action="store_true", help="measure AdamW, too")
    group.add_argument(
        "--write-calibration", metavar="FILE", help="write what --calibration FILE of a plan reads; on one GPU"
    )
    group.add_argument(
        "--held-multiprocessors",
        type=int,
        metavar="N",
        help="the step again while N multiprocessors are held, as NCCL's kernels hold them, planned with all and with "
        "--communication-sms (8) fewer; on one GPU",
    )
    group.add_argument(
        "--rounds", type=int, metavar="N", help="measured rounds of 3 steps; medians are shown (default: 7)"
    )
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    kernels = commands.add_parser("kernels", help="every op of the attention and the experts on one GPU")
    kernels.add_argument("--op", nargs="+", choices=OPS, help="only these (default: all)")
    kernels.add_argument("--backend", nargs="+", choices=["cudnn", "tilelang"], help="default: those that can run")
    kernels.add_argument(
        "--tokens", nargs="+", type=int, default=[4096, 8192, 32768, 131072], help="lengths (default: 4k to 128k)"
    )
    kernels.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to FILE, which plot_kernels.py draws"
    )
    kernels.set_defaults(run=run_kernels)
    commands.add_parser("step", help="a training step: the flags of pretrain_glm.py and more, see step --help")
    return parser.parse_args()


def main() -> int:
    if sys.argv[1:2] == ["step"]:
        return run_step(sys.argv[2:])
    arguments = parse_arguments()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
