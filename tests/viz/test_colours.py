"""Colours of verbs: alike in hue where verbs are of a kind, and told apart wherever two are in one picture.

Told apart by everyone: a picture is also looked at as those see it who lack one kind of cones, by the matrices of
Machado, Oliveira and Fernandes (2009, "A physiologically-based model for simulation of color vision deficiency",
table of severity 1.0), which are of linear RGB. Distances are those of CIELAB (CIE 1976, D65): 2.3 is just
noticeable.
"""

from itertools import combinations

import numpy as np
import pytest
from table import RECIPES, SPECS, graph_of

from zfunc.core.moves import MOVES
from zfunc.core.ops import VERBS
from zfunc.viz.legend import PALETTE, colour_of

BUILT_IN = [*VERBS, *MOVES]
LEAST = 7.0  # between two verbs of a picture, and for normal vision:
LEAST_OF_ALL_CONES = 12.0
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = [
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
]
WHITE = [0.95047, 1.0, 1.08883]


def lab(colour: str, vision: str = "normal") -> np.ndarray:
    """CIELAB of #rrggbb (sRGB, IEC 61966-2-1)."""
    rgb = np.array([*bytes.fromhex(colour[1:])]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISIONS[vision]) @ linear, 0.0, 1.0)
    x, y, z = (f(t) for t in np.array(XYZ) @ seen / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def f(t: float) -> float:
    return t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29


def pairs() -> set[tuple[str, str]]:
    """Verbs that one graph of the table has; one that none has may be beside any."""
    pictures = [{op.verb for op in graph_of(recipe, name)} for recipe in RECIPES for name in SPECS]
    seen = set[str]().union(*pictures)
    alone = [{verb, other} for verb in BUILT_IN if verb not in seen for other in BUILT_IN]
    return {pair for verbs in (*pictures, *alone) for pair in combinations(sorted(verbs & {*BUILT_IN}), 2)}


@pytest.mark.parametrize("vision", VISIONS)
def test_any_two_verbs_of_a_picture_can_be_told_apart(vision: str) -> None:
    seen = {verb: lab(colour_of(verb), vision) for verb in BUILT_IN}
    apart = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in pairs()}
    assert len(apart) > 1_000
    least = LEAST_OF_ALL_CONES if vision == "normal" else LEAST
    assert {pair: d for pair, d in apart.items() if d < least} == {}


def test_distances_are_those_of_the_standard() -> None:
    """Red, by the tables of Lindbloom; white and black have no colour, and nobody sees any in a grey."""
    assert lab("#ff0000") == pytest.approx([53.24, 80.09, 67.20], abs=0.02)
    for vision in VISIONS:
        for grey, lightness in (("#000000", 0.0), ("#ffffff", 100.0), ("#777777", 50.03)):
            assert lab(grey, vision) == pytest.approx([lightness, 0.0, 0.0], abs=0.05)


def test_every_built_in_verb_has_a_colour_of_a_kind_and_a_kind_has_a_hue() -> None:
    assert sorted(verb for kind in PALETTE.values() for verb in kind) == sorted(BUILT_IN)
    for kind, colours in PALETTE.items():
        a, b = np.array([lab(colour)[1:] for colour in colours.values()]).T
        hues = np.angle(np.outer(a + 1j * b, a - 1j * b), deg=True)
        assert abs(hues).max() < 45, kind
