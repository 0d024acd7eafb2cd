"""The steps of scripts.attention_ladder, in this order: vectors, formulas, modules, mistakes."""
