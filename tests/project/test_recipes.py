"""The recipes of examples/ and their SLURM jobs, with stand-ins for torchrun, srun, scontrol and the interpreter."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_glm.config import RunConfig
from megatron_glm.config.flags import build_parser, resolve
from megatron_glm.config.model import ModelConfig
from megatron_glm.parallel.pipeline.layout import build_layout, check_layout
from megatron_glm.planner.machine import H100
from megatron_glm.planner.memory import peak_memory
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.report import report

ROOT = Path(__file__).resolve().parents[2]

# name: preset, nodes, sequence, CP, global batch, attention, packing, checkpoints every
RECIPES = {
    "glm5.2_32k_cp8": ("glm5.2", 64, 32768, 8, 64, "tilelang", "best-fit", None),
    "glm5.2_4k_tilelang": ("glm5.2", 32, 4096, 1, 256, "tilelang", "best-fit", None),
    "glm5.2_4k_cudnn": ("glm5.2", 32, 4096, 1, 256, "cudnn", "best-fit", None),
    "glm5.2_hellaswag": ("glm5.2", 32, 160, 1, 512, "torch", "none", 1000),
    "glm5.1_hellaswag": ("glm5.1", 32, 160, 1, 512, "torch", "none", 1000),
    "glm5_hellaswag": ("glm5", 32, 160, 1, 512, "torch", "none", 1000),
}

STUBS = {
    "torchrun": 'printf "%s\\n" "$@" >"$BOX/torchrun.args"',
    "nvidia-smi": "for i in 0 1 2 3 4 5 6 7; do echo GPU $i; done",
    # A rank, the planner or a step of SCALE=tiny's preparation, by the script that it is given
    "python": """
case $1 in
  -c | -m) exec REAL_PYTHON "$@" ;;
  */plan.py) exec REAL_PYTHON "$@" ;;
  */quickstart_data.py) touch "$3/train.jsonl" "$3/valid.jsonl" ;;
  */convert_hf.py) mkdir -p "$5/iter_0000000/hf"
    touch "$5/iter_0000000/hf/tokenizer.json" "$5/iter_0000000/tensors.index"
    echo 0 >"$5/latest_checkpointed_iteration.txt" ;;
  *) echo "world ${WORLD_SIZE:-} rank ${SLURM_PROCID:-} master ${MASTER_ADDR:-}"
    echo "files $(ulimit -Sn) of $(ulimit -Hn), logs $LOGS"; printf '%s\\n' "$@"
    exit "${RANK_CODE:-0}" ;;
esac""".replace("REAL_PYTHON", sys.executable),
    "scontrol": """
case "$1 $2" in
  "show hostnames") printf "node0\\nnode1\\n" ;;
  "show job") printf "JobId=%s\\n   Command=%s\\n" "$3" "${SUBMITTED:-}" ;;
  *) echo "$@" >>"$BOX/scontrol.args" ;;
esac""",
    # 2 nodes x 4 ranks; the highest exit code is srun's
    "srun": """
while [ "${1#--}" != "$1" ]; do case $1 in --output=*) output=${1#*=} ;; esac; shift; done
export SLURM_NTASKS=8 SLURM_NNODES=2 SLURM_STEP_ID=0 code=0
for rank in 0 1 2 3 4 5 6 7; do
  SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 4)) "$@" >>"${output//%t/$rank}" 2>&1 &
done
for job in $(jobs -p); do wait "$job" || { last=$?; code=$((last > code ? last : code)); }; done
exit $code""",
}


@pytest.fixture
def box(tmp_path) -> Path:
    """A folder with the stand-ins in bin/, a checkpoint and data, as far as the scripts look at them."""
    (tmp_path / "bin").mkdir()
    for name, body in STUBS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    checkpoint(tmp_path / "base", 0)
    (tmp_path / "rows.jsonl").touch()
    return tmp_path


def checkpoint(folder: Path, iteration: int) -> None:
    hf = folder / f"iter_{iteration:07d}" / "hf"
    hf.mkdir(parents=True)
    (hf / "tokenizer.json").touch()
    (hf.parent / "tensors.index").touch()
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")


def bash(box: Path, script: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a script of examples/ in an environment that holds no more than it needs."""
    given = {
        "PATH": f"{box / 'bin'}:{os.environ['PATH']}",
        "BOX": str(box),
        "PYTHON": str(box / "bin" / "python"),
        "CHECKPOINT": str(box / "base"),
        "DATA_PATH": str(box / "rows.jsonl"),
        "VALID_DATA_PATH": str(box / "rows.jsonl"),
        "SAVE": str(box / "save"),
        "MASTER_ADDR": "node0",
    }
    command = ["bash", ROOT / "examples" / script, *flags]
    return subprocess.run(command, env=given | environment, cwd=box, text=True, capture_output=True)


