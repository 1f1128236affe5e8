"""Draws mutants of the code: small mistakes, each of one kind, for a person to read and choose from.

    python -m tests.mutants [NUMBER] [SEED] > drawn.json

Prints candidates for `tests/mutants.json`, spread over folders in proportion to their lines. Many do not change what
the code computes: only those that a reader has found to be wrong, other than by a certain crash, belong in the table.
"""

import ast
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PER_FILE = 3
# Modules that only print, draw or choose sizes for a device that the suite does not have.
LEFT_OUT = {
    "terminal",
    "__main__",
    "cli",
    "report",
    "tables",
    "drawing",
    "plots",
    "views",
    "demo",
    "cudnn",
    "gpu",
    "tpu",
}
SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.And: ast.Or,
    ast.Or: ast.And, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.FloorDiv: ast.Mult,
}  # fmt: skip
PAIRS = "minimum maximum min max argmin argmax any all ceil floor repeat tile ones zeros ones_like zeros_like cos sin"
FUNCTIONS = dict(zip(PAIRS.split()[::2], PAIRS.split()[1::2], strict=True)) | {"mean": "sum", "round": "floor"}
FUNCTIONS |= {other: name for name, other in FUNCTIONS.items()}
BOUNDS, SHAPES = ("minimum", "maximum", "min", "max", "clip"), ("reshape", "transpose", "moveaxis")
UNLIKE = ("isinstance", "getattr", "hasattr", "setattr", "partial", "zip", "rearrange", "einsum", "swapaxes", "astype")
OPERATORS = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare)
SILENT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
NOT_COMPUTED = ("annotation", "returns", "decorator_list", "bases")


def changed(node: ast.AST, **fields: Any) -> ast.AST:
    """A copy of a node with other fields."""
    made = copy(node)
    vars(made).update(fields)
    return made


def mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Kind and mutated node of every mistake that this node alone can have."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            if type(op) in SWAPPED:
                yield "operator", changed(node, op=SWAPPED[type(op)]())
            if isinstance(op, ast.Mult | ast.Div):
                yield "dropped factor", left
            if isinstance(op, ast.BitAnd):
                yield from (("forgotten mask", side) for side in (left, right))
            if isinstance(op, ast.Sub | ast.Div | ast.FloorDiv) and not isinstance(right, ast.Constant):
                yield "swapped arguments", changed(node, left=right, right=left)
        case ast.BoolOp(op=op, values=values):
            yield "condition", changed(node, op=SWAPPED[type(op)]())
            yield "condition", changed(node, values=values[1:]) if len(values) > 2 else values[1]
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            yield "comparison", changed(node, ops=[SWAPPED[type(op)]()])
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
            yield "negation", operand
        case ast.IfExp(body=body, orelse=orelse):
            yield "negation", changed(node, body=orelse, orelse=body)
        case ast.Subscript(slice=index):
            yield from (("index", changed(node, slice=made)) for made in indices(index))
        case ast.Call():
            yield from calls(node)
        case ast.Constant(value=int(value)) if type(value) is int:
            yield "off by one", ast.Constant(value + 1)


def indices(index: ast.AST) -> Iterator[ast.AST]:
    """Mistakes in what stands between brackets: 0 and 1 exchanged, slices that begin or end one too late."""
    match index:
        case ast.Constant(value=0 | 1 as number):
            yield ast.Constant(1 - number)
        case ast.Slice(step=None):
            for side in ("lower", "upper"):
                if bound := getattr(index, side):
                    yield changed(index, **{side: ast.BinOp(bound, ast.Add(), ast.Constant(1))})
        case ast.Slice(lower=None, upper=None):
            yield ast.Slice()
        case ast.Tuple(elts=parts):
            for i, part in enumerate(parts):
                yield from (changed(index, elts=[*parts[:i], made, *parts[i + 1 :]]) for made in indices(part))


def calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Mistakes in a call: another function, swapped arguments, an axis, a bound or an order that is not there."""
    is_method, args = isinstance(node.func, ast.Attribute), node.args
    name = getattr(node.func, "attr" if is_method else "id", "")
    if name in FUNCTIONS and (is_method or name != "sum"):
        yield "function", changed(node, func=changed(node.func, **{"attr" if is_method else "id": FUNCTIONS[name]}))
    if name in BOUNDS and len(args) > 1:
        yield "dropped bound", args[0]
    if name in ("argsort", "sort", "top_k") and args:
        key = args[0].operand if isinstance(args[0], ast.UnaryOp) else ast.UnaryOp(ast.USub(), args[0])
        yield "order", changed(node, args=[key, *args[1:]])
    if name == "sorted":
        yield "order", changed(node, keywords=[*node.keywords, ast.keyword("reverse", ast.Constant(True))])
    if name == "cumsum" and args:
        yield "order", args[0]
    if name in SHAPES and len(args) > 1 and not isinstance(args[0], ast.Constant | ast.Starred):
        yield "shape", changed(node, args=[*args[:-2], args[-1], args[-2]])
    if name == "where" and len(args) == 3:
        yield "negation", changed(node, args=[args[0], args[2], args[1]])
    elif len(args) > 1 and name not in (*BOUNDS, *SHAPES, *UNLIKE) and type(args[0]) is type(args[1]):
        yield "swapped arguments", changed(node, args=[args[1], args[0], *args[2:]])
    for i, keyword in enumerate(node.keywords):
        match keyword:
            case ast.keyword(arg="axis", value=value) if ast.unparse(value) in ("-2", "-1", "0", "1"):
                kind, other = "axis", {"-1": -2, "-2": -1, "0": 1, "1": 0}[ast.unparse(value)]
            case ast.keyword(value=ast.Constant(value=bool(flag))):
                kind, other = "flag", not flag
            case _:
                continue
        made = changed(keyword, value=ast.Constant(other))
        yield kind, changed(node, keywords=[*node.keywords[:i], made, *node.keywords[i + 1 :]])


def expressions(node: ast.AST, parent: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """The nodes that compute something, with their parents: no annotations, texts, decorators or error messages."""
    if not isinstance(node, SILENT):
        yield node, parent
        for field, value in ast.iter_fields(node):
            for child in (value if isinstance(value, list) else [value]) if field not in NOT_COMPUTED else ():
                if isinstance(child, ast.AST):
                    yield from expressions(child, node)


def is_mutant(old: str, new: str) -> bool:
    """Whether the new text of a module is Python that does something else."""
    try:
        return ast.dump(ast.parse(old)) != ast.dump(ast.parse(new))
    except SyntaxError:
        return False


def _lines(lines: list[str], first: int, last: int) -> str:
    return "\n".join(lines[first : last + 1]).strip()


def candidates(path: Path) -> list[dict[str, str]]:
    """All mutants of a file whose mistake is on one line; up to two lines before it make the text unique."""
    text, found = path.read_text(), []
    lines = text.split("\n")
    for node, parent in expressions(ast.parse(text)):
        row = getattr(node, "lineno", 0) - 1
        if row < 0 or node.end_lineno != row + 1:
            continue
        starts = (start for start in range(row, row - 3, -1) if text.count(_lines(lines, start, row)) == 1)
        if (start := next(starts, None)) is None:
            continue
        raw = lines[row].encode()
        for kind, mutant in mutations(node):
            inner = isinstance(mutant, OPERATORS) and isinstance(parent, (*OPERATORS, ast.Attribute, ast.Subscript))
            made = f"({ast.unparse(mutant)})" if inner else ast.unparse(mutant)
            line = (raw[: node.col_offset] + made.encode() + raw[node.end_col_offset :]).decode()
            old = _lines(lines, start, row)
            new = old.removesuffix(lines[row].strip()) + line.strip()
            found.append({"kind": kind, "file": str(path.relative_to(ROOT)), "old": old, "new": new})
    return found


def draw(number: int, seed: int) -> list[dict[str, str]]:
    """For each folder its share of the mutants: the kind drawn least so far, and few per file."""
    chance, drawn, kinds, files = random.Random(seed), [], Counter[str](), Counter[str]()
    folders: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted(path for top in ("vlkv", "pallas_kernels") for path in (ROOT / top).rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.with_suffix("").parts):
            folders[Path(*path.relative_to(ROOT).parts[:-1][:2])].append(path)
    lines = {name: sum(path.read_text().count("\n") for path in paths) for name, paths in folders.items()}
    for name, paths in folders.items():
        pool = [mutant for path in paths for mutant in candidates(path)]
        chance.shuffle(pool)
        wanted = round(number * lines[name] / sum(lines.values()))
        while pool and wanted:
            chosen = min(pool, key=lambda mutant: (kinds[mutant["kind"]], files[mutant["file"]]))
            pool.remove(chosen)
            text = (ROOT / chosen["file"]).read_text()
            if files[chosen["file"]] < PER_FILE and is_mutant(text, text.replace(chosen["old"], chosen["new"])):
                kinds[chosen["kind"]] += 1
                files[chosen["file"]] += 1
                drawn.append(chosen)
                wanted -= 1
    return drawn


if __name__ == "__main__":
    print(json.dumps(draw(*(int(value) for value in (*sys.argv[1:], 200, 0)[:2])), indent=1))
