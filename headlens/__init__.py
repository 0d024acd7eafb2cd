"""The attention lens: statistics, heatmaps and an interactive page of a model's attention heads.

The folder imports no other package of this repository, so you can copy it into another project.

    from headlens import Lens, capture, show

    captured = capture(model, input_ids)  # our GPT, or a decoder of transformers
    captured.layers[3].weights  # (B, H, T, T)

    lens = Lens(tokenizer, context_length=1024, max_steps=1000, text=validation_text)
    if lens.due(step):
        lens.snapshot(model, step)  # writes data, images and pages to attention/

docs/reference.md describes the public names below, and headlens.trainer has LensCallback, which
needs transformers. All else may change. In reading order: capturing.py, observing.py and proof.py
(weights of a model), statistics.py, whole_text.py and recording.py (what is measured of the heads
at one step), heads.py (their names), history.py and snapshot_data.py (files), lens.py (snapshots
during training), drawing.py, render.py and page/ (images and pages), dashboard.py (W&B),
projections.py and ablation.py (what the model loses without a head), parts.py (what wrote an
attention score).
"""

# ruff: noqa: F401
import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ablation import head_removal, mean_contexts
    from .arrays import from_arrays
    from .capturing import Captured, LayerAttention, capture
    from .config import DEFAULT_PROMPTS, LensConfig
    from .dashboard import define_wandb_metrics, wandb_values
    from .drawing import draw_figure
    from .heads import KINDS, as_csv
    from .lens import Lens, Snapshot
    from .live_snapshots import LiveSnapshots
    from .matching import matched_heads
    from .page import live_data, live_page, page_html, run_data, trainer_curves
    from .parts import ScoreParts, score_parts
    from .passages import beginning, text_prompts
    from .proof import Proof
    from .reading import Reader, Reading
    from .render import FRAMES, draw_run, folder_page, show, write_page
    from .rounding import formatted, rounded
    from .snapshot_data import (
        SnapshotData,
        last_snapshot,
        read_snapshot,
        snapshot_bytes,
        write_snapshot,
    )
    from .statistics import STATISTICS
    from .tokens import LensTokenizer, lens_tokenizer

# {name: file}, read from the imports above, which only type checkers run: torch takes seconds to
# import, so a file is imported when one of its names is used.
_PLACE_OF = {
    alias.name: statement.module
    for statement in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(statement, ast.ImportFrom) and statement.level
    for alias in statement.names
}
__all__ = list(_PLACE_OF)


def __getattr__(name: str) -> object:
    """Imports a public name."""
    if name in _PLACE_OF:
        return getattr(importlib.import_module(f".{_PLACE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
