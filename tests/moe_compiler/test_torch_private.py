"""Canaries: each wrapper of a private torch API, by name, so that a torch release that moves one says which."""

from __future__ import annotations

import contextlib

import pytest
import torch

from moe_compiler import torch_private


def test_fake_mode_of_and_fakeify():
    mode = torch_private.fake_mode_of([torch.ones(2)])
    fake = torch_private.fakeify(mode, torch.ones(2, 3))
    assert tuple(fake.shape) == (2, 3) and fake.fake_mode is mode
    assert torch_private.fakeify(mode, 7) == 7


def test_uncached_fakes_neither_asks_nor_fills_the_cache_of_results():
    mode = torch_private.fake_mode_of([])
    x = torch_private.fakeify(mode, torch.ones(2, 3))

    def looked_up():
        before = mode.cache_info()
        torch.cat([x, x])
        after = mode.cache_info()
        return (after.hits + after.misses) - (before.hits + before.misses)

    with torch_private.uncached_fakes(mode):
        assert looked_up() == 0
    with mode:
        assert looked_up() > 0


def test_make_fx_pre_dispatch_keeps_composite_operators():
    mode = torch_private.fake_mode_of([])
    x, w = (torch_private.fakeify(mode, torch.ones(2, 2)) for _ in range(2))
    traced = torch_private.make_fx_pre_dispatch(lambda a, b: torch.nn.functional.linear(a, b), mode, [x, w])
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [torch.ops.aten.linear.default]


def test_make_fx_decomposed_gives_what_inductor_lowers():
    mode = torch_private.fake_mode_of([])
    x = torch_private.fakeify(mode, torch.ones(2, 2))
    traced = torch_private.make_fx_decomposed(lambda a: torch.nn.functional.silu(a), mode, [x])
    targets = [n.target for n in traced.graph.nodes if n.op == "call_function"]
    assert torch.ops.aten.silu.default not in targets and targets


def test_aot_module_hands_over_the_joint_graph_then_forward_and_backward():
    phases = []

    def note(module, is_backward):
        phases.append(is_backward)
        return module

    def backend(module, inputs):
        return torch_private.aot_module(
            module, inputs, note, joint=lambda graph: phases.append(len(graph.nodes)), backward_now=True
        )

    x = torch.ones(2, requires_grad=True)
    out = torch.compile(lambda a: (a * a).sum(), backend=backend)(x)
    out.backward()
    assert phases[0] > 3 and phases[1:] == [False, True] and torch.equal(x.grad, torch.full((2,), 2.0))


def test_compile_fx_takes_patches_for_one_compile():
    from torch._inductor import config

    seen = []

    class Pass(torch_private.graph_pass_base()):
        def __call__(self, graph):
            seen.append(len(graph.nodes))

        def uuid(self):
            return None

    def backend(module, inputs):
        return torch_private.compile_fx(module, inputs, {"post_grad_custom_pre_pass": Pass()})

    assert torch.compile(lambda a: a + 1, backend=backend)(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]
    assert len(seen) == 1
    assert config.post_grad_custom_pre_pass is None and torch_private.configured("post_grad_custom_pre_pass") is None
    assert torch_private.passes_of(None) == () and torch_private.passes_of([1, 2]) == (1, 2) == torch_private.passes_of(
        (1, 2)
    )
    assert torch_private.passes_of(7) == (7,)


def test_inference_aware_passes_are_graph_passes_too():
    aware = torch_private.inference_aware_pass_base()
    if aware is None:
        pytest.skip("this torch tells no pass whether a graph is compiled for inference")
    assert issubclass(aware, torch_private.graph_pass_base())


def test_a_checkpoint_is_a_plain_region_and_cond_is_not():
    assert torch_private.is_plain_region(torch.ops.higher_order.tag_activation_checkpoint)
    assert not torch_private.is_plain_region(torch.ops.higher_order.cond)


def test_the_calls_of_a_transform_are_known_by_what_they_do():
    found = []

    def backend(module, inputs):
        found.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module

    def function(x):
        y = torch.func.vmap(torch.sin)(x)
        return y + torch.func.jvp(torch.cos, (x,), (x,))[1] + torch.func.grad(lambda v: v.sum())(x)

    torch.compile(function, backend=backend, fullgraph=True)(torch.ones(2))
    steps = [torch_private.transform_step(target) for target in found if torch_private.transform_step(target)]
    assert steps == [1, -1, 1, 1, -1, -1, 1, -1]  # jvp enters two
    assert [step for target in found if (step := torch_private.hooks_step(target))] == [1, -1]
    switches = [target for target in found if torch_private.is_transform_switch(target)]
    assert len(switches) == 4  # forward gradients on and back, the mark on a leaf allowed and forbidden again
    assert not torch_private.is_transform_call(torch.sin) and torch.sin in found


