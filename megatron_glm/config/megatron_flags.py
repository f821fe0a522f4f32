"""What becomes of the flags of Megatron-LM, and of those that others add to it, which are no flags here.

`sort_flags.py` reads the tables. A name in a list has no dashes before it.
"""

from __future__ import annotations

# Accepted, because it is so in every run here: switches that may be followed by `true`.
SWITCHES = (
    # model
    "use-mcore-models enable-experimental swiglu gated-linear-unit disable-bias-linear use-rotary-position-embeddings "
    "no-position-embedding untie-embeddings-and-output-weights multi-latent-attention qk-layernorm "
    "dsa-indexer-scoring-relu dsa-indexer-rope-interleaved "
    # experts
    "moe-grouped-gemm moe-router-enable-expert-bias moe-router-pre-softmax moe-permute-fusion moe-router-fusion "
    "moe-per-layer-logging moe-shared-expert-overlap "
    # optimizer, sharding, numbers
    "decoupled-weight-decay use-distributed-optimizer overlap-grad-reduce overlap-param-gather use-torch-fsdp2 "
    "use-megatron-fsdp use-custom-fsdp init-model-with-meta-device accumulate-allreduce-grads-in-fp32 "
    "grad-reduce-in-fp32 attention-softmax-in-fp32 calculate-per-token-loss check-for-nan-in-loss-and-grad "
    "override-opt-param-scheduler use-cpu-initialization "
    # kernels that Megatron fuses or not, with the same result
    "no-rope-fusion no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-gelu-fusion no-bias-dropout-fusion "
    "no-persist-layer-norm no-gradient-accumulation-fusion cross-entropy-loss-fusion "
    # data
    "no-create-attention-mask-in-dataloader reset-position-ids reset-attention-mask eod-mask-loss variable-seq-lengths "
    # checkpoints
    "use-dist-ckpt auto-detect-ckpt-format ckpt-fully-parallel-save ckpt-fully-parallel-load "
    "ckpt-assume-constant-structure use-persistent-ckpt-worker use-checkpoint-args exit-on-missing-checkpoint "
    "no-save-rng no-load-rng exit-signal-handler "
    # log
    "log-throughput log-throughput-to-tensorboard log-memory-to-tensorboard log-learning-rate-to-tensorboard "
    "log-batch-size-to-tensorboard use-pytorch-profiler"
).split()

ANY = ("any",)
# Accepted with one of these values, which are so in every run here, or choose between ways to the same result of which
# there is one. ANY: each of them means the same here.
SERVED: dict[str, tuple[str, ...]] = {
    # model
    "--normalization": ("RMSNorm",),
    "--position-embedding-type": ("rope",),
    "--rotary-percent": ("1",),
    "--rotary-scaling-factor": ("1",),
    "--rope-type": ("rope",),
    "--mscale": ("1", "0"),
    "--mscale-all-dim": ("1", "0"),
    "--experimental-attention-variant": ("dsa",),
    "--attention-dropout": ("0",),
    "--hidden-dropout": ("0",),
    "--make-vocab-size-divisible-by": ANY,  # padding rows enter neither the loss nor a checkpoint
    # experts
    "--moe-router-score-function": ("sigmoid",),
    "--moe-router-dtype": ("fp32",),
    "--moe-token-drop-policy": ANY,  # no token is dropped
    "--expert-tensor-parallel-size": ("1",),
    # optimizer, sharding, numbers
    "--optimizer": ("adam", "adamw"),
    "--num-distributed-optimizer-instances": ("1",),
    "--data-parallel-sharding-strategy": ("optim_grads_params",),
    "--outer-dp-sharding-strategy": ("no_shard",),
    "--megatron-fsdp-main-params-dtype": ("fp32",),
    "--megatron-fsdp-main-grads-dtype": ("fp32",),
    "--megatron-fsdp-grad-comm-dtype": ("fp32",),
    "--main-params-dtype": ("fp32",),
    "--main-grads-dtype": ("fp32",),
    "--lr-warmup-init": ("0",),
    "--distributed-backend": ("nccl",),
    # recomputation
    "--recompute-method": ("uniform",),
    "--recompute-num-layers": ("1",),
    # kernels that Megatron fuses or not, with the same result
    "--cross-entropy-fusion-impl": ANY,
    # data
    "--tokenizer-type": ANY,  # the file says what it is
    "--dataloader-type": ("single",),
    "--num-workers": ANY,
    "--num-dataset-builder-threads": ANY,
    # checkpoints
    "--ckpt-format": ("torch_dist",),
    "--dist-ckpt-format": ("torch_dist",),
    "--dist-ckpt-strictness": ("raise_all",),
    "--exit-signal": ("SIGTERM", "SIGUSR1"),
}

