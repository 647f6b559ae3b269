"""One module with a loop over its experts: what the loop sees, what takes its place, and whether that is the same.

The module runs once with an observer at its loops. Which of the values there are tokens, ids and weights is decided by
their shapes and dtypes; where several could be, each is tried. Every candidate is compared with the original before it
stays.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_compiler.errors import PrepareError
from moe_compiler.preparation import one_graph, probe
from moe_compiler.preparation.change import Change
from moe_compiler.preparation.expert_dispatch import ExpertBank, Holding, Shape, banks_of, dispatcher
from moe_compiler.preparation.loop_source import Place, Source, read_source
from moe_compiler.preparation.one_graph import Verdict
from moe_compiler.preparation.probe import Call

__all__ = ["Block", "Known", "Recipe", "is_prepared"]

_FULLGRAPH = "fullgraph=True"
_OUTSIDE = (
    "take it out of the loop: counts of all experts are torch.bincount(ids.flatten(), minlength=E), and a capacity can "
    "set the weights of the tokens beyond it to zero before the loop; or leave the module to eager"
)
_MAX_TRIES = 96
_OURS = "_moepdl_prepared"


@dataclass(frozen=True)
class Recipe:
    """How a loop of one class was replaced: enough to do the same on another instance of it."""

    method: str
    after: str
    build: Callable[[Source], Callable[..., Any]]


Known = dict[Any, tuple[Recipe, Verdict]]


@dataclass(frozen=True)
class Agreed:
    """A replacement that agrees with the original: the function to bind, its error, and the original's line."""

    recipe: Recipe
    function: Callable[..., Any]
    error: float
    line: str


@dataclass(frozen=True)
class _Seen:
    """What a method saw: its arguments by name and its result, and its locals around each loop."""

    arguments: dict[str, Any]
    result: Any
    stages: dict[tuple[int, int], dict[str, Any]]


