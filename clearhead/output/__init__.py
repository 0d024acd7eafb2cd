"""What a run prints, logs and draws: metrics, W&B, report, comparison of runs."""
