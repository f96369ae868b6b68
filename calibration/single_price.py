"""The price of one plan, without arrays: the formulas that price tables, followed once with names in place of numbers and written out as
one Python function of a step's features.

An array operation on one step costs as much as on a hundred. So ``price_table`` is called with a table of names; every operation on it
becomes an assignment of one number for each rank. Operations on constants alone are done at once, the same one is made once, and what no
result needs is left out. There is no second copy of any formula, and results are the same to the last bit: exp, log and powers are
numpy's, whose last bits are its own, and so are sums of many ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from calibration.features import BY_RATIO, FeatureTable
from engine.core.features import Features, features
from engine.core.plan import StepPlan
from engine.core.specs import ModelSpec, V41Spec
from engine.core.step_cost import ComponentPrice, StepPrice

if TYPE_CHECKING:
    from calibration.cost_model import PricedTable

# Beyond so many data ranks arrays are the faster way: the function grows with the ranks.
MAX_RANKS = 16
_PAIRS = ("context_pairs", "window_pairs", "candidate_pairs", *BY_RATIO)
_SEQUENTIAL = 8  # as few numbers numpy adds one after the other; more in several chains
_TEMPLATES = {
    "add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "divide": "{0} / {1}",
    "minimum": "{0} if {0} < {1} else {1}",
    "maximum": "{0} if {0} > {1} else {1}",
    "power": "float(power({0}, {1}))",
    "greater": "{0} > {1}",
    "less_equal": "{0} <= {1}",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "floor": "floor({0})",
    "ceil": "ceil({0})",
    "absolute": "abs({0})",
    "exp": "float(exp({0}))",
    "log": "float(log({0}))",
    "where": "{1} if {0} else {2}",
}
# Of which the one operand is the result where the other is this constant; x * 0 is 0 besides.
_NEUTRAL_RIGHT = {"add": 0, "subtract": 0, "multiply": 1, "divide": 1}
_NEUTRAL_LEFT = {"add": 0, "multiply": 1}

Cell = str | float  # a name of the function, or a constant
Cells = NDArray[Any]  # of Cell


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """``np.interp`` of one number."""
    after = bisect_right(xs, x)
    if after == 0:
        return ys[0]
    if after == len(xs) or xs[after - 1] == x:
        return ys[after - 1]
    slope = (ys[after] - ys[after - 1]) / (xs[after] - xs[after - 1])
    return slope * (x - xs[after - 1]) + ys[after - 1]


def _sum(*values: float) -> float:
    return float(np.array(values, dtype=np.float64).sum())


class _Program:
    """Assignments in the order made."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {
            "floor": math.floor, "ceil": math.ceil, "exp": np.exp, "log": np.log, "power": np.power,
            "interpolate": interpolate, "sum_of": _sum,
        }  # fmt: skip
        self._name_of: dict[str, str] = {}
        self._made: dict[str, tuple[str, tuple[Cell, ...]]] = {}

    def apply(self, operation: str, *cells: Cell) -> Cell:
        if len(cells) == 2:
            left, right = cells
            if operation == "multiply" and 0 in cells:
                return 0.0
            if _NEUTRAL_RIGHT.get(operation) == right:
                return left
            if _NEUTRAL_LEFT.get(operation) == left:
                return right
        return self.made(_TEMPLATES[operation], *cells)

    def made(self, template: str, *cells: Cell) -> Cell:
        """The name of the expression, or its value where it is constant."""
        text = template.format(*cells)
        if not any(isinstance(cell, str) for cell in cells):
            return cast(float, eval(text, self.scope))
        name = self._name_of.setdefault(text, f"v{len(self._name_of)}")
        self._made[name] = text, cells
        return name

    def keep(self, values: object) -> str:
        """A name for constants as they are."""
        name = f"k{len(self.scope)}"
        self.scope[name] = values
        return name

    def read(self, text: str) -> Cell:
        """The name of a number of the features."""
        name = self._name_of.setdefault(text, f"v{len(self._name_of)}")
        self._made[name] = text, ()
        return name

    def function(self, results: Sequence[Cell]) -> tuple[Callable[[Features], tuple[float, ...]], str]:
        """``results`` of a step's features; and the text of the function."""
        needed, waiting = set[str](), [cell for cell in results if isinstance(cell, str)]
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting += [cell for cell in self._made[name][1] if isinstance(cell, str)]
        lines = [f"{name} = {text}" for name, (text, _) in self._made.items() if name in needed]
        source = "\n    ".join(["def price(features):", *lines, f"return ({', '.join(map(str, results))},)"])
        exec(compile(source, "<price of a step>", "exec"), self.scope)
        return self.scope["price"], source


