"""The page of matched heads: one self-contained HTML file without scripts.

    html = page(runs, groups, pairs)  # see lens/matching.py

The page has a table for each layer: a row for each group of matched heads, a column for each run.
lens/assemble.py joins index.html and style.css of this folder; this file writes the content.
"""

import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from ..assemble import assemble, content_security_policy
from ..heads import prompt_of, title_of
from ..heatmap import data_url
from ..matching import Group, mean_similarity
from ..matching_runs import MatchedRun, group_title
from ..rounding import formatted

THUMBNAIL = 64  # pixels


def page(runs: Sequence[MatchedRun], groups: Sequence[Group], pairs: np.ndarray) -> str:
    """Returns the page as HTML. groups: match_heads(pairs)."""
    num_layers, num_heads = pairs.shape[2:4]
    layers = [[group for group in groups if group.layer == n] for n in range(num_layers)]
    in_all = [group for group in groups if len(group.members) == len(runs)]
    counts = Counter(group_title(group, runs) for group in in_all).most_common()
    names = ", ".join(f"{count} × {name}" for name, count in counts)
    template = assemble(Path(__file__).parent / "index.html")
    parts = {
        "CSP": content_security_policy(template.encode()),
        "TITLE": f"Heads of {len(runs)} runs",
        "FOUND": f"{len(in_all)} of {num_layers * num_heads} heads occur in each of the"
        f" {len(runs)} runs",
        "NAMES": escape(names),
        "PROMPTS": "".join(f"<li>{escape(text)}</li>" for text in runs[0].texts),
        "OVERVIEW": "".join(_overview(of_layer, runs) for of_layer in layers),
        "LAYERS": "".join(_layer(of_layer, runs) for of_layer in layers),
        "RUNS": _run_table(runs, mean_similarity(pairs)),
    }
    return re.sub("__([A-Z]+)__", lambda found: parts[found[1]], template)


def _overview(groups: Sequence[Group], runs: Sequence[MatchedRun]) -> str:
    """Returns a square for each group of a layer. Its colour shows the stability."""
    squares = "".join(
        f'<a href="#{_anchor(group)}"><svg viewBox="0 0 24 24" role="img">'
        f"<title>{escape(group_title(group, runs))}: in {len(group.members)} of {len(runs)} runs, "
        f"stability {formatted(group.stability)}</title>"
        f'<rect width="24" height="24" fill-opacity="{max(group.stability, 0):.2f}"/></svg></a>'
        for group in groups
        if len(group.members) > 1
    )
    return f"<p><b>L{groups[0].layer}</b>{squares or 'no matched heads'}</p>"


def _layer(groups: Sequence[Group], runs: Sequence[MatchedRun]) -> str:
    """Returns the table of a layer. Its last row has the heads without a match."""
    rows, alone = [], [""] * len(runs)
    for group in groups:
        cells = {
            number: _cell(group, number, runs[number], len(group.members) > 1)
            for number in group.members
        }
        if len(group.members) == 1:
            ((number, cell),) = cells.items()
            alone[number] += cell
            continue
        title = (
            f"<b>{escape(group_title(group, runs))}</b>"
            f"<span>in {len(group.members)} of {len(runs)} runs</span>"
            f"<span>stability {formatted(group.stability)}</span>"
            f"{'<em>interchangeable</em>' if group.is_ambiguous else ''}"
        )
        cells = [cells.get(number, "") for number in range(len(runs))]
        rows.append(_table_row(title, cells, f' id="{_anchor(group)}"'))
    if any(alone):
        rows.append(_table_row("<b>no match</b><span>in one run</span>", alone, ' class="alone"'))
    return f"<h2>Layer {groups[0].layer}</h2>\n{_table('heads', runs, rows)}\n"


def _anchor(group: Group) -> str:
    return f"L{group.layer}" + "".join(f"-{run}.{m.head}" for run, m in group.members.items())


def _cell(group: Group, number: int, run: MatchedRun, is_matched: bool) -> str:
    """Returns a head: its heatmap, its similarity to the other heads of the group, its name, and
    its similarity to its last map at each step."""
    layer, member = group.layer, group.members[number]
    head, name = member.head, run.names[layer][member.head]
    shown = prompt_of(name, run.periods)
    value = f" {formatted(member.similarity)}" if is_matched else ""
    chart = ""
    if is_matched and len(run.steps) > 1:
        since = run.since_step(layer, head)
        chart = _chart(run.similar[:, layer, head])
        chart += "" if since is None else f"<span>similar since step {since}</span>"
    url = data_url(run.codes[shown][layer, head], THUMBNAIL)
    return (
        f'<figure><img src="{url}" alt="L{layer} H{head}">'
        f'<figcaption><span class="run">{escape(run.name)}</span><b>H{head}</b>{value}'
        f"<span>{escape(title_of(name))}</span>{chart}</figcaption></figure>"
    )


def _chart(values: np.ndarray) -> str:
    """Returns a line chart of a head's similarity to its last map, from 0 to 1."""
    points = " ".join(
        f"{x:.1f},{20 - 18 * y:.1f}"
        for x, y in zip(np.linspace(1, 63, len(values)), values.clip(0, 1), strict=True)
    )
    return (
        '<svg viewBox="0 0 64 22" role="img"><title>similarity to the last map</title>'
        f'<path d="M0 11H64M0 20H64"/><polyline points="{points}"/></svg>'
    )


def _run_table(runs: Sequence[MatchedRun], values: np.ndarray) -> str:
    """Returns the mean similarity of each pair of runs as a table."""
    rows = [
        _table_row(escape(run.name), [formatted(value) for value in row])
        for run, row in zip(runs, values, strict=True)
    ]
    return _table("pairs", runs, rows)


def _table(kind: str, runs: Sequence[MatchedRun], rows: Sequence[str]) -> str:
    names = "".join(f'<th scope="col">{escape(run.name)}</th>' for run in runs)
    head = f"<thead><tr><td></td>{names}</tr></thead>"
    body = f"<tbody>\n{''.join(rows)}</tbody>"
    return f'<div><table class="{kind}">{head}{body}</table></div>'


def _table_row(title: str, cells: Sequence[str], attributes: str = "") -> str:
    columns = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr{attributes}><th scope="row">{title}</th>{columns}</tr>\n'
