"""`prepare`: blocks that are fragments before and one match after, the same numbers, and nothing else touched."""

from __future__ import annotations

import copy
import textwrap
import types

import pytest
import torch

import moe_compiler
from moe_compiler.backend import explain, moepdl
from moe_compiler.errors import PrepareError
from moe_compiler.testing import examples
from tests.moe_compiler import uncapturable
from tests.moe_compiler.blocks import assert_accurate, qwen3_block, qwen3_decoder
from tests.moe_compiler.uncapturable import BLOCKS, E, H


def block(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return BLOCKS[name]().eval()


def ours(model):
    return torch.compile(model, backend=moepdl, fullgraph=True, options={"remainder": "eager"})


def first(out):
    return out[0] if isinstance(out, tuple) else out


def run(model, x, call=None):
    """(result, gradients of x and of every parameter, zeros for None) of a model, or of a compiled one with its own."""
    x = x.detach().clone().requires_grad_()
    leaves = [x, *model.parameters()]
    out = first((model if call is None else call)(x))
    grad = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape).to(out.dtype)
    if not out.requires_grad:
        return out.detach(), []
    found = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return out.detach(), [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


# One of each kind of loop; most of the others are in the tests below.
KINDS = ("NumelBranch", "FlatInfer", "PackedLoop", "FlatLoop")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in BLOCKS]
)
def test_a_fragment_becomes_one_match_with_the_same_numbers(name):
    model = block(name)
    untouched = copy.deepcopy(model)
    x = torch.randn(2, 9, H)
    with torch.no_grad():
        before = explain(model, x)
    assert not before.matches and before.fragments
    assert any("moe_compiler.prepare" in text for text in [*before.notes, *(f.remedy for f in before.fragments)])
    assert all("uncapturable.py" in fragment.where for fragment in before.fragments)

    (change,) = moe_compiler.prepare(model)
    assert change.error < 1e-5 and change.needs == "fullgraph=True"
    assert list(model.state_dict()) == list(untouched.state_dict())
    with torch.no_grad():
        after = explain(model, x)
    assert not after.fragments
    if name != "BiasedPackedLoop":
        # What is its own loop over all experts keeps its own masks.
        formulation = "one_hot_loop" if name == "FlatLoop" else "where_loop"
        assert [match.formulation for match in after.matches] == [formulation] and not change.misses
        assert after.matches[0].router == "R1/R2 softmax, top-k, renormalise"

    with torch.set_grad_enabled(name != "FlatInfer"):  # its scatter_reduce_ on its own sum cannot be differentiated
        _check_numbers(model, untouched, x)


def _check_numbers(model, untouched, x):
    wide = copy.deepcopy(untouched)
    if isinstance(wide, uncapturable.NumelBranch):  # sums in fp32 whatever comes in
        wide.moe = types.MethodType(
            lambda self, x, ids, w: uncapturable.NumelBranch.moe(self, x, ids, w.double()), wide
        )
    exact, grads = run(wide.double(), x.double())
    eager, eager_grads = run(untouched, x)
    for found, found_grads in (run(model, x), run(model, x, ours(model))):
        assert_accurate(found, eager, exact)
        assert len(found_grads) == len(eager_grads)
        for triple in zip(found_grads, eager_grads, grads, strict=True):
            assert_accurate(*triple)


def test_twice_changes_nothing_more_and_undo_puts_the_original_back():
    model = block("HitLoop")
    (change,) = moe_compiler.prepare(model)
    assert (change.path, change.what) == ("", "forward") and "uncapturable.py" in change.before
    assert moe_compiler.prepare(model) == []
    change.undo()
    change.undo()
    assert "forward" not in vars(model)
    assert model.forward.__func__ is uncapturable.HitLoop.forward
    assert len(moe_compiler.prepare(model)) == 1


def test_only_the_instance_is_changed_and_it_can_be_copied():
    model, other = block("RangeSkip"), block("RangeSkip")
    moe_compiler.prepare(model)
    assert other.forward.__func__ is uncapturable.RangeSkip.forward
    copied = copy.deepcopy(model)
    assert copied.forward.__self__ is copied
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        x = torch.randn(1, 5, H)
        assert copied(x).abs().sum() == 0 and model(x).abs().sum() > 0