class Block:
    """A module with experts: is there a loop that Dynamo does not capture, and what takes its place."""

    def __init__(self, name: str, module: nn.Module, held: Holding, tests: list[Call]) -> None:
        self.name, self.module, self.tests = name, module, tests
        self.count = held.count
        self.broken = ""
        self.observed: dict[str, _Seen] = {}
        self.reasons: dict[str, None] = {}
        self.lost: dict[tuple[str, int], str] = {}

    def who(self) -> str:
        """The module, for a sentence."""
        return f"{self.name or 'the model'} ({type(self.module).__name__})"

    def chooses(self) -> bool:
        """Does a method of the module hold a loop that sees tensors of integers or truth values (a choice)?"""
        self.observed = {name: seen for name in self.methods() if (seen := self.seen(name)) is not None}
        return any(
            isinstance(value, _Noted) and not value.floating
            for seen in self.observed.values()
            for stage in ({name: _noted(value) for name, value in seen.arguments.items()}, *seen.stages.values())
            for value in stage.values()
        )

    def key(self) -> tuple[Any, ...]:
        """Equal for modules that are written and sized alike, and whose parts were prepared alike."""
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in self.module.named_parameters())
        parts = tuple(is_prepared(child) for child in self.module.modules())
        return type(self.module), self.module.training, shapes, parts

    def prepared(self, before: Verdict, known: Known) -> Change | None:
        """Replace the loop; None when the module is one graph already and has nothing that a form of ours would match.

        before: the verdict on the module as it is; known: recipes by key, which is added to. Raises PrepareError, with
        the module as it was, when it is not one graph and nothing agrees with it.
        """
        if not before.broken and (before.matched or not before.loose):
            return None
        if self.is_hidden() and before.broken:
            raise PrepareError(
                f"{self.who()} is not one graph, and its source is missing",
                why=before.broken,
                try_="define the class in a file, where Python finds its text",
            )
        self.broken = before.broken or "its sizes depend on the data, and no formulation matches it"
        self.refuse_random()
        key = self.key()
        if key in known:
            recipe, after = known[key]
            agreed = self.agreeing(recipe)
            if agreed is not None:
                return self.changed(agreed, after)
        second: tuple[Agreed, Verdict] | None = None
        for recipe in itertools.islice(self.recipes(), _MAX_TRIES):
            agreed = self.agreeing(recipe)
            after = self.judged(agreed) if agreed is not None else Verdict(broken="it does not agree")
            if agreed is None or after.broken:
                continue
            if after.matched:
                known[key] = recipe, after
                return self.changed(agreed, after)
            second = second or (agreed, after)
        if second is not None and before.broken:
            known[key] = second[0].recipe, second[1]
            return self.changed(*second)
        if not before.broken:
            return None
        if self.lost:
            file, line = next(iter(self.lost))
            raise PrepareError(
                f"{self.who()} is not one graph and could not be prepared: its loop does more than add up its experts",
                why="; ".join([*list(self.lost.values())[:3], self.broken, *list(self.reasons)[-3:]]),
                try_=_OUTSIDE,
                where=f"{file}:{line}: {linecache.getline(file, line).strip()}",
            )
        raise PrepareError(
            f"{self.who()} is not one graph and could not be prepared",
            why="; ".join([self.broken, *list(self.reasons)[-4:]]),
            try_="write its loop over all experts, or leave the module to eager",
        )

    def refuse_random(self) -> None:
        """A block that draws random numbers cannot be compared, and a dropout inside of its experts is not matched."""
        dropout = next(
            (m for m in self.module.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p and m.training),
            None,
        )
        if dropout is not None or (self.module.training and self._varies()):
            raise PrepareError(
                f"{self.name or 'the model'} draws random numbers in training mode",
                why=f"{dropout} is active" if dropout is not None else "two runs with different seeds differ (jitter?)",
                try_="model.eval() before prepare, or set dropout and jitter to 0",
            )

    def _varies(self) -> bool:
        return any(probe.varies(self.module, test) for test in self.tests)

    def methods(self) -> list[str]:
        """The module's own methods that hold a loop, outermost first."""
        found = [name for name, source in self._written() if source is not None and source.loops()]
        return sorted(dict.fromkeys(found), key=lambda name: name != "forward")

    def is_hidden(self) -> bool:
        """Is the source of its forward out of reach?"""
        return any(name == "forward" and source is None for name, source in self._written())

    def _written(self) -> Iterator[tuple[str, Source | None]]:
        """The methods that the module's classes define, torch's own aside, with their source."""
        for cls in type(self.module).__mro__:
            if cls.__module__.split(".")[0] != "torch":
                for name, value in vars(cls).items():
                    if inspect.isfunction(value):
                        yield name, read_source(value)

    def recipes(self) -> Iterator[Recipe]:
        """Ways to replace a loop of this module, the likely ones first."""
        seen = self.observed
        banks = list(banks_of(self.module))
        for name, found in reversed(list(seen.items())):
            yield from self.by_arguments(name, found, banks)
        for name, found in seen.items():
            yield from self.by_locals(name, found, banks)
        for name in seen:
            yield from self.by_loop(name)

    def seen(self, method: str) -> _Seen | None:
        """Run the module and look at the first call of one of its methods."""
        source = read_source(getattr(type(self.module), method))
        assert source is not None
        stages: dict[tuple[int, int], dict[str, Any]] = {}
        calls: list[tuple[dict[str, Any], Any]] = []

        def observe(index: int, stage: int, values: dict[str, Any]) -> None:
            if not calls:
                stages.setdefault((index, stage), {name: _noted(value) for name, value in values.items()})

        function = source.observed(observe)
        signature = inspect.signature(source.function)

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            calls.append((dict(bound.arguments), result))
            return result

        with self.installed(method, recorded):
            for test in reversed(self.tests):
                try:
                    probe.run(self.module, test)
                except Exception as error:  # the observed copy may not run where the original does
                    self.reasons[f"{method}: {error}"] = None
                if calls:
                    return _Seen(*calls[0], stages)
        return None

    def by_arguments(self, method: str, seen: _Seen, banks: Sequence[ExpertBank]) -> Iterator[Recipe]:
        """A method that is given tokens, ids and weights, and returns the sum: all of its body."""
        if not isinstance(seen.result, Tensor) or self.loses(method, None):
            return
        noted = {name: _noted(value) for name, value in seen.arguments.items()}
        for x, ids, weights, shape in _roles(noted, _noted(seen.result), self.count, prefer=set(noted)):
            for bank in banks:
                yield Recipe(
                    method, f"a loop over all of {bank.what}", _Body(dispatcher(bank, shape), (x, ids, weights))
                )

    def by_locals(self, method: str, seen: _Seen, banks: Sequence[ExpertBank]) -> Iterator[Recipe]:
        """A loop inside of a longer method: the loop, and as much behind it as makes the sum."""
        source = read_source(getattr(type(self.module), method))
        assert source is not None
        for place in source.loops():
            before = seen.stages.get((place.index, -1))
            if before is None or self.loses(method, place):
                continue
            loaded = source.loaded(place)
            for stage in range(place.after + 1):
                if source.lost(place, stage):
                    break
                behind = seen.stages.get((place.index, stage), {})
                for result, value in behind.items():
                    if not isinstance(value, _Noted) or not value.floating or value == before.get(result):
                        continue
                    for x, ids, weights, shape in _roles(before, value, self.count, prefer=loaded):
                        for bank in banks:
                            build = _Cut(place, stage, result, dispatcher(bank, shape), (x, ids, weights))
                            yield Recipe(method, f"a loop over all of {bank.what}", build)

    def loses(self, method: str, place: Place | None) -> bool:
        """Does a loop (None: a method) do something that a sum in its place would not? What a loop does is noted."""
        source = read_source(getattr(type(self.module), method))
        assert source is not None
        found = source.lost(place)
        for effect in found if place is not None else ():
            self.lost.setdefault((source.file, effect.line), f"line {effect.line}: {effect.what}")
        return bool(found)

    def by_loop(self, method: str) -> Iterator[Recipe]:
        """The loop as it is, over all experts and without its branches about rows."""
        source = read_source(getattr(type(self.module), method))
        assert source is not None
        for place in source.loops():
            text = f"its own loop over all {self.count} experts, without branches about rows"
            yield Recipe(method, text, _Plain(place, self.count))

    @contextmanager
    def installed(self, method: str, function: Callable[..., Any]) -> Iterator[None]:
        restore = _install(self.module, method, function)
        try:
            yield
        finally:
            restore()

    def agreeing(self, recipe: Recipe) -> Agreed | None:
        """The function that a recipe makes, when it agrees with the original; None, and a reason kept, when not."""
        method = recipe.method
        source = read_source(getattr(type(self.module), method))
        if source is None or method in vars(self.module):
            self.reasons[f"{method} was already replaced on this instance by other code"] = None
            return None
        try:
            function = recipe.build(source)
            error = max(self.compared(method, function, test) for test in self.tests)
        except Exception as reason:  # whatever it is, the original stays
            self.reasons[f"{recipe.after}: {probe.first_line(reason)}"] = None
            return None
        line = f"{source.function.__qualname__} at {source.file}:{source.tree.lineno}"
        return Agreed(recipe, self.in_this_mode(method, function), error, line)

    def judged(self, agreed: Agreed) -> Verdict:
        """The verdict on the module with the replacement."""
        with self.installed(agreed.recipe.method, agreed.function):
            after = one_graph.verdict(self.module, self.tests[0])
        if after.broken:
            self.reasons[f"{agreed.recipe.after}: {after.broken}"] = None
        return after

    def changed(self, agreed: Agreed, after: Verdict) -> Change:
        """Put the replacement on."""
        recipe = agreed.recipe
        return Change(
            path=self.name,
            what=recipe.method,
            before=f"{agreed.line}: {self.broken}",
            after=recipe.after,
            error=agreed.error,
            blocks=(self.name,),
            needs=_FULLGRAPH,
            misses=after.misses,
            _restore=_install(self.module, recipe.method, agreed.function),
        )

    def compared(self, method: str, function: Callable[..., Any], test: Call) -> float:
        def new(dtype: torch.dtype | None) -> probe.Outcome:
            with self.installed(method, function):
                return probe.run(self.module, test, dtype)

        return probe.agreement(lambda dtype: probe.run(self.module, test, dtype), new)

    def in_this_mode(self, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, guarded by the module's mode unless it agrees in the other mode too."""
        mode = self.module.training
        modes = [(child, child.training) for child in self.module.modules()]
        try:
            self.module.train(not mode)
            for test in self.tests:
                self.compared(method, function, test)
            vars(function)[_OURS] = True
            return function
        except Exception:  # another path, random numbers, or not written for that mode at all
            pass
        finally:
            for child, training in modes:
                child.training = training
        original = getattr(type(self.module), method)

        @functools.wraps(function)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.training is not mode:
                return original(self, *args, **kwargs)
            return function(self, *args, **kwargs)

        vars(guarded)[_OURS] = True
        return guarded


def is_prepared(module: nn.Module) -> bool:
    """Was a method of this instance replaced by `prepare`?"""
    return any(getattr(value, _OURS, False) for value in vars(module).values() if isinstance(value, types.MethodType))


def _install(module: nn.Module, method: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Bind a function to one instance, over the method of its class; returns what puts back what was there."""
    attributes = vars(module)
    had, old = method in attributes, attributes.get(method)
    attributes[method] = types.MethodType(function, module)

    def restore() -> None:
        if had:
            attributes[method] = old
        else:
            attributes.pop(method, None)

    return restore


@dataclass(frozen=True)
class _Body:
    dispatch: Callable[..., Tensor]
    names: tuple[str, ...]

    def __call__(self, source: Source) -> Callable[..., Any]:
        return source.with_body(self.dispatch, self.names)


@dataclass(frozen=True)
class _Cut:
    place: Place
    stage: int
    result: str
    dispatch: Callable[..., Tensor]
    names: tuple[str, ...]

    def __call__(self, source: Source) -> Callable[..., Any]:
        return source.without_loop(self.place, self.stage, self.result, self.dispatch, self.names)


@dataclass(frozen=True)
class _Plain:
    place: Place
    count: int

    def __call__(self, source: Source) -> Callable[..., Any]:
        return source.with_plain_loop(self.place, self.count)


# Which value plays which role


@dataclass(frozen=True)
class _Noted:
    """A tensor as it was when it was looked at."""

    identity: int
    version: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    low: int = 0
    high: int = 0

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def numbers(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


def _noted(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None
    low, high = 0, 0
    if value.dtype in (torch.int32, torch.int64) and value.numel():
        low, high = int(value.min()), int(value.max())
    return _Noted(id(value), value._version, tuple(value.shape), value.dtype, low, high)


def _roles(
    values: Mapping[str, Any], result: _Noted, experts: int, *, prefer: set[str]
) -> Iterator[tuple[str, str, str, Shape]]:
    """(x, ids, weights, shape): names of values that can be the tokens, the choice and its weights of `result`."""
    tensors = {name: value for name, value in values.items() if isinstance(value, _Noted)}
    order = sorted(tensors, key=lambda name: (name not in prefer, len(tensors[name].shape) != 2))
    for x in order:
        tokens = tensors[x]
        if not tokens.floating or len(tokens.shape) < 2 or not tokens.shape[-1] or tokens.numbers != result.numbers:
            continue
        rows = tokens.numbers // tokens.shape[-1]
        for ids in order:
            choice = tensors[ids]
            whole = choice.dtype in (torch.int32, torch.int64) and choice.numbers and rows
            if not whole or choice.numbers % rows or choice.low < 0 or choice.high > experts:
                continue
            k = choice.numbers // rows
            for weights in order:
                scale = tensors[weights]
                if scale.floating and weights != x and scale.numbers == choice.numbers and k <= experts:
                    dtype = "x" if result.dtype == tokens.dtype else "weights" if result.dtype == scale.dtype else ""
                    flat = len(result.shape) == 2 and len(tokens.shape) > 2
                    yield x, ids, weights, Shape(k, flat, dtype)
