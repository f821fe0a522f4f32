import runpy
from pathlib import Path

from setuptools import find_packages, setup

PACKAGES = runpy.run_path(str(Path(__file__).parent / "megatron_glm" / "packages.py"))
CHECKS = ["ruff==0.17.6", "pyright[nodejs]==1.1.414"]  # pinned, so that a new version fails no old commit
LOGGING = ["tensorboard", "wandb", "matplotlib"]
EXTRAS = {
    "test": ["pytest", "pytest-timeout", *CHECKS, "transformers>=5.24", "peft", "pyarrow", "sentencepiece", *LOGGING],
    "data": ["pyarrow", "sentencepiece"],
    "logging": LOGGING,
    "docs": ["mkdocs==1.6.1"],
    "te": ["transformer-engine[pytorch,core-cu13]==2.20.2"],
}
EXTRAS |= {entry.extra: entry.requirements for entry in PACKAGES["SETS"]}  # Hopper kernels, with the torch they fit

setup(
    # The scripts go along: tools/ as a package of its own, the two trainers as modules.
    packages=[*find_packages(include=["megatron_glm", "megatron_glm.*"]), "megatron_glm_tools"],
    package_dir={"megatron_glm_tools": "tools"},
    py_modules=["finetune_glm", "pretrain_glm"],
    package_data={"megatron_glm": ["presets/*.json", "py.typed"]},
    install_requires=["torch>={}.{}".format(*PACKAGES["TORCH"]), *PACKAGES["REQUIRED"]],
    extras_require=EXTRAS,
)
