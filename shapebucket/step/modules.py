"""flax.nnx modules as arguments of a step: their variables are taken out for an executable, and put back after it.

A module is a graph of Python objects that holds its state in variables, and a step changes it in place. An executable takes
and returns arrays alone. To split modules into the two at each call, as `nnx.jit` does, costs several times the call; here
the variables of an instance are remembered, with the contents of every object of the graph, and a call only makes sure that
each of those still holds the very same things.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.sharding import AxisType, NamedSharding
from jax.tree_util import DictKey, GetAttrKey

from shapebucket.errors import DriftError, SignatureError, StepError
from shapebucket.step._flax_private import Access
from shapebucket.step.arguments import BATCH, Place, at, label_of, replaced
from shapebucket.step.drift import Returned, explained

_KEPT = 4  # instances that are remembered: a model, its average, …
_INTERNAL = ("_pytree__", "_object__")  # flax's own attributes
_NOTHING = "nothing"
_METADATA = "'s metadata"  # of a variable


Keys = tuple[Any, ...]
"""The path of each leaf of a module, as one key of a pytree's."""


class ModuleState:
    """The arrays of one module: what an executable takes and returns in its place. A pytree; its paths are the variables'.

    Attributes:
        keys: of the leaves.
        leaves: the arrays; None for one that a step did not change, in what it returns.
    """

    __slots__ = ("keys", "leaves")

    def __init__(self, keys: Keys, leaves: Sequence[Any]) -> None:
        self.keys = keys
        self.leaves = leaves

    def only(self, other: ModuleState) -> ModuleState:
        """Returns the leaves that another state of the module has as well."""
        pairs = zip(self.leaves, other.leaves, strict=True)
        return ModuleState(self.keys, [None if each is None else mine for mine, each in pairs])


def _flat(state: ModuleState) -> tuple[Sequence[Any], Keys]:
    return state.leaves, state.keys


def _flat_with_keys(state: ModuleState) -> tuple[list[Any], Keys]:
    return list(zip(state.keys, state.leaves, strict=True)), state.keys


jax.tree_util.register_pytree_with_keys(
    ModuleState, _flat_with_keys, lambda keys, leaves: ModuleState(keys, tuple(leaves)), _flat
)


