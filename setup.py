from setuptools import find_packages, setup

LOGGING = ["tensorboard", "wandb", "matplotlib"]
EXTRAS = {
    "test": ["pytest", "pytest-timeout", "ruff==0.17.6", "transformers>=5.24", "pyarrow", "sentencepiece", *LOGGING],
    "data": ["pyarrow", "sentencepiece"],
    "logging": LOGGING,
    # Hopper kernels. tilelang needs apache-tvm-ffi < 0.1.13; later flashmla builds need a newer torch than 2.11.
    "gpu": [
        "tilelang==0.1.15",
        "apache-tvm-ffi==0.1.12",
        "z3-solver==4.15.4.0",
        "nvidia-cudnn-frontend==1.32.0",
        "nvidia-cutlass-dsl[cu13]==4.8.1",
        "tokenspeed-flashmla==1.0.0.post20260615",
    ],
    "te": ["transformer-engine[pytorch,core-cu13]==2.20.2"],
}

setup(
    name="megatron-glm",
    version="0.1.0",
    description="An explicit-parallelism trainer for the GLM-5 family",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_glm", "megatron_glm.*"]),
    package_data={"megatron_glm": ["presets/*.json"]},
    install_requires=["torch>=2.11", "numpy", "safetensors", "tokenizers", "jinja2", "tqdm"],
    extras_require=EXTRAS,
)
