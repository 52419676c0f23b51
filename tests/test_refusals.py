"""Each refusal in the source has the form of a refusal, whether or not a test reaches it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from inspect import getmembers, isclass

from tests.refusals import CODE
from tests.test_layering import HOUSE, PACKAGE
from vitsweep import errors

VALUE = "\0"
"""What stands for a value in the text of a refusal."""
PARTS = {"UnsafeFileError", "WrongEvidenceError", "NoNumberError"}
"""Errors whose text is a part of another one's."""
WAY_OUT = re.compile(
    r"[:;] .|[.\0] [A-Z]|\b(must|needs?|lacks|takes|instead|at (most|least)|same command)\b|[?]$|\0[.]?$"
)
"""What follows the rule: a clause or sentence more, the value that is needed, or a suggestion."""


@cache
def kinds() -> frozenset[str]:
    """Names of the errors that are printed to a user."""
    found = {name for name, cls in getmembers(errors, isclass) if issubclass(cls, Exception)}
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    for _ in range(3):  # of their subclasses too
        found |= {c.name for c in classes if found & {ast.unparse(b) for b in c.bases}}
    return frozenset(found - PARTS)


def text_of(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(map(text_of, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
    return VALUE


def refusals(source: str, names: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of what is raised, or returned to be raised, and of each conflict."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "conflicts":
            yields = [n.value for n in ast.walk(node) if isinstance(n, ast.Yield) and n.value]
            yield from ((n.lineno, text_of(n)) for n in yields)
        made = getattr(node, "exc" if isinstance(node, ast.Raise) else "value", None)
        if isinstance(node, (ast.Raise, ast.Return)) and isinstance(made, ast.Call) and made.args:
            if ast.unparse(made.func).split(".")[-1] in names:
                yield node.lineno, text_of(made.args[0])


def faults(text: str) -> list[str]:
    """Return what a refusal lacks."""
    rule = CODE.sub("", text)  # one that is all value is made elsewhere
    return [
        fault
        for fault, is_there in {
            "names nothing": "`" not in text and VALUE not in text,
            "no rule": len(rule.replace(VALUE, " x ").split()) < 2,
            "no sentence": not text.endswith((".", "?", VALUE)),
            "an open quote": text.count("`") % 2 == 1,
            "no way out": not WAY_OUT.search(rule),
        }.items()
        if is_there and rule.strip(VALUE + "\n .:")
    ]


def test_each_refusal_names_its_setting_states_its_rule_and_has_a_way_out() -> None:
    names, found, count = kinds(), [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, text in refusals(path.read_text(), names):
            count += 1
            if lacking := faults(text):
                found.append(f"{path.relative_to(HOUSE)}:{line}: {lacking} {text!r}")
    assert count > 350
    assert not found, "\n".join(found)


def test_a_bad_refusal_is_found() -> None:
    head = "class MineError(VitsweepError): ...\ndef f(x):\n    "
    for bad in (
        'raise VitsweepError("This is not possible.")',
        'raise errors.BadValueError(f"`precision={x}` is wrong.")',
        'raise BadValueError(f"`precision={x}: choose another one.")',
        'return VitsweepError(f"`{x}`: use O1")',
    ):
        [(_, text)] = refusals(head + bad, kinds())
        assert faults(text), bad
