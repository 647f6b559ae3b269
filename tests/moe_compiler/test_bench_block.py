"""What `moepdl bench block` measures: the models' own blocks, judged by float64, beside a floor of the right value."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from moe_compiler.bench import exact
from moe_compiler.bench.block import Block, make_block
from moe_compiler.bench.floor import Speed, device_speed, floor_us
from moe_compiler.bench.peers import PeerBlock, load_peers
from moe_compiler.bench.routers import ROUTERS, make_router
from moe_compiler.bench.shapes import NAMED, Shape, find_shape
from moe_compiler.bench.ways import Compiled, inductor_spellings
from moe_compiler.errors import UsageError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "peers_torch.py"
H200 = Speed(4.3e12, 790e12, "given")


def small(name: str) -> Shape:
    """A named shape with its rules and small sizes."""
    shape = NAMED[name]
    return dataclasses.replace(
        shape,
        experts=min(shape.experts, 16),
        k=min(shape.k, 4),
        hidden=64,
        intermediate=32,
        shared=16 if shape.shared else 0,
        groups=min(shape.groups, 4),
        kept_groups=min(shape.kept_groups, 2),
    )


# transformers' class of each named shape: (module, block, config, what the block names its router).
CLASSES = {
    "qwen3": ("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", "gate"),
    "mixtral": ("mixtral", "MixtralSparseMoeBlock", "MixtralConfig", "gate"),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", "gate"),
    "gpt-oss-20b": ("gpt_oss", "GptOssMLP", "GptOssConfig", "router"),
    "qwen3-next": ("qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextConfig", "gate"),
    "olmoe": ("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig", "gate"),
    "glm-4.5-air": ("glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig", "gate"),
    "phi-3.5-moe": ("phimoe", "PhimoeSparseMoeBlock", "PhimoeConfig", "router"),
}
# Where the defaults of the configuration class are those of another model of the family.
NOT_DEFAULT = {
    "gpt-oss-20b": {"num_local_experts", "num_experts"},
    "qwen3": {"norm_topk_prob"},
    "olmoe": {"intermediate_size"},
}


def config_of(name: str, shape: Shape):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {
        "hidden_size": shape.hidden,
        "num_experts_per_tok": shape.k,
        "norm_topk_prob": shape.renormalize,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.intermediate,
        "shared_expert_intermediate_size": shape.shared,
        "num_experts": shape.experts,
        "num_local_experts": shape.experts,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "n_group": shape.groups,
        "topk_group": shape.kept_groups,
        "routed_scaling_factor": shape.scale,
    }
    kind = getattr(transformers, CLASSES[name][2])
    default = kind()
    known = {key: value for key, value in sizes.items() if hasattr(default, key)}
    return kind, default, known


@pytest.mark.parametrize("name", NAMED)
def test_sizes_are_those_of_the_published_configuration(name: str):
    """The defaults of transformers' configuration classes are the published ones, but where told in NOT_DEFAULT."""
    _, default, known = config_of(name, NAMED[name])
    for key, value in known.items():
        dense = key == "intermediate_size" and hasattr(
            default, "moe_intermediate_size"
        )  # of the layers without experts
        alias = key in ("num_experts", "num_local_experts") and hasattr(default, "n_routed_experts")
        if not dense and not alias and key not in NOT_DEFAULT.get(name, ()):
            assert getattr(default, key) == value, key


