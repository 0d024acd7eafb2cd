/* One chart for each statistic: a line for each head over the steps. */

import { clamp, format, shortNumber, stepText } from "./text.js";
import { roundTicks } from "./ticks.js";
import { $, dot, line, make, prepareCanvas } from "./dom.js";
import {
  A, B, chancesOf, headName, here, indexInB, otherRunSide, hoverHead, hovered, layerName,
  nearestIndex, placeOfHead, rangeOf, run, selected, seriesOf,
} from "./state.js";
import { colours } from "./colours.js";
import { nameAt } from "./names.js";
import { select, sideWidth } from "./grid.js";
import { openHelp } from "./help.js";

const charts = [];
const LEAST = 0.2; // range of the axis of a weight or an entropy if all heads are nearly equal
const MARGIN = { left: 32, right: 50, top: 6, bottom: 16 }; // right: for names of heads
const APART = 10; // pixels between the ends of lines with a label
const CHART_FONT = "10.5px system-ui, sans-serif";

export function buildCharts() {
  charts.length = 0;
  $("charts").replaceChildren();
  for (const statistic of run.statistics.filter(({ empty }) => !empty)) {
    const chart = { statistic, value: make("span", { className: "value number" }) };
    chart.lines = make("canvas");
    chart.marks = make("canvas", { className: "marks" });
    chart.lines.setAttribute("role", "img");
    chart.lines.setAttribute("aria-label", `${statistic.title} of all heads at each step`);
    chart.frame = make("div", { className: "frame" }, chart.lines, chart.marks);
    const title = make("button", { textContent: statistic.title, title: statistic.description });
    title.addEventListener("click", () => openHelp(statistic.key));
    const caption = make("figcaption", {}, title, chart.value);
    chart.figure = make("figure", { className: "chart" }, caption, chart.frame);
    chart.figure.dataset.statistic = statistic.key;
    $("charts").append(chart.figure);
    charts.push(chart);
    chart.lines.addEventListener("pointermove", (event) => {
      const near = nearest(chart, event);
      hoverHead(near?.index ?? null, near?.at ?? null);
    });
    chart.lines.addEventListener("pointerleave", () => hoverHead(null));
    chart.lines.addEventListener("click", (event) => {
      const near = nearest(chart, event);
      if (near) select(near.index);
    });
  }
}

/** Computes the scales of a chart: x of a step (of a layer if there is one step), y of a value. */
function measure(chart) {
  const { statistic } = chart;
  const sides = otherRunSide() ? [A, B] : [A];
  const bounds = sides.flatMap((of) => rangeOf(of, statistic.key));
  chart.empty = !bounds.length;
  const chances = chancesOf(A, statistic.key);
  bounds.push(...chances.filter(Number.isFinite), ...(chart.empty ? [0, 1] : []));
  let [low, high] = [Math.min(...bounds), Math.max(...bounds)];
  if (low > 0 && low < 0.6 * high) low = 0;
  if (low >= 0 && high <= 1 && high - low < LEAST) {
    const middle = clamp((low + high) / 2, LEAST / 2, 1 - LEAST / 2);
    [low, high] = [middle - LEAST / 2, middle + LEAST / 2];
  } else if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const steps = sides.flatMap((of) => seriesOf(of, statistic.key).steps);
  const { clientWidth: width, clientHeight: tall } = chart.frame;
  const single = run.steps.length === 1;
  const [from, to] = single ? [-0.5, run.layers - 0.5] : [Math.min(...steps), Math.max(...steps)];
  const inner = width - MARGIN.left - MARGIN.right;
  const x = (value) => MARGIN.left + ((value - from) / (to - from || 1)) * inner;
  const y = (value) => tall - MARGIN.bottom -
    ((value - low) / (high - low)) * (tall - MARGIN.top - MARGIN.bottom);
  Object.assign(chart, { width, tall, single, from, to, low, high, x, y, chances });
}

/** Draws the axes and the faint lines of all heads, which do not depend on the shown step. */
function drawChartLines() {
  for (const chart of charts) {
    chart.figure.hidden = false; // a hidden chart has no size
    measure(chart);
    chart.figure.hidden = chart.empty;
    if (chart.empty) continue;
    const { statistic, width, tall, x, y, chances } = chart;
    const context = prepareCanvas(chart.lines, width, tall);
    context.font = CHART_FONT;
    context.fillStyle = colours.muted;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.lineWidth = 1;
    for (const tick of roundTicks(chart.low, chart.high, 3)) {
      context.strokeStyle = colours.line;
      line(context, [[MARGIN.left, y(tick)], [width - MARGIN.right, y(tick)]]);
      context.fillText(shortNumber(tick), MARGIN.left - 5, y(tick));
    }
    context.textBaseline = "alphabetic";
    const ends = chart.single ? [0, run.layers - 1] : [chart.from, chart.to];
    [...new Set(ends)].forEach((value, n) => {
      const text = chart.single ? layerName(value) : (n ? "" : "step ") + shortNumber(value);
      context.textAlign = chart.single ? "center" : n ? "right" : "left";
      context.fillText(text, x(value), tall - 3);
    });
    for (const of of [otherRunSide(), A]) {
      if (!of) continue;
      const { count } = of.run;
      const series = seriesOf(of, statistic.key);
      const faint = chart.single ? clamp(60 / count, 0.15, 0.6) : clamp(16 / count, 0.025, 0.45);
      const heads = Array.from({ length: count }, (_, index) => [index, lineColour(index)]);
      for (const [index, colour] of heads.sort((one, two) => !!one[1] - !!two[1])) {
        context.strokeStyle = context.fillStyle = colour ?? (of === A ? colours.ink : colours.other);
        context.globalAlpha = colour ? 0.85 : faint;
        drawHistory(context, chart, of, series, index);
      }
    }
    context.globalAlpha = 1;
    if (!chart.single && !otherRunSide()) labelEnds(context, chart);
    context.strokeStyle = colours.muted;
    context.setLineDash([3, 3]);
    chances.forEach((chance, layer) => {
      if (!Number.isFinite(chance)) return;
      const ends = chart.single && chances.length > 1 ? [x(layer - 0.4), x(layer + 0.4)]
        : [MARGIN.left, width - MARGIN.right];
      line(context, ends.map((end) => [end, y(chance)]));
    });
    context.setLineDash([]);
  }
}