def launched(box: Path, script: str, *flags: str, **environment: str) -> tuple[list[str], RunConfig]:
    """torchrun's own arguments and the configuration of the ranks that it would have started."""
    done = bash(box, script, *flags, **environment)
    assert done.returncode == 0, done.stderr
    arguments = (box / "torchrun.args").read_text().splitlines()
    program = arguments.index(str(ROOT / "finetune_glm.py"))
    return arguments[:program], resolve(build_parser().parse_args(arguments[program + 1 :]))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_settings(box, name):
    preset, nodes, seq_length, cp, batch, attention, packing, save_interval = RECIPES[name]
    torchrun, config = launched(box, f"{name}.sh")
    assert torchrun[:2] == ["--nnodes", str(nodes)] and torchrun[-2:] == ["--nproc-per-node", "8"]
    assert torchrun[torchrun.index("--rdzv-endpoint") + 1] == "node0:29500"

    assert config.model == ModelConfig.from_hf(preset)
    parallel, train, optimizer = config.parallel, config.train, config.optimizer
    sizes = (parallel.tensor_model_parallel_size, parallel.context_parallel_size)
    sizes += (parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size)
    assert sizes == (1, cp, 4, 64)
    assert parallel.num_layers_per_virtual_pipeline_stage == 2
    assert (parallel.moe_token_dispatcher_type, parallel.expert_node_size) == ("hybrid", 8)
    assert parallel.recompute_granularity == "full"
    assert config.kernels.attention_backend == attention
    assert (train.micro_batch_size, train.global_batch_size, train.train_iters) == (1, batch, 100)
    assert (train.seed, train.bf16) == (1234, True)
    assert (config.data.seq_length, config.data.packing) == (seq_length, packing)
    assert bool(config.data.valid_data_path) == (packing == "none")
    assert config.checkpoint.save_interval == save_interval
    assert (config.checkpoint.load, config.checkpoint.save) == (str(box / "base"), str(box / "save"))
    assert (optimizer.lr, optimizer.lr_decay_style, optimizer.weight_decay) == (1e-5, "constant", 0)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.999, 1e-8)
    assert (optimizer.lr_warmup_iters, optimizer.moe_router_bias_update_rate) == (0, 0)

    for world_size in {nodes * 8, 256}:  # 256 GPUs serve every recipe
        config.check(world_size)
        micro_batches = config.micro_batches(parallel.data_parallel_size(world_size))
        check_layout(parallel, config.model, world_size, seq_length, micro_batches)
        stages = build_layout(parallel, config.model, seq_length, micro_batches).stages
        assert [len(stage.layers) for stage in stages] == 6 * [3] + 30 * [2]  # 9 virtual stages a rank


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_the_published_model_and_data(box, name):
    preset, packing = RECIPES[name][0], RECIPES[name][6]
    done = bash(box, f"{name}.sh", CHECKPOINT="none", DATA_PATH="none.jsonl", VALID_DATA_PATH="none.jsonl")
    tulu, hellaswag = ("allenai/tulu-3-sft-mixture", "train[:100000]"), ("rowan/hellaswag", "train")
    wanted = [tulu] if packing == "best-fit" else [hellaswag, ("rowan/hellaswag", "validation")]
    assert re.findall(r"load_dataset\('(.+?)', split='(.+?)'\)", done.stderr) == wanted
    assert f"hf download zai-org/{preset.replace('glm', 'GLM-')} " in done.stderr


def documented() -> list[list[str]]:
    """Rows of the table of verdicts in docs/recipes.md: script, nodes, GPUs, flags added, peak, verdict."""
    lines = (ROOT / "docs" / "recipes.md").read_text().splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in cells if row[-1] in ("fits", "does not fit")]


def test_the_documented_verdicts_are_those_of_the_planner(box):
    rows = documented()
    assert {row[0] for row in rows} == {f"{name}.sh" for name in RECIPES}
    for script, nodes, gpus, flags, peak, verdict in rows:
        _, config = launched(box, script, *flags.split(), NNODES=nodes)
        planned = peak_memory(Plan.create(config, int(gpus), 8))
        assert int(gpus) == 8 * int(nodes)
        assert [f"{planned / GIB:.1f}", "fits" if planned <= 80 * GIB else "does not fit"] == [peak, verdict], script


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_spends_its_memory_where_it_saves_the_most_traffic(box, name):
    """No setting that fits 80 GB sends less in a step."""
    plan = Plan.create(launched(box, f"{name}.sh")[1], 8 * RECIPES[name][1], 8)
    assert list(report(plan, H100))[-1].startswith("verdict: fits")


