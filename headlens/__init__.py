"""The attention lens: statistics, heatmaps and an interactive page of a model's attention heads.

The folder imports no other package of this repository, so you can copy it into another project.

    from headlens import Lens, capture, show

    captured = capture(model, input_ids)  # our GPT, or a decoder of transformers
    captured.layers[3].weights  # (B, H, T, T)

    lens = Lens(tokenizer, context_length=1024, max_steps=1000, text=validation_text)
    if lens.due(step):
        lens.snapshot(model, step)  # writes data, images and pages to attention/

In reading order: config.py (settings), tokens.py (what the lens needs of a tokenizer), prompts.py
(prompts), passages.py (prompts from a text), capturing.py (attention weights of a model),
statistics.py (statistics of heads), text.py (heads on whole text), predictions.py (what the model
predicts), probe.py (all of this at one step), history.py (statistics of all snapshots), heads.py
(names of heads), copying.py (when the model learns to copy), snapshot_data.py (a snapshot as a
file), rounding.py (digits of numbers), heatmap.py, fonts.py, panel.py, figure.py and animation.py
(images), ablation.py (what a head is good for), page/ and assemble.py (the interactive page),
render.py (images and pages from snapshot files), snapshots.py (attention snapshots during
training), trainer.py (of transformers' Trainer), notebook.py (the page in a notebook), live.py (the
data of a page that follows a run). matching.py finds the heads that several runs have in common.
"""

import importlib

_PLACES = {
    "capture": "capturing",
    "Captured": "capturing",
    "LayerAttention": "capturing",
    "lens_tokenizer": "tokens",
    "LensConfig": "config",
    "Lens": "lens",
    "Snapshot": "lens",
    "SnapshotData": "snapshot_data",
    "read_snapshot": "snapshot_data",
    "write_snapshot": "snapshot_data",
    "write_page": "render",
    "render_run": "render",
    "show": "notebook",
    "draw_figure": "figure",
    "clearest_prompt": "lens",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> object:
    """Imports a public name when it is used: torch and matplotlib take seconds."""
    if name in _PLACES:
        return getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
