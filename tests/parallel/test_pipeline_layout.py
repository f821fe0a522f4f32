"""Chunks of layers: even, by flag, by string, by cost; and the refusals."""

import pytest

from megatron_glm.config import LossConfig, ModelConfig, ParallelConfig
from megatron_glm.config.flops import head_flops, layer_flops
from megatron_glm.parallel.pipeline.costs import MEASURED, Rates
from megatron_glm.parallel.pipeline.layout import build_layout, check_layout, stage_costs
from megatron_glm.parallel.pipeline.schedule import build_schedule
from megatron_glm.parallel.pipeline.simulate import simulate

GLM52 = ModelConfig.from_hf("glm5.2")
TINY = ModelConfig.from_hf("glm5.2-tiny")


def layout_of(pp, per_stage=None, layout=None, model=GLM52, micro_batches=4):
    parallel = ParallelConfig(
        pipeline_model_parallel_size=pp,
        num_layers_per_virtual_pipeline_stage=per_stage,
        pipeline_model_parallel_layout=layout,
    )
    return build_layout(parallel, model, 4096, micro_batches)


def sizes(layout) -> list[int]:
    return [len(stage.layers) for stage in layout.stages]


def check_whole(layout, model) -> None:
    """Every layer once, in order; embedding first, head last, the MTP layer once."""
    assert [layer for stage in layout.stages for layer in stage.layers] == list(range(model.num_hidden_layers))
    assert [stage.embedding for stage in layout.stages].index(True) == 0
    assert [stage.head for stage in layout.stages].index(True) == len(layout.stages) - 1
    [mtp] = [i for i, stage in enumerate(layout.stages) if stage.mtp]
    assert model.num_nextn_predict_layers == 1 and not any(stage.layers for stage in layout.stages[mtp + 1 :])
    assert len(layout.stages) == layout.pp * layout.chunks


def test_even_and_virtual_stages_spread_the_remainder():
    assert sizes(layout_of(4)) == [20, 20, 19, 19]
    layout = layout_of(4, per_stage=2)
    assert layout.chunks == 9 and sizes(layout) == [3] * 6 + [2] * 30
    check_whole(layout, GLM52)
    assert [stage.layers[0] for stage in layout.of_rank(1)[:3]] == [3, 15, 24]
    assert layout.stages[-1].mtp and layout.stages[-1].head


def test_selection_crosses_only_into_shared_layers():
    layout = layout_of(4, per_stage=2)
    for stage in layout.stages:
        assert stage.needs_topk(GLM52) == (GLM52.indexer_types[stage.layers[0]] == "shared")
    assert not layout_of(2, layout="Et*78|L").stages[1].needs_topk(GLM52)


@pytest.mark.parametrize(
    "text, pp, expected",
    [
        ("Et*20|t*20|t*20|t*18L", 4, [20, 20, 20, 18]),
        ("Et*2|(tt|)*37,t*2|mL", 4, [2] * 39 + [0]),
        ("E t*3|(tt|)*37,t|m|L", 41, [3] + [2] * 37 + [1, 0, 0]),
        ("Et*4|((tt|)*2,t*4|)*8,t*10L", 2, [4] + [2, 2, 4] * 8 + [10]),
    ],
)
def test_layout_strings(text, pp, expected):
    layout = layout_of(pp, layout=text)
    assert sizes(layout) == expected
    check_whole(layout, GLM52)
    marked = [i for i, stage in enumerate(layout.stages) if stage.mtp]
    assert marked == [39] if "m|L" in text else marked == [len(expected) - 1]


def test_the_layout_string_of_the_documentation():
    """`Et*3|(tt|)*29,m|L` is 32 stages of a 61-layer model."""
    with pytest.raises(ValueError, match=r"has 61 layers \(t\), the model has 78"):
        layout_of(8, layout="Et*3|(tt|)*29,m|L")


