"""What must be installed: the packages that every run imports, and the table of GPU packages that load together.

setup.py, examples/setup.sh, the refusals of `ops/backends.py`, tools/doctor.py and docs/install.md read it.
Compiled packages fit few torch releases: tokenspeed-flashmla 1.0.0.post20260615 fails under torch 2.14.1 with an
undefined symbol. So a torch outside the table is refused where GPU kernels are wanted. Nothing here imports torch.

    python -m megatron_glm.packages check      one line and exit code 2 if this interpreter cannot run the trainer
    python -m megatron_glm.packages cpu        what to install beside setup.py's; also gpu, hopper, fresh (see `wanted`)
    python -m megatron_glm.packages rivals     what to uninstall first (see `rivals`)
"""

from __future__ import annotations

import platform
import runpy
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

REQUIRED = ("numpy", "safetensors", "tokenizers", "jinja2", "tqdm")
TORCH = (2, 11)  # the oldest that is served, on any machine
CPU_TORCH = "2.13.0"  # what a machine without a GPU gets
CUDA = "13"  # the major version that the torch build must have; torch's wheels for Linux on PyPI have it from 2.11 on
DRIVER = 580  # the first one for CUDA 13
PYTHONS = ((3, 11), (3, 13))  # the first and the last that all packages have wheels for, on x86_64

# module -> requirement, the same for every set; tilelang needs apache-tvm-ffi < 0.1.13
SHARED = {
    "tilelang": "tilelang==0.1.15",
    "tvm_ffi": "apache-tvm-ffi==0.1.12",
    "z3": "z3-solver==4.15.4.0",
    "cudnn": "nvidia-cudnn-frontend==1.32.0",
    "cutlass": "nvidia-cutlass-dsl[cu13]==4.8.1",
}

# TileLang and DeepGEMM compile kernels at run time. All four of one CUDA release: pip would mix 13.0 and 13.5.
COMPILER = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
)


class GpuSet(NamedTuple):
    torch: str
    extra: str  # of setup.py
    packages: dict[str, str]  # module -> requirement
    tested: str

    @property
    def requirements(self) -> list[str]:
        return [f"torch=={self.torch}", *self.packages.values(), *COMPILER]

    @property
    def install(self) -> str:
        return f"pip install -e '.[{self.extra}]'"


# A machine without torch gets the first. FlashMLA is sgl's for 2.14.1: tokenspeed's later builds pin torch 2.14.0.
SETS = (
    GpuSet(
        torch="2.11.0",
        extra="gpu",
        packages={
            **SHARED,
            "flash_mla": "tokenspeed-flashmla==1.0.0.post20260615",
            "deep_gemm": "tokenspeed-deepgemm==2.5.0.post20260629",
        },
        tested="all GPU tests and figures",
    ),
    GpuSet(
        torch="2.14.1",
        extra="gpu-torch214",
        packages={
            **SHARED,
            "flash_mla": "sgl-flash-mla==1.0.0",
            "deep_gemm": "tokenspeed-deepgemm==2.6.1.post20260827",
        },
        tested="loads; not yet run on a GPU",
    ),
)
FRESH = SETS[0]