# What is written here instead -> how Megatron calls it; {} is the given value.
NAMES = {
    "--num-experts {}": "num-moe-experts",
    "--norm-epsilon {}": "layernorm-epsilon",
    "--moe-token-dispatcher-type alltoall, hybrid over several nodes, or hybridep": "moe-enable-deepep "
    "moe-flex-dispatcher-backend",
    "tools/benchmark.py step --routing balanced": "moe-router-force-load-balancing",
    "--attention-backend cudnn or tilelang": "use-flash-attn",
    "--attention-backend, which chooses the kernels": "transformer-impl",
    "--attention-backend": "dsa-kernel-backend",
    "--recompute-granularity selective": "recompute-activations",
    "--deterministic": "deterministic-mode",
    "--num-layers-per-virtual-pipeline-stage: layers / (stages x {})": "num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout, which lists the stages, or auto": "decoder-first-pipeline-num-layers "
    "decoder-last-pipeline-num-layers num-layers-in-first-pipeline-stage num-layers-in-last-pipeline-stage",
    "--pipeline-model-parallel-layout auto": "account-for-embedding-in-pipeline-split "
    "account-for-loss-in-pipeline-split",
    "--reshard-after-forward false": "torch-fsdp2-no-reshard-after-forward",
    "--num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 1": "first-last-layers-bf16",
    "--adam-moments-dtype fp32 or bf16": "exp-avg-dtype exp-avg-sq-dtype",
    "--lr-warmup-iters, which is {} / --global-batch-size": "lr-warmup-samples",
    "--lr-decay-iters, which is {} / --global-batch-size": "lr-decay-samples",
    "--lr-wsd-decay-iters, which is {} / --global-batch-size": "lr-wsd-decay-samples",
    "--load {} --finetune": "pretrained-checkpoint",
    "--eval-only": "skip-train",
    "--eval-iters, which is the whole set unless given": "full-validation",
    "--tokenizer-model of finetune_glm.py, a tokenizer.json": "vocab-file merge-file",
    "--on-nan stop or skip; a step that is not finite is never taken": "no-check-for-nan-in-loss-and-grad",
    "--profile": "timing-log-level use-nsys-profiler",
    "--keep-last {}": "most-recent-k",
    "--load-hf {}": "hf-checkpoint",
    "--load {}": "ref-load",
    "finetune_glm.py": "sft",
}

# Values of flags that exist here, which mean something else or nothing here.
VALUES = {
    "--attention-backend": {
        "flash": "--attention-backend cudnn or tilelang",
        "fused": "--attention-backend cudnn or tilelang",
        "unfused": "--attention-backend torch",
        "local": "--attention-backend torch",
    },
    "--moe-token-dispatcher-type": {
        "flex": "--moe-token-dispatcher-type alltoall, hybrid over several nodes, or hybridep",
    },
    "--fp8": dict.fromkeys(("e4m3", "hybrid"), "--fp8 blockwise"),
    "--fp8-format": {"hybrid": "--fp8-format e4m3, for gradients, too"},
    "--fp8-recipe": dict.fromkeys(("delayed", "tensorwise", "mxfp8"), "--fp8-recipe blockwise, the scales of a Hopper"),
    "--lr-decay-style": {"inverse-square-root": "--lr-decay-style cosine, linear, constant or WSD"},
    "--eval-iters": {"0": "leave --eval-iters and the validation data out"},
    "--packing": dict.fromkeys(("true", "True"), "--packing best-fit")
    | dict.fromkeys(("false", "False"), "--packing none"),
}

