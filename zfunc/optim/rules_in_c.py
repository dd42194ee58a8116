"""The C of element-wise rules, printed from the rules themselves.

A rule runs once on names instead of numbers, and what it does to them is written down. A C expression rounds each
operation once to float, as NumPy and torch do, where neither products are contracted nor extra precision is kept
(`-ffp-contract=off`, SSE and later). `csrc/_rules.h` has all that zfunc comes with, as plain loops, and AdamW's
once more for vectors, in stages.

    python -m zfunc.optim.by_name    # writes csrc/_rules.h; a test holds that it is current
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zfunc.optim import rules
from zfunc.optim.rules import Factors, Rule

RULES_H = Path(__file__).with_name("csrc") / "_rules.h"
SPECIAL = "NAN", "INFINITY"  # of math.h
FLOORS = {
    rules.GRAD_FLOOR: "grad",
    rules.EXP_AVG_FLOOR: "exp_avg",
    rules.EXP_AVG_SQ_FLOOR: "exp_avg_sq",
}


def _operator(op: str) -> tuple[Any, Any]:
    return lambda x, y: Value(op, x, value_of(y)), lambda x, y: Value(op, value_of(y), x)


class Value:
    """A float in C: a name, or an operation of others. It is not computed, so it has no truth."""

    def __init__(self, op: str, *args: Value, text: str = "") -> None:
        self.op, self.args, self.text = op, args, text

    __add__, __radd__ = _operator("+")
    __sub__, __rsub__ = _operator("-")
    __mul__, __rmul__ = _operator("*")
    __truediv__, __rtruediv__ = _operator("/")

    def __bool__(self) -> bool:
        raise TypeError("a rule has no branches: its values are arrays")


def name(text: str) -> Value:
    """A variable."""
    return Value("name", text=text)


def value_of(x: Any) -> Value:
    """A value, or a number as a float of C."""
    if isinstance(x, Value):
        return x
    rounded = struct.unpack("f", struct.pack("f", x))[0]
    return name(
        f"{rounded!r}f"
        if math.isfinite(rounded)
        else f"(float){'-' * (rounded < 0)}{SPECIAL[rounded == rounded]}"
    )


class Names:
    """`rules.Operations` on values."""

    def flush(self, x: Value, floor: Any, /) -> Value:
        """x, and 0 where its size is below the floor."""
        return Value("flush", x, floor if isinstance(floor, Value) else Value("floor", text=repr(floor)))

    def sqrt(self, x: Value, /) -> Value:
        """The nearest float."""
        return Value("sqrt", x)

    def signed(self, x: Value, size: Any, /) -> Value:
        """`size` with the sign of x; 0 where x is 0, NaN where it is NaN."""
        return Value("signed", x, value_of(size))


class Printer:
    """Values as text: `vector` of csrc/_vectors.h, or one float."""

    def __init__(self, *, vector: bool = False) -> None:
        self.kind, self.vector = "vf" if vector else "float", vector
        self.names: dict[Value, str] = {}

    def text(self, x: Value) -> str:
        """An expression; what has a variable of its own is that."""
        if x in self.names or x.op == "name":
            return self.names.get(x, x.text)
        if x.op == "floor":
            return self._floor(float(x.text))
        args = [self.text(y) for y in x.args]
        if x.op == "flush" and self.vector:
            return f"v_flush({args[0]}, k->size, {args[1]})"
        if x.op == "flush":
            floor = args[1] if x.args[1].op == "floor" else f"(int32_t)zf_bits({args[1]})"
            return f"zf_flush({args[0]}, {floor})"
        if x.op == "sqrt":
            return f"{'v_sqrt' if self.vector else 'sqrtf'}({args[0]})"
        if x.op == "signed":
            return f"zf_signed({args[0]}, {args[1]})"
        left, right = (
            f"({t})" if y.op in "+-*/" and y not in self.names else t
            for y, t in zip(x.args, args, strict=True)
        )
        if (x.op == "+" and x.args[0].op in "+-*") or (x.op in "+-" and x.args[0].op == "*"):
            left = args[0]  # as C groups them
        if x.op in "+-" and x.args[1].op == "*":
            right = args[1]
        return f"{left} {x.op} {right}"

    def _floor(self, floor: float) -> str:
        known = FLOORS.get(floor)
        if self.vector:
            return f"k->floor_{known}"
        return f"ZF_FLOOR_{known.upper()}" if known else hex(bits_of(floor))

    def lines(self, results: Sequence[Value]) -> Iterator[str]:
        """A variable for everything that is read more than once, and for every new moment."""
        uses = Counter(y for x in unique(results) for y in x.args) + Counter(results[1:])
        for x in unique(results):
            # Also of an old moment that becomes another: stores come last.
            if x in results[1:] or (x.op not in ("name", "floor") and uses[x] > 1):
                text = self.text(x)
                self.names[x] = f"t{len(self.names)}"
                yield f"const {self.kind} {self.names[x]} = {text};"


def unique(results: Iterable[Value], seen: dict[Value, None] | None = None) -> dict[Value, None]:
    """All values that results are made of, operands first."""
    seen = {} if seen is None else seen
    for x in results:
        if x not in seen:
            unique(x.args, seen)
            seen[x] = None
    return seen


def bits_of(x: float) -> int:
    """Those of a float32."""
    return struct.unpack("I", struct.pack("f", x))[0]


def plain(rule: Rule) -> str:
    """The loop of a rule over some elements, whose moments are float arrays."""
    k: Any = Factors._make(name(f"k.{x}") for x in Factors._fields)
    o, printer, g, p = Names(), Printer(), name("g"), name("p[i]")
    change, *new = rule.update(o, k, g, *(name(f"{x}[i]") for x in rule.state))
    names, moved = printer.text, name("change")
    body = [
        f"float g = {names(rules.scaled(o, k, name('grad[i]')))};",
        f"if (decay == ZF_L2) g = {names(rules.with_l2(o, k, g, p))};",
        *printer.lines([change, *new]),
        f"float change = {names(change)};",
        f"if (decay == ZF_DECOUPLED) change = {names(moved + k.decay * p)};",
        *(f"{x}[i] = {names(y)};" for x, y in zip(rule.state, new, strict=False)),
        f"p[i] = {names(p - moved if rule.weights else moved)};",
    ]
    if not rule.weights:
        body = [x for x in body if not x.startswith("if (decay")]
    arrays = ", ".join(f"float *restrict {x}" for x in ("p", *rule.state))
    return "\n".join(
        [
            f"ZF_INLINE void zf_rule_{rule.name}(const zf_factors k, int decay, size_t n,\n"
            f"    const float *restrict grad, {arrays}) {{",
            "    for (size_t i = 0; i < n; i++) {",
            *(f"        {x}" for x in body),
            "    }",
            "}",
        ]
    )


def staged(rule: Rule) -> str:
    """A rule with one root for vectors, in stages of which none waits for another: `keep`, what is a product of old
    moments alone; the new `moments`; after their root the `change`."""
    k: Any = Factors._make(name(f"k->{x}") for x in Factors._fields)
    o, g, old = Names(), name("g"), [name(f"*{x}") for x in rule.state]
    change, *new = rule.update(o, k, g, *old)
    kept = [y for x in new for y in unique([x]) if y.op == "*" and y.args[1] in old]
    (root,) = [x for x in unique([change]) if x.op == "sqrt"]
    pointers = ", ".join(f"vf *{x}" for x in rule.state)
    start, finish = Printer(vector=True), Printer(vector=True)
    start.names = dict(zip(kept, (f"*{x}" for x in rule.state), strict=True))
    finish.names = {root: "root", **dict(zip(new, rule.state, strict=True))}
    moments = [f"*{x} = {start.text(y.args[0])};" for x, y in zip(rule.state, new, strict=True)]
    for x, y in zip(rule.state, new, strict=True):
        start.names[y.args[0]] = f"*{x}"
        # 8-bit codes need the range of the last moment, and flush it only where that is below the floor.
        moments.append(f"{'if (!codes) ' if y is new[-1] else ''}*{x} = {start.text(y)};")
    keep = [f"*{x} = {Printer(vector=True).text(y)};" for x, y in zip(rule.state, kept, strict=True)]
    values = ", ".join(f"vf {x}" for x in rule.state)
    p = name("p")
    parts = [
        (f"void v_{rule.name}_keep(const v_call *k, {pointers})", keep),
        (f"void v_{rule.name}_moments(const v_call *k, int codes, vf g, {pointers})", moments),
        (f"vf v_{rule.name}_root({values})", [f"return {finish.text(root.args[0]).join(('v_sqrt(', ')'))};"]),
        (f"vf v_{rule.name}_change(const v_call *k, {values}, vf root)", [f"return {finish.text(change)};"]),
        ("vf v_with_l2(const v_call *k, vf g, vf p)", [f"return {start.text(rules.with_l2(o, k, g, p))};"]),
    ]
    return "\n".join(
        f"ZF_V_INLINE {head} {{\n" + "\n".join(f"    {x}" for x in body) + "\n}" for head, body in parts
    )


def header(printed: Sequence[Rule], vectors: Rule | None = None) -> str:
    """A header with some rules: their numbers, factors, floors, loops, and the choice of one."""
    floors = [
        f"#define ZF_FLOOR_{x.upper()} {bits_of(floor):#010x} /* bits of {floor!r} */"
        for floor, x in FLOORS.items()
    ]
    calls = [
        f"    {'else ' if i else ''}if (a->rule == ZF_{x.name.upper()}) ZF_BY_DECAY(zf_rule_{x.name}, "  # pyright: ignore
        + ", ".join(["p", *(f"m[{j}]" for j in range(len(x.state)))])
        + ");"
        for i, x in enumerate(printed)
    ]
    parts = [
        "/* Printed by `python -m zfunc.optim.by_name` from the rules of the optimizers: not to be edited. */",
        "#ifndef ZF_RULES_H\n#define ZF_RULES_H",
        "enum { " + ", ".join(f"ZF_{x.name.upper()} = {i}" for i, x in enumerate(printed)) + " };",  # pyright: ignore
        "#define ZF_FACTORS(each) \\\n    " + " \\\n    ".join(f"each({x})" for x in Factors._fields),
        "#define ZF_AS_FLOAT(name) float name;\ntypedef struct { ZF_FACTORS(ZF_AS_FLOAT) } zf_factors;",
        "\n".join(floors),
        *(plain(x) for x in printed),
        "/* The rule of a call, over the elements of a block: of p and moments m, with gradients g. */\n"
        "#define ZF_APPLY(a, p, m, g, n) \\\n" + " \\\n".join(calls),
        "#endif",
    ]
    if vectors:
        parts.append("#ifdef ZF_RULES_OF_VECTORS\n" + staged(vectors) + "\n#endif")
    return "\n\n".join(parts) + "\n"
