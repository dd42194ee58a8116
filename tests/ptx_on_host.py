"""PTX, which NVRTC makes of a CUDA kernel, as C++: an instruction is a line, a thread of the grid a call.

An instruction that is not known here is an error. So are those whose bits no two machines need to share:
approximations, fused products and sums, flushed denormals.
"""

import re
from pathlib import Path

SHIM = Path(__file__).with_name("ptx_on_host.h")
BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}
COMPARED = {"eq": "==", "neu": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
INT_ONLY = {"ne": "!=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
CALLED = {"sqrt": "sqrtf", "shl": "shl", "shr": "shr", "min": "least", "max": "most", "not": "~", "neg": "-"}
REGISTERS = ("u32", "f64", "u64")  # of parameters


def on_host(ptx: str, name: str) -> str:
    """C++ with a function `run` of the numbers of blocks and of threads in each, and of the kernel's arguments."""
    ptx = re.sub(r"//.*|\.pragma .*", "", ptx)
    head, body = ptx.split(f".entry {name}(")[1].split("{", 1)
    params = re.findall(r"\.param \.(\w+) (\w+)", head)
    assert {kind for kind, _ in params} <= set(REGISTERS)
    taken = "".join(f", {kind} {x}" for kind, x in params)
    lines = [_line(x.strip()) for x in re.split(r"(?<=[;:])\s", body.rsplit("}", 1)[0]) if x.strip()]
    given = "".join(f", {x}" for _, x in params)
    return "\n".join(
        [
            f'#include "{SHIM}"',
            f"static void thread(u32 ctaid_x, u32 ntid_x, u32 tid_x{taken}) {{",
            *sorted(lines, key=lambda x: not x.startswith("u64 ")),  # C++ jumps over no declaration
            "}",
            f'extern "C" void run(u32 grid, u32 block{taken}) {{ for (u32 i = 0; i < grid; i++)',
            f"for (u32 j = 0; j < block; j++) thread(i, block, j{given}); }}",
        ]
    )


def _line(text: str) -> str:
    """A line of C++ for a line of PTX: of registers, local memory, a label or an instruction."""
    if text.startswith(".reg"):
        name, count = re.fullmatch(r"\.reg \.\w+\s+%(\w+)(?:<(\d+)>)?;", text).groups()  # type: ignore[union-attr]
        return f"u64 {name}{f'[{count}]' if count else ''};"
    if text.startswith(".local"):
        name, count = re.fullmatch(r"\.local \.align \d+ \.b8\s+(\w+)\[(\d+)\];", text).groups()  # type: ignore[union-attr]
        return f"u64 {name}_[{count} / 8 + 1], {name} = (u64){name}_;"
    if text.endswith(":"):
        return f"{text.lstrip('$')};"
    guard, op, operands = re.fullmatch(r"(?:@(!?%\w+)\s+)?([\w.:]+)\s*(.*);", text, re.DOTALL).groups()  # type: ignore[union-attr]
    args = [_operand(x) for x in re.findall(r"\{.*?\}|[^,\s]+", operands)]
    return f"{f'if ({_operand(guard)}) ' if guard else ''}{{ {_instruction(op, args)} }}"


def _operand(x: str) -> str:
    if x[0] == "{":
        return x
    x = re.sub(r"\b0[fd]([0-9A-F]+)\b", r"0x\1ull", x)
    x = re.sub(r"%(ctaid|ntid|tid)\.x", r"\1_x", x)
    return re.sub(r"%(\w+?)(\d+)\b", r"\1[\2]", x).replace("%", "").replace("$", "")


def _instruction(op: str, args: list[str]) -> str:
    verb, *how = op.split(".")
    kind = how[-1] if how else ""
    to = args[0] if args else ""
    if verb in ("ret", "bra"):
        return f"goto {to};" if verb == "bra" else "return;"
    if verb in ("ld", "st"):
        return _moved(verb, how, args)
    if verb in ("mov", "cvta"):
        return f"{to} = {args[1]};"
    if kind in ("f32", "f64") and verb in (*BINARY, "sqrt", "cvt"):
        assert how[:1] == ["rn"], op
        assert how[1:-1] == (["f32"] if verb == "cvt" else []), op
    if verb == "cvt":
        return f"{to} = as<{how[-2]}>({how[-2]}(of<{kind}>({args[1]})));"
    if verb == "selp":
        return f"{to} = {args[3]} ? {args[1]} : {args[2]};"
    values = [f"of<{kind}>({x})" for x in args[1:]]
    if verb == "setp":
        assert (len(how), len(args)) == (2, 3), op
        if how[0] == "nan":
            return f"{to} = {values[0]} != {values[0]} || {values[1]} != {values[1]};"
        sign = (COMPARED if kind[0] == "f" else COMPARED | INT_ONLY)[how[0]]
        return f"{to} = {values[0]} {sign} {values[1]};"
    if verb == "mul" and "wide" in how:
        return f"{to} = u64({values[0]}) * u64({values[1]});" if kind == "u32" else _unknown(op)
    if verb == "mad" and "lo" in how:
        return f"{to} = u32({args[1]} * {args[2]} + {args[3]});" if kind.endswith("32") else _unknown(op)
    if verb in BINARY and how[:-1] in ([], ["lo"], ["rn"]):
        return f"{to} = as<{kind}>({kind}({values[0]} {BINARY[verb]} {values[1]}));"
    if verb not in CALLED or kind == "pred" or (kind[0] == "f") != (verb == "sqrt"):
        return _unknown(op)
    return f"{to} = as<{kind}>({kind}({CALLED[verb]}({', '.join(values)})));"


def _moved(verb: str, how: list[str], args: list[str]) -> str:
    """A read of memory or of a parameter (`ld`), or a write (`st`)."""
    place, value = (args[1], args[0]) if verb == "ld" else (args[0], args[1])
    kind, place = how[-1], place[1:-1]
    registers = [_operand(x) for x in re.findall(r"%\w+", value)] if value[0] == "{" else [value]
    if how[0] == "param":
        return f"{value} = as<{kind}>({place});"
    at = [f"(({kind} *)({place}))[{i}]" for i in range(len(registers))]
    pairs = zip(at, registers, strict=True)
    if verb == "ld":
        return " ".join(f"{x} = as<{kind}>({y});" for y, x in pairs)
    return " ".join(f"{y} = of<{kind}>({x});" for y, x in pairs)


def _unknown(op: str) -> str:
    raise NotImplementedError(f"the instruction {op}")