@pytest.mark.parametrize("name", NAMED)
def test_a_named_block_computes_what_the_models_own_does(name: str):
    import importlib

    shape = small(name)
    if name in ("deepseek-v3", "glm-4.5-air"):  # their shared expert is as wide as one routed
        shape = dataclasses.replace(shape, shared=shape.intermediate)
    kind, _, known = config_of(name, shape)
    folder, class_name, _, router = CLASSES[name]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = kind(**known)
    config._experts_implementation = "batched_mm"
    theirs = getattr(module, class_name)(config).eval()
    ours = make_block(shape, torch.float32, "cpu", 0).twin("batched_mm")
    pairs = {
        f"{router}.weight": ours.router.weight,
        "experts.gate_up_proj": ours.gate_up,
        "experts.down_proj": ours.down,
    }
    if shape.biases:
        pairs |= {
            f"{router}.bias": ours.router.bias,
            "experts.gate_up_proj_bias": ours.gate_up_bias,
            "experts.down_proj_bias": ours.down_bias,
        }
    if shape.router == "sigmoid":
        pairs[f"{router}.e_score_correction_bias"] = ours.router.choice_bias
    if ours.shared is not None:
        own = "shared_expert" if shape.shared_gate else "shared_experts"
        pairs |= {f"{own}.{key}": value for key, value in ours.shared.named_parameters() if key != "gate.weight"}
        if shape.shared_gate:
            pairs["shared_expert_gate.weight"] = ours.shared.gate.weight
    state = theirs.state_dict()
    assert set(pairs) == set(state)
    theirs.load_state_dict({key: value.detach() for key, value in pairs.items()})
    x = torch.randn(1, 33, shape.hidden)
    with torch.no_grad():
        want = theirs(x)
        want = want[0] if isinstance(want, tuple) else want
        torch.testing.assert_close(ours(x[0]), want[0], rtol=1e-5, atol=1e-7)


def test_shapes_by_name_and_by_sizes():
    assert find_shape("mixtral") is NAMED["mixtral"]
    assert find_shape("8,2,64,32") == Shape("8,2,64,32", 8, 2, 64, 32)
    assert find_shape("8,2,64,32,16").shared == 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("qwen", "there is no shape 'qwen'"),
        ("8,2,64", "'8,2,64' is no shape"),
        ("8,2,64,0", "is no shape"),
        ("8,2,64,x", "is no shape"),
        ("2,8,64,32", "8 experts a token of 2"),
    ],
)
def test_a_shape_that_is_none(text: str, said: str):
    with pytest.raises(UsageError, match=said):
        find_shape(text)


def test_the_nearest_name_is_offered():
    with pytest.raises(UsageError) as caught:
        find_shape("mixtrall")
    assert caught.value.try_ == "mixtral"


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_agree_with_float64(name: str, dtype: torch.dtype):
    block = make_block(small(name), dtype, "cpu", 0)
    x = torch.randn(40, 64).to(dtype)
    choice = exact.choice_of(block, x)
    wanted = exact.exact_output(block, x, choice)
    limit = 1e-6 if dtype is torch.float32 else 1e-2
    for spelling in ("grouped_mm", "batched_mm"):
        error = exact.output_error(block.twin(spelling)(x), wanted, choice.near)
        assert 1e-9 < error < limit  # above 1e-9: float64 is no lower precision in disguise
    # The routers agree with their own float64 rule wherever the choice is clear.
    weights, ids = block.router(x)
    clear = ~choice.near
    assert (ids.sort(-1)[0] == choice.ids.sort(-1)[0])[clear].all()
    assert clear.sum() > 20
    order, other = ids.argsort(-1), choice.ids.argsort(-1)
    error = weights.gather(1, order).double() - choice.weights.gather(1, other)
    assert error[clear].abs().max() < limit

    x.requires_grad_()
    grad = torch.randn(40, 64).to(dtype).masked_fill(choice.near[:, None], 0)
    block(x).backward(grad)
    errors = exact.gradient_errors(block, x, grad, choice)
    names = {key for key, _ in block.named_parameters()} | {"x"}
    assert set(errors) == names
    assert max(errors.values()) < limit
    block.down.grad[choice.ids[0, 0]] *= 2
    assert exact.gradient_errors(block, x, grad, choice)["down"] > 0.01
    block.router.weight.grad = None
    assert exact.gradient_errors(block, x, grad, choice)["router.weight"] == float("inf")