def modules_among(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    statics: Collection[Place],
    donated: Collection[Place],
) -> Modules | None:
    """Returns the flax.nnx modules among the arguments of a step; None where there are none, or flax was not imported.

    Raises:
        StepError: for one that is not an argument of its own, a bare variable, and one over a mutable array.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    found: list[Place] = []
    for place in (*range(len(args)), *kwargs):
        value = at(args, kwargs, place)
        if place in statics or value is BATCH:
            continue
        if isinstance(value, nnx.Pytree):
            found.append(place)
        else:
            _refuse_hidden(nnx, label_of(fn, place), value)
    if not found:
        return None
    labels = tuple(label_of(fn, place) for place in found)
    roots = tuple(at(args, kwargs, place) for place in found)
    return Modules(nnx, tuple(found), labels, roots, [place in donated for place in found])


def _refuse_hidden(nnx: Any, label: str, value: Any) -> None:
    """Raises StepError for modules within another argument, and variables, which would be updated as copies."""
    leaves = jax.tree.leaves(value, is_leaf=lambda each: isinstance(each, nnx.Pytree))
    if any(isinstance(each, nnx.Pytree) for each in leaves):
        raise StepError(
            f"{label!r} is a {type(value).__name__} that holds a flax.nnx module: give each module as an argument of its own"
        )
    if isinstance(value, nnx.Variable):
        raise StepError(
            f"{label!r} is a bare flax.nnx variable: give the module that holds it, or its array, variable[...]"
        )


class Modules:
    """The flax.nnx modules of a step: what their structure was at `compile`, and the instances called with since.

    Attributes:
        places: which arguments they are.
        labels: the names of these.
    """

    def __init__(
        self, nnx: Any, places: tuple[Place, ...], labels: tuple[str, ...], roots: tuple[Any, ...], donated: list[bool]
    ) -> None:
        self.places = places
        self.labels = labels
        self._nnx = nnx
        self._access = Access.of(nnx.Variable)
        self._donated = donated
        self._facts = self._walk(roots).facts
        self._graphdef, state = nnx.split(roots)
        self._tree = jax.tree.structure(state)
        self._keys = _keys(state, len(roots))
        self._counts = [len(keys) for keys in self._keys]
        self._shardings = [_kept_sharding(leaf) for leaf in jax.tree.leaves(state)]
        self._known: tuple[Instance, ...] = ()  # replaced as a whole, never changed: several threads may call

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Instance]:
        """Returns a call's arguments with arrays in the modules' places, and what takes the result.

        Raises:
            SignatureError: if an argument is no module, or one of another structure than at `compile`.
        """
        try:
            roots = [at(args, kwargs, place) for place in self.places]
        except (IndexError, KeyError):
            raise SignatureError(
                f"the step was compiled with the flax.nnx modules {[*self.labels]}, but was called without one of them: "
                "call it as compile() was called"
            ) from None
        instance = self._instance(roots)
        for place, state in zip(self.places, instance.read(), strict=True):
            args, kwargs = replaced(args, kwargs, place, state)
        return args, kwargs, instance

    def pure(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step as a function of arrays: it takes states in the modules' places, and returns what the step
        returns, and the states, with those leaves that changed, or all of a donated module.
        """

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves = [leaf for place in self.places for leaf in at(args, kwargs, place).leaves]
            modules = self._nnx.merge(self._graphdef, jax.tree.unflatten(self._tree, leaves))
            for place, module in zip(self.places, modules, strict=True):
                args, kwargs = replaced(args, kwargs, place, module)
            out = fn(*args, **kwargs)
            self._check_output(out)
            graphdef, state = self._nnx.split(modules)
            new, tree = jax.tree.flatten(state)
            if graphdef != self._graphdef or tree != self._tree:
                raise self._changed(modules)
            donated = self._per_leaf(self._donated)
            changed = [
                _stay(leaf, sharding) if own or leaf is not old else None
                for leaf, old, sharding, own in zip(new, leaves, self._shardings, donated, strict=True)
            ]
            return out, self._states(changed)

        return run

    def jit(self, jit: functools.partial[Any]) -> functools.partial[Any]:
        """Returns `jax.jit` with its options, for the function that `pure` returns."""
        given = jit.keywords.get("out_shardings")
        return jit if given is None else functools.partial(jit, out_shardings=(given, None))

    def returned(self, carried: Mapping[str, Any], result: Any) -> Returned:
        """Finds each carried argument in what `pure` returns."""
        found = Returned({name: each for name, each in carried.items() if name not in self.labels}, result[0])
        found.paths = {name: (0, *path) for name, path in found.paths.items()}
        found.paths |= {label: (1, number) for number, label in enumerate(self.labels)}
        return found

    def only_changed(self, carried: Mapping[str, Any], result: Any) -> dict[str, Any]:
        """Returns the carried arguments without the leaves of modules that the step did not change."""
        states = dict(zip(self.labels, result[1], strict=True))
        return {name: each.only(states[name]) if name in states else each for name, each in carried.items()}

    def _instance(self, roots: Sequence[Any]) -> Instance:
        """Returns what is remembered of these modules, if they are still as they were then, or looks at them anew."""
        known = self._known
        for instance in known:
            if instance.is_of(roots) and instance.is_unchanged():
                return instance
        for label, root in zip(self.labels, roots, strict=True):
            if not isinstance(root, self._nnx.Pytree):
                raise SignatureError(
                    f"{label!r} was a flax.nnx module at compile(), and is a {type(root).__name__}: call it as compile() was "
                    "called"
                )
        walk = self._walk(roots)
        graphdef, state = self._nnx.split(tuple(roots))
        if graphdef != self._graphdef or jax.tree.structure(state) != self._tree:
            raise self._other_structure(walk.facts)
        instance = Instance(self._nnx, self._access, self._states, roots, state, walk, self._drop_dead)
        others = [each for each in known if not each.is_of(roots) and each.is_alive()]
        self._known = (instance, *others[: _KEPT - 1])
        return instance

    def _walk(self, roots: Sequence[Any]) -> _Walk:
        return _Walk(self._nnx, self._access, self.labels, roots)

    def _drop_dead(self, _: Any) -> None:
        self._known = tuple(each for each in self._known if each.is_alive())

    def _states(self, leaves: Sequence[Any]) -> tuple[ModuleState, ...]:
        """Parts the leaves of all modules among them."""
        ends = list(itertools.accumulate(self._counts))
        parts = [leaves[end - count : end] for end, count in zip(ends, self._counts, strict=True)]
        return tuple([ModuleState(keys, part) for keys, part in zip(self._keys, parts, strict=True)])

    def _per_leaf(self, values: Iterable[Any]) -> list[Any]:
        return [value for value, count in zip(values, self._counts, strict=True) for _ in range(count)]

    def _check_output(self, out: Any) -> None:
        leaves = jax.tree.leaves(out, is_leaf=lambda each: isinstance(each, self._nnx.Pytree))
        if any(isinstance(each, self._nnx.Pytree) for each in leaves):
            raise StepError(
                "the step returns a flax.nnx module: modules are updated in place, so return the loss and such alone"
            )

    def _changed(self, modules: Sequence[Any]) -> DriftError:
        lines = _differences(self._facts, self._walk(modules).facts, "taken", "returned")
        return DriftError(
            "the step changes what its modules are made of, so the next call would need another program:\n"
            f"{explained(lines)}\n"
            "Create variables before compile(); take what the step sows out again with nnx.pop(), and return it.",
            lines,
        )

    def _other_structure(self, facts: Mapping[str, Any]) -> SignatureError:
        lines = _differences(self._facts, facts, "expected", "received")
        return SignatureError(
            "the modules are not made of what they were at compile(), so the step has no executable for them:\n"
            f"{explained(lines)}\n"
            "model.train() and model.eval() change attributes that are static: give evaluation a CompiledStep of its own, "
            "compiled in that mode, and set the mode again before a call; or compile() anew.",
            lines,
        )