@pytest.mark.timeout(900)
def test_one_recipe_runs_in_small(tmp_path):
    """Eight processes that train, and the settings that they print."""
    environment = os.environ | {"SCALE": "tiny", "PYTHON": sys.executable, "TINY_FOLDER": str(tmp_path)}
    command = ["bash", str(ROOT / "examples/glm5.2_32k_cp8.sh"), "--train-iters", "1", "--verbose"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" iteration        1/       1 | consumed samples:            8 |") == 1
    printed = dict(re.findall(r"^  (\w+) = (.+)$", done.stdout, re.M))
    wanted = {"context_parallel_size": "2", "pipeline_model_parallel_size": "2", "expert_model_parallel_size": "4"}
    wanted |= {"num_layers_per_virtual_pipeline_stage": "1", "moe_token_dispatcher_type": "hybrid", "seed": "1234"}
    wanted |= {"recompute_granularity": "full", "packing": "best-fit", "bf16": "True", "lr": "1e-05"}
    assert wanted.items() <= printed.items()
    assert (tmp_path / "glm5.2_32k_cp8/latest_checkpointed_iteration.txt").read_text().strip() == "1"
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("name", RECIPES)
def test_tiny_is_the_same_recipe_on_eight_ranks(box, name):
    _, full = launched(box, f"{name}.sh")
    torchrun, tiny = launched(box, f"{name}.sh", SCALE="tiny", TINY_FOLDER=str(box / "tiny"))
    assert torchrun == ["--standalone", "--nproc-per-node", "8"]
    assert tiny.model == ModelConfig.from_hf("glm5.2-tiny")
    assert tiny.kernels.attention_backend == "torch"

    def changed(section: str) -> set[str]:
        ours, theirs = (dataclasses.asdict(getattr(config, section)) for config in (full, tiny))
        return {key for key in ours if ours[key] != theirs[key]}

    degrees = {"pipeline_model_parallel_size", "expert_model_parallel_size", "expert_node_size"}
    degrees |= {"num_layers_per_virtual_pipeline_stage", "context_parallel_size"}
    assert changed("parallel") <= degrees
    assert changed("train") == {"global_batch_size", "train_iters"}
    assert changed("data") <= {"seq_length", "data_path", "valid_data_path"}
    assert changed("optimizer") == set()

    parallel = tiny.parallel
    assert (parallel.context_parallel_size > 1) == (full.parallel.context_parallel_size > 1)
    micro_batches = tiny.micro_batches(parallel.data_parallel_size(8))
    assert micro_batches == full.micro_batches(full.parallel.data_parallel_size(RECIPES[name][1] * 8))
    tiny.check(8)
    grid = check_layout(parallel, tiny.model, 8, tiny.data.seq_length, micro_batches)
    assert grid.pp == 2 and grid.dp > 1 and grid.node == grid.inter == 2


def test_flags_of_the_command_line_win(box):
    layout = ("--pipeline-model-parallel-layout", "auto", "--moe-token-dispatcher-type", "alltoall")
    _, config = launched(box, "glm5.2_32k_cp8.sh", "--seq-length", "8192", "--train-epochs", "2", *layout, "--lr=2e-5")
    assert (config.data.seq_length, config.train.train_epochs, config.optimizer.lr) == (8192, 2, 2e-5)
    assert config.train.train_iters is None  # what excludes a given flag is gone
    config.check(512)


def test_the_environment_says_where_and_on_what(box):
    (box / "other.jsonl").touch()
    torchrun, config = launched(
        box, "glm5.2_4k_cudnn.sh", NNODES="64", GPUS_PER_NODE="4", DATA_PATH="other.jsonl", MASTER_PORT="1234"
    )
    assert torchrun[:2] == ["--nnodes", "64"] and "node0:1234" in torchrun and torchrun[-1] == "4"
    assert config.parallel.expert_node_size == 4
    assert config.data.data_path == ("other.jsonl",)


def test_flags_that_cannot_be_served_are_refused_before_torchrun(box):
    for flag in ("--seq-lenght", "--global-batch-size"):
        done = bash(box, "glm5.2_4k_cudnn.sh", flag, "100", PYTHON=sys.executable)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert not (box / "torchrun.args").exists()


