"""Bytes, seconds and parameters in words. Memory is in GiB, as nvidia-smi and torch count it; rates are in GB/s."""


def format_bytes(nbytes: float) -> str:
    """`nbytes` of memory as text, in B, KiB, MiB or GiB, whichever suits the size.

    >>> format_bytes(900), format_bytes(3 << 20), format_bytes(40e9)
    ('900 B', '3.0 MiB', '37.3 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def format_parameters(count: float, trained: float) -> str:
    """Text of a model's number of parameters (elements), and of how many of them are trained.

    >>> format_parameters(1000, 1000), format_parameters(1000, 8)
    ('1,000 parameters', '1,000 parameters, 8 of them trained')
    """
    share = f", {trained:,.0f} of them trained" if trained < count else ""
    return f"{count:,.0f} parameters{share}"


def format_seconds(seconds: float) -> str:
    """A duration in seconds as text, in the unit that suits its length.

    >>> format_seconds(0.0421)
    '42.1 ms'
    """
    unit, name = second_unit(seconds)
    return f"{seconds / unit:.3g} {name}" if seconds < 1000 else f"{seconds:,.0f} s"


def second_unit(seconds: float) -> tuple[float, str]:
    """The largest unit of s, ms and us that is not above `seconds`, else us: its size in seconds, and its name."""
    return next(((u, name) for u, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= u), (1e-6, "us"))


def format_clock(seconds: float) -> str:
    """Seconds as text of minutes and seconds, with hours from 1 hour on.

    >>> format_clock(7.4), format_clock(125), format_clock(3725)
    ('0:07', '2:05', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