/** Returns the colour of the name of a head; null without a name, or if the lines show two runs. */
const lineColour = (index) =>
  (otherRunSide() ? null : nameAt(here, index)?.colours[Number(colours.isDark)] ?? null);

/** Writes the name of a head at the end of its line, over other names. */
function labelEnd(context, { width, y }, index, value, colour) {
  const left = width - MARGIN.right + 5;
  Object.assign(context, { font: CHART_FONT, textAlign: "left", textBaseline: "middle" });
  context.fillStyle = colours.page;
  context.fillRect(left, y(value) - 5, width, 10);
  context.fillStyle = colour;
  context.fillText(headName(index), left, y(value));
}

/** Labels the lines that end apart from all others. */
function labelEnds(context, chart) {
  const values = seriesOf(A, chart.statistic.key).rows.at(-1) ?? [];
  const isNear = (one, two) => Number.isFinite(two) && Math.abs(chart.y(one) - chart.y(two)) < APART;
  values.forEach((value, index) => {
    if (!Number.isFinite(value) || values.filter((other) => isNear(value, other)).length > 1) return;
    labelEnd(context, chart, index, value, lineColour(index) ?? colours.muted);
  });
}

/** Draws one head: a line with gaps for missing values, or a dot if there is one step. */
function drawHistory(context, chart, of, { steps, rows, at }, index) {
  if (chart.single || steps.length === 1) {
    const value = rows[at]?.[index];
    const x = chart.x(chart.single ? placeOfHead(index, of.run).layer : steps[at]);
    if (Number.isFinite(value)) dot(context, x, chart.y(value), 2.5);
    return;
  }
  context.beginPath();
  let pen = false;
  rows.forEach((row, n) => {
    const known = Number.isFinite(row[index]);
    if (known) context[pen ? "lineTo" : "moveTo"](chart.x(steps[n]), chart.y(row[index]));
    pen = known;
  });
  context.stroke();
}

/** Draws the shown step, the selected head and the head under the pointer. */
export function drawChartMarks() {
  for (const chart of charts) {
    if (!chart.x || chart.empty) continue;
    const { width, tall, x, y, statistic, single } = chart;
    const context = prepareCanvas(chart.marks, width, tall);
    const upright = (step, colour) => {
      context.strokeStyle = colour;
      context.lineWidth = 1;
      line(context, [[x(step), MARGIN.top - 4], [x(step), tall - MARGIN.bottom]]);
    };
    if (!single && B) upright((here === A ? B : A).step, colours.other);
    if (!single) upright(here.step, colours.ink);
    const shown = seriesOf(here, statistic.key);
    const trace = (of, index, colour, thick, when) => {
      const series = seriesOf(of, statistic.key);
      const end = series.rows.at(-1)?.[index];
      if (!single && of.run === run && Number.isFinite(end)) labelEnd(context, chart, index, end, colour);
      context.strokeStyle = context.fillStyle = colour;
      context.lineWidth = thick;
      series.at = when ?? series.at;
      drawHistory(context, chart, of, series, index);
      const value = series.rows[series.at]?.[index];
      const place = single ? placeOfHead(index, of.run).layer : series.steps[series.at];
      if (Number.isFinite(value)) dot(context, x(place), y(value), 3.2);
    };
    const at = hovered.at ?? shown.at;
    const index = hovered.index ?? selected();
    const chosen = selected() ?? index; // no head is enlarged: the hovered head
    if (chosen !== null) {
      if (otherRunSide()) trace(B, indexInB(chosen), colours.other, 2);
      trace(here, chosen, colours.accent, 2.5, index === chosen ? at : shown.at);
    }
    if (index !== chosen) trace(here, index, colours.ink, 1.4, at);
    const value = index === null ? null : shown.rows[at]?.[index] ?? null;
    const when = hovered.at === null || single ? "" : `${stepText(shown.steps[at])}: `;
    chart.value.textContent = index === null ? "" : `${headName(index)} ${when}${format(value)}`;
  }
}

/** Returns the point nearest to the pointer, {index: of the head, at: of the step}, or null. */
function nearest(chart, event) {
  const box = chart.lines.getBoundingClientRect();
  const [px, py] = [event.clientX - box.left, event.clientY - box.top];
  const { steps, rows } = seriesOf(here, chart.statistic.key);
  const at = chart.single ? 0 : nearestIndex(steps.map(chart.x), px);
  let found = null;
  let least = Infinity;
  rows[at]?.forEach((value, index) => {
    if (!Number.isFinite(value)) return;
    const across = chart.single ? chart.x(placeOfHead(index).layer) - px : 0;
    const distance = Math.hypot(chart.y(value) - py, across);
    if (distance < least) [least, found] = [distance, { index, at }];
  });
  return found;
}

let chartFacts = [];

export function drawCharts() {
  const at = run.steps.length === 1 && B?.at;
  const facts = [run, document.documentElement.dataset.theme, otherRunSide()?.run, at, sideWidth(),
    innerHeight, selected() === null, here.run.frames[here.frame].heads.names.join()];
  if (facts.some((fact, n) => fact !== chartFacts[n])) drawChartLines();
  chartFacts = facts;
  drawChartMarks();
}