def test_an_expert_without_tokens_gets_zeros_where_the_loop_over_hits_leaves_none():
    model = block("HitLoop")
    x = torch.randn(1, 1, H)
    first(model(x)).sum().backward()
    unhit = [e for e, expert in enumerate(model.experts) if expert.w1.weight.grad is None]
    assert len(unhit) == E - uncapturable.K
    model.zero_grad()
    moe_compiler.prepare(model)
    first(ours(model)(x)).sum().backward()
    assert all(model.experts[e].w1.weight.grad.abs().sum() == 0 for e in unhit)
    assert sum(bool(expert.w1.weight.grad.abs().sum() > 0) for expert in model.experts) == uncapturable.K


def test_rows_assigned_by_a_boolean_mask_in_training():
    model = block("MoeInfer").train()
    untouched = copy.deepcopy(model)
    x = torch.randn(2, 9, H)
    assert not explain(model, x).matches
    (change,) = moe_compiler.prepare(model)
    assert change.what == "forward"
    assert [match.formulation for match in explain(model, x).matches] == ["where_loop"]
    exact, grads = run(copy.deepcopy(untouched).double(), x.double())
    eager, eager_grads = run(untouched, x)
    found, found_grads = run(model, x, ours(model))
    assert_accurate(found, eager, exact)
    for triple in zip(found_grads, eager_grads, grads, strict=True):
        assert_accurate(*triple)
    # The other mode has a loop of its own, which this did not look at: it runs as before.
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), untouched.eval()(x))


def test_the_dtype_of_the_model_is_the_one_that_is_compared():
    model = block("HitLoop").to(torch.bfloat16)
    (change,) = moe_compiler.prepare(model)
    assert 1e-4 < change.error < 1e-2
    x = torch.randn(2, 9, H).bfloat16()
    with torch.no_grad():
        eager, exact = uncapturable.HitLoop.forward(model, x)[0], copy.deepcopy(model).double()(x.double())[0]
        assert_accurate(ours(model)(x)[0], eager, exact)


def test_every_layer_of_a_stack_is_changed_and_the_models_own_inputs_are_used():
    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(11, H)
            self.layers = torch.nn.ModuleList(BLOCKS["RangeSkip"]() for _ in range(2))

        def forward(self, ids, scale):
            x = self.embed(ids)
            for layer in self.layers:
                x = x + layer(x) * scale
            return x

    model = Stack().eval()
    ids = torch.arange(8)[None]
    eager = model(ids, scale=0.5)
    changes = moe_compiler.prepare(model, ids, scale=0.5)
    assert [change.path for change in changes] == ["layers.0", "layers.1"]
    report = explain(model, ids, scale=0.5)
    assert sum(match.count for match in report.matches) == 2 and not report.fragments
    torch.testing.assert_close(ours(model)(ids, scale=0.5), eager)


def test_jitter_and_dropout_are_refused_while_they_draw_and_kept_where_they_do_not():
    model = block("HitLoop").train()
    model.jitter = 0.1
    with pytest.raises(PrepareError, match="random numbers") as caught:
        moe_compiler.prepare(model)
    assert "model.eval()" in caught.value.try_ and "forward" not in vars(model)

    model.eval()
    moe_compiler.prepare(model)
    model.train()
    x = torch.randn(2, 9, H)
    results = []
    for forward in (model, lambda x: uncapturable.HitLoop.forward(model, x)):
        torch.manual_seed(5)
        results.append(forward(x)[0])
    torch.testing.assert_close(*results)

    model = block("RangeSkip").train()
    model.experts[0].w2 = torch.nn.Sequential(model.experts[0].w2, torch.nn.Dropout(0.5))
    with pytest.raises(PrepareError, match="random numbers") as caught:
        moe_compiler.prepare(model)
    assert "Dropout(p=0.5" in caught.value.why


class Threshold(uncapturable.Block):
    """An expert with many rows computes something else: no loop over all experts says that."""

    def forward(self, hidden):
        flat = hidden.view(-1, hidden.shape[-1])
        _, weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(ids == number)
            if token.numel() > 12:
                out[token] += weights[token, place, None] * expert(flat[token])
            else:
                out[token] += weights[token, place, None] * expert(-flat[token])
        return out.view(hidden.shape)


