"""What the passes of a segment depend on beside its function: one value that makes, shares and prices them."""

from attrs import evolve, frozen

from zfunc.core.pipeline import R, W
from zfunc.core.setting_values import Recompute
from zfunc.core.spec import StepSpec


@frozen
class PassOptions:
    """What the forward and backward of a segment depend on beside its function. Segments with the same
    function and equal options share traces.

    - `wrt_input`: backward returns the gradient of the input, too; `last`: the segment returns the loss.
    - `moving`: weights and inputs are in other memory in backward than in forward, and the old memory is
      reused.
    - `split`: backward is divided into one for the input and one for the weights; `ahead`: what backward
      recomputes is made in a separate pass before it.
    - `compiled`: `torch.compile` compiles each pass, in the mode that is named, if any.
    - `tiles`: the number of tiles that rows of tokens are divided into; `keys_on_host`: their keys and values
      are in host memory.
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
        """These options without those that change no cost: `moving` costs only with min-cut, a split backward
        or an early recomputation."""
        parts = self.split or self.ahead
        return evolve(self, moving=self.moving and (parts or self.recompute == "min-cut"))


def pass_options(spec: StepSpec) -> tuple[PassOptions, ...]:
    """The options with which forward and backward of each segment are made for a step of `spec`."""
    settings, parts, first = spec.settings, spec.mesh.parts, spec.layout.first_trainable
    alike = settings.compile_segments, settings.tiles, settings.keys_on == "host"
    return tuple(
        PassOptions(
            mode, s > first, spec.is_last(s), settings.moves, (W, s) in parts, (R, s) in parts, *alike
        )
        for s, mode in enumerate(settings.recompute_modes(spec.num_segments))
    )
