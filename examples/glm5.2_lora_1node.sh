#!/usr/bin/env bash
# LoRA of GLM-5.2 on Tulu 3, the frozen model from its FP8 release: one node of 8 H200 GPUs.
#   bash examples/glm5.2_lora_1node.sh [flags of finetune_glm.py]
#   sbatch examples/slurm/glm5.2_lora_1node.sbatch     the same by SLURM
#   bash examples/glm5.2_lora_1node.sh --dry-run       what it needs, without any GPU
#   SCALE=tiny bash examples/glm5.2_lora_1node.sh      its layout in small, on a CPU
# shellcheck disable=SC2034  # launch.sh reads the variables
set -euo pipefail
# shellcheck source=examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

setting NNODES 1
setting GPUS_PER_NODE 8
setting MASTER_ADDR localhost
setting BASE hf/GLM-5.2-FP8
setting DATA_PATH data/tulu3.jsonl
setting SAVE runs/glm5.2_lora_1node

HF_MODEL=zai-org/GLM-5.2-FP8
HF_DATA=allenai/tulu-3-sft-mixture
HF_SPLIT='train[:100000]'

MODEL_ARGS=(--hf-config glm5.2 --bf16 --attention-backend cudnn --recompute-granularity full
  --base-precision fp8 --lora-rank 16 --lora-alpha 32 --lora-expert-rank 8)
PARALLEL_ARGS=(--pipeline-model-parallel-size 1 --expert-model-parallel-size 8)
DATA_ARGS=(--data-path "$DATA_PATH" --seq-length 4096 --packing best-fit)
OPTIMIZER_ARGS=(--lr 1e-4 --lr-decay-style cosine --weight-decay 0 --adam-beta1 0.9 --adam-beta2 0.95)
TRAIN_ARGS=(--micro-batch-size 1 --global-batch-size 64 --train-iters 500 --seed 1234)
# What SCALE=tiny changes, with launch.sh
TINY_ARGS=(--seq-length 256 --global-batch-size 16)

launch "$@"
