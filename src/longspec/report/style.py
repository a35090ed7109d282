"""Define one quiet look for every figure: matplotlib settings, and SVG whose colours are the page's CSS variables.

A figure is drawn in placeholder colours; each becomes `var(--name)`, so that the page's light and dark schemes colour
text, axes and series alike. Text stays text, in the page's own font.
"""

import io
import re
from contextlib import AbstractContextManager

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

WIDTH = 9.6  # inches; the page scales every figure to its own width
STAGES = 5  # number of colours for stages; further stages reuse them
NAMES = ("ink", "muted", "line", "paper", "untrained", "lookup", "imported", "with-lookup")
# Each CSS variable's placeholder colour, which occurs nowhere else in matplotlib's output.
COLOUR = {name: f"#0{n:x}0101" for n, name in enumerate([*NAMES, *(f"stage-{n + 1}" for n in range(STAGES))])}
DASHED = (0, (4, 2))

SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9.0,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.edgecolor": COLOUR["line"],
    "axes.labelcolor": COLOUR["muted"],
    "axes.titlecolor": COLOUR["ink"],
    "text.color": COLOUR["ink"],
    "xtick.color": COLOUR["line"],
    "ytick.color": COLOUR["line"],
    "xtick.labelcolor": COLOUR["muted"],
    "ytick.labelcolor": COLOUR["muted"],
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "grid.color": COLOUR["line"],
    "grid.linewidth": 0.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}


def quiet() -> AbstractContextManager[None]:
    """Apply the look to the figures drawn inside a block."""
    return matplotlib.rc_context(SETTINGS)


def drafter_colour(drafter: str, stages: list[str]) -> str:
    """Return a drafter's colour, the same in every figure: baselines have their own, stages get theirs by order."""
    if drafter in stages:
        return COLOUR[f"stage-{stages.index(drafter) % STAGES + 1}"]
    return COLOUR[drafter]


def panels(widths: list[float], height: float, *, common: bool = True) -> tuple[Figure, list[Axes]]:
    """Return a row of panels, with a common y axis or one each; height: inches; widths: relative."""
    figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.08, wspace=0.03))
    axes = figure.subplots(1, len(widths), sharey=common, squeeze=False, width_ratios=widths)
    return figure, list(axes[0])


def to_svg(figure: Figure, name: str, description: str) -> Markup:
    """Return the figure as an inline SVG element; ids differ between names, and equal figures give equal text."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.id": None}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    opening = re.search(r'viewBox="[^"]*"', text)
    assert opening is not None
    label = Markup(' role="img" aria-label="{}"').format(description)
    text = re.sub(r"^<svg[^>]*>", lambda _: f"<svg {opening.group()}{label}>", text, count=1)
    used = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda match: match.group() if match.group(1) in used else "", text)
    for variable, placeholder in COLOUR.items():
        text = text.replace(placeholder, f"var(--{variable})")
    return Markup(text)
