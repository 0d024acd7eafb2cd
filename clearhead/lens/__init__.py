"""The attention lens: statistics, heatmaps and an interactive page of a model's attention heads.

The folder imports no other package of this repository, so you can copy it into another project. You
provide a function that runs the model and calls `capture` with the attention weights of each layer:

    def capture_attention(token_ids, capture):  # of a transformers model with eager attention
        output = model(torch.tensor([token_ids]), output_attentions=True)
        for layer, attn_weights in enumerate(output.attentions):
            capture(layer, attn_weights)
        return output.logits

    from clearhead.lens import Lens, LensConfig

    lens = Lens(LensConfig(), tokenizer.encode, token_bytes, context_length=1024)
    snapshot = lens.snapshot(capture_attention, step=100, max_steps=1000, folder=Path("attention"))

In reading order: config.py (settings), statistics.py (statistics of heads), probe.py (prompts and
forward pass), predictions.py (what the model predicts), history.py (statistics of all snapshots),
heads.py (names of heads), stages.py (when the model learns to copy), snapshot_data.py (a snapshot
as a file), rounding.py (digits of numbers), heatmap.py, panel.py, figure.py and animation.py
(images), ablation.py (what a head is good for), page/ and assemble.py (the interactive page),
render.py (images and pages from snapshot files), snapshots.py (attention snapshots during
training). matching.py, matching_runs.py and matching_page/ find the heads that several runs have in
common.
"""

import importlib

_PLACES = {
    "LensConfig": "config",
    "Lens": "snapshots",
    "Snapshot": "snapshots",
    "SnapshotData": "snapshot_data",
    "read_snapshot": "snapshot_data",
    "write_snapshot": "snapshot_data",
    "write_page": "render",
    "render_run": "render",
    "draw_figure": "figure",
    "clearest_prompt": "snapshots",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> object:
    """Imports a public name when it is used: torch and matplotlib take seconds."""
    if name in _PLACES:
        return getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