class _Traced(NDArrayOperatorsMixin):
    """An array of cells that every operation with it writes down. Only what prices need is known; all else is refused by TypeError."""

    def __init__(self, program: _Program, cells: Cells) -> None:
        self._program, self.cells = program, cells
        self.shape, self.ndim = cells.shape, cells.ndim

    def __bool__(self) -> bool:
        raise TypeError("a price of names cannot branch on a feature: use np.where")

    def __array__(self, *_dtype: object, **_options: object) -> NDArray[Any]:
        raise TypeError("a price of names has no array of numbers")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: Any) -> Any:
        # ``out`` is an array that ``+=`` would add to: the name on its left is bound to the result either way.
        if method != "__call__" or ufunc.__name__ not in _TEMPLATES or options.keys() - {"out"}:
            return NotImplemented
        return self._each(ufunc.__name__, *operands)

    def __array_function__(self, function: Any, _types: Any, operands: Any, options: Any) -> Any:
        known = getattr(self, f"_{function.__name__}", None)
        return NotImplemented if known is None else known(*operands, **options)

    def _each(self, operation: str, *operands: Any) -> _Traced:
        arrays = np.broadcast_arrays(*map(_cells_of, operands))
        found = [self._program.apply(operation, *cells) for cells in zip(*(array.flat for array in arrays), strict=True)]
        return self._of(found, arrays[0].shape)

    def _of(self, cells: list[Cell], shape: tuple[int, ...]) -> _Traced:
        found = np.empty(len(cells), dtype=object)
        found[:] = cells
        return _Traced(self._program, found.reshape(shape))

    # --- functions of numpy -------------------------------------------------------------------------------------------------

    def _where(self, condition: Any, yes: Any, no: Any) -> _Traced:
        return self._each("where", condition, yes, no)

    def _clip(self, values: Any, low: Any, high: Any) -> _Traced:
        return self._each("minimum", self._each("maximum", values, low), high)

    def _zeros_like(self, values: _Traced, *, order: str = "C") -> _Traced:
        assert order == "C"
        return self._full_like(values, 0.0)

    def _full_like(self, values: _Traced, value: float) -> _Traced:
        return self._of([value] * values.cells.size, values.shape)

    def _broadcast_to(self, values: _Traced, shape: tuple[int, ...]) -> _Traced:
        return _Traced(self._program, np.broadcast_to(values.cells, shape))

    def _repeat(self, values: _Traced, count: int, axis: int) -> _Traced:
        return _Traced(self._program, np.repeat(values.cells, count, axis=axis))

    def _interp(self, values: _Traced, xs: NDArray[Any], ys: NDArray[Any]) -> _Traced:
        points = f"{self._program.keep(xs.tolist())}, {self._program.keep(ys.tolist())}"
        return self._of([self._program.made(f"interpolate({{0}}, {points})", cell) for cell in values.cells.flat], values.shape)

    # --- methods of arrays ---------------------------------------------------------------------------------------------------

    def astype(self, _dtype: object) -> _Traced:
        return self  # a truth value of Python counts as 1 or 0

    def __getitem__(self, index: Any) -> _Traced:
        """Of each step one rank, as (steps, ranks), or what numpy selects."""
        if isinstance(index, tuple) and isinstance(index[1], _Traced):
            chosen = [self._chosen(row, rank) for row, rank in zip(self.cells, index[1].cells, strict=True)]
            return self._of(chosen, (len(chosen),))
        return _Traced(self._program, self.cells[index])

    def max(self, axis: int) -> _Traced:
        assert axis == 1
        return self._columns("maximum")

    def sum(self, axis: int, keepdims: bool = False) -> _Traced:
        assert axis == 1
        many = self.shape[1] >= _SEQUENTIAL
        found = self._of([self._row("sum_of({row})", row) for row in self.cells], self.shape[:1]) if many else self._columns("add")
        return found[:, None] if keepdims else found

    def mean(self, axis: int) -> _Traced:
        found: _Traced = self.sum(axis) / self.shape[1]
        return found

    def argmax(self, axis: int) -> _Traced:
        """The first of them, where several are the largest."""
        assert axis == 1
        return self._of([self._row("({row}).index(max(({row})))", row) for row in self.cells], self.shape[:1])

    def _columns(self, operation: str) -> _Traced:
        found = self[:, 0]
        for column in range(1, self.shape[1]):
            found = self._each(operation, found, self[:, column])
        return found

    def _row(self, template: str, row: Cells) -> Cell:
        """``template`` with the cells of a step in place of {row}."""
        return self._program.made(template.replace("{row}", _places(len(row))), *row)

    def _chosen(self, row: Cells, rank: Cell) -> Cell:
        if len(row) == 1 or all(cell == row[0] for cell in row):
            return cast(Cell, row[0])
        return self._program.made(f"({_places(len(row))})[{{{len(row)}}}]", *row, rank)