def test_a_gradient_where_no_token_went_must_be_zero():
    block = make_block(find_shape("8,2,64,32"), torch.float32, "cpu", 0)
    x = torch.randn(1, 64, requires_grad=True)
    grad = torch.randn(1, 64)
    block(x).backward(grad)
    choice = exact.choice_of(block, x)
    idle = next(e for e in range(8) if e not in choice.ids)
    assert exact.gradient_errors(block, x, grad, choice)["gate_up"] < 1e-6
    block.gate_up.grad[idle] = 1e-2
    assert exact.gradient_errors(block, x, grad, choice)["gate_up"] > 1e-3


@pytest.mark.parametrize("rule", ROUTERS)
def test_near_ties_are_those_that_rounding_can_turn(rule: str):
    """Logits in bfloat16 choose as float64 does wherever no near tie is claimed, and ties are claimed sparingly."""
    name = next(name for name, shape in NAMED.items() if shape.router == rule)
    shape = dataclasses.replace(small(name), k=2)
    router = make_router(shape, torch.bfloat16)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.normal_(std=0.1)
    x = torch.randn(4000, 64).bfloat16()
    clear = ~router.near_ties(x)
    rounded = router.choose(router.logits(x)).sort(-1)[0]
    wanted = router.choose(router.exact_logits(x)).sort(-1)[0]
    assert (rounded == wanted)[clear].all()
    assert clear.float().mean() > 0.7
    if rule in ("softmax", "top_k_first"):
        assert (rounded != wanted).any(), "no rounding ever turned a choice: the test says nothing"


def test_a_wrong_shape_and_no_clear_token_are_infinitely_wrong():
    y, near = torch.ones(3, 4).double(), torch.tensor([False, True, False])
    assert exact.output_error(torch.ones(3, 4), y, near) == 0
    assert exact.output_error(torch.tensor([[1.0] * 4, [9.0] * 4, [1.0] * 4]), y, near) == 0
    assert exact.output_error(torch.ones(3, 5), y, near) == float("inf")
    assert exact.output_error(torch.ones(3, 4), y, near | True) == float("inf")


@pytest.mark.parametrize(
    ("error", "wrong"), [(2.4e-3, False), (2.6e-3, True), (float("nan"), True), (float("inf"), True)]
)
def test_what_passes(error: float, wrong: bool):
    assert bool(exact.problem(error, 1e-3, torch.bfloat16)) is wrong


@pytest.mark.parametrize(
    ("name", "tokens", "hit", "direction", "wanted"),
    [
        # 8 of 9.437 MB in bf16 over 4.3 TB/s
        ("qwen3", 1, 8, "forward", 8 * 3 * 2048 * 768 * 2 / 4.3e6),
        ("qwen3", 8192, 128, "forward", 8192 * 8 * 6 * 2048 * 768 / 790e6),
        ("qwen3", 8192, 128, "forward_backward", 3 * 8192 * 8 * 6 * 2048 * 768 / 790e6),
        # with backward: the hit experts are read twice, the gradients of all of them written
        ("qwen3", 1, 8, "forward_backward", (2 * 8 + 128) * 3 * 2048 * 768 * 2 / 4.3e6),
        ("deepseek-v3", 1, 8, "forward", 9 * 3 * 7168 * 2048 * 2 / 4.3e6),
        ("gpt-oss-20b", 1, 4, "forward", 4 * (3 * 2880 * 2880 + 3 * 2880) * 2 / 4.3e6),
        ("mixtral", 8192, 8, "forward", 7306.8),
    ],
)
def test_the_floor(name: str, tokens: int, hit: int, direction: str, wanted: float):
    assert floor_us(NAMED[name], tokens, hit, direction, H200, 2) == pytest.approx(wanted, rel=1e-4)


def test_the_speed_of_this_cpu_is_measured():
    speed = device_speed("cpu", torch.float32)
    assert speed.source.startswith("measured")
    assert 1e8 < speed.bandwidth < 1e13
    assert 1e7 < speed.flops < 1e15


