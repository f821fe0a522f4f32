#!/usr/bin/env bash
# GLM-5.2 on HellaSwag, one row of at most 160 tokens a pack, with the reference attention: 32 nodes of 8 GPUs.
#   MASTER_ADDR=FIRST_NODE bash examples/glm5.2_hellaswag.sh [flags of finetune_glm.py]     on every node
#   sbatch examples/slurm/glm5.2_hellaswag.sbatch     the same by SLURM
#   bash examples/glm5.2_hellaswag.sh --dry-run       what it needs, without any GPU
#   SCALE=tiny bash examples/glm5.2_hellaswag.sh      its layout in small, on a CPU
# shellcheck disable=SC2034  # launch.sh reads the variables
set -euo pipefail
# shellcheck source=examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

setting NNODES 32
setting GPUS_PER_NODE 8
setting MASTER_ADDR localhost
setting CHECKPOINT checkpoints/GLM-5.2
setting DATA_PATH data/hellaswag/train.jsonl
setting VALID_DATA_PATH data/hellaswag/validation.jsonl
setting SAVE runs/glm5.2_hellaswag

HF_MODEL=zai-org/GLM-5.2
HF_DATA=rowan/hellaswag
HF_SPLIT=train

MODEL_ARGS=(--hf-config glm5.2 --bf16 --attention-backend torch --recompute-granularity full)
PARALLEL_ARGS=(--tensor-model-parallel-size 1 --context-parallel-size 1 --pipeline-model-parallel-size 4
  --num-layers-per-virtual-pipeline-stage 2 --expert-model-parallel-size 64
  --moe-token-dispatcher-type hybrid --expert-node-size "$GPUS_PER_NODE"
  --reshard-after-forward true --reshard-experts-after-forward true
  --grad-sync last)
DATA_ARGS=(--data-path "$DATA_PATH" --valid-data-path "$VALID_DATA_PATH"
  --seq-length 160 --packing none)
OPTIMIZER_ARGS=(--lr 1e-5 --lr-decay-style constant --weight-decay 0
  --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8)
TRAIN_ARGS=(--micro-batch-size 1 --global-batch-size 512 --train-iters 100 --seed 1234
  --save-interval 1000 --eval-interval 1000)
# What SCALE=tiny changes, with launch.sh: as many micro-batches a pipeline as at full scale
TINY_ARGS=(--global-batch-size 32)

launch "$@"
