/* The enlarged head: its heatmaps with tokens, the prompt as shaded text, its statistics. */

import { clamp, format, headName, joinBytes, label, visible } from "./text.js";
import { $, make, prepareCanvas } from "./dom.js";
import {
  A, B, comparable, here, indexInB, hovered, run, selected, sideName, state, update, valueAt,
} from "./state.js";
import { WEIGHTS, colours, height, viridis } from "./colours.js";
import { maxCode, maxDifference, paint } from "./maps.js";
import { sideWidth } from "./grid.js";
import { playing } from "./player.js";

const plots = ["a", "b", "difference"].map((what) => ({ what }));

export function buildDetail() {
  const ids = { a: "map", b: "map-b", difference: "map-difference" };
  for (const plot of plots) {
    plot.map = plot.canvas = make("canvas", { id: ids[plot.what], className: "pixels" });
    plot.marks = make("canvas", { className: "marks" });
    plot.title = make("figcaption");
    plot.frame = make("div", { className: "frame" }, plot.map, plot.marks);
    plot.figure = make("figure", { className: "plot" }, plot.title, plot.frame);
    plot.context = plot.map.getContext("2d", { alpha: false, willReadFrequently: true });
    $("reading").before(plot.figure);
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
    });
  }
  const text = $("text");
  const onToken = (kind, act) => text.addEventListener(kind, ({ target }) => {
    const token = target.closest("[data-token]")?.dataset.token;
    if (token !== undefined) act(Number(token));
  });
  onToken("pointerover", (query) => hoverCell({ query, key: null }));
  onToken("click", (query) => update({ query }));
  text.addEventListener("pointerleave", () => hoverCell(null));
}

/** Marks a cell of the heatmap ({query, key}), a row (key is null), or nothing (null). */
export function hoverCell(cell) {
  Object.assign(hovered, cell ?? { query: null, key: null });
  drawReading();
}

export const selectedQuery = () => Math.min(state.query ?? Infinity, A.T - 1);

export function drawDetail() {
  const index = selected();
  $("detail").hidden = index === null;
  if (index === null) return;
  const { layer, head } = state;
  $("detail-title").textContent = headName(layer, head);
  if (hovered.query >= A.T) Object.assign(hovered, { query: null, key: null });
  const shown = B?.same ? plots : plots.slice(0, 1);
  placePlots(shown);
  for (const plot of plots) {
    plot.figure.hidden = !shown.includes(plot);
    if (plot.figure.hidden) continue;
    paint(plot, index, plot.what, Math.round(plot.size * devicePixelRatio));
    const title = plot.what === "difference" ? "B − A" : sideName(plot.what === "a" ? A : B);
    Object.assign(plot.title, { textContent: title, title });
    plot.map.setAttribute("role", "img");
    plot.map.setAttribute("aria-label", `attention of layer ${layer} head ${head}: ${title}`);
  }
  drawValues(index);
  drawReading();
}

const FONT = "11px ui-monospace, SF Mono, Menlo, Consolas, DejaVu Sans Mono, monospace";
const ruler = document.createElement("canvas").getContext("2d");

const TOP = 6; // space above a heatmap for the first label

/** Sets the sizes of the enlarged heatmaps, if possible to whole pixels for each weight. */
function placePlots(shown) {
  const [compact, wide] = ["compact", "wide"].map((name) => $("app").classList.contains(name));
  ruler.font = FONT;
  const labels = A.tokens.map((token) => label(token, compact ? 7 : 12));
  const widest = Math.max(...labels.map((text) => ruler.measureText(text).width));
  const left = Math.ceil(clamp(widest, 12, 84)) + 8;
  // In a low window, the text is next to the map, not below it.
  const around = compact ? (wide ? 144 : 100) : wide ? 390 : 150;
  const low = Math.max(compact ? 120 : 170, innerHeight - left - around);
  const text = compact && !wide && sideWidth > 400 ? 170 : 0; // next to the map
  const inRow = (sideWidth - text - left - 14 - 26 * (shown.length - 1)) / shown.length;
  const stacked = shown.length > 1 && inRow < 120;
  const room = Math.max(40, Math.min(stacked ? sideWidth - left - 22 : inRow, low, 560));
  const cell = Math.min(room / A.T, Math.max(46, 90 / A.T));
  const whole = Math.floor(cell * devicePixelRatio) / devicePixelRatio;
  const size = (whole > 0.8 * cell ? whole : cell) * A.T;
  for (const plot of shown) {
    const plain = plot.what !== "a" && !stacked; // the labels of the first heatmap are for all
    Object.assign(plot, { left: plain ? 4 : left, size, cell: size / A.T, labels, plain });
    plot.width = plot.left + Math.max(size, 60) + 10;
    plot.height = TOP + size + left + 34;
    plot.figure.style.width = plot.frame.style.width = `${plot.width}px`;
    plot.frame.style.height = `${plot.height}px`;
    Object.assign(plot.map.style, { left: `${plot.left}px`, top: `${TOP}px` });
    plot.map.style.width = plot.map.style.height = `${size}px`;
    plot.barTop = size + left + 2;
  }
}

