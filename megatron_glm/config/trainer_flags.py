"""Flags of other trainers (transformers, TRL, axolotl, LLaMA-Factory, DeepSpeed, swift, verl), a line each.

They are refused: a setting has one name. `sort_flags.py` reads the tables, `_` and `-` are the same to it.
"""

from __future__ import annotations

ACCUMULATION = "--global-batch-size, which is --micro-batch-size x data-parallel ranks x {}"
WEIGHTS = "--load-hf {} (a Hugging Face folder), or --load (a checkpoint of tools/convert_hf.py)"
SHARDED = "weights, gradients and moments are always sharded; see --reshard-after-forward and --grad-sync"
PEFT = "adapters are LoRA, given by --lora-rank: all that is adapted is frozen, and there is no dropout"
QUANTIZED = "there is no training of quantised weights"
ROWS = "the keys of a row say what it is (docs/data.md)"

# What is written here instead -> how others call it; {} is the given value.
NAMES = {
    "--lr {}": "learning-rate base-lr max-lr peak-lr",
    "--min-lr, which is {} x --lr": "min-lr-ratio min-lr-rate cosine-min-lr-ratio lr-min-ratio",
    "--lr-warmup-iters {}": "warmup-steps num-warmup-steps lr-warmup-steps warmup-iters warmup",
    "--lr-warmup-fraction {}": "warmup-ratio lr-warmup-ratio lr-warmup-steps-ratio warmup-fraction",
    "--lr-decay-style, which is cosine, linear, constant or WSD": "lr-scheduler-type lr-scheduler scheduler "
    "lr-schedule",
    "--lr-decay-iters {}": "lr-decay-steps decay-steps",
    "--weight-decay {}": "wd",
    "--adam-beta1 {}": "beta1",
    "--adam-beta2 {}": "beta2",
    "--adam-eps {}": "adam-epsilon eps",
    "--clip-grad {}": "max-grad-norm max-norm gradient-clipping grad-clip grad-norm-clip clip-grad-norm "
    "gradient-clip-val",
    "--train-iters {}": "max-steps max-iters train-steps num-train-steps num-steps total-steps total-training-steps "
    "training-steps iters",
    "--train-epochs {}": "num-train-epochs num-epochs num-epoch max-epochs epochs total-epochs",
    "--micro-batch-size {}": "per-device-train-batch-size per-gpu-train-batch-size per-device-batch-size "
    "per-gpu-batch-size micro-batch train-micro-batch-size-per-gpu micro-batch-size-per-gpu local-batch-size mbs",
    "--micro-batch-size {}, which validation uses too": "per-device-eval-batch-size per-gpu-eval-batch-size "
    "eval-batch-size val-batch-size eval-micro-batch-size",
    "--global-batch-size {}": "train-batch-size global-batch gbs total-batch-size",
    "--global-batch-size (of a step) or --micro-batch-size (of a rank at a time)": "batch-size bs",
    ACCUMULATION: "gradient-accumulation-steps grad-accum-steps gradient-accumulation grad-accum grad-acc "
    "accumulate-grad-batches gas accumulation-steps",
    "--save {}": "output-dir output save-dir save-path checkpoint-dir ckpt-dir default-local-dir",
    "--load DIR, the folder that --save has written": "resume resume-from-checkpoint resume-from resume-path "
    "auto-resume-from-checkpoints resume-mode load-checkpoint load-from-checkpoint ckpt-path",
    "--no-load-optim or --finetune": "resume-only-model load-weights-only",
    "--save-interval {}": "save-steps save-freq save-every checkpoint-interval checkpointing-steps",
    "--save-interval N, --eval-interval N, --log-interval N": "save-strategy eval-strategy evaluation-strategy "
    "logging-strategy",
    "--keep-last {}": "save-total-limit keep-last-n-checkpoints max-checkpoints max-ckpt-to-keep keep-latest-k "
    "total-limit",
    "--eval-interval {}": "eval-steps eval-freq eval-every val-interval val-check-interval test-freq val-freq",
    "--eval-iters, which is {} / --global-batch-size": "max-eval-samples",
    "--eval-iters {}": "limit-val-batches eval-max-steps max-eval-steps",
    "--valid-data-path FILE (beside training), or --eval-only": "do-eval",
    "--eval-only": "evaluate-only val-only",
    "--log-interval {}": "logging-steps log-steps log-every log-freq log-every-n-steps logging-interval print-freq",
    "--tensorboard-dir {}": "logging-dir log-dir tb-dir tensorboard-path",
    "--tensorboard-dir DIR, --wandb-project NAME or --log-file FILE": "report-to log-with logger loggers tracker",
    "--tensorboard-dir DIR": "tensorboard use-tensorboard",
    "--wandb-project NAME": "wandb use-wandb",
    "--wandb-project {}": "project project-name",
    "--wandb-exp-name {}": "run-name wandb-run-name wandb-name experiment-name exp-name",
    WEIGHTS: "model model-name model-path model-name-or-path model-id base-model pretrained-model-name-or-path "
    "pretrained-model pretrained hf-model hf-path",
    "--hf-config {}": "config-name model-config model-type preset",
    "--tokenizer-model {}": "tokenizer tokenizer-name tokenizer-path tokenizer-name-or-path tokenizer-dir",
    "--data-path {}": "dataset datasets dataset-name dataset-path dataset-dir train-file train-files train-data "
    "train-dataset data dataset-name-or-path training-data data-dir",
    "--valid-data-path {}": "eval-dataset val-dataset valid-dataset test-datasets validation-file eval-file val-file "
    "val-files valid-data val-data eval-data eval-data-path val-data-path validation-data-path dataset-test val-set",
    "--valid-data-path FILE": "val-size val-set-size eval-size split-dataset-ratio dev-ratio",
    "--seq-length {}": "max-seq-length max-seq-len max-sequence-length seq-len sequence-len sequence-length cutoff-len "
    "max-length model-max-length block-size context-length max-tokens ctx-len max-source-length",
    "--packing best-fit": "sample-packing neat-packing pack packed",
    "--overlong truncate or split": "truncation truncation-strategy overflow",
    "--recompute-granularity full or selective": "gradient-checkpointing activation-checkpointing "
    "use-gradient-checkpointing gradient-checkpointing-kwargs grad-checkpoint checkpoint-activations ac-mode",
    "--bf16, or nothing: fp32": "bfloat16 precision dtype torch-dtype mixed-precision amp param-dtype model-dtype",
    "--attention-backend cudnn or tilelang": "flash-attn flash-attention attn-implementation use-flash-attention "
    "use-flash-attn-2 use-flash-attention-2 attn-impl attn-backend",
    "--seed {}": "data-seed random-seed rng-seed",
    "--on-nan skip": "skip-nan ignore-nan",
    "--distributed-timeout-minutes, which is {} / 60": "ddp-timeout nccl-timeout",
    "--tensor-model-parallel-size {} (with --sequence-parallel)": "tp tp-size tensor-parallel-size tensor-parallel "
    "tensor-parallel-degree tp-degree model-parallel-size tensor-model-parallel",
    "--pipeline-model-parallel-size {}": "pp pp-size pipeline-parallel-size pipeline-parallel pipeline-parallel-degree "
    "pp-degree",
    "--num-layers-per-virtual-pipeline-stage, which is layers / (stages x {})": "vp vpp vpp-size "
    "virtual-pipeline-model-parallel-size virtual-pipeline-parallel-size",
    "--expert-model-parallel-size {}": "ep ep-size expert-parallel-size expert-parallel expert-parallel-degree "
    "ep-degree",
    "--context-parallel-size {}": "cp cp-size context-parallel context-parallel-degree cp-degree "
    "sequence-parallel-size sequence-parallel-degree sp sp-size ulysses-sequence-parallel-size ring-attn-size",
    "--rotary-base {}": "rope-theta",
    "--num-layers {}": "num-hidden-layers n-layers",
    "--ffn-hidden-size {}": "intermediate-size",
    "--moe-ffn-hidden-size {}": "moe-intermediate-size",
    "--num-experts {}": "n-routed-experts num-local-experts",
    "--moe-router-topk {}": "num-experts-per-tok",
    "--dpo-beta {}": "pref-beta beta",
    "--dpo-loss-type {}": "loss-type",
    "--dpo-sft-loss-weight {}": "rpo-alpha sft-loss-weight pref-ftx",
    "--dpo-average-log-probs": "preference-average-log-probs",
    "--loss {}": "pref-loss rlhf-type",
    "--dry-run": "estimate-memory plan",
    "--lora-rank {}": "lora-r lora-dim",
    "--lora-target-modules {}": "lora-target target-modules",
    "--lora-rank N": "lora use-lora use-peft peft peft-type adapter finetuning-type train-type tuner-type tuner",
    "--lora-rslora": "use-rslora",
    "--load {}": "adapter-path adapter-name-or-path lora-model-dir",
}

