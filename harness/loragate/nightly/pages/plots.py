"""Small plots of the nights as inline SVG: coordinates only, the template draws. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loragate.nightly.morning import Night, day_of

WIDTH, HEIGHT = 320.0, 80.0
# more would be narrower than a pixel
_MOST = 90


@dataclass(frozen=True, slots=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """`top`: the value at the upper edge, as text."""

    title: str
    top: str
    bars: tuple[Bar, ...]


def plots(nights: Sequence[Night]) -> tuple[Plot, ...]:
    """Trends of the last nights; none before the second one."""
    if len(nights) < 2:
        return ()
    last = nights[-_MOST:]
    odd = [1000 * night.suspects / night.trials for night in last]
    return (
        _plot("not right, of 1000 trials", last, odd, "{:.3g}"),
        _plot("trials", last, [float(night.trials) for night in last], "{:.0f}"),
        _plot("seconds of trials", last, [night.seconds for night in last], "{:.0f}"),
    )


def _plot(title: str, nights: Sequence[Night], values: Sequence[float], shown: str) -> Plot:
    top = max(values)
    step = WIDTH / len(nights)
    bars = []
    for k, (night, value) in enumerate(zip(nights, values, strict=True)):
        height = HEIGHT * value / top if top else 0.0
        label = f"{day_of(night.run.started_at)} {night.run.machine}: {shown.format(value)}"
        bars.append(
            Bar(
                x=round(k * step, 2),
                y=round(HEIGHT - height, 2),
                width=round(max(0.5, step - 1), 2),
                height=round(height, 2),
                label=label,
            )
        )
    return Plot(title, shown.format(top), tuple(bars))
