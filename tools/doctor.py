#!/usr/bin/env python3
"""One page of what this machine can run, and for each missing thing the command that installs it.

    python tools/doctor.py      exit code 0 if it can train on the best backend for its hardware, else 1

The best backend is cudnn on a Hopper GPU and torch elsewhere. What imports compiled code runs in a process of its own,
so that a crash or a hang there becomes a line here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_glm import packages, signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

if __name__ == "__main__" and sys.version_info >= packages.PYTHONS[0]:
    from megatron_glm import signals

    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

GIB = 1 << 30
SECONDS = 180  # the longest that one import may take: a cold file system, many cores compiling
DESCRIPTORS = 16384  # rank 0 of 512 holds a socket to every rank for each of about ten groups
OK, MISSING, WARN, ABSENT, OTHER = "ok", "MISSING", "warn", "absent", "-"  # ABSENT: optional; OTHER: for other hardware

TORCH = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "nccl": nccl}))
"""
BACKEND = """
from megatron_glm.ops import backends
if lacks := backends.lacking("{0}", "auto"):
    raise SystemExit("it lacks " + ", ".join(lacks))
backends.load("{0}")
print('"loads"')
"""
DEEP_EP = """
import json, torch, deep_ep
print(json.dumps("with HybridEPBuffer" if hasattr(deep_ep, "HybridEPBuffer") else "without HybridEPBuffer"))
"""
IMPORT = "import json, torch, {0}; print(json.dumps('loads'))"


class Line(NamedTuple):
    state: str
    subject: str
    found: str
    fix: str = ""  # a command


class Gpu(NamedTuple):
    name: str
    memory: str
    capability: str
    driver: str


class Machine(NamedTuple):
    gpus: list[Gpu]
    trouble: str  # what nvidia-smi says where it fails

    @property
    def hopper(self) -> bool:
        return any(gpu.capability == "9.0" for gpu in self.gpus)

    @property
    def backend(self) -> str:
        return "cudnn" if self.hopper else "torch"


