// Draws the charts as SVG. A cursor at the nearest logged step shows the value of each line.
// Positions are percentages of the plot, so a chart fits any width and its text keeps its size.

import { format, rounded } from "../../../headlens/page/text.js";
import { roundTicks } from "../../../headlens/page/ticks.js";

// Lines: [metric, name, CSS classes]. Class "thin": the line behind a smoothed one. text: a value with
// the digits that report.py writes.
const CHARTS = [
  {title: "Loss", unit: "nats per token", isLoss: true, text: (value) => rounded(value, 4), lines: [
    ["train/loss", "training", "training"], ["smoothed", "smoothed", "training"],
    ["val/loss", "validation", "validation"],
  ]},
  {title: "Validation", unit: "bits per byte", isLoss: true, text: (value) => rounded(value, 3),
    lines: [["val/bits_per_byte", "validation", "validation"]]},
  {title: "Validation accuracy", unit: "of targets", text: (value) => `${(100 * value).toFixed(1)}%`,
    tick: (value) => `${compact.format(100 * value)}%`,
    lines: [["val/accuracy", "validation", "validation"]]},
  {title: "Learning rate", unit: "", fromZero: true,
    text: (value) => String(+value.toPrecision(3)),
    lines: [["train/learning_rate", "learning rate", "training"]]},
  {title: "Throughput", unit: "tokens per second", fromZero: true,
    text: (value) => `${Math.round(value).toLocaleString("en")} tokens/s`,
    lines: [["train/tokens_per_second", "throughput", "training"]]},
  {title: "Gradient norm", unit: "before clipping", fromZero: true, text: format,
    lines: [["train/grad_norm", "gradient norm", "training"]]},
];
const MARKERS_UP_TO = 60; // with more points, markers would hide the line
const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});

function html(tag, parent, properties = {}) {
  return parent.appendChild(Object.assign(document.createElement(tag), properties));
}

function svg(tag, parent, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return parent.appendChild(made);
}

const nearest = (points, step) => points.reduce((best, point) =>
  (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));

/** Returns the SVG path of a line, interrupted at each gap. */
function pathOf(points, x, y) {
  let path = "", pen = "M";
  for (const [step, value] of points) {
    // h0: a point between two gaps is a line of length 0, drawn as a dot by its round cap.
    if (value !== null) path += `${pen}${x(step)} ${y(value)}${pen === "M" ? "h0" : ""}`;
    pen = value === null ? "M" : "L";
  }
  return path;
}

function drawAxes(plot, x, y, xTicks, yTicks) {
  svg("rect", plot, {class: "area", width: "100%", height: "100%"});
  for (const [tick, text] of yTicks) {
    const at = `${y(tick)}%`;
    svg("line", plot, {class: "grid", x2: "100%", y1: at, y2: at});
    const place = {class: "y", y: at, dx: -8, dy: ".35em", "text-anchor": "end"};
    svg("text", plot, place, text);
  }
  svg("line", plot, {class: "axis", x2: "100%", y1: "100%", y2: "100%"});
  const group = svg("g", plot);
  for (const tick of xTicks) {
    const place = {class: "x", x: `${x(tick)}%`, y: "100%", dy: "1.5em", "text-anchor": "middle"};
    svg("text", group, place, compact.format(tick));
  }
  svg("text", plot, {x: "100%", y: "100%", dy: "3em", "text-anchor": "end"}, "step");
}

function drawChart(figure, {title, unit, ...options}, lines) {
  const heading = html("h3", html("figcaption", figure), {textContent: `${title} `});
  html("span", heading, {className: "unit", textContent: unit});
  const readout = html("div", figure, {className: "readout", ariaLive: "polite"});
  const drawn = lines.filter((line) => line.points.length);
  if (drawn.length) drawPlot(figure, readout, {title, ...options}, drawn);
  if (lines.some((line) => line.all.length > line.points.length)) {
    const textContent = "NaN and infinite values are not drawn.";
    html("p", figure, {className: "note", textContent});
  }
}