/** Draws labels, cross-hair and colour bar of one heatmap. */
function drawMarks(plot, query, key) {
  const context = prepareCanvas(plot.marks, plot.width, plot.height);
  const { left, size, cell } = plot;
  const every = Math.ceil(11.5 / cell);
  context.font = FONT;
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.translate(0, TOP);
  const write = (n, column, strong) => {
    const text = plot.labels[n];
    context.save();
    context.translate(column ? left + (n + 0.5) * cell : left - 4,
      column ? size + 5 : (n + 0.5) * cell);
    if (column) context.rotate(-Math.PI / 2);
    if (strong) {
      const width = Math.min(context.measureText(text).width, 84) + 5;
      context.fillStyle = colours.accent;
      context.beginPath();
      context.roundRect(-width + 2.5, -7.5, width, 15, 3);
      context.fill();
    }
    context.fillStyle = strong ? colours.page : colours.muted;
    context.fillText(text, 0, 0.5, 84);
    context.restore();
  };
  for (const column of [false, true]) {
    if (!column && plot.plain) continue;
    for (let n = 0; n < A.T; n += every) write(n, column, false);
  }
  if (!plot.plain) write(query, false, true);
  if (key !== null) write(key, true, true);

  const box = (x, y, w, h, colour, line) => {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(left + x * cell, y * cell, w * cell, h * cell);
  };
  box(0, query, query + 1, 1, colours.page, 2.5);
  box(0, query, query + 1, 1, colours.accent, 1.5);
  if (key !== null) {
    box(key, key, 1, A.T - key, colours.page, 2.5);
    box(key, key, 1, A.T - key, colours.accent, 1.5);
    box(key, query, 1, 1, colours.ink, 2);
  }
  drawColourBar(context, plot);
}

/** Returns the ticks of a colour bar that ends at the weight or difference `most`: their positions,
 * 0 to 1, and their texts. */
