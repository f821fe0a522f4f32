"""A command line of another trainer is answered by one message that sorts it; what is so in every run is accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_glm.config import DataConfig, PretrainDataConfig, megatron_flags, trainer_flags
from megatron_glm.config.flags import build_parser, parse
from megatron_glm.config.megatron_flags import ANY, VALUES
from megatron_glm.config.sort_flags import ALWAYS, NOT_HERE, OF_MODEL, RENAMED, nearest

ROOT = Path(__file__).resolve().parents[2]
OURS = {data: set(build_parser(data=data).takes_value) for data in (DataConfig, PretrainDataConfig)}
TINY = "--hf-config glm5.2-tiny --data-path rows.jsonl --train-iters 10 --seq-length 64".split()

# The flags of Megatron's DeepSeek-V3 examples, those of the functional tests and of slime's GLM-5 added.
DEEPSEEK_V3 = """
--distributed-timeout-minutes 60 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
--pipeline-model-parallel-layout Et*3|(tt|)*29mL --expert-model-parallel-size 64 --context-parallel-size 1
--expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--use-mcore-models --sequence-parallel --use-flash-attn --disable-bias-linear --micro-batch-size 1
--global-batch-size 8192 --train-samples 585937500 --exit-duration-in-mins 220 --no-check-for-nan-in-loss-and-grad
--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --no-rope-fusion --no-bias-swiglu-fusion --manual-gc
--manual-gc-interval 10 --enable-experimental --transformer-impl transformer_engine --seq-length 4096
--data-cache-path cache --tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3
--data-path 1.0 slimpajama_text_document --split 99,1,0 --no-mmap-bin-files --no-create-attention-mask-in-dataloader
--num-workers 6 --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
--max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000 --make-vocab-size-divisible-by 3232
--normalization RMSNorm --norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights --multi-latent-attention
--attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --qk-layernorm
--lr-decay-samples 584765624 --lr-warmup-samples 1536000 --lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7
--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58)
--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss
--moe-router-topk 8 --moe-token-dispatcher-type flex --moe-enable-deepep --moe-flex-dispatcher-backend hybridep
--moe-router-pre-softmax --moe-grouped-gemm --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4
--moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-permute-fusion
--moe-router-padding-for-fp8 --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
--v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --mtp-num-layers 1
--mtp-loss-scaling-factor 0.1 --eval-iters 32 --eval-interval 200 --no-load-optim --no-load-rng
--auto-detect-ckpt-format --load checkpoints --save checkpoints --save-interval 500 --save-retain-interval 5000
--dist-ckpt-strictness log_all --ckpt-format torch_dist --async-save --use-persistent-ckpt-worker --init-method-std 0.02
--log-timers-to-tensorboard --log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm
--log-validation-ppl-to-tensorboard --log-throughput --log-interval 1 --logging-level 40 --tensorboard-dir tb
--wandb-project dsv3 --wandb-entity adlr --wandb-exp-name proxy --wandb-save-dir wandb --timing-log-level 0 --bf16
--recompute-granularity selective --recompute-modules mla_up_proj moe mlp layernorm --fp8-recipe blockwise
--fp8-format e4m3 --fp8-param-gather --use-precision-aware-optimizer --main-grads-dtype fp32 --main-params-dtype fp32
--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --experimental-attention-variant dsa --dsa-indexer-n-heads 64
--dsa-indexer-head-dim 128 --dsa-indexer-topk 2048 --dsa-indexer-loss-coeff 0.01 --deterministic-mode
--optimizer adam --recompute-method uniform --recompute-num-layers 1 --decoder-last-pipeline-num-layers 18
--attention-backend flash --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --calculate-per-token-loss
--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --overlap-moe-expert-parallel-comm --delay-wgrad-compute
--data-parallel-sharding-strategy optim_grads_params --use-megatron-fsdp --num-distributed-optimizer-instances 1
""".split()


def refusal(capsys, words: list[str], data=DataConfig) -> str:
    """What is answered to these words; it must end with code 2 and one `error:`, the first thing written."""
    with pytest.raises(SystemExit) as stop:
        parse(words, data=data)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("error: ") == 1
    return message


def test_the_flags_of_a_real_megatron_command_are_sorted_by_one_message(capsys):
    flags = [word for word in DEEPSEEK_V3 if word.startswith("--")]
    assert len(set(flags)) > 130
    message = refusal(capsys, DEEPSEEK_V3, PretrainDataConfig)
    for flag in flags:
        assert len(re.findall(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", message)) >= 1, flag
    heads = {line.strip().split(":")[0] for line in message.splitlines() if line.startswith("  ") and line[2] != " "}
    assert {"accepted", "always so here, accepted", "another name here", "not here"} <= heads
    assert "unknown" not in heads
    for line in (
        "--lr-warmup-samples 1536000: --lr-warmup-iters, which is 1536000 / --global-batch-size",
        "--moe-token-dispatcher-type flex: --moe-token-dispatcher-type alltoall",
        "--attention-backend flash: --attention-backend cudnn or tilelang",
        "--deterministic-mode: --deterministic",
        "--rotary-scaling-factor 40: always 1 here",
        "--recompute-modules mla_up_proj moe mlp layernorm: --recompute-granularity selective or full decides",
        "--fp8-param-gather: FP8 training has no such setting",
    ):
        assert f"    {line}" in message


def test_all_that_is_always_so_is_accepted_and_named_in_one_line(capsys):
    always = []
    for i, (flag, served) in enumerate(ALWAYS.items()):
        value = [] if served == () else ["7"] if served == ANY else [served[-1]]
        always += [f"{flag}={value[0]}"] if value and i % 2 else [flag, *value]
    always += "--moe_grouped_gemm true --hidden-dropout 0.00 --normalization=rmsnorm".split()
    fixed = "--num-query-groups 4 --kv-channels 16 --moe-shared-expert-intermediate-size=32".split()
    model = parse(TINY).model
    fixed[1], fixed[3] = str(model.num_attention_heads), str(model.qk_nope_head_dim)
    fixed[4] = f"--moe-shared-expert-intermediate-size={model.n_shared_experts * model.moe_intermediate_size}"
    fixed += ["--moe-layer-freq", "([0]*1 + [1]*5)"]
    capsys.readouterr()
    assert parse([*always, *TINY, *fixed]) == parse(TINY)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("always so here, accepted: --use-mcore-models")
    assert {*ALWAYS, "--moe_grouped_gemm", "--kv-channels", "--moe-layer-freq"} <= set(line.split())


@pytest.mark.parametrize(
    "words, answer",
    [
        ("--normalization LayerNorm", "--normalization LayerNorm: always RMSNorm here"),
        ("--attention-dropout=0.1", "--attention-dropout 0.1: always 0 here"),
        ("--swiglu false", "--swiglu false: it is so in every run and takes no value"),
        ("--moe-router-score-function softmax", "always sigmoid here"),
        ("--kv-channels 99", "--kv-channels 99: the model has qk_nope_head_dim "),
        ("--num-query-groups 3", "--num-query-groups 3: the model has num_attention_heads "),
        ("--moe-layer-freq [0]*2+[1]*4", "--moe-layer-freq [0]*2+[1]*4: the model has [0]*1+[1]*5"),
        ("--moe-layer-freq 2", "the model has [0]*1+[1]*5"),
        ("--moe-layer-freq print(1)", "the model has [0]*1+[1]*5"),
        ("--num-layers 4 --moe-layer-freq [0]*1+[1]*5", "the model has [0]*1+[1]*3"),
        ("--dsa-indexer-topk-freq 4", "the model has indexers in layers 0 "),
        ("--bf16 true", "--bf16 true: here it is --bf16, which takes no value"),
        ("--bf16=false", "--bf16 false: it takes no value: leave it out"),
        ("--micro_batch_size 2", "--micro_batch_size 2: here it is --micro-batch-size 2"),
        ("--sequence_parallel true", "--sequence_parallel true: here it is --sequence-parallel, which takes no value"),
        ("--no_save_optim false", "--no_save_optim false: it takes no value: leave it out"),
        ("--gradient_checkpointing False", "--gradient_checkpointing False: leave it out"),
        ("--packing true", "--packing true: here it is --packing best-fit"),
        ("--dtype float32", "--dtype float32: here it is --bf16, or nothing: fp32"),
        ("--optimizer.lr 1e-4", "--optimizer.lr 1e-4: here it is --lr 1e-4"),
        ("--num-workers 8 -lr 1e-3", "--num-workers 8 -lr 1e-3: it takes one value"),
        ("--tokenizer-type", "--tokenizer-type: it takes one value"),
        ("--node_rank 3", "a flag of torchrun"),
        ("--fp16 --unheard-of-setting 1 -2", "  unknown:\n    --unheard-of-setting\n"),
        ("--moe-router-topkk 3", "unknown flag --moe-router-topkk; did you mean --moe-router-topk?"),
        ("--moe-router-padding-for-quantization", "experts' rows are padded where a kernel needs it"),
        ("--mock-data", "--mock-data: a flag of pretrain_glm.py"),
        ("--lora_dropout 0.1 --bf16 yes", "adapters are LoRA, given by --lora-rank"),
        ("--eval-iters 0", "leave --eval-iters and the validation data out"),
        ("train.train_iters=10", "unexpected argument train.train_iters=10; write --FLAG VALUE"),
        ("config.yaml", "unexpected argument config.yaml; settings are flags; "),
        ("--fp16 --lr abc", "argument --lr: invalid float value: 'abc'"),
    ],
)
def test_one_wrong_flag_gets_its_reason(capsys, words, answer):
    assert answer in refusal(capsys, [*TINY, *words.split()])


def test_documents_are_apart_or_not(capsys):
    words = "--hf-config glm5.2-tiny --mock-data --train-iters 1 --no-document-mask --reset-attention-mask".split()
    answer = "--reset-attention-mask and --no-document-mask contradict each other"
    assert answer in refusal(capsys, words, PretrainDataConfig)


def test_the_indexer_pattern_of_the_model_is_accepted_from_both_flags():
    flags = "--hf-config glm5.2 --data-path rows.jsonl --train-iters 10".split()
    parse([*flags, *"--dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3".split()])


@pytest.mark.parametrize(
    "given, ours",
    {
        "learning-rate 3e-4": "--lr 3e-4",
        "max-steps 5": "--train-iters 5",
        "num_train_epochs 3": "--train-epochs 3",
        "gradient-accumulation-steps 4": "--global-batch-size, which is --micro-batch-size x data-parallel ranks x 4",
        "per_device_train_batch_size 2": "--micro-batch-size 2",
        "save-total-limit 2": "--keep-last 2",
        "eval-steps=50": "--eval-interval 50",
        "logging-steps 1": "--log-interval 1",
        "max-grad-norm 1.0": "--clip-grad 1.0",
        "output-dir out": "--save out",
        "resume": "--load DIR, the folder that --save has written",
        "resume-from-checkpoint out": "--load DIR",
        "tp 8": "--tensor-model-parallel-size 8 (with --sequence-parallel)",
        "pp 2": "--pipeline-model-parallel-size 2",
        "ep 2": "--expert-model-parallel-size 2",
        "cp 2": "--context-parallel-size 2",
        "model glm": "--load-hf glm (a Hugging Face folder)",
        "model_name_or_path glm": "--load-hf glm",
        "dataset rows": "--data-path rows",
        "max-seq-length 64": "--seq-length 64",
        "cutoff_len 64": "--seq-length 64",
        "warmup-ratio 0.03": "--lr-warmup-fraction 0.03",
        "report-to wandb": "--tensorboard-dir DIR, --wandb-project NAME or --log-file FILE",
    }.items(),
)
def test_other_trainers_names_are_answered_with_ours(capsys, given, ours):
    word = f"--{given.split()[0]}".split("=")[0]
    message = refusal(capsys, [*TINY, *f"--{given}".split()])
    assert message.startswith(f"error: {word}") and f": here it is {ours}" in message and message.count("\n") == 1


@pytest.mark.parametrize(
    "word, flag",
    [
        ("--seq-lenght", "--seq-length"),
        ("--micro-batchsize", "--micro-batch-size"),
        ("--train-iter", "--train-iters"),
        ("--tensr-model-parallel-szie", "--tensor-model-parallel-size"),
        ("--weight-decya", "--weight-decay"),
        ("--seq-len", "--seq-length"),
        ("--num-workers", None),
        ("--max-lr", None),
        ("--adam-beta3", None),
        ("--test-interval", None),
        ("--num-heads", None),
        ("--log-level", None),
        ("--qqq", None),
        ("--", None),
    ],
)
def test_a_guess_is_made_where_it_is_sure(word, flag):
    assert nearest(word, OURS[DataConfig]) == flag


def test_the_tables_are_consistent():
    raw = [table for source in (megatron_flags, trainer_flags) for table in (source.NAMES, source.REASONS)]
    names = [f"--{name}" for table in raw for text in table.values() for name in text.split()] + [*ALWAYS, *OF_MODEL]
    assert len(names) == len(set(names)), {name for name in names if names.count(name) > 1}
    assert len(names) > 400 and all(re.fullmatch(r"--[a-z0-9-]+\*?", name) for name in names)
    assert not OURS[DataConfig] & OURS[PretrainDataConfig] & set(names)
    assert not (OURS[DataConfig] | OURS[PretrainDataConfig]) & (set(names) - set(NOT_HERE))
    assert set(VALUES) <= OURS[DataConfig] | OURS[PretrainDataConfig]


def test_the_flags_that_the_tables_name_exist():
    tools = "".join((ROOT / "tools" / name).read_text() for name in ("benchmark.py", "convert_hf.py"))
    texts = [*RENAMED.values(), *NOT_HERE.values()]
    texts += [text for values in VALUES.values() for text in values.values()]
    for flag in re.findall(r"--[a-z][a-z0-9-]*", " ".join(texts)):
        assert flag in OURS[DataConfig] | OURS[PretrainDataConfig] or f'"{flag}"' in tools, flag
