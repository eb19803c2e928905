"""Ways to break a source: each finds its places in a syntax tree and says what stands there instead.

A mutant's name does not change when lines move: file, function, operator, and the how-manieth of that kind in it.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

Edit = tuple[ast.AST, ast.AST, str]
"""From the start of the first node to the end of the second one, the text that replaces them."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: bytes ``begin`` to ``end`` (half-open) of the file become ``text``."""

    name: str
    line: int
    begin: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """The source, changed."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def _drop_call(node: ast.AST) -> Iterator[Edit]:
    """A statement that is a call, such as a release, a renewal, an undo, is left out."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield node, node, "pass"


def _drop_lock(node: ast.AST) -> Iterator[Edit]:
    """A ``with`` over something that is called a lock does not take it."""
    if isinstance(node, ast.With):
        for item in node.items:
            shown = ast.unparse(item.context_expr)
            if "lock" in shown and item.optional_vars is None:
                yield item.context_expr, item.context_expr, '__import__("contextlib").nullcontext()'


def _drop_finally(node: ast.AST) -> Iterator[Edit]:
    """What must happen in any case happens in none."""
    if isinstance(node, ast.Try) and node.finalbody:
        yield node.finalbody[0], node.finalbody[-1], "pass"


def _swap_arguments(node: ast.AST) -> Iterator[Edit]:
    """The first two arguments of a call change places."""
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        first, second = node.args[:2]
        plain = not any(isinstance(argument, ast.Starred) for argument in (first, second))
        if plain and ast.dump(first) != ast.dump(second):
            yield first, second, f"{ast.unparse(second)}, {ast.unparse(first)}"


def _off_by_one(node: ast.AST) -> Iterator[Edit]:
    """A whole number in a comparison, a sum or a slice is one more."""
    if isinstance(node, ast.Compare | ast.BinOp | ast.Slice):
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.Constant) and type(part.value) is int:
                yield part, part, str(part.value + 1)


_TURNED: Final = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def _turn_comparison(node: ast.AST) -> Iterator[Edit]:
    """A border belongs to the other side, or the opposite is asked."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        turned = copy.deepcopy(node)
        turned.ops = [_TURNED[type(node.ops[0])]()]
        yield node, node, f"({ast.unparse(turned)})"


def _negate(node: ast.AST) -> Iterator[Edit]:
    """A condition that is no comparison is turned round."""
    if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare):
        yield node.test, node.test, f"not ({ast.unparse(node.test)})"


OPERATORS: Final[dict[str, Callable[[ast.AST], Iterator[Edit]]]] = {
    "drop-call": _drop_call,
    "drop-lock": _drop_lock,
    "drop-finally": _drop_finally,
    "swap-arguments": _swap_arguments,
    "off-by-one": _off_by_one,
    "turn-comparison": _turn_comparison,
    "negate": _negate,
}


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Every mutant of a file, in the order of the text. Logging and annotations are left alone."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    counts: Counter[str] = Counter()
    found = []
    for owner, node in _walk(ast.parse(source), ""):
        for operator, edits in OPERATORS.items():
            for first, last, text in edits(node):
                kind = f"{path}:{owner or '<module>'}:{operator}"
                counts[kind] += 1
                begin = starts[first.lineno - 1] + first.col_offset  # type: ignore[attr-defined]
                end = starts[last.end_lineno - 1] + last.end_col_offset  # type: ignore[attr-defined]
                found.append(Mutant(f"{kind}:{counts[kind]}", first.lineno, begin, end, text))  # type: ignore[attr-defined]
    return found


def _walk(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if _is_talk(child) or (isinstance(child, ast.AnnAssign) and child.value is None):
            continue
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = f"{owner}.{child.name}".lstrip(".") if named else owner  # type: ignore[attr-defined]
        yield inner, child
        yield from _walk(child, inner)


def _is_talk(node: ast.AST) -> bool:
    """A call of a logger: nobody tests the words."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).lower().startswith(("log.", "self._log."))
