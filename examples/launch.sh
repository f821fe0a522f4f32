# shellcheck shell=bash disable=SC2034  # the recipes use the variables
# What the recipes have in common; each sources this file, sets its flags and calls `launch "$@"`.
#
# Environment: NNODES, GPUS_PER_NODE, MASTER_ADDR, CHECKPOINT, DATA_PATH, SAVE (their values are shown); SCALE=tiny for
# the same layout in small on 8 CPU processes, with a random model and data made in TINY_FOLDER; PYTHON.
# A recipe that sets PROGRAM=pretrain_glm.py first starts from scratch where CHECKPOINT is none. One that also sets
# AFTER=RECIPE is a stage after that recipe: a new run, iteration 0, from the weights of the last one.
# A recipe with BASE, a Hugging Face folder, trains adapters on it as it is: CHECKPOINT is then for SCALE=tiny alone.
# Flags of the program on the command line come last and win. --dry-run plans the run and starts nothing,
# --rehearse-rank R runs two steps of one of its ranks, in one process. --layout auto takes the fastest layout that fits
# (tools/plan.py search) instead of the recipe's, on GPUs of --gpu-type (h100).
# Ranks: torchrun on each node, or this process is one of srun's.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
recipe_name=$(basename "$0" .sh)
program=${PROGRAM:-finetune_glm.py}
tiny_folder=${TINY_FOLDER:-$PWD/tiny_output}
settings=()
args=()

# Whether this process is one of several that srun started. The script of sbatch looks the same: the program refuses it.
by_srun=no
if [ -n "${SLURM_PROCID:-}" ] && [ "${SLURM_NTASKS:-1}" != 1 ]; then by_srun=yes; fi

say() { if [ $by_srun = no ] || [ "$SLURM_PROCID" = 0 ]; then printf '%s\n' "$@"; fi; } # only the first rank prints

case ${SCALE:=full} in
  full)
    if [ $by_srun = yes ]; then # what srun started is what there is
      NNODES=${SLURM_NNODES:-1}
      GPUS_PER_NODE=$((SLURM_NTASKS / NNODES))
      MASTER_ADDR=${MASTER_ADDR:-the first node}
    fi
    ;;
  tiny)
    if [ $by_srun = yes ]; then
      echo "error: SCALE=tiny starts its own 8 processes: run it without srun, or with SLURM_NTASKS=1" >&2
      exit 2
    fi
    NNODES=1 GPUS_PER_NODE=8 MASTER_ADDR=localhost
    CHECKPOINT=$tiny_folder/base SAVE=$tiny_folder/$recipe_name
    DATA_PATH=$tiny_folder/train.jsonl VALID_DATA_PATH=$tiny_folder/valid.jsonl
    if [ "$program" = pretrain_glm.py ]; then
      CHECKPOINT=${AFTER:+$tiny_folder/$AFTER}
      CHECKPOINT=${CHECKPOINT:-none} DATA_PATH=$tiny_folder/library_text_document
    fi
    ;;
  *)
    echo "error: SCALE is $SCALE; it is full or tiny" >&2
    exit 2
    ;;
esac

# quoted WORD…: the words as they are written in a command.
quoted() {
  local words
  printf -v words '%q ' "$@"
  printf '%s' "${words% }"
}

# setting NAME DEFAULT: an environment variable, to be printed.
setting() {
  local origin=""
  if [ -z "${!1:-}" ]; then
    printf -v "$1" %s "$2"
    origin=" (default)"
  fi
  settings+=("  $1=${!1}$origin")
}

# given FLAG ARGUMENT…: whether the arguments hold the flag.
given() {
  local argument
  for argument in "${@:2}"; do
    if [ "${argument%%=*}" = "$1" ]; then return 0; fi
  done
  return 1
}

