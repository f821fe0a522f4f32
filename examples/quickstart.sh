#!/usr/bin/env bash
# The whole job on a laptop in minutes: make a small random GLM-5.2 and a chat dataset, convert, fine-tune with packing,
# convert back, check the result against transformers, and let it answer a question.
#   bash examples/quickstart.sh [FOLDER]      default: quickstart_output; QUICKSTART_ITERS sets the length
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0" && exit ;;
  -*) echo "error: $1 is no folder: bash examples/quickstart.sh [FOLDER]" >&2 && exit 2 ;;
esac
mkdir -p "${1:-quickstart_output}"
out=$(cd "${1:-quickstart_output}" && pwd)
cd "$(dirname "$0")/.."
iterations=${QUICKSTART_ITERS:-100}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # more threads than idle cores make a small model many times slower

if [ -n "$(ls -A "$out")" ] && [ ! -e "$out/.quickstart" ]; then
  echo "error: $out holds something else: name an empty folder or none" >&2
  exit 2
fi
python=$(bash examples/setup.sh)
rm -rf "$out"
mkdir "$out" && touch "$out/.quickstart"
quoted() { # the words as a command that can be copied
  local words
  printf -v words '%q ' "$@"
  printf '%s' "${words% }"
}
step() { printf '\n[%s] %s\n' "$SECONDS s" "$*"; }
# All to a log file, the lines that matter to the screen. Ctrl-C is for the program, which has more to say.
chosen() {
  trap '' INT
  tee "$out/$1" | grep --line-buffered -E "^($2)"
}

# On a Hopper GPU its kernels, with attention sizes that they serve; else fp32 and the torch reference.
sizes=() attention=(--attention-backend torch)
if nvidia-smi -L >/dev/null 2>&1 && PYTHONPATH=$PWD "$python" -c \
  'import sys; from megatron_glm.ops import backends; sys.exit(bool(backends.lacking("cudnn", "auto")))'; then
  sizes=(--kernel-sizes) attention=(--attention-backend cudnn --bf16)
fi

step "make a model of glm5.2-tiny's shape and conversations about Python's standard library"
"$python" examples/quickstart_data.py --save "$out" "${sizes[@]}"

step "convert it to a sharded checkpoint"
"$python" tools/convert_hf.py --from-hf "$out/hf" --save "$out/base"

step "fine-tune it for $iterations iterations, ${attention[*]}"
train=(finetune_glm.py --data-path "$out/train.jsonl" --valid-data-path "$out/valid.jsonl" --seq-length 256
  --micro-batch-size 2 --global-batch-size 4 --lr 4e-3 --lr-warmup-iters 4 --moe-router-bias-update-rate 0.01
  "${attention[@]}"
  --save "$out/trained" --log-interval 10)
lines="loaded|saved|leaving| validation|.*[.]jsonl:"
if [ ! -t 2 ]; then lines+="| iteration"; fi # a terminal shows a bar
"$python" "${train[@]}" --load "$out/base" --train-iters "$iterations" --log-file "$out/train.log.jsonl" \
  | chosen train.log "$lines"

step "convert it back to the Hugging Face layout"
"$python" tools/convert_hf.py --load "$out/trained" --to-hf "$out/hf_trained"

step "check the result: read it in again, evaluate, compare with transformers"
"$python" tools/convert_hf.py --from-hf "$out/hf_trained" --save "$out/reread"
"$python" finetune_glm.py --load "$out/reread" --data-path "$out/valid.jsonl" --seq-length 256 --eval-only \
  --attention-backend torch \
  | chosen eval.log "eval"
if "$python" -c 'import transformers' 2>/dev/null; then
  loss=$(sed -n 's/^eval | lm loss: \([0-9.]*\) .*/\1/p' "$out/eval.log")
  "$python" examples/compare_with_transformers.py --hf "$out/hf_trained" --data-path "$out/valid.jsonl" --loss "$loss"
else
  echo "transformers is not installed: not compared"
fi

step "let it answer a question"
"$python" - "$out/valid.jsonl" >"$out/prompt.jsonl" <<'PROMPT'
import json, sys
question = json.loads(open(sys.argv[1]).readline())["messages"][0]
print(json.dumps({"messages": [question]}))
PROMPT
"$python" tools/generate.py --load "$out/trained" --prompt-file "$out/prompt.jsonl" --max-new-tokens 40 \
  "${attention[@]}" >"$out/answer.jsonl" 2>"$out/generate.log" || { cat "$out/generate.log" >&2 && exit 1; }

step "done"
"$python" - "$out" <<'SUMMARY'
import json, sys
folder = sys.argv[1]
log = [record for record in map(json.loads, open(f"{folder}/train.log.jsonl")) if "iteration" in record]
middle = sorted(log, key=lambda record: record["tokens_per_second_per_gpu"])[len(log) // 2]
memory = max(record.get("peak_memory_bytes", 0) for record in log)
last = [record["lm_loss"] for record in log[-10:]]
print(f"training loss    {log[0]['lm_loss']:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)} iterations)")
print(f"validation loss  {log[-1]['valid_lm_loss']:.3f}")
speed, rate = middle["tokens_per_second_per_gpu"], 1000 * middle["tflops_per_gpu"]
print(f"speed            {speed:.0f} tokens/s, {rate:.2f} GFLOP/s (median)")
print(f"memory           {memory / 2**30:.2f} GiB at the peak")
print("question        ", json.load(open(f"{folder}/prompt.jsonl"))["messages"][0]["content"])
print("its answer      ", " ".join(json.load(open(f"{folder}/answer.jsonl"))["text"].split()))
SUMMARY
cat <<END
checkpoint       $out/trained
Hugging Face     $out/hf_trained
log              $out/train.log, $out/train.log.jsonl
Next, go on where it stopped:
  cd $(quoted "$PWD")
  $(quoted "$python" "${train[@]}" --load "$out/trained" --train-iters $((2 * iterations)))
END
