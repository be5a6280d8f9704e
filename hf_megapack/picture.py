"""Draw packed rows to scale with matplotlib, which is fetched only when something is drawn.

A segment is a box at the level of its depth, and a pale strip reaches from it as far as its slots are seen: what hangs
below a strip shares the prefix. Everything is read off the batch; what a report counts is not counted here again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_megapack.batch import PackedBatch, PackedRow
from hf_megapack.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue against orange is told apart by every common kind of colour vision; lightness alone orders the blues.
_ROOT_COLOUR, _LEAF_COLOUR = "#0B3C6F", "#A9D3F0"
_LEARNED_COLOUR, _PADDING_COLOUR, _INK = "#D55E00", "#E3E3E3", "#222222"
_WIDTH_INCHES, _LEFT_INCHES, _RIGHT_INCHES = 16.0, 1.45, 2.25
_HEADER_INCHES, _FOOTER_INCHES = 1.1, 0.65
_DOTS_PER_INCH = 100
# Below the tree of each row: a gap, the strip of learned slots, a gap to the next row.
_GAP_INCHES, _STRIP_INCHES, _NEXT_INCHES = 0.04, 0.12, 0.18
_LEGEND_DEPTHS = 5


def require_matplotlib() -> None:
    """Check that pictures can be drawn.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401 - an optional dependency
    except ImportError:
        raise ConfigError(
            "drawing packed rows needs matplotlib, which is not installed: pip install matplotlib, or install "
            "hf_megapack[inspect]"
        ) from None


def check_picture_name(name: str) -> None:
    """Check that a picture can be written under a name.

    Args:
        name: File, whose ending says what kind of picture it is.

    Raises:
        ConfigError: If matplotlib is not installed, the ending is of no kind that it writes, or there is no folder.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    # Without an ending matplotlib would write a file of another name.
    if Path(name).suffix.removeprefix(".").lower() not in kinds:
        raise ConfigError(
            f"picture {name!r} cannot be written: its name must end in one of .{', .'.join(sorted(kinds))}"
        )
    if not Path(name).parent.is_dir():
        raise ConfigError(f"there is no folder {Path(name).parent} for the picture")


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class _Run:
    """One row as some rank runs it."""

    update: int
    rank: int
    row_index: int
    row: PackedRow
    is_dummy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Sizes that all rows share; the axes count slots to the right and inches down.

    Attributes:
        row_inches: From the top of one row to the top of the next.
        slots_per_dot: Slots in a dot of the picture.
    """

    row_inches: float
    slots_per_dot: float

    @property
    def tree_inches(self) -> float:
        """Height of all levels of a row's tree together."""
        return self.row_inches - _GAP_INCHES - _STRIP_INCHES - _NEXT_INCHES

    @property
    def strip(self) -> tuple[float, float]:
        """Top and bottom of the strip of learned slots, from the top of its row."""
        top = self.tree_inches + _GAP_INCHES
        return top, top + _STRIP_INCHES


def plot_rows(
    batches: Sequence[PackedBatch], *, title: str, details: str, capacity: int | None, max_rows: int
) -> "Figure":
    """Draw the rows of some updates in the order in which the ranks run them.

    Args:
        batches: The updates.
        title: First line of the header.
        details: Second line of the header.
        capacity: Slots that a row may hold, to be marked; None leaves it out.
        max_rows: Most rows to draw, dummies included; the axis says how many there are.

    Returns:
        A picture 1,600 dots wide; pyplot does not hold on to it.

    Raises:
        ConfigError: If matplotlib is not installed, or `max_rows` is below 1.
    """
    require_matplotlib()
    # pyplot, not a bare Figure: importing it is what makes notebooks show figures.
    from matplotlib import pyplot

    if max_rows < 1:
        raise ConfigError(f"max_rows is {max_rows}; it must be at least 1")
    runs = list(_runs(batches))
    shown = runs[:max_rows]
    depths = [_segment_depths(run.row.segments.parent) for run in shown]
    num_levels = 1 + max(int(depth.max()) for depth in depths)
    colours = _depth_colours(num_levels)
    # Few rows may be tall, the taller the deeper.
    row_inches = float(np.clip(7.0 / len(shown), 0.95, np.clip(0.25 * num_levels, 2.2, 5.0)))
    height = _HEADER_INCHES + _FOOTER_INCHES + row_inches * len(shown)
    figure = pyplot.figure(figsize=(_WIDTH_INCHES, height), dpi=_DOTS_PER_INCH, facecolor="white")
    pyplot.close(figure)
    axes = figure.add_axes(
        (
            _LEFT_INCHES / _WIDTH_INCHES,
            _FOOTER_INCHES / height,
            1 - (_LEFT_INCHES + _RIGHT_INCHES) / _WIDTH_INCHES,
            row_inches * len(shown) / height,
        )
    )
    num_slots = _set_up_axes(axes, shown, row_inches, num_runs=len(runs), capacity=capacity)
    axes_dots = _DOTS_PER_INCH * (_WIDTH_INCHES - _LEFT_INCHES - _RIGHT_INCHES)
    scale = _Scale(row_inches=row_inches, slots_per_dot=num_slots / axes_dots)
    for index, (run, depth) in enumerate(zip(shown, depths, strict=True)):
        top = index * row_inches
        _draw_tree(axes, top, run.row, depth, colours, scale)
        _draw_marks(axes, top, run, scale)
        if not run.is_dummy:
            _label_segments(axes, top, run.row, depth, colours, scale)
    x = _LEFT_INCHES / _WIDTH_INCHES
    figure.text(x, 1 - 0.36 / height, title, fontsize=15, fontweight="bold", color=_INK)
    figure.text(x, 1 - 0.62 / height, details, fontsize=10.5, color=_INK)
    handles = _legend_handles(shown, colours)
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(x, 1 - 0.72 / height),
        ncols=len(handles),
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        fontsize=9.5,
        columnspacing=1.4,
        handlelength=1.6,
    )
    return figure