class Instance:
    """Modules that a step was called with: their variables, and the contents of each object of their graph.

    The modules themselves are held weakly, and what is remembered goes with them. Where a variable holds a tree, flax's own
    means are used throughout: correct, and as slow as `nnx.jit`.
    """

    def __init__(
        self,
        nnx: Any,
        access: Access,
        states: Callable[[Sequence[Any]], tuple[ModuleState, ...]],
        roots: Sequence[Any],
        state: Any,
        walk: _Walk,
        dropped: Callable[[Any], None],
    ) -> None:
        self._nnx = nnx
        self._access = access
        self._states = states
        self._roots = [weakref.ref(root, dropped) for root in roots]
        self._contents = walk.contents()
        holders = jax.tree.leaves(state, is_leaf=lambda each: isinstance(each, nnx.Variable))
        self._empty = [each for each in walk.variables if not jax.tree.leaves(access.get(each))]
        holders = [each for each in holders if not any(each is other for other in self._empty)]
        # Of each leaf: the variable, or the array itself, where it is an attribute without one.
        self._variables = [each if isinstance(each, nnx.Variable) else None for each in holders]
        self._arrays = [None if isinstance(each, nnx.Variable) else each for each in holders]
        self._has_arrays = any(each is None for each in self._variables)
        self._all_variables = walk.variables
        self._metadata = [dict(access.metadata(each)) for each in walk.variables]
        self._plain = all(each is None or jax.tree_util.all_leaves([access.get(each)]) for each in self._variables)

    def is_of(self, roots: Sequence[Any]) -> bool:
        """Says whether these are the modules."""
        return all(ref() is root for ref, root in zip(self._roots, roots, strict=True))

    def is_alive(self) -> bool:
        """Says whether all of the modules are still there."""
        return all(ref() is not None for ref in self._roots)

    def is_unchanged(self) -> bool:
        """Says whether each object of the graph holds the very things that it held."""
        metadata, get = self._access.metadata, self._access.get
        try:
            return (
                self._plain
                and self._contents.are_unchanged()
                and all(map(operator.eq, map(metadata, self._all_variables), self._metadata))
                and all(get(each) is None for each in self._empty)
            )
        except Exception:  # metadata may compare as it likes: look again
            return False

    def read(self) -> tuple[ModuleState, ...]:
        """Returns the arrays of each module."""
        get = self._access.get
        if not self._plain:
            return self._states(jax.tree.leaves(self._nnx.split(self._live())[1]))
        if not self._has_arrays:
            return self._states(list(map(get, self._variables)))
        pairs = zip(self._variables, self._arrays, strict=True)
        return self._states([array if variable is None else get(variable) for variable, array in pairs])

    def update(self, result: Any) -> Any:
        """Puts the states that `pure` returned into the modules, and returns what the step itself returned."""
        out, states = result
        self._write(states)
        return out

    def _write(self, states: Sequence[ModuleState]) -> None:
        """Puts new arrays into the variables; None leaves one as it is."""
        new = [leaf for state in states for leaf in state.leaves]
        if not self._plain:
            return self._write_slowly(new)
        put = self._access.put
        if self._has_arrays and any(
            leaf is not None and variable is None for variable, leaf in zip(self._variables, new, strict=True)
        ):
            return self._write_slowly(new)
        for variable, leaf in zip(self._variables, new, strict=True):
            if leaf is not None:
                put(variable, leaf)
        return None

    def _write_slowly(self, new: Sequence[Any]) -> None:
        """Does it by flax's own means: also for arrays that are attributes, and variables that hold trees."""
        roots = self._live()
        old, tree = jax.tree.flatten(self._nnx.split(roots)[1])
        pairs = zip(old, new, strict=True)
        state = jax.tree.unflatten(tree, [before if after is None else after for before, after in pairs])
        for number, root in enumerate(roots):
            if number in state:
                self._nnx.update(root, state[number])

    def _live(self) -> tuple[Any, ...]:
        return tuple(ref() for ref in self._roots)


