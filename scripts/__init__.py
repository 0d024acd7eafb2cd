"""Commands: python -m scripts.NAME."""
