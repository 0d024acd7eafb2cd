"""What benchmarks/training.py prints: its figures as text tables."""

TABLES = {
    "shipped": "As shipped: each as its own project runs it on this device",
    "equalised": "Equalised: the same precision for all, compiled where that is possible",
}


def header(results: dict) -> str:
    """Model, step, machine and versions."""
    where = f"{results['cores']} cores of {results['processor']}, threads: {results['threads']}"
    changed = ", with uncommitted changes" if results["uncommitted_changes"] else ""
    settings = results["settings"]
    versions = " ".join(f"{n} {results[n]}" for n in ("torch", "transformers") if n in results)
    return "\n".join(
        [
            f"{settings['model']}, {results['parameters']:,} parameters; a step has "
            f"{settings['batch_size']} windows of {settings['length']} tokens",
            f"on {results.get('gpu', where)}",
            f"{versions}; commit {results['commit']}{changed}",
        ]
    )


def equivalence_table(results: dict) -> str:
    lines = [f"{'Equivalence check in fp32':<32}{'loss':>14}{'gradient norm':>16}{'after':>14}"]
    for key, found in results["equivalence"].items():
        figures = f"{found['loss']:>14.6f}{found['grad_norm']:>16.6f}{found['loss_after']:>14.6f}"
        note = "  (its GELU set to tanh)" if found["own_gelu"] else ""
        lines.append(f"  {key:<30}{figures}{note}")
    return "\n".join(lines)


def roofline_table(roofline: dict) -> str:
    lines = ["Roofline                                 GFLOP/s   tokens/s"]
    for precision, found in roofline["products"].items():
        shape = " x ".join(map(str, found["best_shape"]))
        for words, rate, speed in (
            (f"{precision}, best: {shape}", found["best"], found["best_tokens_per_second"]),
            (f"{precision}, the step's own", found["own"], found["own_tokens_per_second"]),
        ):
            lines.append(f"  {words:<36}{rate / 1e9:>10,.0f}{speed:>11,.0f}")
    return "\n".join([*lines, f"  copying memory: {roofline['copy'] / 1e9:,.1f} GB/s"])


def speed_table(name: str, rows: list[dict]) -> str:
    """Options, step times and speedups of all variants of one table."""
    parts = [TABLES[name], _options(rows), "", _times(rows)]
    return "\n".join(parts + (["", _speedups(rows)] if len(rows) > 1 else []))


def _options(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        options = {
            row["precision"]: True,
            "compiled": row["compiled"],
            "fused AdamW": row["fused_adamw"],
            "freed memory kept": row["freed_memory_kept"],
            "padded vocabulary": row["vocabulary_padded"],
            "TF32": row["tf32"],
        }
        lines.append(f"  {row['name']:<26}{', '.join(text for text, on in options.items() if on)}")
    return "\n".join(lines)


def _times(rows: list[dict]) -> str:
    """The last column is peak memory on a GPU, and page faults on a CPU."""
    with_roofline = "share_of_best" in rows[0]
    with_peak = any("peak_memory_bytes" in row for row in rows)
    head = f"  {'':<26}{'first, s':>9}{'ms a step':>11}{'quartiles':>18}{'tokens/s':>10}"
    head += f"{'of best':>8}{'of own':>7}" if with_roofline else ""
    lines = [head + f"{'GB' if with_peak else 'faults':>9}"]
    for row in rows:
        step = row["step_seconds"]
        quartiles = f"{1e3 * step['lower_quartile']:,.1f}-{1e3 * step['upper_quartile']:,.1f}"
        line = f"  {row['name']:<26}{row['first_step_seconds']:>9.1f}{1e3 * step['median']:>11,.1f}"
        line += f"{quartiles:>18}{row['tokens_per_second']:>10,.0f}"
        if with_roofline:
            line += f"{row['share_of_best']:>8.0%}{row['share_of_own']:>7.0%}"
        if with_peak:
            line += f"{row['peak_memory_bytes'] / 1e9:>9.1f}"
        else:
            line += f"{row['page_faults_per_step']:>9,.0f}"
        lines.append(line)
    return "\n".join(lines)


def _speedups(rows: list[dict]) -> str:
    subjects = [row for row in rows if row["project"] == "ours"] or rows[:1]
    heads = "".join(f"{subject['name'] + ' is':>24}" for subject in subjects)
    lines = [f"  {'N times as fast as':<26}{heads}"]
    for row in rows:
        if row in subjects and len(subjects) == 1:
            continue
        line = f"  {row['name']:<26}"
        for subject in subjects:
            found = subject["times_as_fast_as"].get(row["name"])
            words = "{median:.2f} ({least:.2f}-{most:.2f})".format(**found) if found else ""
            line += f"{words:>24}"
        lines.append(line.rstrip())
    return "\n".join(lines)
