"""The picture of a replay: hit rate over requests, restarts marked, bytes resident."""

from __future__ import annotations

import numpy as np

from .replay import Curve

WINDOW_REQUESTS = 200


def draw(curve: Curve, path: str, title: str) -> None:
    """Write the picture to `path`; its ending says the format. Needs matplotlib. Raises OSError, ValueError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    hits, refs = np.array(curve.hits, float), np.array(curve.refs, float)
    x = np.arange(1, len(hits) + 1)
    window = min(WINDOW_REQUESTS, len(hits))
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    recent = _moving_sum(hits, window) / np.maximum(1, _moving_sum(refs, window))
    top.plot(x, 100 * recent, color="tab:blue", linewidth=0.8, alpha=0.6, label=f"last {window} requests")
    top.plot(x, 100 * np.cumsum(hits) / np.maximum(1, np.cumsum(refs)), color="tab:blue", label="since the start")
    for i, request in enumerate(curve.restarts):
        for axes in (top, bottom):
            axes.axvline(request, color="tab:red", linestyle="--", linewidth=1, label=None if i else "worker killed")
    top.set_ylabel("blocks hit, %")
    top.set_ylim(bottom=0)
    top.set_title(title)
    top.legend(loc="best", frameon=False)
    bottom.plot(x, np.array(curve.resident_bytes) / 2**20, color="tab:green")
    bottom.set_ylabel("resident, MiB (all ranks)")
    bottom.set_xlabel("request")
    bottom.set_ylim(bottom=0)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)


def _moving_sum(values: np.ndarray, window: int) -> np.ndarray:
    total = np.cumsum(values)
    total[window:] = total[window:] - total[:-window]
    return total
