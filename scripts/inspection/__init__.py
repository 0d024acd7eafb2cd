"""Parts of scripts.inspect_attention: its settings, and on what heads are measured."""
