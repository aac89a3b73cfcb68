"""The off-policy correction: how pi_proximal / pi_behaviour weighs tokens, and which ones leave the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from asyncrl.config.sections import Section

Bounds = tuple[float, float]

CAPS = ("token_tis", "sequence_tis", "geometric_tis")
"""Kinds that truncate: they have an upper bound alone."""
WEIGHT_BOUNDS: Mapping[str, Bounds] = {
    **dict.fromkeys(CAPS, (0.0, 2.0)),
    "token_mis": (0.5, 2.0),
    "sequence_mis": (0.5, 2.0),
    "geometric_mis": (0.99, 1.01),
    "icepop": (0.5, 5.0),
}
"""Default lower and upper bound of each kind."""
MASK_BOUNDS: Mapping[str, Bounds] = {
    "sequence": (0.5, 2.0),
    "geometric": (0.99, 1.01),
    "veto": (1e-4, float("inf")),
    "dppo_tv": (0.2, 0.2),
    "opsm": (0.0, 0.5),
}
"""Default lower and upper bound of each mask; opsm has an upper one alone."""
TRAJECTORY_LEVELS = ("sequence", "geometric")
"""First words of the correction kinds that weigh a token by its whole trajectory."""
TRAJECTORY_MASKS = ("sequence", "geometric", "veto", "opsm")
"""Masks that look at all tokens of a trajectory."""


class MaskConfig(Section):
    """Tokens or whole trajectories that leave the loss (policy loss, entropy bonus and KL), on top of the weight."""

    kind: Literal["sequence", "geometric", "veto", "dppo_tv", "opsm"]
    """`sequence`, `geometric`: trajectories whose ratio pi_proximal / pi_behaviour (product or geometric mean of its
    tokens') is out of bounds. `veto`: trajectories with any token's ratio out of bounds. `dppo_tv`: tokens whose
    probability has already moved too far in the advantage's direction. `opsm`: trajectories of negative advantage whose
    mean log pi_behaviour / pi_target is above `upper`."""
    lower: float | None = Field(default=None, ge=0)
    """Smallest ratio that is kept; for dppo_tv the largest fall of a probability. Nothing means 0.5 (sequence), 0.99
    (geometric), 1e-4 (veto), 0.2 (dppo_tv)."""
    upper: float | None = Field(default=None, gt=0)
    """Largest ratio that is kept; for dppo_tv the largest rise of a probability. Nothing means 2 (sequence), 1.01
    (geometric), no bound (veto), 0.2 (dppo_tv), 0.5 (opsm)."""

    @property
    def bounds(self) -> Bounds:
        return _filled(self.lower, self.upper, MASK_BOUNDS[self.kind])

    @model_validator(mode="after")
    def _keys_belong_to_the_kind(self) -> MaskConfig:
        where = f"algorithm.correction.masks: the {self.kind} mask"
        if self.kind == "opsm" and self.lower is not None:
            raise ValueError(f"{where} has no lower. Set upper instead")
        if self.kind not in ("dppo_tv", "opsm"):
            _check_bounds(where, self.bounds)
        return self


class CorrectionConfig(Section):
    """Off-policy correction: how pi_proximal / pi_behaviour weighs the policy loss.

    The ratio of a token, of its trajectory (the product), or the trajectory's geometric mean.
    """

    kind: Literal[
        "none",
        "token_tis",
        "sequence_tis",
        "geometric_tis",
        "token_mis",
        "sequence_mis",
        "geometric_mis",
        "icepop",
    ] = "token_tis"
    """`*_tis`: min(ratio, upper). `*_mis`, `icepop`: the ratio where it is within [lower, upper], else 0."""
    lower: float | None = Field(default=None, ge=0)
    """Smallest ratio that `*_mis` and icepop keep. Nothing means 0.5 (geometric_mis 0.99)."""
    upper: float | None = Field(default=None, gt=0)
    """Largest weight of `*_tis`, largest ratio that `*_mis` and icepop keep. Nothing means 2 (geometric_mis 1.01,
    icepop 5)."""
    masks: tuple[MaskConfig, ...] = ()
    """Any of them together, such as `[{kind: veto}, {kind: geometric, lower: 0.98}]`."""

    @property
    def trajectory_parts(self) -> list[str]:
        """The kind and the masks that are computed from whole trajectories, as `key value`."""
        parts = [f"algorithm.correction.kind {self.kind}"] if self.kind.startswith(TRAJECTORY_LEVELS) else []
        return parts + [f"the {mask.kind} mask" for mask in self.masks if mask.kind in TRAJECTORY_MASKS]

    @property
    def bounds(self) -> Bounds:
        return _filled(self.lower, self.upper, WEIGHT_BOUNDS[self.kind])

    def mask(self, kind: str) -> MaskConfig | None:
        return next((mask for mask in self.masks if mask.kind == kind), None)

    @model_validator(mode="after")
    def _makes_sense(self) -> CorrectionConfig:
        where = f"algorithm.correction.kind {self.kind}"
        if self.kind in CAPS and self.lower is not None:
            raise ValueError(f"{where} has no lower. Set algorithm.correction.upper instead")
        if self.kind == "none" and (self.lower is not None or self.upper is not None):
            raise ValueError(f"{where} has no lower and upper. Leave them out")
        if self.kind in WEIGHT_BOUNDS and self.kind not in CAPS:
            _check_bounds(where, self.bounds)
        kinds = [mask.kind for mask in self.masks]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise ValueError(f"algorithm.correction.masks names {', '.join(twice)} twice. Keep one")
        for level in ("sequence", "geometric"):
            if self.kind == f"{level}_mis" and level in kinds:
                raise ValueError(
                    f"{where} and the {level} mask both reject by the {level} ratio. Drop the mask, or set "
                    f"algorithm.correction.kind={level}_tis"
                )
        return self


def _filled(lower: float | None, upper: float | None, default: Bounds) -> Bounds:
    return (default[0] if lower is None else lower, default[1] if upper is None else upper)


def _check_bounds(where: str, bounds: Bounds) -> None:
    lower, upper = bounds
    if not lower < 1 < upper:
        raise ValueError(
            f"{where} keeps ratios within [{lower:g}, {upper:g}], which leaves out 1, the ratio of on-policy tokens. "
            "Set lower below 1 and upper above 1"
        )