# values_of FLAG -> the array `values`: what the program will take, that is, the flag's last occurrence in `args`.
values_of() {
  local i reading=no
  values=()
  for ((i = 0; i < ${#args[@]}; i++)); do
    case ${args[i]} in
      "$1") reading=yes values=() ;;
      "$1="*) reading=no values=("${args[i]#*=}") ;;
      --*) reading=no ;;
      *) if [ $reading = yes ]; then values+=("${args[i]}"); fi ;;
    esac
  done
}

# number_of FLAG -> stdout, 1 if the flag is absent.
number_of() {
  local values
  values_of "$1"
  echo "${values[0]:-1}"
}

# drop FLAG: takes the flag and its value out of `args`.
drop() {
  local i kept=()
  for ((i = 0; i < ${#args[@]}; i++)); do
    case ${args[i]} in
      "$1") i=$((i + 1)) ;;
      "$1="*) ;;
      *) kept+=("${args[i]}") ;;
    esac
  done
  args=("${kept[@]}")
}

# take_layout ARGUMENT…: what --layout says -> `layout`, empty without it; the other arguments -> `rest`.
take_layout() {
  layout='' rest=()
  while [ $# != 0 ]; do
    case $1 in
      --layout) layout=${2:-nothing} && shift $(($# > 1)) ;;
      --layout=*) layout=${1#*=} ;;
      *) rest+=("$1") ;;
    esac
    shift
  done
  if [ -n "$layout" ] && [ "$layout" != auto ]; then
    echo "error: --layout is $layout; it can be auto" >&2
    exit 2
  fi
  if [ -n "$layout" ] && [ "$SCALE" = tiny ]; then
    echo "error: --layout auto plans for GPUs: not with SCALE=tiny" >&2
    exit 2
  fi
}

# The fastest layout that fits NNODES x GPUS_PER_NODE -> `args`, at their end.
find_layout() {
  local found word words=()
  for word in "${args[@]}"; do
    if [ "$word" != --dry-run ]; then words+=("$word"); fi
  done
  say "--layout auto: looking for the fastest layout that fits $((NNODES * GPUS_PER_NODE)) GPUs ..."
  found=$("$python" "$root/tools/plan.py" search --gpus $((NNODES * GPUS_PER_NODE)) \
    --nproc-per-node "$GPUS_PER_NODE" --program "$program" --results 1 --json "${words[@]}") || exit
  found=$("$python" -c 'import json, sys; print("\n".join(json.load(sys.stdin)[0]["flags"]))' <<<"$found")
  mapfile -t words <<<"$found"
  args+=("${words[@]}")
  say "  $(quoted "${words[@]}")"
}

# The flags that say what to plan for -> `planned_for`, out of `args`: a run refuses them.
take_plan_flags() {
  local flag values
  planned_for=()
  for flag in --gpu-type --gpu-memory-gb --nvlink-gb-per-second --nic-gb-per-second --calibration; do
    values_of "$flag"
    if [ ${#values[@]} != 0 ]; then planned_for+=("$flag" "${values[0]}"); fi
    drop "$flag"
  done
}

# holds_checkpoints FOLDER: whether a save was completed there, even if the pointer to it is lost.
holds_checkpoints() {
  local found
  if [ -e "$1/latest_checkpointed_iteration.txt" ]; then return; fi
  for found in "$1"/iter_[0-9][0-9][0-9][0-9][0-9][0-9][0-9]; do
    if [ -d "$found" ] && [ ! -e "$found/.pending" ]; then return; fi
  done
  return 1
}

# The flags of the run -> `args`: the recipe, what SCALE=tiny changes, the command line.
collect() {
  local load=(--load "${CHECKPOINT:=none}")
  if [ -n "${AFTER:-}" ]; then load+=(--finetune); fi
  if [ "$CHECKPOINT" = none ] && [ "$program" = pretrain_glm.py ]; then load=(); fi
  if [ -n "${BASE:-}" ] && [ "$SCALE" = full ]; then load=(--load-hf "$BASE"); fi
  if [ "$SCALE" = full ] && holds_checkpoints "$SAVE"; then
    say "SAVE holds a checkpoint: going on from there"
    load=(--load "$SAVE")
    if [ -n "${BASE:-}" ]; then load+=(--base "$BASE"); fi
  fi
  if [ -n "$layout" ]; then PARALLEL_ARGS=(); fi
  args=("${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${TRAIN_ARGS[@]}"
    "${load[@]}" --save "$SAVE")
  if [ -n "$layout" ]; then
    drop --recompute-granularity
    drop --micro-batch-size
  fi
  if [ "$SCALE" = tiny ]; then
    if given --expert-node-size "${args[@]}"; then args+=(--expert-node-size 2); fi
    args+=(--hf-config glm5.2-tiny --attention-backend torch --pipeline-model-parallel-size 2
      --num-layers-per-virtual-pipeline-stage 1 --expert-model-parallel-size 4 --train-iters 3 "${TINY_ARGS[@]}")
  fi
  if given --train-epochs "$@"; then drop --train-iters; fi
  if given --num-layers-per-virtual-pipeline-stage "$@"; then
    drop --pipeline-model-parallel-layout
  elif given --pipeline-model-parallel-layout "${args[@]}" "$@"; then
    drop --num-layers-per-virtual-pipeline-stage
  fi
  if given --moe-token-dispatcher-type "$@"; then drop --expert-node-size; fi
  args+=("$@")
}

# The checkpoint's files -> `problems`, with what to do.
check_checkpoint() {
  local values load folder download="hf download $HF_MODEL --local-dir hf/${HF_MODEL#*/}"
  values_of --load-hf
  if [ ${#values[@]} != 0 ]; then
    if [ -e "${values[0]}/config.json" ]; then check_model "${values[0]}/config.json" BASE; return; fi
    problems+=("${values[0]} holds no model. Set BASE to a Hugging Face folder, or download it:
    hf download $HF_MODEL --local-dir $(quoted "${values[0]}")")
    return
  fi
  values_of --load
  if [ ${#values[@]} = 0 ]; then return; fi # from scratch
  load=${values[0]}
  if [[ ! $load =~ iter_[0-9]{7}/?$ ]] && ! holds_checkpoints "$load"; then
    if [ -n "${AFTER:-}" ]; then
      problems+=("$load holds no checkpoint. Run the stage before, examples/$AFTER.sh, or set CHECKPOINT to its SAVE")
      return
    fi
    problems+=("$load holds no checkpoint. Set CHECKPOINT to a converted one, or download the model and convert it
  ($HF_MODEL-FP8 is half the size and does too):
    $download
    python tools/convert_hf.py --from-hf hf/${HF_MODEL#*/} --save $(quoted "$load")")
    return
  fi
  values_of --ckpt-step
  if ! folder=$(PYTHONPATH=$root "$python" -c 'import sys; from megatron_glm.config.iterations import print_start
print_start(*sys.argv[1:])' "$load" "${values[@]}"); then
    problems+=("$folder")
    return
  fi
  values_of --tokenizer-model
  if [ "$program" = finetune_glm.py ] && [ ${#values[@]} = 0 ] && [ ! -e "$folder/hf/tokenizer.json" ]; then
    problems+=("$folder/hf/tokenizer.json is missing. Download the tokenizer and name its folder:
    $download tokenizer.json tokenizer_config.json chat_template.jinja
    bash $(quoted "$0") --tokenizer-model hf/${HF_MODEL#*/}")
  fi
  check_model "$folder/hf/config.json"
}

# json_number KEY FILE -> stdout, nothing if it is not there.
json_number() { { grep -oE "\"$1\": *[0-9]+" "$2" 2>/dev/null || true; } | head -n 1 | grep -oE '[0-9]+$' || true; }

# check_model CONFIG [VARIABLE]: the checkpoint's model against the recipe's -> `problems`. GLM-5 and 5.2 have the same shapes, so
# that the rotary base tells them apart.
check_model() {
  local values preset key wanted found
  values_of --hf-config
  preset=$root/megatron_glm/presets/${values[0]}.json
  for key in hidden_size=--hidden-size num_hidden_layers=--num-layers rope_theta=--rotary-base; do
    values_of "${key#*=}"
    wanted=${values[0]:-$(json_number "${key%=*}" "$preset")}
    found=$(json_number "${key%=*}" "$1")
    if [ -n "$wanted" ] && [ -n "$found" ] && [ "$wanted" != "$found" ]; then
      problems+=("$1 has ${key%=*} $found, the recipe's model has $wanted: the checkpoint is of another model.
  Set ${2:-CHECKPOINT} to $HF_MODEL$([ -n "${2:-}" ] || echo ", converted")")
      return
    fi
  done
}

# check_data FLAG SPLIT: files of a data flag -> `problems`, with what to do.
check_data() {
  local values path variable=${1#--}
  variable=${variable^^}
  values_of "$1"
  for path in "${values[@]}"; do
    if [ ! -e "$path" ] && ! compgen -G "$path" >/dev/null; then
      problems+=("$1 $path: no such data. Set ${variable//-/_} to JSONL or Parquet files, or download
  $HF_DATA:
    pip install datasets && mkdir -p $(quoted "$(dirname "$path")")
    python -c \"import sys, datasets; datasets.load_dataset('$HF_DATA', split='$2').to_json(sys.argv[1])\" \\
      $(quoted "$path")")
    fi
  done
}

# The prefixes of --data-path, maybe after their weights -> `problems`, with what to do.
check_prefixes() {
  local values path
  values_of --data-path
  for path in "${values[@]}"; do
    if [[ ! $path =~ ^[0-9.]+$ ]] && { [ ! -e "$path.bin" ] || [ ! -e "$path.idx" ]; }; then
      problems+=("--data-path $path: $path.bin and .idx are not both there. Set DATA_PATH to the prefix of
  Megatron files, or download $HF_DATA and make them:
    hf download --repo-type dataset $HF_DATA --include '$HF_SPLIT' --local-dir 'data/${HF_DATA#*/}'
    hf download $HF_MODEL tokenizer.json tokenizer_config.json --local-dir hf/${HF_MODEL#*/}
    python tools/preprocess_data.py --input 'data/${HF_DATA#*/}' --output-prefix $(quoted "${path%_text_document}") \\
      --tokenizer-model hf/${HF_MODEL#*/} --append-eod")
    fi
  done
}

# Whether --save can be written -> `problems`; the run would find out after loading the weights.
check_save() {
  local values folder
  values_of --save
  folder=${values[0]}
  while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
  if [ ! -d "$folder" ] || [ ! -w "$folder" ]; then
    problems+=("--save ${values[0]} cannot be written: $folder is no writable folder. Set SAVE to another one")
  fi
}

# The number of GPUs against the layout -> `problems`.
check_gpus() {
  local world=$((NNODES * GPUS_PER_NODE)) tp cp pp ep gpus
  tp=$(number_of --tensor-model-parallel-size) cp=$(number_of --context-parallel-size)
  pp=$(number_of --pipeline-model-parallel-size) ep=$(number_of --expert-model-parallel-size)
  if ((world % (tp * cp * pp) || world % (pp * ep))); then
    problems+=("NNODES $NNODES x GPUS_PER_NODE $GPUS_PER_NODE = $world GPUs do not fit the layout: they must be a
  multiple of TP x CP x PP = $tp x $cp x $pp = $((tp * cp * pp)) and of PP x EP = $pp x $ep = $((pp * ep))")
  fi
  if [ "$SCALE" = tiny ] || [ $by_srun = yes ]; then return; fi
  gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
  if ((gpus < GPUS_PER_NODE)); then
    problems+=("this machine has $gpus GPUs, GPUS_PER_NODE is $GPUS_PER_NODE. SCALE=tiny and --dry-run need none")
  fi
  if ((NNODES > 1)) && [ "$MASTER_ADDR" = localhost ]; then
    problems+=("NNODES is $NNODES: set MASTER_ADDR to the first node's name, the same on every node")
  fi
}

# A random model of GLM-5.2's shape and a dataset, or the sources of Python's library as Megatron files, for
# SCALE=tiny; made once.
make_tiny() {
  rm -rf "${SAVE:?}"
  if [ "$program" = pretrain_glm.py ]; then
    if [ ! -e "$DATA_PATH.idx" ]; then
      mkdir -p "$tiny_folder"
      PYTHONPATH=$root "$python" "$root/examples/quickstart_data.py" --save "$tiny_folder"
      PYTHONPATH=$root "$python" "$root/tools/preprocess_data.py" --tokenizer-model "$tiny_folder/hf" --append-eod \
        --input "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')/*.py" \
        --output-prefix "${DATA_PATH%_text_document}"
    fi
    return
  fi
  if [ ! -e "$CHECKPOINT/latest_checkpointed_iteration.txt" ]; then
    mkdir -p "$tiny_folder"
    PYTHONPATH=$root "$python" "$root/examples/quickstart_data.py" --save "$tiny_folder"
    PYTHONPATH=$root "$python" "$root/tools/convert_hf.py" --from-hf "$tiny_folder/hf" --save "$CHECKPOINT"
  fi
}

launch() {
  local problems=() python=${PYTHON:-python}
  if given --help "$@" || given -h "$@"; then
    sed -n '2,/^# shellcheck/{/^# shellcheck/!s/^# \{0,1\}//p}' "$0"
    echo "Flags: those of $program, which \`python $program --help\` lists; the recipe's come first, yours win."
    exit
  fi
  local layout rest planned_for=()
  take_layout "$@"
  set -- "${rest[@]}"
  say "$recipe_name, SCALE=$SCALE:" "${settings[@]}"
  collect "$@"
  if [ $by_srun = no ]; then python=$(bash "$root/examples/setup.sh"); fi
  if [ -n "$layout" ]; then find_layout; fi
  if given --dry-run "$@" || given --rehearse-rank "$@"; then
    unset SLURM_PROCID # the plan, and a rehearsal, are one process
    WORLD_SIZE=$((NNODES * GPUS_PER_NODE)) LOCAL_WORLD_SIZE=$GPUS_PER_NODE \
      exec "$python" "$root/$program" "${args[@]}"
  fi

  if [ -n "$layout" ]; then take_plan_flags; fi
  if [ "$SCALE" = tiny ]; then
    make_tiny
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
  fi
  check_checkpoint
  if [ "$program" = pretrain_glm.py ]; then
    check_prefixes
  else
    check_data --data-path "$HF_SPLIT"
    check_data --valid-data-path validation
  fi
  check_save
  check_gpus
  if [ ${#problems[@]} != 0 ]; then
    say "${problems[@]/#/error: }" >&2
    exit 2
  fi

  say "  flags (later ones win): $(quoted "${args[@]}")"
  if [ $by_srun = yes ]; then
    exec "$python" "$root/$program" "${args[@]}"
  fi
  # Flags that cannot be served are one line here, and one from every rank in torchrun's summary below.
  local plan nodes=(--standalone)
  plan=$(WORLD_SIZE=$((NNODES * GPUS_PER_NODE)) LOCAL_WORLD_SIZE=$GPUS_PER_NODE \
    "$python" "$root/$program" "${args[@]}" "${planned_for[@]}" --dry-run) || exit
  grep -A 9 '^verdict' <<<"$plan" || true
  if ((NNODES > 1)); then
    nodes=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-id "$recipe_name"
      --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}")
  fi
  PATH=$(dirname "$(command -v "$python")"):$PATH # the torchrun of this interpreter, not another environment's
  ulimit -Sn "$(ulimit -Hn)" # torchrun keeps the store that all ranks connect to
  exec torchrun "${nodes[@]}" --nproc-per-node "$GPUS_PER_NODE" "$root/$program" "${args[@]}"
}