@dataclass(frozen=True)
class _Contents:
    """What the containers of a graph held: compared by identity, in C, since it is done at each call."""

    dicts: list[dict[Any, Any]]
    keys: list[Any]
    values: list[Any]
    lists: list[list[Any]]
    items: list[Any]
    lengths: list[int]
    others: list[tuple[Any, list[Any]]]

    def are_unchanged(self) -> bool:
        """Says whether they hold the very same things, under the same keys."""
        chained, same = itertools.chain.from_iterable, operator.is_
        return (
            [*map(len, self.dicts), *map(len, self.lists)] == self.lengths
            and all(map(same, chained(self.dicts), self.keys))
            and all(map(same, chained(map(dict.values, self.dicts)), self.values))
            and all(map(same, chained(self.lists), self.items))
            and all(_same(_children(node), children) for node, children in self.others)
        )


class _Walk:
    """One look at the objects of some modules: the variables, the containers, and a description by path."""

    def __init__(self, nnx: Any, access: Access, labels: Sequence[str], roots: Sequence[Any]) -> None:
        self._nnx = nnx
        self._access = access
        self._seen: dict[int, str] = {}
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._others: list[tuple[Any, list[Any]]] = []
        self.variables: list[Any] = []
        self.facts: dict[str, Any] = {}
        """What stands at each path: a static value itself, and text for anything else."""
        for label, root in zip(labels, roots, strict=True):
            self._visit(label, root)

    def contents(self) -> _Contents:
        """Returns what the containers hold now."""
        return _Contents(
            self._dicts,
            [key for each in self._dicts for key in each],
            [value for each in self._dicts for value in each.values()],
            self._lists,
            [item for each in self._lists for item in each],
            [*map(len, self._dicts), *map(len, self._lists)],
            self._others,
        )

    def _visit(self, path: str, value: Any) -> None:
        nnx = self._nnx
        if isinstance(value, nnx.Variable | nnx.Pytree):
            if (first := self._seen.setdefault(id(value), path)) != path:
                self.facts[path] = f"the same as {first}"
                return
            self.facts[path] = type(value).__name__
        if isinstance(value, nnx.Variable):
            if not issubclass(type(value), nnx.Variable) or isinstance(self._access.get(value), jax.Ref):
                raise StepError(
                    f"{path} is a flax.nnx variable over a mutable array (ref=True or hijax=True), which is updated behind an "
                    "executable's back: make it a plain one"
                )
            self.variables.append(value)
            if metadata := dict(sorted(self._access.metadata(value).items())):
                self.facts[path + _METADATA] = metadata
            tree = jax.tree.structure(self._access.get(value))
            if tree.num_leaves != 1:
                self.facts[path] += f" of {tree}"
        elif isinstance(value, nnx.Pytree):
            self._dicts.append(vars(value))
            for name, each in vars(value).items():
                if not str(name).startswith(_INTERNAL):  # those of a list are numbers
                    self._visit(f"{path}[{name}]" if str(name).isdecimal() else f"{path}.{name}", each)
        elif isinstance(value, dict | nnx.State):
            held = cast("dict[Any, Any]", value if isinstance(value, dict) else value.raw_mapping)
            self._dicts.append(held)
            for key, each in held.items():
                self._visit(f"{path}[{key!r}]", each)
        elif isinstance(value, list | tuple):
            if isinstance(value, list):
                self._lists.append(cast("list[Any]", value))
            for number, each in enumerate(cast("Sequence[Any]", value)):
                self._visit(f"{path}[{number}]", each)
        elif value is None:  # to JAX a container of nothing
            self.facts[path] = None
        elif isinstance(value, jax.Array) or hasattr(value, "__array__"):
            self.facts[path] = "an array"
        else:
            self._visit_other(path, value)

    def _visit_other(self, path: str, value: Any) -> None:
        """Looks into a container of a type of its own, if it is one to JAX."""
        children = _children(value)
        if len(children) == 1 and children[0] is value:
            self.facts[path] = value
            return
        self.facts[path] = type(value).__name__
        self._others.append((value, children))
        for number, each in enumerate(children):
            self._visit(f"{path}[{number}]", each)