def test_a_loop_that_means_something_else_is_left_as_it_is():
    model = Threshold().eval()
    x = torch.randn(2, 9, H)
    eager = model(x)
    with pytest.raises(PrepareError, match="could not be prepared") as caught:
        moe_compiler.prepare(model)
    assert (
        "branch depends on the data" in caught.value.why and "not only whether the expert has rows" in caught.value.why
    )
    assert "test_prepare.py" in caught.value.where and caught.value.where.endswith("if token.numel() > 12:")
    assert not {"forward"} & set(vars(model))
    torch.testing.assert_close(model(x), eager, rtol=0, atol=0)


class Apart(uncapturable.Block):
    """The loop in a method of its own, with the buffers and attributes that the classes below write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(E))
        self.counts: list[int] = []
        self.last = -1

    def forward(self, hidden):
        flat = hidden.reshape(-1, H)
        _, weights, ids = self.route(flat)
        return self.moe(flat, weights, ids).view(hidden.shape)


class Capacity(Apart):
    def moe(self, x, weights, ids, limit=40):
        out = torch.zeros_like(x)
        for number in range(E):
            token, place = torch.where(ids == number)
            if token.numel() > limit:
                token, place = token[:limit], place[:limit]
            out[token] += self.experts[number](x[token]) * weights[token, place, None]
        return out


class AtLeastTwo(Apart):
    def moe(self, x, weights, ids):
        out = torch.zeros_like(x)
        for number in range(E):
            token, place = torch.where(ids == number)
            if token.numel() < 2:
                continue
            out[token] += self.experts[number](x[token]) * weights[token, place, None]
        return out


class Fading(Apart):
    def moe(self, x, weights, ids):
        out, scale = torch.zeros_like(x), 1.0
        for number in ids.unique().tolist():
            token, place = torch.where(ids == number)
            out[token] += self.experts[number](x[token]) * weights[token, place, None] * scale
            scale *= 0.5
        return out


class Hits(Apart):
    def forward(self, hidden):
        x = hidden.reshape(-1, H)
        _, weights, ids = self.route(x)
        out, hit = torch.zeros_like(x), 0
        for number in range(E):
            token, place = torch.where(ids == number)
            if token.numel() == 0:
                continue
            out[token] += self.experts[number](x[token]) * weights[token, place, None]
            hit += 1
        return out.view(hidden.shape), hit


class Counts(Apart):
    def moe(self, x, weights, ids):
        out = torch.zeros_like(x)
        for number in range(E):
            token, place = torch.where(ids == number)
            if token.numel() == 0:
                continue
            self.counts.append(token.numel())
            out[token] += self.experts[number](x[token]) * weights[token, place, None]
        return out


class Last(Apart):
    def moe(self, x, weights, ids):
        out = torch.zeros_like(x)
        for number in ids.unique().tolist():
            token, place = torch.where(ids == number)
            self.last = number
            out[token] += self.experts[number](x[token]) * weights[token, place, None]
        return out


class Load(Apart):
    """Numbers of rows are added to a buffer: none adds nothing, so the loop may run over all experts."""

    def moe(self, x, weights, ids):
        out = torch.zeros_like(x)
        for number in range(E):
            token, place = torch.where(ids == number)
            if token.numel() == 0:
                continue
            self.load[number] += token.numel()
            out[token] += self.experts[number](x[token]) * weights[token, place, None]
        return out


class CutOff(Apart):
    """A capacity without a branch stays, since the loop stays."""

    def moe(self, x, weights, ids, limit=9):
        out = torch.zeros_like(x)
        for number in ids.unique():
            token, place = torch.where(ids == number)
            token, place = token[:limit], place[:limit]
            out[token] += self.experts[number](x[token]) * weights[token, place, None]
        return out


@pytest.mark.parametrize(
    ("cls", "line", "what"),
    [
        (Capacity, "if token.numel() > limit:", "what this branch asks is not only whether the expert has rows"),
        (AtLeastTwo, "if token.numel() < 2:", "what this branch asks is not only whether the expert has rows"),
        (Fading, "* scale", "`scale` is carried from one expert to the next"),
        (Hits, "hit += 1", "the loop makes more than one result (`out`, `hit`)"),
        (Counts, "self.counts.append(token.numel())", "writes into the module"),
        (Last, "self.last = number", "writes an attribute"),
    ],
)
def test_what_a_loop_does_besides_its_sum_is_never_dropped(cls, line, what):
    model = cls().eval()
    with pytest.raises(PrepareError, match="its loop does more than add up its experts") as caught:
        moe_compiler.prepare(model)
    assert what in caught.value.why and "out of the loop" in caught.value.try_
    assert "test_prepare.py" in caught.value.where and caught.value.where.endswith(line)
    assert not {"forward", "moe"} & set(vars(model))
    assert model.last == -1 and model.counts == []


@pytest.mark.parametrize("cls", [Load, CutOff])
def test_what_the_users_own_loop_keeps_over_all_experts(cls):
    torch.manual_seed(0)
    model = cls().eval()
    untouched = copy.deepcopy(model)
    (change,) = moe_compiler.prepare(model)
    assert change.after.startswith("its own loop") and model.load.sum() == 0
    for x in (torch.randn(2, 40, H), torch.randn(1, 1, H)):
        with torch.no_grad():
            torch.testing.assert_close(ours(model)(x), untouched(x))
        assert torch.equal(model.load, untouched.load)
    assert model.load.sum() == (uncapturable.K * 81 if cls is Load else 0)


def test_an_effect_inside_of_an_expert_is_compared():
    model = block("RangeSkip")
    for expert in model.experts:
        expert.calls = 0
        expert.register_forward_hook(lambda module, *_: setattr(module, "calls", module.calls + 1))
    with pytest.raises(PrepareError, match="could not be prepared") as caught:
        moe_compiler.prepare(model)
    assert "it leaves another value in the attribute experts." in caught.value.why
    assert all(expert.calls == 0 for expert in model.experts)


def test_when_one_block_fails_the_others_are_put_back():
    model = torch.nn.ModuleDict({"a": block("HitLoop"), "b": Threshold().eval()})
    with pytest.raises(PrepareError, match=r"^b "):
        moe_compiler.prepare(model)
    assert "forward" not in vars(model["a"])


def test_a_class_without_source_is_named():
    source = textwrap.dedent(
        """
        class Hidden(Block):
            def forward(self, hidden):
                flat = hidden.view(-1, hidden.shape[-1])
                _, weights, ids = self.route(flat)
                out = torch.zeros_like(flat)
                for number in ids.unique():
                    token, place = torch.where(ids == number)
                    out[token] += weights[token, place, None] * self.experts[number](flat[token])
                return out.view(hidden.shape)
        """
    )
    namespace = {"torch": torch, "Block": uncapturable.Block}
    exec(source, namespace)
    with pytest.raises(PrepareError, match=r"Hidden.*source") as caught:
        moe_compiler.prepare(namespace["Hidden"]().eval())
    assert "file" in caught.value.try_


@pytest.mark.parametrize("name", ["where_loop", "one_hot_loop", "grouped_mm", "dense_bmm"])
def test_what_becomes_one_graph_is_left_alone(name):
    assert moe_compiler.prepare(examples()[name]().module.eval()) == []


def test_a_model_without_experts():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    assert moe_compiler.prepare(torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(1, 4, 16)) == []
    assert moe_compiler.prepare(torch.nn.Linear(3, 3)) == []


@pytest.mark.parametrize("given", [False, True])
def test_the_probe_leaves_buffers_attributes_and_random_state_alone(given):
    class Counting(BLOCKS["RangeSkip"]):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.last, self.sizes, self.seen = "none", [], torch.zeros(())
            self.stats = types.SimpleNamespace(tokens=0)

        def forward(self, hidden):
            self.calls += 1
            self.last = "some"
            self.seen += 1
            self.sizes.append(hidden.shape[1])
            self.stats.tokens += hidden.shape[1]
            return uncapturable.RangeSkip.forward(self, hidden)

    model, inputs = Counting().eval(), torch.randn(2, 9, H)
    state = torch.get_rng_state()
    held = model.calls, model.seen, model.sizes, model.stats
    moe_compiler.prepare(model, *([inputs] if given else []))
    assert all(now is then for now, then in zip((model.calls, model.seen, model.sizes, model.stats), held, strict=True))
    assert model.calls == 0 and model.last == "none" and torch.equal(torch.get_rng_state(), state)
    assert model.seen == 0 and model.sizes == [] and model.stats.tokens == 0
    assert all(parameter.grad is None for parameter in model.parameters())


class Named(uncapturable.RangeSkip):
    """The first expert has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.experts[0]


