"""Dtypes: the size of an element, and the names in torch, NumPy and safetensors. No torch here."""

from collections.abc import Collection
from typing import Any, Literal, get_args

from attrs import frozen

from zfunc.options import OneOf

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""What parameters and gradients have on the device, and weights in a file: a subset of DTYPES."""

Dtype = Literal["fp64", "fp32", "bf16", "fp16", "int16", "uint8"]


@frozen
class DtypeInfo:
    """A dtype: bytes of an element; its names in torch, NumPy (uint16 holds the bits of bf16) and safetensors."""

    nbytes: int
    torch: str
    numpy: str
    safetensors: str


DTYPES: dict[Dtype, DtypeInfo] = {
    "fp64": DtypeInfo(8, "float64", "float64", "F64"),
    "fp32": DtypeInfo(4, "float32", "float32", "F32"),
    "bf16": DtypeInfo(2, "bfloat16", "uint16", "BF16"),
    "fp16": DtypeInfo(2, "float16", "float16", "F16"),
    "int16": DtypeInfo(2, "int16", "int16", "I16"),
    "uint8": DtypeInfo(1, "uint8", "uint8", "U8"),
}
SAFETENSORS_FLOATS: tuple[str, ...] = tuple(x.safetensors for x in DTYPES.values() if "float" in x.torch)


@frozen
class OnePrecision(OneOf):
    """A check that a value is a precision, given by its name in zfunc or as torch's dtype."""

    names: Collection[str] = PRECISIONS

    def __call__(self, name: str, value: Any) -> Any:
        """The name of the precision `value`; raises ValueError for anything else."""
        of_torch = {f"torch.{x.torch}": own for own, x in DTYPES.items()}
        return super().__call__(name, value if isinstance(value, str) else of_torch.get(str(value), value))


one_precision = OnePrecision()
