#!/usr/bin/env bash
# GLM-5.2 from scratch, the third stage: each row attends to the 2048 keys that its indexer selects, and all weights
# train, the indexers against the attention to those keys. 20 x 10^9 tokens, 131072 a sample: 64 nodes of 8 GPUs.
#   MASTER_ADDR=FIRST_NODE bash examples/pretrain_glm5.2_sparse.sh [flags of pretrain_glm.py]     on every node
#   sbatch examples/slurm/pretrain_glm5.2_sparse.sbatch     the same by SLURM
#   bash examples/pretrain_glm5.2_sparse.sh --dry-run       what it needs, without any GPU
#   SCALE=tiny bash examples/pretrain_glm5.2_sparse.sh      its layout in small, after SCALE=tiny of the second stage
# shellcheck disable=SC2034  # launch.sh reads the variables
set -euo pipefail
PROGRAM=pretrain_glm.py
AFTER=pretrain_glm5.2_warmup
# shellcheck source=examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

setting NNODES 64
setting GPUS_PER_NODE 8
setting MASTER_ADDR localhost
setting CHECKPOINT runs/pretrain_glm5.2_warmup
setting DATA_PATH data/finepdfs-edu_text_document # of long documents: rows with at most 2048 keys select them all
setting SAVE runs/pretrain_glm5.2_sparse

HF_MODEL=zai-org/GLM-5.2
HF_DATA=HuggingFaceFW/finepdfs-edu
HF_SPLIT='data/eng_Latn/train/*.parquet'

MODEL_ARGS=(--hf-config glm5.2 --bf16 --attention-backend cudnn --indexer-training sparse --recompute-granularity full)
PARALLEL_ARGS=(--tensor-model-parallel-size 1 --context-parallel-size 16 --pipeline-model-parallel-size 8
  --pipeline-model-parallel-layout auto --expert-model-parallel-size 64
  --moe-token-dispatcher-type hybrid --expert-node-size "$GPUS_PER_NODE"
  --reshard-after-forward false --reshard-experts-after-forward true)
read -ra prefixes <<<"$DATA_PATH" # maybe with weights: 0.7 data/a 0.3 data/b
DATA_ARGS=(--data-path "${prefixes[@]}" --split 989,10,1 --seq-length 131072)
# The tokens and the learning rate of GLM-5's sparse stage; the 480 samples of a step are those of DeepSeek-V3.2's
OPTIMIZER_ARGS=(--lr 1e-5 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1.0
  --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --moe-router-bias-update-rate 1e-3
  --moe-aux-loss-coeff 1e-4)
TRAIN_ARGS=(--micro-batch-size 1 --global-batch-size 480 --train-iters 318
  --seed 1234 --eval-interval 100 --eval-iters 1
  --save-interval 50 --async-save --keep-last 2
  --log-file "$SAVE/log.jsonl" --tensorboard-dir "$SAVE/tensorboard")
# What SCALE=tiny changes, with launch.sh
TINY_ARGS=(--split 90,8,2 --seq-length 128 --context-parallel-size 2 --global-batch-size 8 --train-iters 6
  --eval-interval 3 --save-interval 3)

launch "$@"
