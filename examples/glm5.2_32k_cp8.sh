#!/usr/bin/env bash
# GLM-5.2 on Tulu 3, packed to 32768 tokens, context parallelism 8: 64 nodes of 8 GPUs, 32 at least.
#   MASTER_ADDR=FIRST_NODE bash examples/glm5.2_32k_cp8.sh [flags of finetune_glm.py]     on every node
#   sbatch examples/slurm/glm5.2_32k_cp8.sbatch     the same by SLURM
#   bash examples/glm5.2_32k_cp8.sh --dry-run       what it needs, without any GPU
#   SCALE=tiny bash examples/glm5.2_32k_cp8.sh      its layout in small, on a CPU
# shellcheck disable=SC2034  # launch.sh reads the variables
set -euo pipefail
# shellcheck source=examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

setting NNODES 64
setting GPUS_PER_NODE 8
setting MASTER_ADDR localhost
setting CHECKPOINT checkpoints/GLM-5.2
setting DATA_PATH data/tulu3.jsonl
setting SAVE runs/glm5.2_32k_cp8

HF_MODEL=zai-org/GLM-5.2
HF_DATA=allenai/tulu-3-sft-mixture
HF_SPLIT='train[:100000]'

MODEL_ARGS=(--hf-config glm5.2 --bf16 --attention-backend tilelang --recompute-granularity full)
PARALLEL_ARGS=(--tensor-model-parallel-size 1 --context-parallel-size 8 --pipeline-model-parallel-size 4
  --num-layers-per-virtual-pipeline-stage 2 --expert-model-parallel-size 64
  --moe-token-dispatcher-type hybrid --expert-node-size "$GPUS_PER_NODE"
  --reshard-after-forward false --reshard-experts-after-forward false)
DATA_ARGS=(--data-path "$DATA_PATH" --seq-length 32768 --packing best-fit)
OPTIMIZER_ARGS=(--lr 1e-5 --lr-decay-style constant --weight-decay 0
  --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8)
TRAIN_ARGS=(--micro-batch-size 1 --global-batch-size 64 --train-iters 100 --seed 1234)
# What SCALE=tiny changes, with launch.sh: as many micro-batches a pipeline as at full scale
TINY_ARGS=(--context-parallel-size 2 --seq-length 256 --global-batch-size 8)

launch "$@"
