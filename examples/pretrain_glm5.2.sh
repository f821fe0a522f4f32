#!/usr/bin/env bash
# GLM-5.2 from scratch on Megatron's .bin/.idx files, 4096 tokens a sample, 10^12 in all: 64 nodes of 8 GPUs.
# The first of three stages: every row attends to all keys before it, because an indexer with random weights would choose
# random keys. Then pretrain_glm5.2_warmup.sh and pretrain_glm5.2_sparse.sh.
#   MASTER_ADDR=FIRST_NODE bash examples/pretrain_glm5.2.sh [flags of pretrain_glm.py]     on every node
#   sbatch examples/slurm/pretrain_glm5.2.sbatch     the same by SLURM
#   bash examples/pretrain_glm5.2.sh --dry-run       what it needs, without any GPU
#   SCALE=tiny bash examples/pretrain_glm5.2.sh      its layout in small, on a CPU
# shellcheck disable=SC2034  # launch.sh reads the variables
set -euo pipefail
PROGRAM=pretrain_glm.py
# shellcheck source=examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

setting NNODES 64
setting GPUS_PER_NODE 8
setting MASTER_ADDR localhost
setting CHECKPOINT none # a converted one, to go on from its weights
setting DATA_PATH data/fineweb-edu_text_document
setting SAVE runs/pretrain_glm5.2

HF_MODEL=zai-org/GLM-5.2
HF_DATA=HuggingFaceFW/fineweb-edu
HF_SPLIT='sample/100BT/*.parquet'

MODEL_ARGS=(--hf-config glm5.2 --bf16 --attention-backend cudnn --attention dense --recompute-granularity full)
PARALLEL_ARGS=(--tensor-model-parallel-size 1 --context-parallel-size 1 --pipeline-model-parallel-size 8
  --pipeline-model-parallel-layout auto --expert-model-parallel-size 64
  --moe-token-dispatcher-type hybrid --expert-node-size "$GPUS_PER_NODE"
  --reshard-after-forward false --reshard-experts-after-forward true)
read -ra prefixes <<<"$DATA_PATH" # maybe with weights: 0.7 data/a 0.3 data/b
DATA_ARGS=(--data-path "${prefixes[@]}" --split 989,10,1 --seq-length 4096)
# 10^12 tokens in 61700 steps; the ramp-up takes the first 2.5 x 10^10
OPTIMIZER_ARGS=(--lr 2e-4 --min-lr 2e-5 --lr-decay-style WSD --lr-warmup-iters 2000 --lr-wsd-decay-iters 10000
  --lr-wsd-decay-style minus_sqrt --weight-decay 0.1 --clip-grad 1.0
  --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --moe-router-bias-update-rate 1e-3
  --moe-aux-loss-coeff 1e-4 --mtp-loss-scaling-factor 0.3) # the latter two as GLM-5
TRAIN_ARGS=(--micro-batch-size 1 --global-batch-size 4096 --rampup-batch-size 1024 1024 6000000 --train-iters 61700
  --seed 1234 --eval-interval 1000 --eval-iters 4
  --save-interval 500 --async-save --keep-last 3
  --log-file "$SAVE/log.jsonl" --tensorboard-dir "$SAVE/tensorboard")
# What SCALE=tiny changes, with launch.sh: a schedule of 12 steps
TINY_ARGS=(--split 90,8,2 --seq-length 128 --global-batch-size 16 --rampup-batch-size 8 8 32 --train-iters 12
  --lr 3e-3 --lr-warmup-iters 2 --lr-wsd-decay-iters 4 --eval-interval 6 --eval-iters 1 --save-interval 6)

launch "$@"