def test_twins_share_parameters_and_no_compiled_code():
    block = make_block(find_shape("8,2,64,32"), torch.float32, "cpu", 0)
    one, two = block.twin("batched_mm"), block.twin("grouped_mm")
    assert one.gate_up is block.gate_up and two.router is block.router
    assert len({id(kind.forward.__code__) for kind in (type(one), type(two), Block)}) == 3
    assert (one.spelling, two.spelling, block.spelling) == ("batched_mm", "grouped_mm", "grouped_mm")


def test_one_dynamic_compile_serves_all_tokens_and_leaves_the_inputs_unmarked():
    torch._dynamo.reset()
    block = make_block(find_shape("8,2,64,32"), torch.float32, "cpu", 0)
    compiled = Compiled(block, {"remainder": "eager"}, dynamic=True)
    static = Compiled(block, {"remainder": "eager"}, dynamic=False)
    seen = []
    with torch.no_grad():
        for tokens in (4, 37, 64):
            x = torch.randn(tokens, 64)
            way = compiled.ours(x)
            seen.append(way.call)
            assert not hasattr(x, "_dynamo_weak_dynamic_indices")
            with torch._dynamo.config.patch(error_on_recompile=True):
                got = way.call(x)
            torch.testing.assert_close(got, static.ours(x).call(x), rtol=0, atol=0)
            assert compiled.not_rewritten() == ""
    assert all(call is seen[0] for call in seen)


def test_a_block_that_stays_with_inductor_is_told():
    torch._dynamo.reset()
    block = make_block(find_shape("8,2,64,32"), torch.float32, "cpu", 0)
    compiled = Compiled(block, {"remainder": "eager", "disable": ["batched_mm"]}, dynamic=False)
    with torch.no_grad():
        compiled.ours(torch.randn(300, 64))
    assert compiled.not_rewritten().startswith("not rewritten, what was timed is Inductor's: ")


def test_batched_mm_is_tried_where_it_can_win():
    block = make_block(find_shape("8,2,64,32"), torch.bfloat16, "cpu", 0)
    assert inductor_spellings(block, 8) == ("grouped_mm", "batched_mm")
    assert inductor_spellings(block, 9) == ("grouped_mm",)
    assert inductor_spellings(make_block(find_shape("8,2,64,32"), torch.float32, "cpu", 0), 100) == ("batched_mm",)


def peer_block(direction: str = "forward") -> PeerBlock:
    block = make_block(find_shape("8,2,64,32"), torch.float32, "cpu", 0)
    return PeerBlock(block, [torch.randn(5, 64) for _ in range(2)], direction)


def test_what_is_prepared_is_computed_once_and_named():
    given, calls = peer_block(), []

    def align(x: torch.Tensor) -> int:
        calls.append(x)
        return len(calls)

    first, second = given.inputs
    assert [given.prepared(x, align) for x in (first, second, first)] == [1, 2, 1]
    assert given.outside == {"align"}
    with pytest.raises(ValueError, match=r"one of block\.inputs"):
        given.prepared(first.clone(), align)
    given.seal()
    assert given.prepared(second, align) == 2
    with pytest.raises(ValueError, match="another function than in the call before"):
        given.prepared(first, lambda x: 0)


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_routing_is_the_blocks_own(direction: str):
    given = peer_block(direction)
    weights, ids = given.routing(given.inputs[1])
    want_weights, want_ids = given.module.router(given.inputs[1])
    torch.testing.assert_close(weights, want_weights)
    assert torch.equal(ids, want_ids)
    assert weights.is_leaf and weights.requires_grad is (direction == "forward_backward")
    assert given.outside == {"router"}


def test_peers_are_loaded_by_name(tmp_path):
    assert list(load_peers([EXAMPLE])) == ["loop", "all_experts"]
    with pytest.raises(UsageError, match="two ways named 'loop'"):
        load_peers([EXAMPLE], taken=["loop"])
    with pytest.raises(UsageError, match="there is no file"):
        load_peers([tmp_path / "none.py"])
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    with pytest.raises(UsageError, match="defines no peer"):
        load_peers([empty])