def probe(code: str) -> tuple[object, str]:
    """(what the program printed last as JSON, "") or (None, why it did not): run by this interpreter, on its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-W", "default", "-c", code]
    try:
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"no answer in {SECONDS} s"
    if done.returncode < 0:
        return None, f"killed by signal {-done.returncode}"
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return None, said[-1] if said else f"exit code {done.returncode}"
    try:
        return json.loads(done.stdout.splitlines()[-1]), next((line for line in said if "driver" in line), "")
    except (ValueError, IndexError):
        return None, f"no answer, it printed {done.stdout[-80:]!r}"


def look_at_gpus() -> Machine:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Machine([], "")
    query = "--query-gpu=name,memory.total,compute_cap,driver_version"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader"], text=True, capture_output=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Machine([], str(error))
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    gpus = [Gpu(*row) for row in rows if len(row) == 4]
    said = (done.stdout + done.stderr).strip().splitlines()
    return Machine(gpus, "" if gpus or "No devices" in " ".join(said) else (said or ["it says nothing"])[-1])


def driver(machine: Machine) -> Iterator[Line]:
    if machine.trouble:
        yield Line(
            MISSING, "driver", f"nvidia-smi: {machine.trouble}", "sudo nvidia-smi  # then what it says, or a reboot"
        )
    elif not machine.gpus:
        yield Line(OTHER, "driver", "no NVIDIA GPU is seen")
        return
    for gpu in sorted(set(machine.gpus)):
        number = machine.gpus.count(gpu)
        yield Line(OK, "GPU", f"{number} x {gpu.name}, {gpu.memory}, compute capability {gpu.capability}")
    for version in sorted({gpu.driver for gpu in machine.gpus}):
        old = not version.split(".")[0].isdigit() or int(version.split(".")[0]) < packages.DRIVER
        fix = f"sudo apt-get install -y nvidia-driver-{packages.DRIVER}-open  # or your distribution's, then reboot"
        if old:
            found = f"{version}; CUDA {packages.CUDA} needs {packages.DRIVER} or newer"
            yield Line(MISSING if machine.hopper else WARN, "driver", found, fix)
        else:
            yield Line(OK, "driver", version)


def python(machine: Machine) -> Iterator[Line]:
    found = f"{sys.version.split()[0]}, {sys.executable}"
    if too_old():
        fix = "bash examples/setup.sh  # outside any environment, with a newer Python on the PATH"
        yield Line(MISSING, "python", f"{found}; {packages.version_text(packages.PYTHONS[0])} or newer is needed", fix)
    elif machine.hopper and (fault := packages.no_wheels()):
        first, last = map(packages.version_text, packages.PYTHONS)
        fix = f"bash examples/setup.sh  # outside any environment, with a Python {first} to {last} on the PATH"
        yield Line(MISSING, "python", f"{found}; {fault}", fix)
    else:
        yield Line(OK, "python", found)


def too_old() -> bool:
    return sys.version_info < packages.PYTHONS[0]


def required(machine: Machine) -> Iterator[Line]:
    absent = [name for name in packages.REQUIRED if find_spec(name) is None]
    if absent:
        yield Line(MISSING, "packages", f"{', '.join(absent)} not installed", f"pip install {' '.join(absent)}")
    else:
        yield Line(OK, "packages", ", ".join(packages.REQUIRED))


def torch(machine: Machine) -> Iterator[Line]:
    """torch and what comes with it: the GPUs that it sees, NCCL."""
    fresh = packages.FRESH.install if machine.hopper else f"pip install torch=={packages.CPU_TORCH}"
    if packages.installed_torch() is None:
        made = (ROOT / ".venv/bin/activate").is_file() and Path(sys.prefix).resolve() != ROOT / ".venv"
        yield Line(MISSING, "torch", "not installed", "source .venv/bin/activate" if made else fresh)
        return
    found, fault = probe(TORCH)
    if found is None:
        yield Line(MISSING, "torch", f"fails to import: {fault}", f"{fresh} --force-reinstall")
        return
    version, cuda, gpus, nccl = found["version"], found["cuda"], found["gpus"], found["nccl"]
    text = f"{version}, {f'built for CUDA {cuda}' if cuda else 'built without CUDA'}"
    if packages.numbers(version) < packages.TORCH:
        yield Line(MISSING, "torch", f"{text}; {packages.version_text(packages.TORCH)} or newer is needed", fresh)
    elif machine.hopper and (refused := packages.refusal(version, cuda)):
        yield Line(MISSING, "torch", f"{text}, not in the table of tested sets", refused)
    elif machine.gpus and not cuda:
        again = f"pip uninstall -y torch && pip install torch=={packages.FRESH.torch}"
        yield Line(MISSING, "torch", f"{text}: it sees no GPU", again)
    elif machine.gpus and gpus == 0:
        fix = "env | grep CUDA_VISIBLE_DEVICES; nvidia-smi"
        yield Line(MISSING, "torch", f"{text}, sees no GPU: {fault or 'CUDA does not start'}", fix)
    else:
        yield Line(OK, "torch", f"{text}, sees {gpus} GPUs" if machine.gpus else text)
    if nccl:
        yield Line(OK, "NCCL", f"{nccl}, torch's (DeepEP 2 needs 2.30.4 or newer)")
    else:
        yield Line(OTHER, "NCCL", "comes with a CUDA build of torch; ranks on CPUs use gloo")


def compilers(machine: Machine) -> Iterator[Line]:
    """Triton compiles with the host's C compiler at run time, TileLang and DeepGEMM with nvcc, too."""
    if not machine.gpus:
        return
    host = next(filter(None, map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))), None)
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if host is None:
        yield Line(MISSING, "compiler", "no gcc, which Triton calls", "sudo apt-get install -y g++")
    elif not headers.is_file():
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        yield Line(MISSING, "compiler", f"{host}; {headers} is missing", f"sudo apt-get install -y {package}")
    else:
        yield Line(OK, "compiler", host)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [Path(home, "bin")] if home else [Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")]
    nvcc = next((str(place / "nvcc") for place in places if (place / "nvcc").is_file()), None)
    nvcc = nvcc or shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not machine.hopper:
        return
    if nvcc is None:
        yield Line(WARN, "nvcc", "none; TileLang and DeepGEMM call it", f"pip install {' '.join(packages.COMPILER)}")
    else:
        yield Line(OK, "nvcc", nvcc)


def attention(machine: Machine) -> Iterator[Line]:
    has_torch = packages.installed_torch() is not None
    for backend in ("torch", "cudnn", "tilelang"):
        subject = f"--attention-backend {backend}"
        if backend != "torch" and not machine.hopper:
            yield Line(OTHER, subject, "for Hopper GPUs")
            continue
        found, fault = probe(BACKEND.format(backend)) if has_torch else (None, "needs torch")
        if found:
            yield Line(OK, subject, "loads")
        else:
            fix = "pip install -e ." if backend == "torch" else packages.repair()
            unseen = fault.endswith("it lacks a Hopper GPU")  # torch's line says why
            yield Line(MISSING if backend == machine.backend else WARN, subject, fault, "" if unseen else fix)


def libraries(machine: Machine) -> Iterator[Line]:
    """Optional ones, each imported if it is there."""
    version = packages.installed_torch()
    te = "NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_WITH_NCCL_EP=0 pip install --no-build-isolation -e '.[te]'"
    deep_ep = (
        "git clone -b hybrid-ep https://github.com/deepseek-ai/DeepEP && "
        "HYBRID_EP_MULTINODE=0 pip install --no-build-isolation ./DeepEP"
    )
    for subject, module, code, fix in (
        ("DeepGEMM", "deep_gemm", IMPORT.format("deep_gemm"), packages.repair()),
        ("DeepEP", "deep_ep", DEEP_EP, deep_ep),
        ("Transformer Engine", "transformer_engine", IMPORT.format("transformer_engine.pytorch"), te),
    ):
        if not machine.hopper:
            yield Line(OTHER, subject, "for Hopper GPUs")
        elif find_spec(module) is None or version is None:
            yield Line(ABSENT, subject, "not installed", fix)
        else:
            found, fault = probe(code)
            yield Line(OK, subject, found) if found else Line(WARN, subject, f"fails to import: {fault}", fix)


def limits(machine: Machine) -> Iterator[Line]:
    cores, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and limit.read_text().strip().isdigit():
        memory = min(memory, int(limit.read_text()))
    yield Line(OK, "CPU, memory", f"{cores} cores, {memory / GIB:.0f} GiB")
    for folder in dict.fromkeys((str(Path.cwd()), "/tmp")):
        free = shutil.disk_usage(folder).free / GIB
        fix = f"df -h {folder}  # checkpoints, kernels that are compiled and pip need room"
        yield Line(OK if free >= 10 else WARN, "disk", f"{free:.0f} GiB free in {folder}", "" if free >= 10 else fix)
    if machine.gpus and Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").total / GIB
        fix = "" if shared >= 1 else "docker run --shm-size=16g …  # NCCL's ranks exchange data there"
        yield Line(WARN if fix else OK, "/dev/shm", f"{shared:.2f} GiB", fix)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a run raises its own limit to this one
    few = hard != resource.RLIM_INFINITY and hard < DESCRIPTORS
    fix = "echo '* - nofile 65536' | sudo tee /etc/security/limits.d/90-nofile.conf  # then log in again" if few else ""
    yield Line(WARN if few else OK, "descriptors", f"{'no limit' if hard < 0 else hard} a process", fix)


def examine(machine: Machine) -> Iterator[Line]:
    checks: tuple[Callable[[Machine], Iterator[Line]], ...]
    checks = (driver, python, limits)
    if not too_old():
        checks = (driver, python, required, torch, attention, compilers, libraries, limits)
    for check in checks:
        try:
            yield from check(machine)
        except Exception as error:  # a page without one line is worth more than none
            yield Line(WARN, check.__name__, f"could not be looked at: {type(error).__name__}: {error}")


def main() -> int:
    argparse.ArgumentParser(description=re.sub(r"\n\n.*", "", __doc__ or "", flags=re.S)).parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it
    machine, states = look_at_gpus(), []
    for line in examine(machine):
        states.append(line.state)
        print(f"{line.state:8}{line.subject:29}{line.found}", flush=True)
        if line.fix:
            print(f"{'':8}{'':29}-> {line.fix}", flush=True)
    if MISSING in states:
        print(f"\nNo training here on the best backend, {machine.backend}, until what is MISSING is there.")
        return 1
    print(f"\nTraining runs here with --attention-backend {machine.backend}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