@pytest.mark.parametrize(
    "text, pp, words",
    [
        ("Et*39|t*38L", 2, ["77 layers", "78"]),
        ("Et*26|t*26|t*26L", 2, ["3 stages", "--pipeline-model-parallel-size 2"]),
        ("Et*39|t*39mmL", 2, ["2 MTP layers", "has 1"]),
        ("t*39|t*39L", 2, ["one E"]),
        ("Et*39L|t*39", 2, ["then one L"]),
        ("Et*39||t*38|tL", 4, ["stage 1 of 4 is empty"]),
        ("Et*39|(t*39L", 2, ["brackets"]),
        ("Et*39|x*39L", 2, ["'x'"]),
        ("*3Et*39|t*39L", 2, ["'*3'"]),
        ("Et*99999999999|tL", 2, ["*99999999999 repeats beyond"]),
        ("E((t*999)*999)*999|tL", 2, ["*999 repeats beyond"]),
    ],
)
def test_wrong_layout_strings_are_refused(text, pp, words):
    with pytest.raises(ValueError) as error:
        layout_of(pp, layout=text)
    assert all(word in str(error.value) for word in ["--pipeline-model-parallel-layout", repr(text), *words])


def test_too_many_stages_are_refused():
    with pytest.raises(ValueError, match="--num-layers-per-virtual-pipeline-stage 20 x .*size 4 exceeds the 78 layers"):
        layout_of(4, per_stage=20)


def test_cost_of_a_layer_is_the_sum_of_its_parts():
    """Per token at 4096, from the sizes of the released model: projections, core, experts, router, indexer."""
    attention = 2 * (6144 * 2048 + 2048 * 16384 + 6144 * 576 + 64 * 448 * 512 + 16384 * 6144)
    core = 2 * 64 * 1536.25 * 512
    shared_moe = attention + core + 6 * 6144 * 2048 * 9 + 2 * 6144 * 256
    indexer = 2 * (2048 * 4096 + 6144 * (128 + 32)) + 2 * 2048.5 * 32 * 128
    assert GLM52.indexer_types[5:7] == ("shared", "full")
    assert sum(layer_flops(GLM52, 5, [4096])) / 4096 == pytest.approx(shared_moe)
    assert sum(layer_flops(GLM52, 6, [4096])) / 4096 == pytest.approx(shared_moe + indexer)
    assert sum(layer_flops(GLM52, 0, [4096])) / 4096 == pytest.approx(attention + core + indexer + 6 * 6144 * 12288)


OPERATIONS = Rates(*[(1, 2)] * len(Rates._fields))  # as if all ran at the same rate


def idle(layout, micro_batches=4, recompute="none", rates=MEASURED) -> float:
    schedule = build_schedule(layout.pp, layout.chunks, micro_batches)
    return simulate(schedule, costs_of(layout, recompute, rates)).idle


def costs_of(layout, recompute="none", rates=MEASURED, schedule="1f1b"):
    parallel = ParallelConfig(recompute_granularity=recompute, pipeline_schedule=schedule)
    return stage_costs(layout, GLM52, 4096, parallel, rates)


def test_idle_shares_of_the_recipe():
    """78 layers on 4 ranks, 4 micro-batches of 4096 tokens, full recompute, costs in operations."""
    assert idle(layout_of(4, per_stage=2), 4, "full", OPERATIONS) == pytest.approx(0.144, abs=5e-4)
    ten_chunks = "E" + "tt|" * 38 + "t|tL"
    assert idle(layout_of(4, layout=ten_chunks), 4, "full", OPERATIONS) == pytest.approx(0.0965, abs=5e-4)


def test_an_automatic_layout_is_idle_for_less_than_seven_percent():
    automatic = layout_of(4, layout="auto")
    check_whole(automatic, GLM52)
    assert automatic.chunks <= 10 and idle(automatic) <= 0.07