function drawPlot(figure, readout, {title, isLoss, fromZero, text, tick = compact.format}, lines) {
  const [x0, x1] = [data.steps[0], Math.max(data.steps[1], data.steps[0] + 1)];
  const values = lines.flatMap((line) => line.points.map((point) => point[1]));
  const low = Math.min(...values, fromZero ? 0 : Infinity);
  const yTicks = roundTicks(low, Math.max(...values), 5, true);
  const xTicks = roundTicks(x0, x1, Math.min(6, x1 - x0));
  const [y0, y1] = [yTicks[0], yTicks.at(-1)];
  const x = (step) => +(100 * (step - x0) / (x1 - x0)).toFixed(3);
  const y = (value) => +(100 * (y1 - value) / (y1 - y0)).toFixed(3);

  const label = `${title} over steps: ${lines.map((line) => line.name).join(", ")}`;
  const plot = svg("svg", figure, {class: "plot", role: "img", tabindex: 0, "aria-label": label});
  drawAxes(plot, x, y, xTicks, yTicks.map((value) => [value, tick(value)]));
  const box = {class: "lines", viewBox: "0 0 100 100", preserveAspectRatio: "none"};
  const drawn = svg("svg", plot, box);
  for (const {name, classes, points, all} of lines) {
    svg("path", drawn, {class: classes, "data-name": name, d: pathOf(all, x, y)});
    if (classes !== "validation" || points.length > MARKERS_UP_TO) continue;
    for (const [step, value] of points) {
      svg("circle", plot, {class: classes, r: 3.5, cx: `${x(step)}%`, cy: `${y(value)}%`});
    }
  }
  for (const {classes, points} of lines) {
    if (classes === "validation" && isLoss) markLowest(plot, points, {x, y, text});
  }
  addCursor(plot, readout, lines, {x, y, text, stepAt: (across) => x0 + across * (x1 - x0)});
}

/** Marks the lowest value of a validation line after step 0, if it is not the last one. */
function markLowest(plot, all, {x, y, text}) {
  const points = all.filter(([step]) => step > 0);
  if (points.length === 0) return;
  const [step, value] = points.reduce((best, point) => (point[1] < best[1] ? point : best));
  if (points.at(-1)[1] === value) return;
  const at = {x: `${x(step)}%`, y: `${y(value)}%`};
  svg("circle", plot, {class: "lowest", r: 6, cx: at.x, cy: at.y});
  const anchor = x(step) < 25 ? "start" : x(step) > 75 ? "end" : "middle";
  const place = {class: "validation", ...at, dy: "-1.6em", "text-anchor": anchor};
  svg("text", plot, place, `lowest: ${text(value)} at step ${step.toLocaleString("en")}`);
}

/** Shows the values at the cursor, or at the last step. */
function addCursor(plot, readout, lines, {x, y, text, stepAt}) {
  const every = new Set(lines.flatMap((line) => line.points.map((point) => point[0])));
  const steps = [...every].sort((a, b) => a - b);
  const cursor = svg("g", plot);
  const rest = steps.length - 1;
  let at = rest;

  function show(index, withCursor = true) {
    at = Math.min(Math.max(index, 0), rest);
    const step = steps[at], across = `${x(step)}%`;
    cursor.replaceChildren();
    readout.replaceChildren();
    html("span", readout, {className: "step", textContent: `step ${step.toLocaleString("en")}`});
    if (withCursor) svg("line", cursor, {class: "cursor", x1: across, x2: across, y2: "100%"});
    for (const {name, classes, points} of lines) {
      const [there, value] = nearest(points, step);
      const when = there === step ? "" : ` at step ${there.toLocaleString("en")}`;
      html("span", readout, {className: classes, textContent: `${name} ${text(value)}${when}`});
      if (!withCursor) continue;
      svg("circle", cursor, {class: `dot ${classes}`, r: 4, cx: `${x(there)}%`, cy: `${y(value)}%`});
    }
  }

  const leave = () => show(rest, false);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.querySelector(".area").getBoundingClientRect();
    const [step] = nearest(steps.map((s) => [s]), stepAt((event.clientX - box.left) / box.width));
    show(steps.indexOf(step));
  });
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length}[event.key];
    if (!move) return;
    event.preventDefault();
    show(cursor.childElementCount ? at + move : at);
  });
  leave();
}

const data = JSON.parse(document.getElementById("data").textContent);
const place = document.querySelector(".charts");
for (const chart of CHARTS) {
  const lines = chart.lines.filter(([key]) => key in data.lines).map(([key, name, classes]) => {
    const all = data.lines[key], points = all.filter((point) => point[1] !== null);
    const thin = key === "train/loss" && "smoothed" in data.lines ? " thin" : "";
    return {name, classes: classes + thin, all, points};
  });
  const figure = {className: chart.lines.length > 1 ? "wide" : ""};
  if (lines.length) drawChart(html("figure", place, figure), chart, lines);
}

// scripts/live.py shows the report in a frame, and loads it again when it is written again.
if (parent !== window) {
  const tell = () => parent.postMessage({scrolled: scrollY}, "*");
  addEventListener("scroll", tell);
  addEventListener("message", ({source, data}) => {
    if (source === parent && Number.isFinite(data?.scroll)) scrollTo(0, data.scroll);
  });
}
