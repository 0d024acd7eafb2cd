/* The enlarged head: its heatmaps, what is under the pointer, and its statistics. */

import { clamp, format, formatCell, formatChange } from "./text.js";
import { $, bold, make, quotedToken } from "./dom.js";
import {
  A, B, errorOf, headName, here, hovered, indexInB, overText, run, selected, selectedQuery,
  sideName, state, uniformOf, update, valueAt,
} from "./state.js";
import { nameAt } from "./names.js";
import { paint } from "./maps.js";
import { cellOf } from "./cells.js";
import { drawMarks, placePlots, plots } from "./plots.js";
import { drawText } from "./words.js";
import { drawNextToken } from "./predictions.js";
import { withUniform } from "./grid.js";
import { isPlaying } from "./player.js";
import { switchHeads } from "./typing.js";
import { clearWhy, explain } from "./why.js";

export function buildDetail() {
  for (const plot of plots) {
    plot.map = plot.canvas = make("canvas", { id: plot.id, className: "pixels" });
    plot.marks = make("canvas", { className: "marks" });
    plot.title = make("figcaption");
    plot.frame = make("div", { className: "frame" }, plot.map, plot.marks);
    plot.figure = make("figure", { className: "plot" }, plot.title, plot.frame);
    plot.context = plot.map.getContext("2d", { alpha: false, willReadFrequently: true });
    if (plot === plots[0]) $("plots").prepend(plot.figure);
    else $("others").append(plot.figure);
    const cell = (event) => {
      const box = plot.map.getBoundingClientRect();
      const place = (part) => clamp(Math.floor(part * A.T), 0, A.T - 1);
      const query = place((event.clientY - box.top) / box.height);
      const key = place((event.clientX - box.left) / box.width);
      return { query, key: Math.min(key, query) };
    };
    plot.map.addEventListener("pointermove", (event) => hoverCell(cell(event)));
    plot.map.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") hoverCell(null);
    });
    plot.map.addEventListener("click", (event) => {
      const { query, key } = cell(event);
      update({ query });
      hoverCell({ query, key });
      askWhy(query, key);
    });
  }
  $("why-ask").addEventListener("click", () =>
    askWhy(selectedQuery(), strongestKey(selectedQuery())));
  $("switch-head").addEventListener("click", () =>
    switchHeads([selected()], run.off.has(selected())));
  const text = $("text");
  const onToken = (kind, act) => text.addEventListener(kind, ({ target }) => {
    const token = target.closest("[data-token]")?.dataset.token;
    if (token !== undefined) act(Number(token));
  });
  // Not pointerover: a text that scrolls under a resting pointer does not change the query token.
  onToken("pointermove", (query) => {
    if (hovered.query !== query || hovered.key !== null) hoverCell({ query, key: null });
  });
  onToken("click", (query) => update({ query }));
  text.addEventListener("pointerleave", () => hoverCell(null));
}

function askWhy(query, key) {
  if (!$("why").hidden) explain($("why-parts"), selected(), query, key);
}

/** Marks a cell of the heatmap ({query, key}), a row (key is null), or nothing (null). */
export function hoverCell(cell) {
  Object.assign(hovered, cell ?? { query: null, key: null });
  drawReading();
}

export function drawDetail() {
  const index = selected();
  $("detail").hidden = index === null;
  if (hovered.query >= A.T) Object.assign(hovered, { query: null, key: null });
  if (index === null) return;
  $("detail-title").textContent = headName(index);
  const order = B?.same ? [...new Set([state.show, "a", "b", "difference"])] : ["a"];
  plots.forEach((plot, n) => (plot.what = order[n]));
  $("others").hidden = order.length === 1;
  placePlots();
  for (const plot of plots) {
    if (!plot.what) continue;
    paint(plot, index, plot.what, Math.round(plot.size * devicePixelRatio));
    const name = plot.what === "difference" ? "B − A" : sideName(plot.what === "a" ? A : B);
    const title = name + (plot.step > 1 ? ` · labels: 1 token in ${plot.step}` : "");
    // In a panel, which cannot scroll the map back to its place, the line of the caption stays.
    const hidden = order.length === 1 && plot.step === 1 && !$("app").classList.contains("compact");
    Object.assign(plot.title, { textContent: title, title, hidden });
    plot.map.setAttribute("role", "img");
    plot.map.setAttribute("aria-label", `attention of ${headName(index)}: ${title}`);
  }
  $("why").hidden = !run.isTyped;
  clearWhy($("why-parts"), index);
  $("switch-head").hidden = !run.isTyped;
  $("switch-head").textContent = run.off?.has(selected()) ? "switch on" : "switch off";
  $("detail").classList.toggle("off", Boolean(run.off?.has(selected())));
  drawValues(index);
  drawReading();
}

/** Draws cross-hairs, readout and text for the token under the pointer. */
function drawReading() {
  if (selected() === null) return;
  const query = hovered.query ?? selectedQuery();
  drawText(query);
  drawNextToken(query);
  const key = hovered.key ?? strongestKey(query);
  for (const plot of plots) if (plot.what) drawMarks(plot, query, key, hovered.key !== null);
  drawReadout(query, key, hovered.key === null);
}

/** Returns the key token to which a query token attends most. */
function strongestKey(query) {
  const value = (key) => cellOf(here, selected(), query, key).value;
  let best = 0;
  for (let key = 1; key <= query; key++) if (value(key) > value(best)) best = key;
  return best;
}

function drawReadout(query, key, most) {
  const cell = (of) => cellOf(of, selected(), query, key);
  const token = (n) => quotedToken(A.labels[n]);
  const [a, b] = [cell(A), cell(B)];
  const parts = [token(query), ` (${query}) attends ${most ? "most " : ""}to `, token(key),
    ` (${key}): `];
  const product = ({ weight, norm }) =>
    (norm ? ` (weight ${formatCell(weight)} × norm ${formatCell(norm)})` : "");
  if (!B) parts.push(bold(formatCell(a)), product(a));
  else if (b === null) parts.push("A ", bold(formatCell(a)));
  else {
    parts.push("A ", bold(formatCell(a)), product(a), ", B ", bold(formatCell(b)), product(b),
      ", B − A ", bold(formatChange(a, b)));
  }
  $("readout").setAttribute("aria-live", isPlaying() ? "off" : "polite");
  $("readout").replaceChildren(...parts);
}

function drawValues(index) {
  const list = $("values");
  const shown = run.statistics.filter((statistic) => !statistic.empty);
  if (list.children.length !== shown.length) {
    list.replaceChildren(...shown.map(({ title, description }) =>
      make("div", { title: description }, make("dt", { textContent: title }),
        make("dd", { className: "number" }))));
  }
  const hasErrors = run.windows !== null;
  list.classList.toggle("two", B !== null || hasErrors);
  $("values-of").textContent = `statistics: ${overText()}${hasErrors ? " (mean ± standard error)" : ""}`;
  shown.forEach(({ key }, n) => {
    const a = valueAt(A, key, index);
    const inB = indexInB(index);
    const error = hasErrors ? errorOf(A, key, index) : null;
    list.children[n].lastChild.textContent = inB < 0 ? withUniform(key, index, a, false, error)
      : `${format(a)} → ${withUniform(key, index, valueAt(B, key, inB))}`;
    list.children[n].classList.toggle("strong", nameAt(here, index)?.key === key);
    list.children[n].hidden = valueAt(A, key, index) === null && uniformOf(A, key, index) === null;
  });
}