class Shared(uncapturable.RangeSkip):
    """Two experts are one module."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[1] = self.experts[0]


class Listed(uncapturable.RangeSkip):
    """A second list holds the same modules."""

    def __init__(self) -> None:
        super().__init__()
        self.again = torch.nn.ModuleList(self.experts)


class Parted(Threshold):
    """Lists of the experts' linears beside the list of experts, and a loop that cannot be prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.ModuleList(expert.w1 for expert in self.experts)
        self.down = torch.nn.ModuleList(expert.w2 for expert in self.experts)


def _held(model):
    """Every tensor of a model by every name: the object, its dtype and its bytes."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (id(value), value.dtype, value.detach().clone()) for name, value in named}


@pytest.mark.parametrize("cls", [Named, Shared, Listed, Parted])
@pytest.mark.parametrize("given", [False, True])
def test_a_module_with_two_names_holds_what_it_held(cls, given):
    model = cls().eval()
    before = _held(model)
    inputs = [torch.randn(2, 9, H)] if given else []
    if cls is Parted:
        with pytest.raises(PrepareError):
            moe_compiler.prepare(model, *inputs)
    else:
        assert len(moe_compiler.prepare(model, *inputs)) == 1
    after = _held(model)
    assert list(before) == list(after)
    for name, (identity, dtype, value) in before.items():
        assert after[name][:2] == (identity, dtype) and torch.equal(after[name][2], value), name


# transformers' own classes


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    )


def _deepseek():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=3,
            first_k_dense_replace=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    )


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek"])
def test_the_library_setting_of_transformers_5(name):
    pytest.importorskip("transformers", reason="this test prepares transformers' own models")
    model = {"qwen3": qwen3_decoder, "mixtral": _mixtral, "deepseek": _deepseek}[name]().eval()
    model.set_experts_implementation("eager")
    inputs = {"input_ids": torch.arange(20)[None], "use_cache": False}
    with torch.no_grad():
        eager = model(**inputs).logits
        before = explain(model, **inputs)
    assert not before.matches and any("moe_compiler.prepare" in note for note in before.notes)
    (change,) = moe_compiler.prepare(model, **({} if name == "deepseek" else inputs))
    assert (change.path, change.what, change.after) == ("model.layers", "experts_implementation", "grouped_mm")
    assert len(change.blocks) == 2 and change.error < 1e-6
    assert moe_compiler.prepare(model) == []
    with torch.no_grad():
        report = explain(model, **inputs)
        assert sum(match.count for match in report.matches) == 2 and not report.fragments
        torch.testing.assert_close(ours(model)(**inputs).logits, eager)
    change.undo()
    assert model.config._experts_implementation == "eager"


def test_a_block_of_transformers_5_by_itself():
    block = qwen3_block(implementation=None)
    (change,) = moe_compiler.prepare(block)
    assert (change.before.split(",")[0], change.after, change.blocks) == ("None", "grouped_mm", ("experts",))
    change.undo()
    assert block.experts.config._experts_implementation is None


def test_a_setting_that_computes_something_else_is_put_back(monkeypatch):
    from transformers.integrations import moe

    def halved(self, hidden_states, top_k_index, top_k_weights):
        return 0.5 * moe.batched_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)

    block = qwen3_block(implementation="eager")
    forms = {"grouped_mm": halved, "batched_mm": halved}
    monkeypatch.setattr(type(moe.ALL_EXPERTS_FUNCTIONS), "_global_mapping", forms)
    with pytest.raises(PrepareError, match="no experts_implementation agrees") as caught:
        moe_compiler.prepare(block, torch.randn(1, 6, 32))
    assert "5.0e-01" in caught.value.why
    assert block.experts.config._experts_implementation == "eager"