def test_all_that_is_missing_is_named_with_what_to_do(box):
    mistakes = {"CHECKPOINT": "none", "DATA_PATH": "rows", "SAVE": "rows.jsonl/save", "MASTER_ADDR": "localhost"}
    done = bash(box, "glm5.2_hellaswag.sh", GPUS_PER_NODE="9", **mistakes)
    assert done.returncode == 2 and not (box / "torchrun.args").exists()
    assert "none holds no checkpoint" in done.stderr and "hf download zai-org/GLM-5.2 --local-dir" in done.stderr
    assert "convert_hf.py --from-hf hf/GLM-5.2 --save none" in done.stderr
    assert "--data-path rows: no such data. Set DATA_PATH" in done.stderr and "rowan/hellaswag" in done.stderr
    assert "--valid-data-path" not in done.stderr
    assert "--save rows.jsonl/save cannot be written: rows.jsonl is no writable folder" in done.stderr
    assert "32 x GPUS_PER_NODE 9 = 288 GPUs do not fit the layout" in done.stderr
    assert "PP x EP = 4 x 64 = 256" in done.stderr
    assert "this machine has 8 GPUs, GPUS_PER_NODE is 9" in done.stderr
    assert "set MASTER_ADDR to the first node's name" in done.stderr


def test_a_checkpoint_without_tokenizer_needs_one_named(box):
    (box / "base/iter_0000000/hf/tokenizer.json").unlink()
    done = bash(box, "glm5_hellaswag.sh")
    assert done.returncode == 2 and "hf/tokenizer.json is missing" in done.stderr
    assert bash(box, "glm5_hellaswag.sh", "--tokenizer-model", "hf/GLM-5").returncode == 0


def test_a_checkpoint_of_another_model_is_refused(box):
    presets, config = ROOT / "megatron_glm" / "presets", box / "base/iter_0000000/hf/config.json"
    config.write_bytes((presets / "glm5.2.json").read_bytes())
    assert bash(box, "glm5.2_4k_cudnn.sh").returncode == 0
    done = bash(box, "glm5_hellaswag.sh")
    assert done.returncode == 2
    assert "has rope_theta 8000000, the recipe's model has 1000000: the checkpoint is of another model" in done.stderr
    assert "Set CHECKPOINT to zai-org/GLM-5, converted" in done.stderr
    config.write_bytes((presets / "glm5.2-tiny.json").read_bytes())  # other in everything, but one mistake
    assert bash(box, "glm5_hellaswag.sh").stderr.count("error: ") == 1


def test_a_dry_run_is_one_process_that_needs_no_input(box):
    done = bash(box, "glm5.2_32k_cp8.sh", "--dry-run", CHECKPOINT="none", DATA_PATH="none")
    assert done.returncode == 0, done.stderr
    assert "world 512 rank" in done.stdout and done.stdout.splitlines()[-1] == "--dry-run"
    assert not (box / "torchrun.args").exists()


