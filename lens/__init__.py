"""The lens: statistics, heatmaps and an interactive page of a model's attention heads.

It imports nothing from outside this folder, so the folder can be copied into another project. All
it needs is a function that runs the model and passes on each layer's attention weights:

    def capture_attention(token_ids, capture):  # of a transformers model with eager attention
        output = model(torch.tensor([token_ids]), output_attentions=True)
        for layer, attn_weights in enumerate(output.attentions):
            capture(layer, attn_weights)

    from lens.config import LensConfig
    from lens.snapshots import Lens

    lens = Lens(LensConfig(), tokenizer.encode, token_bytes, context_length=1024)
    snapshot = lens.snapshot(capture_attention, step=100, max_steps=1000, folder=Path("attention"))

In reading order: config.py (settings), statistics.py (one number for each head), probe.py (prompts;
running the model), history.py (statistics over the steps), heatmap.py (PNG pictures), page/ and
assemble.py (the interactive page), snapshots.py (all of it at a step of training).
"""