def _runs(batches: Sequence[PackedBatch]) -> Iterator[_Run]:
    for update, batch in enumerate(batches):
        for rank, microbatches in enumerate(batch.schedule.row_index.tolist()):
            for microbatch, row_index in enumerate(microbatches):
                yield _Run(
                    update=update,
                    rank=rank,
                    row_index=row_index,
                    row=batch.rows[row_index],
                    is_dummy=bool(batch.schedule.is_dummy[rank, microbatch]),
                )


def _segment_depths(parent: np.ndarray) -> np.ndarray:
    """Return how many segments are above each."""
    depths: list[int] = []
    for above in parent.tolist():
        depths.append(0 if above < 0 else depths[above] + 1)
    return np.asarray(depths)


def _depth_colours(num_depths: int) -> np.ndarray:
    """Return a colour per depth, from dark to light. RGB, shape (num_depths, 3)."""
    from matplotlib.colors import to_rgb

    root, leaf = np.asarray(to_rgb(_ROOT_COLOUR)), np.asarray(to_rgb(_LEAF_COLOUR))
    return root + np.linspace(0.0, 1.0, num_depths)[:, None] * (leaf - root)


def _set_up_axes(axes: "Axes", shown: Sequence[_Run], row_inches: float, *, num_runs: int, capacity: int | None) -> int:
    """Scale and label the axes, with the numbers of each row beside it; return how many slots they span."""
    longest = max(run.row.input_ids.size for run in shown)
    # A capacity far beyond the rows would squeeze them into a corner.
    is_near = capacity is not None and capacity <= 2 * longest
    num_slots = max(longest, capacity) if is_near else longest
    axes.set_xlim(0, num_slots)
    axes.set_ylim(row_inches * len(shown), -0.05)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    several_ranks, several_updates = any(run.rank for run in shown), any(run.update for run in shown)
    names = []
    for run in shown:
        name = [f"update {run.update}"] if several_updates else []
        name += [f"rank {run.rank}"] if several_ranks else []
        names.append("\n".join([", ".join(name), f"row {run.row_index}"]).strip())
    middles = (np.arange(len(shown)) + 0.5) * row_inches - _NEXT_INCHES / 2
    axes.set_yticks(middles, names, color=_INK)
    for middle, run in zip(middles.tolist(), shown, strict=True):
        axes.annotate(
            _row_note(run),
            (1.0, middle),
            xycoords=("axes fraction", "data"),
            xytext=(12, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=_INK,
        )
    label = "slots (in a box: slots x examples that share them)"
    if is_near:
        axes.axvline(capacity, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)), clip_on=False, gid="capacity")
        label += f"; dashed: capacity {capacity:,}"
    elif capacity is not None:
        label += f"; capacity {capacity:,} is far to the right"
    if num_runs > len(shown):
        label += f"; the first {len(shown)} of {num_runs:,} rows"
    axes.set_xlabel(label, fontsize=10, color=_INK)
    return num_slots


def _row_note(run: _Run) -> str:
    if run.is_dummy:
        return f"dummy: row {run.row_index} again,\ncounts for nothing"
    table = run.row.segments
    num_tokens = int(((table.end - table.start) * np.diff(table.example_offsets)).sum())
    num_slots, num_examples = run.row.input_ids.size, np.unique(table.examples).size
    examples = f"{num_examples} example" + ("s" if num_examples > 1 else "")
    return f"{num_slots:,} slots, {examples}\n{num_tokens:,} tokens\n{num_tokens / num_slots:.2f} per slot"