def _children(node: Any) -> list[Any]:
    return jax.tree.leaves(node, is_leaf=lambda each: each is not node)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _keys(state: Any, count: int) -> list[Keys]:
    """Returns the path of each leaf of each module: `layers[0].kernel`, as the code says it."""
    found: list[list[Any]] = [[] for _ in range(count)]
    for (first, *path), _ in jax.tree_util.tree_leaves_with_path(state):
        steps = [each for each in path if each != GetAttrKey("value")]  # of the variable
        found[first.key].append(GetAttrKey("".join(map(_step, steps)).removeprefix(".")))
    return [tuple(each) for each in found]


def _step(key: Any) -> str:
    return f".{key.key}" if isinstance(key, DictKey) and isinstance(key.key, str) else str(key)


def _kept_sharding(leaf: Any) -> NamedSharding | None:
    """Returns the sharding that a leaf of a module keeps: that over several devices, where XLA would choose."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.num_devices == 1:
        return None
    return sharding if all(each == AxisType.Auto for each in sharding.mesh.axis_types) else None


def _stay(leaf: Any, sharding: NamedSharding | None) -> Any:
    return leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)


def _differences(expected: Mapping[str, Any], found: Mapping[str, Any], before: str, after: str) -> list[str]:
    """Returns a line for each path at which two descriptions differ."""
    lines: list[str] = []
    for path in dict.fromkeys([*expected, *found]):
        one, other = expected.get(path, _NOTHING), found.get(path, _NOTHING)
        if path.endswith(_METADATA) and _NOTHING in (one, other):
            continue  # the variable itself comes or goes
        if one is not other and repr(one) != repr(other):
            lines.append(f"{path}: {one} {before}, {other} {after}")
    return lines or ["an attribute that prints as before and compares unequal to it"]
