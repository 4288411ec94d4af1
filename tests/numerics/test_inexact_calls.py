"""docs/parity.md gives a reason for every operation in quantizers whose last bit depends on the machine."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fp4graph_plugins
import pytest

import fp4graph

ROOT = Path(__file__).parents[2]
#: The folders with the code of quantizers. Only Python is read: the C++ kernels are compiled without contraction, and
#: their tests compare bits.
PLACES = {
    "fp4graph/numerics": Path(fp4graph.__file__).with_name("numerics"),
    "fp4graph/ops": Path(fp4graph.__file__).with_name("ops"),
    "fp4graph/kernels": Path(fp4graph.__file__).with_name("kernels"),
    "plugins": Path(fp4graph_plugins.__file__).parent,
}
#: Functions of torch, Triton and math, and methods of tensors, that are not correctly rounded everywhere or depend on
#: the order of a sum. torch.round is not among them: it rounds to integers.
_NAMES = """
    acos acosh addbmm addcdiv addcmul addmm addmv addr asin asinh atan atan2 atanh atomic_add baddbmm bilinear
    bincount bmm cdist celu cholesky conv1d conv2d conv3d corrcoef cos cosh cov cross cumprod cumsum det digamma
    dist dot eig eigh einsum elu erf erfc erfinv exp exp2 expm1 fft fma gelu geqrf hypot index_add index_reduce
    interpolate inv lerp lgamma linalg linear log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp
    logdet logit logsumexp lstsq matmul matrix_exp matrix_power mean mm multi_dot mv nanmean nanprod nanquantile
    nansum norm orgqr pinverse polar pow prod qr quantile reciprocal renorm rsqrt scaled_dot_product_attention
    scatter_add scatter_reduce segment_reduce sigmoid silu sin sinc sinh softmax softplus sqrt std std_mean sum
    sum_to_size svd tan tanh tensordot trapezoid tril_solve var var_mean vdot xlogy
"""
INEXACT = frozenset(_NAMES.split())
#: Calls that are exact or correctly rounded although their last name is in ``INEXACT``: they take Python's numbers.
EXACT = frozenset({"math.sqrt", "math.prod", "prod", "sum"})
#: A row of the page's table: operations | file, file ×n | reason
ROW = re.compile(r"^\| (?P<calls>`[^|]+`) \| (?P<files>`[^|]+\.py`[^|]*) \| (?P<reason>[^|]+) \|$", re.MULTILINE)


def inexact(source: str) -> Iterator[tuple[str, int]]:
    """Yield operation and line of each call of a function in ``INEXACT``, each ``@``, and each ``**`` except between
    literals."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            whole = ast.unparse(node.func)
            name = whole.rsplit(".", 1)[-1]
            module = whole.split(".")[-2] if "." in whole else ""
            if whole in EXACT:
                continue
            if name.rstrip("_") in INEXACT or module in ("linalg", "fft", "special"):
                yield name.rstrip("_"), node.lineno
            elif any(isinstance(argument, ast.Constant) and argument.value == "sum" for argument in node.args):
                yield "sum", node.lineno  # an argument of Groups.reduce
        elif isinstance(node, ast.BinOp | ast.AugAssign):
            if isinstance(node.op, ast.MatMult):
                yield "@", node.lineno
            elif isinstance(node.op, ast.Pow) and not _is_number(node):
                yield "**", node.lineno


def _is_number(node: ast.AST) -> bool:
    return all(
        isinstance(part, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop) for part in ast.walk(node)
    )


def in_code() -> dict[str, dict[str, list[int]]]:
    """Return the lines of inexact calls by file and operation."""
    calls: dict[str, dict[str, list[int]]] = {}
    for place, file in ((place, file) for place, folder in PLACES.items() for file in sorted(folder.rglob("*.py"))):
        for operation, line in inexact(file.read_text(encoding="utf-8")):
            calls.setdefault(f"{place}/{file.name}", {}).setdefault(operation, []).append(line)
    return calls


def on_the_page() -> dict[str, Counter[str]]:
    """Return the number of calls for which docs/parity.md gives a reason, by file and operation."""
    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    calls: dict[str, Counter[str]] = {}
    for row in ROW.finditer(text):
        for file, count in re.findall(r"`([^`]+)`(?: ×(\d+))?", row["files"]):
            for operation in re.findall(r"`([^`]+)`", row["calls"]):
                calls.setdefault(file, Counter())[operation] += int(count or 1)
    return calls


def test_every_inexact_operation_has_a_reason():
    called, listed = in_code(), on_the_page()
    assert listed, "docs/parity.md has lost its table"
    wrong = []
    for file in sorted(called.keys() | listed.keys()):
        for operation in sorted(called.get(file, {}).keys() | listed.get(file, {}).keys()):
            lines, count = called.get(file, {}).get(operation, []), listed.get(file, {}).get(operation, 0)
            if len(lines) != count:
                where = f" (lines {', '.join(map(str, sorted(lines)))})" if lines else ""
                wrong.append(f"{file}: `{operation}` {len(lines)} times{where}, listed {count} times")
    assert not wrong, (
        "operations whose last bit depends on the machine: use an exact form (fp4graph/numerics/exact.py), or list "
        "them with the reason in docs/parity.md, 'What is not exact':\n" + "\n".join(wrong)
    )


@pytest.mark.parametrize(
    ("source", "operations"),
    [
        ("torch.sqrt(x)", ["sqrt"]), ("x.sqrt_()", ["sqrt"]), ("root(x) + math.sqrt(2)", []),
        ("torch.linalg.qr(x).Q", ["qr"]), ("torch.linalg.vector_norm(x)", ["vector_norm"]),
        ("a @ b", ["@"]), ("x @= y", ["@"]), ("x ** 0.5 + 2.0**-126", ["**"]), ("2.0**k", ["**"]),
        ("x.sum(-1) + sum(counts)", ["sum"]), ("groups.reduce(x, 'sum')", ["sum"]), ("tl.exp2(x)", ["exp2"]),
        ("x.scatter_reduce(0, i, y, op)", ["scatter_reduce"]), ("x.scatter_add_(0, i, y)", ["scatter_add"]),
        ("x.sum_to_size(2)", ["sum_to_size"]), ("x.prod() + math.prod(x.shape)", ["prod"]), ("x.scatter(0, i, y)", []),
        ("torch.nn.functional.softmax(x, -1)", ["softmax"]), ("x.amax(-1).round().floor()", []),
    ],
)  # fmt: skip
def test_the_scan_finds_inexact_operations_alone(source, operations):
    assert [operation for operation, _ in inexact(source)] == operations