def _draw_tree(axes: "Axes", top: float, row: PackedRow, depth: np.ndarray, colours: np.ndarray, scale: _Scale) -> None:
    """Draw the segments, and behind each the strip of slots that see it."""
    table = row.segments
    level = scale.tree_inches / (1 + int(depth.max()))
    upper, lower = top + depth * level, top + (depth + 1) * level
    has_below = np.isin(np.arange(depth.size), table.parent)
    reach = row.subtree_end[table.start]
    _add_boxes(
        axes,
        table.end[has_below],
        reach[has_below],
        upper[has_below],
        lower[has_below],
        gid="reach",
        facecolors=1 - 0.22 * (1 - colours[depth[has_below]]),
    )
    _add_boxes(
        axes,
        table.start,
        table.end,
        upper,
        lower,
        gid="segments",
        facecolors=colours[depth],
        edgecolors="white",
        # A white edge would hide a box that is hardly wider.
        linewidths=np.where(table.end - table.start > 3 * scale.slots_per_dot, 0.4, 0.0),
    )


def _draw_marks(axes: "Axes", top: float, run: _Run, scale: _Scale) -> None:
    """Draw the strip of learned slots, padding, and the hatching of a dummy."""
    row = run.row
    num_slots = row.input_ids.size
    upper, lower = top + scale.strip[0], top + scale.strip[1]
    _add_boxes(axes, [0], [num_slots], upper, lower, gid="strip", facecolors="#F2F2F2")
    # The edge keeps a run visible that is narrower than a dot.
    learned = _runs_of(row.loss_weights > 0)
    style: dict[str, Any] = {"facecolors": _LEARNED_COLOUR, "edgecolors": _LEARNED_COLOUR, "linewidths": 0.7}
    _add_boxes(axes, *learned, upper, lower, gid="learned", **style)
    owned = np.zeros(num_slots, dtype=bool)
    for start, end in zip(row.segments.start.tolist(), row.segments.end.tolist(), strict=True):
        owned[start:end] = True
    style = {"facecolors": _PADDING_COLOUR, "edgecolors": "#9A9A9A", "hatch": "....", "linewidths": 0.0}
    _add_boxes(axes, *_runs_of(~owned), top, lower, gid="padding", **style)
    if run.is_dummy:
        style = {"facecolors": (1, 1, 1, 0.6), "edgecolors": "#555555", "hatch": "//", "linewidths": 0.8}
        _add_boxes(axes, [0], [num_slots], top, lower, gid="dummies", **style)


def _add_boxes(axes: "Axes", left: Any, right: Any, upper: Any, lower: Any, *, gid: str, **style: Any) -> None:
    """Add one collection of rectangles; scalars hold for all of them."""
    from matplotlib.collections import PolyCollection

    left, right, upper, lower = np.broadcast_arrays(left, right, upper, lower)
    corners = ((left, upper), (right, upper), (right, lower), (left, lower))
    boxes = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    axes.add_collection(PolyCollection(boxes, gid=gid, **style), autolim=False)


def _runs_of(marked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return first slot and first slot after each run of marked slots."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marked, [False]]).astype(np.int8)))
    return edges[::2], edges[1::2]


def _label_segments(
    axes: "Axes", top: float, row: PackedRow, depth: np.ndarray, colours: np.ndarray, scale: _Scale
) -> None:
    """Write length and number of owners into the boxes that have room."""
    table = row.segments
    level = scale.tree_inches / (1 + int(depth.max()))
    if level * _DOTS_PER_INCH < 13:
        return
    num_owners = np.diff(table.example_offsets)
    for index, (start, end) in enumerate(zip(table.start.tolist(), table.end.tolist(), strict=True)):
        shared = f" x {num_owners[index]}" if num_owners[index] > 1 else ""
        room = (end - start) / scale.slots_per_dot
        text = next((text for text in (f"{end - start:,}{shared}", shared[1:]) if 6.6 * len(text) + 6 <= room), "")
        if text:
            is_dark = colours[depth[index]].mean() < 0.55
            axes.text(
                (start + end) / 2,
                top + (depth[index] + 0.5) * level,
                text,
                ha="center",
                va="center_baseline",
                fontsize=8.5,
                color="white" if is_dark else _INK,
            )


def _legend_handles(shown: Sequence[_Run], colours: np.ndarray) -> list[Any]:
    """Return legend entries for what the picture shows."""
    from matplotlib.patches import Patch

    picked = np.unique(np.linspace(0, len(colours) - 1, _LEGEND_DEPTHS).round().astype(int))
    handles = [Patch(facecolor=colours[depth], label=f"depth {depth}") for depth in picked.tolist()]
    if len(colours) > 1:
        handles.append(Patch(facecolor=1 - 0.22 * (1 - colours[0]), label="prefix reused here"))
    handles.append(Patch(facecolor=_LEARNED_COLOUR, label="loss-bearing"))
    if any(run.row.num_padding_slots or _has_gaps(run.row) for run in shown):
        handles.append(Patch(facecolor=_PADDING_COLOUR, edgecolor="#9A9A9A", hatch="....", label="padding"))
    if any(run.is_dummy for run in shown):
        handles.append(Patch(facecolor="white", edgecolor="#555555", hatch="///", label="dummy"))
    return handles


def _has_gaps(row: PackedRow) -> bool:
    return int((row.segments.end - row.segments.start).sum()) < row.input_ids.size
