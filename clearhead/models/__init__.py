"""Trained models: Hugging Face in and out, decoding, perplexity, removal of heads."""
