"""Single errors that one could make in a source file, each a change of its syntax tree.

========== ==================================================================
operator   change
========== ==================================================================
compare    ``<`` and ``<=``, ``>`` and ``>=``, ``==`` and ``!=``, ``is`` and
           ``is not``, ``in`` and ``not in``: each becomes the other
boolean    ``and`` and ``or``: each becomes the other; ``not x`` becomes ``x``
condition  the test of an ``if``, a conditional expression or a filter negated
arithmetic ``+`` and ``-``, ``*`` and ``/``, ``//`` and ``%``: each becomes the
           other; ``**`` becomes ``*``, ``@`` is left; ``-x`` becomes ``x``
set        ``&``, ``|`` and ``-`` of sets: ``&`` and ``|`` become each other
number     ``n`` becomes ``n + 1``
flag       ``True`` and ``False``: each becomes the other
drop       a call, a raise, an assignment to an item or an augmented
           assignment that stands alone is left out
========== ==================================================================

Not changed: texts, annotations, assertions (``strict=True`` is one), what a ``raise`` says,
defaults of class fields and of arguments, and code that only a type checker reads.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPERATORS = ("compare", "boolean", "condition", "arithmetic", "set", "number", "flag", "drop")

_COMPARE = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
_SET = {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
_NOT_CHANGED = ("annotation", "returns", "decorator_list", "type_params", "defaults", "kw_defaults")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change.

    Attributes:
        path: the file.
        where: the function or method that holds it (``Mask._causal``), or ``<module>``.
        line, end_line: of the changed expression or statement.
        operator: one of :data:`OPERATORS`.
        before, after: the changed expression as text, in one line.
        number: tells mutations apart that are the same in all of that, in order.
        tree: the whole file with the change.
    """

    path: Path
    where: str
    line: int
    end_line: int
    operator: str
    before: str
    after: str
    number: int
    tree: ast.Module

    @property
    def name(self) -> str:
        """Stable while the function is not edited: says what changed, not on which line."""
        count = f" #{self.number}" if self.number else ""
        place = f"{self.path.parent.name}/{self.path.name}"
        return f"{place} {self.where}: {self.operator}: {self.before} -> {self.after}{count}"


@dataclass(frozen=True)
class _Site:
    """Where in the tree: the way to the node, and the function around it."""

    steps: tuple[tuple[str, int | None], ...]
    where: str


def mutations(path: Path) -> Iterator[Mutation]:
    """Every mutation of a file, in the order of its text."""
    source = ast.parse(path.read_text(encoding="utf-8"))
    seen: dict[tuple[str, str, str, str], int] = {}
    for site, node in _sites(source, (), "<module>"):
        for operator, changed in _changes(node):
            before, after = _text(node), _text(changed)
            key = (site.where, operator, before, after)
            number = seen[key] = seen.get(key, -1) + 1
            yield Mutation(
                path=path,
                where=site.where,
                line=node.lineno,
                end_line=node.end_lineno or node.lineno,
                operator=operator,
                before=before,
                after=after,
                number=number,
                tree=_replaced(source, site, changed),
            )


def _sites(
    node: ast.AST, steps: tuple[tuple[str, int | None], ...], where: str
) -> Iterator[tuple[_Site, ast.expr | ast.stmt]]:
    if isinstance(node, (ast.expr, ast.stmt)):
        yield _Site(steps, where), node
    inner = where
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        inner = node.name if where == "<module>" else f"{where}.{node.name}"
    for field, value in ast.iter_fields(node):
        if field in _NOT_CHANGED:
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not _is_left(node, child):
                step = (field, index if isinstance(value, list) else None)
                yield from _sites(child, (*steps, step), inner)


def _is_left(parent: ast.AST, child: ast.AST) -> bool:
    """Whether nothing in ``child`` is changed."""
    if isinstance(child, (ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(parent, ast.Raise):
        return True
    if isinstance(parent, ast.keyword) and _text(parent) == "strict=True":
        return True
    if isinstance(parent, ast.ClassDef) and not isinstance(child, ast.FunctionDef):
        return True
    if isinstance(child, ast.If) and _text(child.test) == "TYPE_CHECKING":
        return True
    return isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            ops = [*node.ops]
            ops[index] = _COMPARE[type(op)]()
            yield "compare", _with(node, ops=ops)
    elif isinstance(node, ast.BoolOp):
        yield "boolean", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "boolean", node.operand
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "arithmetic", node.operand
    elif isinstance(node, ast.BinOp):
        for operator, table in (("arithmetic", _ARITHMETIC), ("set", _SET)):
            if type(node.op) in table:
                yield operator, _with(node, op=table[type(node.op)]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "flag", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield "number", ast.Constant(node.value + 1)
    if isinstance(node, (ast.If, ast.IfExp)):
        yield "condition", _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        yield from _filters(node)
    elif _may_go(node):
        yield "drop", ast.Pass()


def _filters(
    node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
) -> Iterator[tuple[str, ast.AST]]:
    for index, generator in enumerate(node.generators):
        for inner, test in enumerate(generator.ifs):
            ifs = [*generator.ifs]
            ifs[inner] = ast.UnaryOp(ast.Not(), test)
            generators = [*node.generators]
            generators[index] = _with(generator, ifs=ifs)
            yield "condition", _with(node, generators=generators)


def _may_go(node: ast.expr | ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Subscript, ast.Attribute)) for target in node.targets)
    return isinstance(node, (ast.AugAssign, ast.Raise))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _replaced(source: ast.Module, site: _Site, changed: ast.AST) -> ast.Module:
    """A copy of the way to the node, everything else shared."""

    def along(node: ast.AST, steps: tuple[tuple[str, int | None], ...]) -> ast.AST:
        if not steps:
            return changed
        (field, index), *rest = steps
        value = getattr(node, field)
        if index is None:
            return _with(node, **{field: along(value, tuple(rest))})
        items = [*value]
        items[index] = along(items[index], tuple(rest))
        return _with(node, **{field: items})

    tree = along(source, site.steps)
    assert isinstance(tree, ast.Module)
    return tree


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.If):
        text = f"if {ast.unparse(node.test)}"
    else:
        text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node)))
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."
