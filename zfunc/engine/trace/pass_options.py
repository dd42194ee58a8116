"""What the passes of a segment depend on beside its function: one value that makes, shares and prices them."""

from attrs import evolve, frozen

from zfunc.core.pipeline import R, W
from zfunc.core.setting_values import Recompute
from zfunc.core.spec import StepSpec


@frozen
class PassOptions:
    """The options of a segment's passes. Segments of one function with equal options share passes and traces.

    - `wrt_input`: backward returns the gradient of the input, too; `last`: the segment returns the loss.
    - `moving`: backward gets weights and inputs in other memory than forward, which is filled anew meanwhile.
    - `split`: backward comes in two halves; `ahead`: a pass before backward makes what it recomputes.
    - `compiled`: `torch.compile` compiles each pass, in the mode that is named, if any.
    - `tiles`: the number of tiles in which rows of tokens pass; `keys_on_host`: their keys and values are there.
    """

    recompute: Recompute
    wrt_input: bool = True
    last: bool = False
    moving: bool = False
    split: bool = False
    ahead: bool = False
    compiled: bool | str = False
    tiles: int = 1
    keys_on_host: bool = False

    @property
    def priced(self) -> "PassOptions":
        """These options as costs depend on them: `moving` costs only with min-cut, a split or an early
        recompute."""
        parts = self.split or self.ahead
        return evolve(self, moving=self.moving and (parts or self.recompute == "min-cut"))


def pass_options(spec: StepSpec) -> tuple[PassOptions, ...]:
    """The options of the passes of each segment in a step of `spec`."""
    settings, parts, first = spec.settings, spec.mesh.parts, spec.layout.first_trainable
    alike = settings.compile_segments, settings.tiles, settings.keys_on == "host"
    return tuple(
        PassOptions(
            mode, s > first, spec.is_last(s), settings.moves, (W, s) in parts, (R, s) in parts, *alike
        )
        for s, mode in enumerate(settings.recompute_modes(spec.num_segments))
    )