def test_a_dispatch_mode_sees_the_operators_inside_of_a_transform():
    seen = []

    class Mode(torch_private.dispatch_mode_base()):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.func.vmap(lambda row: row.add_(1))(torch.ones(2, 2))
    assert torch.ops.aten.add_.Tensor in seen


def test_a_tensor_of_a_transform_is_known():
    kept = []
    torch.func.vmap(lambda row: kept.append(row) or row)(torch.ones(2, 2))
    assert torch_private.is_wrapped_by_transform(kept[0]) and not torch_private.is_wrapped_by_transform(torch.ones(2))


def test_a_graph_that_ddp_cut_is_known_by_its_reason():
    import inspect

    from torch._dynamo.backends import distributed

    module = torch.fx.symbolic_trace(lambda x: x + 1)
    assert not torch_private.is_cut_by_ddp(module)
    assert '"DDPOptimizer intentional graph-break' in inspect.getsource(distributed.SubmodCompiler.compile_submod)
    module.compile_subgraph_reason = torch._dynamo.output_graph.GraphCompileReason("DDPOptimizer intentional", [])
    assert torch_private.is_cut_by_ddp(module)


def test_mode_options_knows_inductors_modes():
    assert torch_private.mode_options("max-autotune-no-cudagraphs")["max_autotune"] is True
    with pytest.raises(RuntimeError):
        torch_private.mode_options("fastest")


def test_compile_id_and_subgraph_break_inside_of_a_compile():
    found = []

    def backend(module, inputs):
        found.append((torch_private.current_compile_id(), torch_private.subgraph_break(module)))
        return module

    def function(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    before = torch_private.graph_break_count()
    torch.compile(function, backend=backend)(torch.ones(2))
    assert torch_private.graph_break_count() > before
    assert len(found) == 2 and found[0][0] != found[1][0]
    assert "graph_break" in found[0][1][0] and "test_torch_private.py" in found[0][1][1] and found[1][1] is None
    assert torch_private.current_compile_id() == "0/0"


def test_real_tensors_inside_of_a_fake_mode():
    mode = torch_private.fake_mode_of([])
    with mode, torch_private.real_tensors():
        assert float(torch.ones(3).sum()) == 3.0


def test_code_cache_dir_follows_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert torch_private.code_cache_dir() == str(tmp_path)


def test_graph_break_errors_and_data_dependent_sizes():
    found = []

    def backend(module, inputs):
        found.append(torch_private.has_data_dependent_sizes(module))
        return module

    torch.compile(lambda x: x[x > 0] * 2, backend=backend, fullgraph=True)(torch.ones(3))
    torch.compile(lambda x: x * 2, backend=backend, fullgraph=True)(torch.ones(3))
    assert found == [True, False]

    def broken(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch_private.graph_break_errors()):
        torch.compile(broken, backend=backend, fullgraph=True)(torch.ones(3))


def test_compiled_frames_have_a_failure_a_break_and_a_line():
    def skipped(x):
        for _ in range(2):
            torch._dynamo.graph_break()
        return x

    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    start = max((frame.started for frame in torch_private.compiled_frames()), default=0)
    for function in (skipped, broken):
        torch.compile(function, backend="eager")(torch.ones(2))
    first, second, resumed = torch_private.compiled_frames(start)
    assert (first.function, second.function) == ("skipped", "broken")
    assert "graph_break" in first.failure and "test_torch_private.py" in first.where
    assert not second.failure and "graph_break" in second.broken
    assert resumed.function.startswith("torch_dynamo_resume_in_broken") and not resumed.failure


def test_break_of_names_the_users_line():
    def function(x):
        return torch.ones(x.nonzero().shape[0] if x.sum() > 0 else 1)

    with pytest.raises(torch_private.graph_break_errors()) as caught, torch_private.quiet_dynamo():
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(3))
    reason, where = torch_private.break_of(caught.value)
    assert "ata-dependent" in reason and "test_torch_private.py" in where
    assert torch_private.is_torch_file(torch.nn.__file__) and not torch_private.is_torch_file(__file__)


def test_configured_dynamo():
    before = torch._dynamo.config.recompile_limit
    with torch_private.configured_dynamo({"recompile_limit": 3}):
        assert torch._dynamo.config.recompile_limit == 3
    assert torch._dynamo.config.recompile_limit == before


def test_forget_compiled_lets_dynamo_look_at_a_skipped_frame_again():
    def function(x):
        for _ in range(2):
            torch._dynamo.graph_break()
        return x

    torch.compile(function, backend="eager")(torch.ones(2))
    whole = torch.compile(function, backend="eager", fullgraph=True)
    with contextlib.suppress(RuntimeError):  # newer releases say that no frame was compiled
        whole(torch.ones(2))
    torch_private.forget_compiled(function)
    with pytest.raises(torch_private.graph_break_errors()), torch_private.quiet_dynamo():
        whole(torch.ones(2))


def test_keep_order_names_settings_that_inductor_has():
    for key, value in torch_private.keep_order().items():
        assert torch_private.configured(key) != value  # what it is by default, or there is nothing to keep