# Why there is no such setting -> its flags; with `*`, every flag that begins so, has no line of its own and is no
# misspelling. The longest beginning counts.
REASONS = {
    ".bin and .idx files hold token ids, no tokenizer is read": "tokenizer-model",
    "the attention is latent (MLA), each head has its own keys": "group-query-attention",
    "keys are chosen by the indexer": "window-size",
    "the model has no such bias": "add-qkv-bias",
    "the model's activation is SwiGLU": "squared-relu",
    "the model is built in": "spec",
    "the model has no such gate": "moe-shared-expert-gate",
    "groups of experts are limited by --moe-router-group-topk alone": "moe-router-topk-limited-devices",
    "the router has no noise": "moe-input-jitter-eps",
    "no expert has a capacity: every token reaches its experts": "moe-expert-capacity-factor "
    "moe-pad-expert-input-to-capacity moe-token-dropping",
    "dispatch does not overlap the layers of another micro-batch": "overlap-moe-expert-parallel-comm combined-1f1b "
    "combined-1f1b-recipe",
    "weight gradients are computed in the backward": "delay-wgrad-compute split-bw defer-embedding-wgrad-compute",
    "a checkpoint of this family has its experts": "moe-use-upcycling",
    "--recompute-granularity selective or full decides what is recomputed": "moe-layer-recompute recompute-modules",
    "what is kept is cut over the tensor-parallel ranks as it is": "distribute-saved-activations",
    "context-parallel ranks exchange keys in one way": "cp-comm-type hierarchical-context-parallel-sizes",
    "--indexer-training sparse is that loss, warmup the one over all keys": "dsa-indexer-use-sparse-loss",
    "this family's indexer does not rotate its activations": "dsa-indexer-rotate-activation",
    "the precision of the indexer's norm is fixed": "dsa-indexer-k-norm-fp32",
    "the model's rope is not scaled": "beta-fast beta-slow original-max-position-embeddings use-rope-scaling "
    "rope-scaling-factor rotary-seq-len-interpolation-factor yarn-*",
    "only fp32 and --bf16": "fp16",
    "FP8 training has no such setting (--fp8, --fp8-wgrad, --fp8-backend)": "fp8* no-fp8* kitchen-*",
    "there is no FP4 training": "fp4*",
    "experts' rows are padded where a kernel needs it": "moe-router-padding-for-*",
    "nothing is drawn at random in a step": "te-rng-tracker",
    "gradients are summed in fp32 and divided by the whole step's count of tokens": "grad-reduce-in-bf16 "
    "ddp-average-in-collective ddp-*",
    "the softmax is computed in fp32": "apply-query-key-layer-scaling",
    "moments: --adam-moments-dtype; weights and gradients of the optimizer are fp32": "use-precision-aware-optimizer",
    "nothing is moved to host memory; --adam-moments-dtype and --recompute-granularity save memory": (
        "optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d optimizer-offload-fraction cpu-offloading "
        "fine-grained-activation-offloading cpu-offloading-* fine-grained-offloading-* moe-paged-stash*"
    ),
    "weights are gathered at the first forward": "overlap-param-gather-with-optimizer-step",
    "a layer's weights are one bucket": "ddp-bucket-size ddp-num-buckets",
    "NCCL uses its own buffers": "nccl-ub",
    "NCCL reads its environment variables": "nccl-communicator-config-path nccl-*",
    "checkpoints are written in step over gloo": "disable-gloo-process-groups",
    "tensor-parallel collectives do not overlap the products": "tp-comm-overlap tp-comm-*",
    "the order of the ranks is pipeline, data, context, tensor": "use-tp-pp-dp-mapping",
    "pipeline sends always overlap what follows them": "no-overlap-p2p-communication",
    "--weight-decay is the same in every step": "start-weight-decay end-weight-decay weight-decay-incr-style",
    "all parameters have one learning rate": "decoupled-lr decoupled-min-lr",
    "the flags of this run decide the schedule": "use-checkpoint-opt-param-scheduler",
    "a checkpoint of any layout loads into the layout of the flags": "use-mp-args-from-checkpoint-args",
    "every checkpoint is whole; --save-interval and --keep-last": "non-persistent-save-interval "
    "non-persistent-ckpt-type",
    "data-parallel ranks hold parts of the weights, not copies": "check-weight-hash-across-dp-replicas-interval",
    ".bin files are always mapped": "no-mmap-bin-files",
    "no such line in the log; --profile records every kernel": "log-timers-to-tensorboard timing-log-option "
    "barrier-with-l1-time log-energy log-straggler straggler-* moe-routing-trace-* otel-* app-tag-*",
    "the log has the gradient's norm, whole and by module": "log-params-norm log-num-zeros-in-grad",
    "there is no loss scale: bf16 needs none": "log-loss-scale-to-tensorboard loss-scale initial-loss-scale",
    "the log has the validation loss; its exponential is the perplexity": "log-validation-ppl-to-tensorboard",
    "the number of ranks is in the first lines of a run": "log-world-size-to-tensorboard",
    "--log-file has a record of every iteration": "log-progress",
    "the log has one level": "logging-level",
    "every line of the log has the peak memory": "log-memory-interval",
    "--profile records kernels; --dry-run says what memory is for": "record-memory-history",
    "documents are packed into --seq-length, see --packing": "use-dynamic-batch-size",
    "a micro-batch has --micro-batch-size x --seq-length tokens": "max-tokens-per-gpu",
    "groups are made at the start": "lazy-mpu-init",
    "ranks come from the environment, as torchrun and srun set it": "local-rank",
    "settings are flags; a script holds them in arrays, as in examples/": "yaml-cfg",
    "no part of a step is captured as a CUDA graph": "cuda-graph* enable-cuda-graph* external-cuda-graph*",
    "the model has no Mamba layer": "mamba-* hybrid-*",
    "there is no μP": "mup-*",
    "AdamW is the only optimizer yet": "muon-* sgd-* soap-* lion-* adaptive-muon-*",
    "--moe-token-dispatcher-type takes no number of SMs": "moe-deepep-* moe-hybridep-*",
    "there is no reinforcement learning": "rl-* grpo-* rollout-* log-probs-* actor-*",
    "nothing is served here; tools/convert_hf.py --to-hf exports for an inference engine": "inference-*",
    "--wandb-project and --tensorboard-dir are the trackers": "one-logger-*",
    "a job is started again as a whole; it goes on from --load": "inprocess-* adlr-* error-injection-* rerun-* ft-*",
    "the model is a decoder": "retro-* bert-* ict-* retriever-* biencoder-* encoder-*",
    "the model reads text": "vision-* dino-*",
    "the model has no such part": "mhc-* linear-* gdp-* qk-clip* heterogeneous-*",
    "checkpoints have one format and no such setting": "ckpt-* dist-ckpt-* async-* non-persistent-*",
    "documents are read from left to right": "fim-*",
    "a tokenizer is read as its files are": "tokenizer-* tiktoken-* null-tokenizer-*",
    "there is no distillation": "logits-*",
    "weights are sharded by --reshard-after-forward and --reshard-experts-after-forward": "gtp-* fsdp-* "
    "megatron-fsdp-*",
    "torch's flight recorder is set by the environment (TORCH_NCCL_TRACE_BUFFER_SIZE)": "flight-recorder-*",
    "the model is a decoder, of --num-layers and --seq-length": "decoder-*",
    "the MTP layer is one, and --mtp-num-steps trains it": "mtp-*",
    "the router and the dispatch have no such setting": "moe-*",
    "the log has no such line (docs/logs.md)": "log-*",
    "--tensorboard-dir is all that is set": "tensorboard-*",
    "--profile records shapes, kernels and the host": "pytorch-profiler-*",
}

# torchrun's; they stand before the script's name. (--nnodes and --nproc-per-node are also flags of a dry run.)
LAUNCHER = ("--node-rank", "--master-addr", "--master-port", "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint")