export function colourTicks(difference, most) {
  const parts = state.scale === "sqrt" ? [0, 0.01, 0.1, 0.25, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
  const signed = [0, 0.1, 0.5, 1].flatMap((part) => (part ? [-part, part] : [0]));
  return (difference ? signed.sort((a, b) => a - b) : parts).map((part) => {
    const far = Math.sign(part) * height(Math.abs(part));
    const text = String(+(Math.abs(part) * most).toPrecision(most === 1 ? 3 : 2));
    const sign = part < 0 ? "−" : difference && part > 0 ? "+" : "";
    return { far: difference ? (far + 1) / 2 : far, text: sign + text };
  });
}

function drawColourBar(context, plot) {
  const { left, barTop, what } = plot;
  const width = Math.max(plot.size, 60);
  const index = selected();
  const difference = what === "difference";
  if (what !== "a" && !comparable(index)) return;
  const most = difference ? maxDifference(index) : WEIGHTS[maxCode(index)];
  const table = difference ? colours.diverging : viridis;
  for (let x = 0; x < width; x++) {
    context.fillStyle = `rgb(${table[Math.min(255, Math.floor((x / width) * 256))]})`;
    context.fillRect(left + x, barTop, Math.min(1.5, width - x), 8);
  }
  context.font = "10.5px system-ui, sans-serif";
  context.fillStyle = colours.muted;
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  let free = -Infinity; // labels that would overlap are skipped
  const ticks = colourTicks(difference, most)
    .map(({ far, text }) => ({ place: left + width * far, text }));
  const end = ticks.at(-1);
  const endWidth = context.measureText(end.text).width;
  for (const tick of ticks) {
    const wide = context.measureText(tick.text).width;
    const x = clamp(tick.place - wide / 2, left, left + width - wide);
    const last = tick === end;
    if (x < free || (!last && x + wide + 5 > left + width - endWidth)) continue;
    context.fillRect(clamp(tick.place - 0.5, left, left + width - 1), barTop + 8, 1, 3);
    context.fillText(tick.text, x, barTop + 21);
    free = x + wide + 5;
  }
}

/** Returns a weight of the enlarged head in A or B; null if B does not have it. */
function weightOf(of, query, key) {
  if (of === B && !comparable(selected())) return null;
  const index = of === A ? selected() : indexInB(selected());
  return WEIGHTS[of.bytes[of.start + index * of.triangle + (query * (query + 1)) / 2 + key]];
}

/** Draws cross-hairs, readout and text for the token under the pointer. */
function drawReading() {
  if (selected() === null) return;
  const query = hovered.query ?? selectedQuery();
  for (const plot of plots) if (!plot.figure.hidden) drawMarks(plot, query, hovered.key);
  drawReadout(query, hovered.key);
  drawText(query);
}

function drawReadout(query, key) {
  const most = key === null;
  if (most) {
    const first = state.hideFirst && query > 0 ? 1 : 0;
    key = first;
    for (let k = first; k <= query; k++) {
      if (weightOf(here, query, k) > weightOf(here, query, key)) key = k;
    }
  }
  const token = (n) => make("bdi", { textContent: `"${visible(A.tokens[n], 40)}"`,
    title: A.tokens[n] });
  const [a, b] = [weightOf(A, query, key), B && weightOf(B, query, key)];
  const bold = (text) => make("b", { textContent: text });
  const parts = [token(query), ` (${query}) attends ${most ? "most " : ""}to `, token(key),
    ` (${key}): `];
  if (!B) parts.push(bold(a.toFixed(3)));
  else if (b === null) parts.push("A ", bold(a.toFixed(3)));
  else {
    const sign = b - a < -0.0005 ? "−" : b - a > 0.0005 ? "+" : "";
    parts.push("A ", bold(a.toFixed(3)), ", B ", bold(b.toFixed(3)), ", B − A ",
      bold(sign + Math.abs(b - a).toFixed(3)));
  }
  $("readout").setAttribute("aria-live", playing ? "off" : "polite");
  $("readout").replaceChildren(...parts);
}

let textTokens = null; // the tokens that are shown as text

/** Draws the prompt as text. Each key token is shaded by its weight. */
function drawText(query) {
  const text = $("text");
  if (textTokens !== A.tokens) {
    textTokens = A.tokens;
    text.replaceChildren(...joinBytes(A.tokens).map((token, n) => {
      const shown = token === null ? "" : token.trim() ? visible(token) : label(token);
      const span = make("span", { textContent: shown.replaceAll("⏎", "⏎\n") });
      span.dataset.token = n;
      return span;
    }));
  }
  const index = selected();
  const what = comparable(index) ? state.show : "a";
  const most = what === "difference" ? maxDifference(index) : WEIGHTS[maxCode(index)];
  const strongest = colours.isDark ? 0.6 : 0.85;
  [...text.children].forEach((span, key) => {
    span.className = key > query ? "after" : key === query ? "query" : "";
    const hidden = key > query || (state.hideFirst && key === 0);
    let value = hidden ? 0 : weightOf(what === "b" ? B : A, query, key);
    if (what === "difference" && !hidden) value = weightOf(B, query, key) - value;
    const alpha = strongest * height(Math.abs(value), most);
    const hue = what !== "difference" ? "255 176 32" : value < 0 ? "60 130 215" : "235 125 20";
    span.style.backgroundColor = alpha > 0.01 ? `rgb(${hue} / ${alpha.toFixed(3)})` : "";
    span.title = key > query ? "" :
      `${A.tokens[key].slice(0, 400)}\nposition ${key}, weight ${value.toFixed(3)}`;
  });
}

function drawValues(index) {
  const list = $("values");
  const shown = run.statistics.filter((statistic) => !statistic.empty);
  if (list.children.length !== shown.length) {
    list.replaceChildren(...shown.map(({ title, description }) =>
      make("div", { title: description }, make("dt", { textContent: title }),
        make("dd", { className: "number" }))));
  }
  list.classList.toggle("two", B !== null);
  shown.forEach(({ key }, n) => {
    const a = format(valueAt(A, key, index));
    const b = B && indexInB(index) >= 0 ? ` → ${format(valueAt(B, key, indexInB(index)))}` : "";
    list.children[n].lastChild.textContent = a + b;
  });
}