SMALL = ("--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "4", "--context-parallel-size", "2")


def job(box: Path, name: str, **environment: str) -> subprocess.CompletedProcess:
    """The body of an sbatch file as SLURM would run it, on 2 nodes of 4 GPUs."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": name, "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_PROCID": "0"}
    slurm |= {"SLURM_SUBMIT_DIR": str(ROOT), "LOGS": str(box / "logs"), "MASTER_ADDR": ""}
    return bash(box, f"slurm/{name}.sbatch", *SMALL, **slurm, **environment)


def test_a_slurm_job_runs_requeues_and_resumes(box):
    done = job(box, "glm5.2_32k_cp8", RANK_CODE="75")
    assert done.returncode == 75, done.stderr
    assert (box / "scontrol.args").read_text() == "requeue 7\n"
    logs = [(box / "logs" / f"rank-{rank}.log").read_text() for rank in range(8)]
    for rank, text in enumerate(logs):
        lines = text.splitlines()
        assert f"world  rank {rank} master node0" in lines
        assert lines[lines.index("--expert-node-size") + 1] == "4"  # a node's GPUs, from the step
        assert lines[lines.index("--load") + 1] == str(box / "base")
        assert lines[-len(SMALL) :] == list(SMALL)
    assert "NNODES=2" in logs[0] and "NNODES" not in logs[1]  # the first rank speaks

    checkpoint(box / "save", 40)
    assert job(box, "glm5.2_32k_cp8").returncode == 0
    assert (box / "scontrol.args").read_text() == "requeue 7\n"  # not once more
    for rank, before in enumerate(logs):
        text = (box / "logs" / f"rank-{rank}.log").read_text()
        assert text.startswith(before)  # one log a rank, over all attempts
        assert f"--load\n{box / 'save'}\n" in text[len(before) :]


def spooled(box: Path, **environment: str) -> subprocess.CompletedProcess:
    """A job as SLURM runs it: a copy of the sbatch file, in the folder from which it was submitted."""
    (box / "slurm_script").write_bytes((ROOT / "examples/slurm/glm5_hellaswag.sbatch").read_bytes())
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_PROCID": "0"}
    slurm |= {"SLURM_SUBMIT_DIR": str(box), "MASTER_ADDR": ""}
    return bash(box, str(box / "slurm_script"), *SMALL, **slurm | environment)


@pytest.mark.parametrize("known_by", ["SUBMITTED", "MEGATRON_GLM"])
def test_a_job_can_be_submitted_from_any_folder(box, known_by):
    where = {"SUBMITTED": f"{ROOT}/examples/slurm/glm5_hellaswag.sbatch --lr 1", "MEGATRON_GLM": str(ROOT)}
    done = spooled(box, **{known_by: where[known_by]})
    assert done.returncode == 0, done.stderr
    text = (box / "logs/x-7/rank-3.log").read_text()  # beside the folder from which it was submitted
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert "rank 3 master node0" in text and f"files {hard} of {hard}, logs logs/x-7\n" in text


@pytest.mark.parametrize(
    "environment, words",
    [
        ({}, ["is not the repository", "set MEGATRON_GLM to its folder"]),
        ({"MEGATRON_GLM": "/none"}, ["'/none' is not the repository"]),
        ({"MEGATRON_GLM": str(ROOT), "SLURM_JOB_ID": ""}, ["SLURM_JOB_ID is not set", "submit this file with sbatch"]),
        ({"MEGATRON_GLM": str(ROOT), "scontrol": ""}, ["scontrol names no node of 'node[0-1]'", "set MASTER_ADDR"]),
    ],
)
def test_what_a_job_lacks_is_one_line_with_the_remedy(box, environment, words):
    if "scontrol" in environment:
        (box / "bin/scontrol").write_text("#!/bin/sh\nexit 1\n")
    done = spooled(box, **environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (box / "logs/x-7/rank-0.log").exists()


def test_a_failed_slurm_job_is_not_queued_again(box):
    assert job(box, "glm5_hellaswag", RANK_CODE="1").returncode == 1
    assert not (box / "scontrol.args").exists()
    done = job(box, "glm5_hellaswag", DATA_PATH="none")
    assert done.returncode == 2
    logs = [(box / "logs" / f"rank-{rank}.log").read_text() for rank in range(8)]
    assert f"what the ranks said: {box / 'logs'}/rank-*.log" in done.stdout
    assert logs[0].count("no such data") == 1 and "no such data" not in "".join(logs[1:])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_its_job(name):
    lines = (ROOT / "examples/slurm" / f"{name}.sbatch").read_text().splitlines()
    header = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    wanted = {f"--nodes={RECIPES[name][1]}", "--ntasks-per-node=8", "--gpus-per-node=8", f"--job-name={name}"}
    assert wanted | {"--requeue", "--signal=USR1@600", "--open-mode=append"} <= header
    assert lines[-1] == f'run_recipe examples/{name}.sh "$@"'


@pytest.mark.parametrize("pointer", [None, "3", "soon"], ids=["lost", "stale", "unreadable"])
def test_a_run_whose_pointer_is_lost_does_not_start_anew(box, pointer):
    """SAVE holds iterations 3 and 6: the recipe goes on from there or says how."""
    for iteration in (3, 6):
        checkpoint(box / "save", iteration)
    (box / "save" / "latest_checkpointed_iteration.txt").unlink()
    if pointer is not None:
        (box / "save" / "latest_checkpointed_iteration.txt").write_text(pointer)
    done = bash(box, "glm5.2_32k_cp8.sh")
    assert done.returncode == 2 and "--ckpt-step, for example 6" in done.stderr, done.stderr
    assert not (box / "torchrun.args").exists()
    _, config = launched(box, "glm5.2_32k_cp8.sh", "--ckpt-step", "6")
    assert (config.checkpoint.load, config.checkpoint.ckpt_step) == (str(box / "save"), 6)


def test_a_first_save_that_was_killed_before_its_pointer_is_no_checkpoint(box):
    checkpoint(box / "save", 3)
    (box / "save" / "latest_checkpointed_iteration.txt").unlink()
    (box / "save" / "iter_0000003" / ".pending").touch()
    assert launched(box, "glm5.2_32k_cp8.sh")[1].checkpoint.load == str(box / "base")
