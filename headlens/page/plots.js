/* The enlarged heatmaps: their sizes, labels, cross-hairs and colour bars. */

import { clamp, clip } from "./text.js";
import { $, line, prepareCanvas } from "./dom.js";
import { A, comparable, selected } from "./state.js";
import { colours, height, viridis } from "./colours.js";
import { scaleEnd } from "./maps.js";
import { sideWidth } from "./grid.js";

// The enlarged heatmap and, in a comparison, two smaller ones. `what` is "a", "b", "difference" or,
// if the heatmap is hidden, undefined.
export const plots = [{ id: "map" }, { id: "map-2" }, { id: "map-3" }];

const FONT = "px ui-monospace, SF Mono, Menlo, Consolas, DejaVu Sans Mono, monospace";
const ruler = document.createElement("canvas").getContext("2d");

const TOP = 6; // space above a heatmap for the first label
const [SMALLEST, LARGEST] = [8.5, 11]; // size of a label, in pixels
const BESIDE = 250; // height of what is next to a map and not the text, in pixels
const LANE = 9; // width of a second column of short labels, with every other token
const COPIES = 14; // width of the names of the two copies of a repeated sequence

/** Sets the size of the enlarged heatmap, the same with and without a comparison: if possible whole
 * pixels for each weight. The other heatmaps are below it. */
export function placePlots() {
  const [compact, wide] = ["compact", "wide"].map((name) => $("app").classList.contains(name));
  const isShort = A.tokens.filter((token) => token.length > 3).length <= 1; // <|endoftext|>
  const longest = isShort ? 3 : compact ? 7 : 8;
  const labels = A.labels.map((label) => clip(label, longest));
  const copies = A.run.prompts[A.prompt].period ? COPIES : 0;
  // Height above and below the map: bar, title, sentence and colour bar. In a panel, the text is next
  // to the map, not below it.
  const around = compact ? (wide ? 144 : 100) + $("top").offsetHeight : wide ? $("bar").offsetHeight + 140 : 132;
  // Width of the text next to the map; 0: the text is below the map.
  const text = compact ? (!wide && sideWidth() > 400 ? 170 : 0)
    : sideWidth() >= 600 ? 246 : 0;
  ruler.font = LARGEST + FONT;
  const widest = Math.max(...labels.map((text) => ruler.measureText(text).width));
  const left = Math.ceil(clamp(widest, 12, 84)) + 8 + copies + (isShort ? LANE : 0);
  const low = Math.max(compact ? 120 : 170, innerHeight - left - around);
  const room = Math.max(40, Math.min(sideWidth() - text - left - 14, low, 560));
  const most = Math.min(room / A.T, Math.max(46, 90 / A.T));
  sizePlot(plots[0], left, most * A.T, labels);
  const { cell, height: tall } = plots[0];
  $("text").style.maxHeight = text ? `${Math.max(180, tall - BESIDE)}px` : "";
  // If the rows are too low, short labels are in two columns or, if this is not enough, only some
  // tokens have a label.
  const needed = cell < SMALLEST ? Math.ceil(LARGEST / cell) : 1;
  const [step, lanes] = isShort && needed === 2 ? [1, 2] : [needed, 1];
  const font = clamp(Math.floor(2 * cell * step * lanes) / 2, SMALLEST, LARGEST);
  Object.assign(plots[0], { step, lanes, font });
  const small = Math.max(20, (sideWidth() - 44) / 2);
  for (const plot of plots.slice(1)) sizePlot(plot, 4, Math.min(small, plots[0].size), null);
}

function sizePlot(plot, left, room, labels) {
  const whole = Math.floor((room / A.T) * devicePixelRatio) * A.T;
  const most = Math.floor(room * devicePixelRatio);
  const size = (whole > 0.93 * most ? whole : most) / devicePixelRatio;
  const bottom = TOP + size + (labels ? left : 4);
  Object.assign(plot, { left, size, cell: size / A.T, labels, barTop: bottom - TOP + 2 });
  plot.width = left + Math.max(size, 60) + 10;
  plot.height = bottom + 34;
  plot.figure.style.width = plot.frame.style.width = `${plot.width}px`;
  plot.frame.style.height = `${plot.height}px`;
  Object.assign(plot.map.style, { left: `${left}px`, top: `${TOP}px` });
  plot.map.style.width = plot.map.style.height = `${size}px`;
}

/** Returns the tokens with a label. Both copies of a repeated sequence have labels at the same
 * tokens. */
function labelledTokens({ step }) {
  const { period } = A.run.prompts[A.prompt];
  const place = (n) => (period ? ((n - 1) % period) + 1 : n); // in a copy, from 1
  return A.tokens.map((_, n) => n).filter((n) => place(n) % step === 0);
}

/** Draws labels, cross-hair and colour bar of one heatmap. isPointer: the key token is the one under
 * the pointer and has a cross-hair; otherwise it is the one with the largest weight. */
export function drawMarks(plot, query, key, isPointer) {
  const context = prepareCanvas(plot.marks, plot.width, plot.height);
  const { left, size, cell } = plot;
  context.font = plot.font + FONT;
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.translate(0, TOP);
  const write = (n, column, strong) => {
    const text = plot.labels[n];
    const lane = plot.lanes === 2 && n % 2 === 0 ? LANE : 0;
    context.save();
    context.translate(column ? left + (n + 0.5) * cell : left - 4 - lane,
      column ? size + 5 + lane : (n + 0.5) * cell);
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
  if (plot.labels) {
    for (const [column, strong] of [[false, query], [true, key]]) {
      for (const n of labelledTokens(plot)) { // others would be under that of the strong token
        if (Math.abs(n - strong) * cell * plot.lanes >= plot.font) write(n, column, false);
      }
      write(strong, column, true);
    }
  }

  drawCopies(context, plot);
  const box = (x, y, w, h, colour, line) => {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(left + x * cell, y * cell, w * cell, h * cell);
  };
  box(0, query, query + 1, 1, colours.page, 2.5);
  box(0, query, query + 1, 1, colours.accent, 1.5);
  if (isPointer) {
    box(key, key, 1, A.T - key, colours.page, 2.5);
    box(key, key, 1, A.T - key, colours.accent, 1.5);
    box(key, query, 1, 1, colours.ink, 2);
  }
  drawColourBar(context, plot);
}

/** Draws where the second copy of a repeated sequence begins. */
function drawCopies(context, { left, size, cell, labels }) {
  const { period } = A.run.prompts[A.prompt];
  if (!period) return;
  context.save();
  const edge = (period + 1) * cell;
  context.strokeStyle = colours.muted;
  context.lineWidth = 1;
  context.setLineDash([3, 3]);
  line(context, [[left, edge], [left + size, edge]]);
  line(context, [[left + edge, edge], [left + edge, size]]);
  context.fillStyle = colours.ink;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  for (const [text, middle] of [["copy 1", 1 + period / 2], ["copy 2", 1 + 1.5 * period]]) {
    if (!labels) break;
    context.fillText(text, left + middle * cell, 14); // in the masked half
    context.save();
    context.translate(6, middle * cell);
    context.rotate(-Math.PI / 2);
    context.fillText(text, 0, 0);
    context.restore();
  }
  context.restore();
}

/** Returns the ticks of a colour bar that ends at the weight or difference `most`: their positions,
 * 0 to 1, and their texts. */
function colourTicks(difference, most) {
  const parts = [0, 0.01, 0.1, 0.25, 0.5, 1];
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
  const most = scaleEnd(index, what);
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