# Why there is no such setting -> how others call it.
REASONS = {
    PEFT: "lora-dropout modules-to-save use-dora freeze-trainable-layers",
    QUANTIZED: "qlora load-in-4bit load-in-8bit quantization-bit quantization bnb-4bit-compute-dtype quant-method",
    SHARDED: "deepspeed deepspeed-config zero-stage zero-optimization fsdp fsdp-config "
    "fsdp-transformer-layer-cls-to-wrap ddp-find-unused-parameters accelerate-config strategy dp dp-size "
    "data-parallel-size data-parallel-degree dp-shard dp-replicate",
    "AdamW is the only optimizer yet": "optim optimizer-type optimizer-name",
    "training is what this script does": "do-train do-predict stage task-type train-mode",
    "a checkpoint is never written over: choose another --save": "overwrite-output-dir overwrite-output",
    "the loss is on what the assistant writes, or on the labels of a row": "train-on-inputs train-on-prompt "
    "mask-prompt assistant-only-loss completion-only-loss loss-mask-type",
    "chats are rendered by the chat template beside the tokenizer": "template chat-template prompt-template "
    "default-system conv-template",
    ROWS: "dataset-text-field text-column text-key input-key prompt-column label-key apply-chat-template prompt-key "
    "response-key dataset-kwargs dataset-type",
    "kernels are compiled ahead or by the backend": "torch-compile torch-compile-backend use-liger-kernel use-liger "
    "enable-liger-kernel use-unsloth compile",
    "tools/convert_hf.py --to-hf writes a Hugging Face folder": "push-to-hub hub-model-id hub-token save-safetensors "
    "merge-lora export-dir",
    "documents are packed, so that their lengths do not matter": "group-by-length padding-side pad-to-max-length "
    "pad-to-sequence-len padding",
    "the order of the data follows from --seed": "shuffle dataset-shuffle train-dataloader-shuffle "
    "dataloader-drop-last",
    "rows are read and tokenised at the start": "streaming dataloader-num-workers dataloader-pin-memory "
    "preprocessing-num-workers dataset-num-proc dataset-processes num-proc dataloader-prefetch-factor "
    "preprocessing-batch-size overwrite-cache",
    "the loss is the plain cross entropy": "label-smoothing-factor label-smoothing neftune-noise-alpha "
    "noisy-embedding-alpha",
    "every checkpoint is kept until --keep-last removes it": "load-best-model-at-end metric-for-best-model "
    "early-stopping-patience greater-is-better",
    "no code is loaded from a model's folder": "trust-remote-code custom-model-path",
    "settings are flags; a script holds them in arrays, as in examples/": "config config-file config-path yaml",
    "the reference of --loss dpo is --reference-logprobs, or the model without its adapters": "ref-model ref-adapters "
    "ref-adapter-name precompute-ref-log-probs reference-model",
    "there is no reinforcement learning": "reward-model rl",
}