def test_costs_are_times():
    """The head costs its three products in its forward; a layer is slower than its operations, above all backward."""
    layout, head = layout_of(78), 2 * 154880 * 6144  # layers 40 and 77 are of one kind
    measured = costs_of(layout)
    forward, backward = measured[40]
    assert measured[77] == pytest.approx((forward + 3.1 * head, backward))
    in_operations = costs_of(layout, rates=OPERATIONS)[40]
    assert 1 < forward / in_operations[0] < backward / in_operations[1] < 2
    again = costs_of(layout, "full")[40][1] - backward  # all but the selection and a third of the experts' products
    flops = layer_flops(GLM52, 40, [4096])
    spared = flops.experts * MEASURED.experts[0] / 3 + flops.index_scores * 2 + flops.index_projections
    assert again == pytest.approx(forward - spared / 4096) and 0.8 < again / forward < 0.95
    _, without, weights = costs_of(layout, schedule="zero-bubble")[40]  # as products of weights are most of a layer
    assert without + weights == pytest.approx(backward) and 0.3 < weights / backward < 0.5


def test_mtp_steps_cost_their_layer_and_their_heads():
    apart, together = (layout_of(2, layout=f"Et*39|t*38|{end}") for end in ("tm|L", "t|mL"))

    def ends(layout, losses, **changes):
        return stage_costs(layout, GLM52, 4096, ParallelConfig(**changes), OPERATIONS, losses)[2:]

    three, head = LossConfig(3), head_flops(GLM52, 1)
    layer, one = ends(apart, LossConfig())
    last, heads = ends(apart, three)
    assert one == pytest.approx((head, 2 * head)) and heads == pytest.approx((4 * head, 8 * head))
    assert ends(together, three)[0] == pytest.approx(layer)
    assert sum(map(sum, ends(together, three))) == pytest.approx(sum(map(sum, (last, heads))))
    # each a layer and eh_proj, 0.14 of one; the later steps have no latents
    assert 3.3 < (last[0] - layer[0]) / layer[0] < 3.5
    for losses, products in ((LossConfig(3, mtp_detach=True), 9), (LossConfig(3, mtp_loss="tv"), 10)):
        assert ends(apart, losses)[1][0] == pytest.approx(products / 3 * head)
    trunk, mtp = ends(together, LossConfig(3, train_only="mtp"))
    assert trunk[1] == 0 and mtp[1] > 0 and len(ends(apart, three, pipeline_schedule="zero-bubble")[1]) == 3


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_automatic_layout_makes_room_for_mtp_steps(steps):
    losses = LossConfig(steps)
    parallel = ParallelConfig(pipeline_model_parallel_size=4, pipeline_model_parallel_layout="auto")
    automatic, without = (build_layout(parallel, GLM52, 4096, 8, each) for each in (losses, LossConfig()))
    check_whole(automatic, GLM52)
    schedules = [build_schedule(4, layout.chunks, 8) for layout in (automatic, without)]
    costs = [stage_costs(layout, GLM52, 4096, parallel, losses=losses) for layout in (automatic, without)]
    assert simulate(schedules[0], costs[0]).idle < simulate(schedules[1], costs[1]).idle - 0.005
    assert without.stages[-1].mtp and automatic.stages[-2].mtp  # as GLM-5 was trained


def test_automatic_layout_balances_and_repeats():
    for pp, micro_batches in ((2, 2), (3, 5)):
        automatic = layout_of(pp, layout="auto", micro_batches=micro_batches)
        check_whole(automatic, GLM52)
        assert idle(automatic, micro_batches) < idle(layout_of(pp), micro_batches)
        assert sizes(automatic) == sizes(layout_of(pp, layout="auto", micro_batches=micro_batches))
    assert sizes(layout_of(1, layout="auto")) == [78]


def test_layouts_that_the_model_cannot_have_are_refused_before_any_group_exists():
    def check(world, seq_length=64, micro_batches=4, **sizes):
        parallel = ParallelConfig(**sizes)
        return check_layout(parallel, TINY, world, seq_length, micro_batches)

    layers = TINY.num_hidden_layers
    assert check(layers, pipeline_model_parallel_size=layers).pp == layers
    for world, words, flags in (
        (2, "--microbatch-group-size-per-vp-stage 1", {"microbatch_group_size_per_vp_stage": 1}),
        (2, "has 1 layers", {"pipeline_model_parallel_layout": "E|tL"}),
    ):
        with pytest.raises(ValueError, match=words):
            check(world, pipeline_model_parallel_size=2, **flags)