def _places(count: int) -> str:
    return "".join(f"{{{place}}}, " for place in range(count))


def _cells_of(operand: Any) -> Cells:
    return operand.cells if isinstance(operand, _Traced) else np.asarray(operand).astype(object)


def _table_of_names(program: _Program, spec: ModelSpec, num_ranks: int) -> FeatureTable:
    """One step's, [1, R] each."""

    def named(text: str) -> Any:
        row = np.empty((1, num_ranks), dtype=object)
        row[0] = [program.read(f"features.{text}[{rank}]") for rank in range(num_ranks)]
        return _Traced(program, row)

    ratios = sorted({ratio for ratio in spec.compress_ratios if ratio}) if isinstance(spec, V41Spec) else []
    values: dict[str, Any] = {field.name: named(field.name) for field in fields(FeatureTable) if field.name not in BY_RATIO}
    values |= {name: {ratio: named(f"{name}[{ratio}]") for ratio in ratios} for name in BY_RATIO}
    return FeatureTable(**values)


class SinglePrice:
    """Prices of plans one by one, as ``price_table`` does those of tables. ``price_table`` must be a function of its table alone."""

    def __init__(self, price_table: Callable[[FeatureTable], PricedTable], spec: ModelSpec, num_ranks: int) -> None:
        program = _Program()
        priced = price_table(_table_of_names(program, spec, num_ranks))
        self.spec, self._note = spec, priced.note
        self._provenance = [(name, priced.provenance[name]) for name in priced.components]
        results = (priced.step_s, priced.low_s, priced.high_s, priced.extrapolated, *priced.components.values())
        self._price, source = program.function([_cells_of(result)[0] for result in results])
        self._has_pairs = any(name in source for name in _PAIRS)

    def price(self, plan: StepPlan) -> StepPrice:
        step_s, low_s, high_s, extrapolated, *seconds = self._price(features(plan, self.spec, has_pairs=self._has_pairs))
        components = {
            name: ComponentPrice(float(part_s), provenance)
            for (name, provenance), part_s in zip(self._provenance, seconds, strict=True)
            if part_s > 0
        }
        return StepPrice(float(step_s), float(low_s), float(high_s), components, bool(extrapolated), self._note)