def installed_torch() -> tuple[str, str | None] | None:
    """(version, CUDA version or None) of the installed torch, as in ("2.11.0+cu130", "13.0"), without importing it."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0], "version.py")
    if not file.is_file():
        return None
    names = runpy.run_path(str(file))
    return names["__version__"], names.get("cuda")


def gpu_set(version: str, cuda: str | None) -> GpuSet:
    """The set tested with this torch.

    Raises:
        ValueError: none is; names the torch, those of the table, and what to install.
    """
    if fix := refusal(version, cuda):
        build = f"built for CUDA {cuda}" if cuda else "built without CUDA"
        tested = " and ".join(entry.torch for entry in SETS)
        raise ValueError(
            f"torch {version}, {build}, is not one that the GPU packages were tested with (torch {tested}, built for "
            f"CUDA {CUDA}): {fix} brings one with its packages"
        )
    return next(entry for entry in SETS if entry.torch == release(version))


def refusal(version: str, cuda: str | None) -> str | None:
    """None where the table knows this torch, else the command that brings one."""
    known = next((entry for entry in SETS if entry.torch == release(version)), None)
    if known is None:
        return FRESH.install
    if cuda is None or cuda.split(".")[0] != CUDA:
        return f"pip uninstall -y torch && {known.install}"  # pip would take the other build for the right one
    return None


def release(version: str) -> str:
    return version.split("+")[0]


def name_of(requirement: str) -> str:
    return requirement.split("==")[0].split("[")[0]


def holders(chosen: GpuSet) -> dict[str, list[str]]:
    """Module of the set -> the installed packages that hold it, as in {"flash_mla": ["sgl-flash-mla"]}."""
    found = metadata.packages_distributions()
    names = {module: {name.replace("_", "-").lower() for name in found.get(module, [])} for module in chosen.packages}
    present = {distribution.name.replace("_", "-").lower() for distribution in metadata.distributions()}
    for module, requirement in chosen.packages.items():
        names[module] |= {name_of(requirement)} & present  # cutlass lies in a folder that its package adds to the path
    return {module: sorted(held) for module, held in names.items()}


def rivals(chosen: GpuSet) -> list[str]:
    """Installed packages that hold a module of the set under another name: two FlashMLAs overwrite each other."""
    own = {module: name_of(requirement) for module, requirement in chosen.packages.items()}
    return [name for module, names in holders(chosen).items() for name in names if name != own[module]]


def differing(chosen: GpuSet) -> list[str]:
    """Where the installed packages are not those of the set, in words."""
    found = {}
    for module, names in holders(chosen).items():
        found[chosen.packages[module]] = [f"{name}=={metadata.version(name)}" for name in names]
    return [
        f"{' and '.join(versions) or 'nothing'} is installed where {requirement} was tested"
        for requirement, versions in found.items()
        if versions != [requirement.replace("[cu13]", "")]
    ]


def suited() -> GpuSet:
    """The set for the torch that is installed; the first one where none is."""
    torch = installed_torch()
    return next((entry for entry in SETS if torch and entry.torch == release(torch[0])), FRESH)


def repair() -> str:
    """The command that brings the set for the installed torch."""
    others = rivals(suited())
    return (f"pip uninstall -y {' '.join(others)} && " if others else "") + suited().install


def unsuitable() -> str | None:
    """Why this interpreter cannot run the trainer, or None."""
    if sys.version_info < PYTHONS[0]:
        return f"it is Python {platform.python_version()}, {version_text(PYTHONS[0])} or newer is needed"
    missing = [name for name in REQUIRED if find_spec(name) is None]
    torch = installed_torch()
    if torch is None or numbers(torch[0]) < TORCH:
        missing.insert(0, f"torch {version_text(TORCH)} or newer" + (f" (it has {torch[0]})" if torch else ""))
    return f"it lacks {', '.join(missing)}" if missing else None


def numbers(version: str) -> tuple[int, ...]:
    """(2, 11) of "2.11.0+cu130"."""
    return tuple(int(part) for part in version.split(".")[:2])


def version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def no_wheels() -> str | None:
    """Why no set can be installed for this interpreter and processor, or None."""
    if platform.machine() != "x86_64":
        return f"the GPU packages have wheels for x86_64 only, this is {platform.machine()}"
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        first, last = map(version_text, PYTHONS)
        return f"the GPU packages have wheels for Python {first} to {last}, this is {platform.python_version()}"
    return None


def wanted(hardware: str) -> list[str]:
    """The requirements beside `setup.py`'s for this machine; an installed torch that serves stays.

    Args:
        hardware: cpu; gpu, which runs torch alone; hopper, which needs a set; or fresh, the first set whatever is here.
    Raises:
        ValueError: no set fits this machine or its torch.
    """
    torch = None if hardware == "fresh" else installed_torch()
    if hardware in ("cpu", "gpu"):
        if torch is not None and numbers(torch[0]) >= TORCH:
            return []
        return [f"torch=={CPU_TORCH if hardware == 'cpu' else FRESH.torch}"]
    if fault := no_wheels():
        raise ValueError(fault)
    return (FRESH if torch is None else gpu_set(*torch)).requirements


def main(command: str) -> None:
    """Raises ValueError where the command has nothing to print; see the top of this file."""
    if command == "check":
        if fault := unsuitable():
            raise ValueError(fault)
    elif command == "rivals":
        print(*rivals(suited()))
    else:
        print(*wanted(command))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
