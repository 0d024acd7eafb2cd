/* The tabs "losses and samples" and "settings". Python computes and formats all values:
 *
 *   training  {state, result, facts: [[name, value, note]], charts, samples: [{step, prompt, text,
 *             is_shown: at once}], command, environment: [[name, value]], settings}; all texts
 *   chart     {title, unit, sign: after the numbers of the axis, from_zero, lines}
 *   line      {name, kind: "training" or "validation", thin, points: [[step, value or null, text]]}
 *
 * A chart is an SVG. Its positions are percentages, so it fits any width and its text keeps its size.
 * A cursor at the nearest logged step shows the value of each line. */

import { $, make, showMessage } from "./dom.js";
import { clamp, plural, stepText } from "./text.js";
import { roundTicks } from "./ticks.js";

const MARKERS_UP_TO = 60; // with more points, markers would hide the line
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

/** Draws both tabs, again if the run has new values. */
export function showTraining(training) {
  const isOpen = $("more-samples")?.open;
  const { result, facts, charts, samples } = training;
  const focused = [...document.querySelectorAll("#tab-training svg")].indexOf(document.activeElement);
  $("tab-training").replaceChildren(
    make("h2", { className: "result", textContent: result || "No loss was logged yet." }),
    pairs("facts", facts),
    make("div", { className: "charts" }, ...charts.map(chartOf)),
    ...samplesOf(samples, isOpen));
  document.querySelectorAll("#tab-training svg")[focused]?.focus({ preventScroll: true });
  showSettings(training);
}

/** Returns names, values and notes. */
function pairs(className, rows) {
  return make("dl", { className }, ...rows.map(([name, value, note = ""]) => make("div", {},
    make("dt", { textContent: name }),
    make("dd", {}, value, ...(note ? [make("small", { textContent: note })] : [])))));
}

function samplesOf(samples, isOpen) {
  if (!samples.length) return [];
  const article = ({ step, prompt, text }) => make("article", {},
    make("h3", { textContent: stepText(step) }),
    make("p", { dir: "auto" }, make("b", { textContent: prompt }), text));
  const others = samples.filter((sample) => !sample.is_shown);
  const more = make("details", { id: "more-samples", open: Boolean(isOpen) },
    make("summary", { textContent: plural(others.length, "more sample") }), ...others.map(article));
  return [make("h2", { textContent: "What it writes" }),
    make("p", { className: "quiet-text" }, make("b", { textContent: "Bold" }),
      ": the prompt. The model has written the rest."),
    make("div", { className: "samples" },
      ...samples.filter((sample) => sample.is_shown).map(article), ...(others.length ? [more] : []))];
}

function showSettings({ command, environment, settings }) {
  const copy = make("button", { textContent: "copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      showMessage("Command copied.");
    } catch { // a sandboxed frame, or a page that is a file
      getSelection().selectAllChildren(line);
      showMessage("The command is selected: copy it with the keyboard.");
    }
  });
  const line = make("code", { textContent: command });
  const before = $("tab-settings").textContent;
  const parts = [
    make("h2", { textContent: "Train it again" }),
    make("div", { className: "command" }, line, copy),
    make("h2", { textContent: "Where it was trained" }),
    pairs("environment", environment),
    make("h2", { textContent: "All settings" }),
    make("pre", { textContent: settings, tabIndex: 0, ariaLabel: "all settings", role: "region" }),
  ];
  if (parts.map((part) => part.textContent).join("") === before) return; // keeps a selection
  $("tab-settings").replaceChildren(...parts);
}

function svg(tag, parent, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return parent.appendChild(made);
}

const nearestPoint = (points, step) => points.reduce((best, point) =>
  (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));

/** Returns the SVG path of a line, interrupted at each gap. */
export function pathOf(points, x, y) {
  let path = "", pen = "M";
  for (const [step, value] of points) {
    // h0: a point between two gaps is a line of length 0, drawn as a dot by its round cap.
    if (value !== null) path += `${pen}${x(step)} ${y(value)}${pen === "M" ? "h0" : ""}`;
    pen = value === null ? "M" : "L";
  }
  return path;
}

function chartOf({ title, unit, lines, ...options }) {
  const readout = make("p", { className: "readout", ariaLive: "polite" });
  const figure = make("figure", { className: lines.length > 1 ? "wide" : "" },
    make("figcaption", {}, make("h3", { textContent: title }),
      make("span", { className: "quiet-text", textContent: unit })), readout);
  const drawn = lines.map((line) => ({
    ...line, all: line.points, points: line.points.filter(([, value]) => value !== null),
    className: line.kind + (line.thin ? " thin" : ""),
  }));
  const known = drawn.filter(({ points }) => points.length);
  if (known.length) plotOf(figure, readout, { title, ...options }, known);
  if (drawn.some(({ all, points }) => all.length > points.length)) {
    const textContent = "NaN and infinite values are not drawn.";
    figure.append(make("p", { className: "quiet-text", textContent }));
  }
  return figure;
}

function plotOf(figure, readout, { title, sign, from_zero: fromZero }, lines) {
  const points = lines.flatMap((line) => line.points);
  const [values, at] = [points.map(([, value]) => value), points.map(([step]) => step)];
  const [x0, last] = [Math.min(...at), Math.max(...at)];
  const x1 = Math.max(last, x0 + 1);
  const yTicks = roundTicks(Math.min(...values, fromZero ? 0 : Infinity), Math.max(...values), 4, true);
  const [y0, y1] = [yTicks[0], yTicks.at(-1)];
  const x = (step) => +(100 * (step - x0) / (x1 - x0)).toFixed(3);
  const y = (value) => +(100 * (y1 - value) / (y1 - y0)).toFixed(3);
  const label = `${title} over steps: ${lines.map((line) => line.name).join(", ")}`;
  const plot = svg("svg", figure, { class: "plot", role: "img", tabindex: 0, "aria-label": label });
  svg("rect", plot, { class: "area", width: "100%", height: "100%" });
  for (const tick of yTicks) {
    svg("line", plot, { class: "rule", x2: "100%", y1: `${y(tick)}%`, y2: `${y(tick)}%` });
    const place = { class: "y", y: `${y(tick)}%`, dx: -8, dy: ".35em", "text-anchor": "end" };
    svg("text", plot, place, compact.format(tick) + sign);
  }
  const group = svg("g", plot);
  for (const tick of roundTicks(x0, x1, Math.min(7, x1 - x0))) {
    const place = { class: "x", x: `${x(tick)}%`, y: "100%", dy: "1.6em", "text-anchor": "middle" };
    svg("text", group, place, compact.format(tick));
  }
  const box = { class: "lines", viewBox: "0 0 100 100", preserveAspectRatio: "none" };
  const drawn = svg("svg", plot, box);
  for (const { name, kind, className, points: known, all } of lines) {
    svg("path", drawn, { class: className, "data-name": name, d: pathOf(all, x, y) });
    if (kind !== "validation" || known.length > MARKERS_UP_TO) continue;
    for (const [step, value] of known) {
      svg("circle", plot, { class: kind, r: 3.5, cx: `${x(step)}%`, cy: `${y(value)}%` });
    }
  }
  addCursor(plot, readout, lines, { x, y, stepAt: (across) => x0 + across * (x1 - x0) });
}

/** Shows the values at the cursor, or at the last step. */
function addCursor(plot, readout, lines, { x, y, stepAt }) {
  const every = new Set(lines.flatMap((line) => line.points.map(([step]) => step)));
  const steps = [...every].sort((a, b) => a - b);
  const cursor = svg("g", plot);
  const rest = steps.length - 1;
  let at = rest;

  function show(index, withCursor = true) {
    at = clamp(index, 0, rest);
    const step = steps[at];
    cursor.replaceChildren();
    readout.replaceChildren(make("span", { className: "step", textContent: stepText(step) }));
    if (withCursor) svg("line", cursor, { x1: `${x(step)}%`, x2: `${x(step)}%`, y2: "100%" });
    for (const { name, className, points } of lines) {
      const [there, value, text] = nearestPoint(points, step);
      const when = there === step ? "" : ` at ${stepText(there)}`;
      readout.append(make("span", { className, textContent: `${name} ${text}${when}` }));
      if (!withCursor) continue;
      svg("circle", cursor, { class: className, r: 4, cx: `${x(there)}%`, cy: `${y(value)}%` });
    }
  }

  const leave = () => show(rest, false);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.querySelector(".area").getBoundingClientRect();
    const [step] = nearestPoint(steps.map((s) => [s]), stepAt((event.clientX - box.left) / box.width));
    show(steps.indexOf(step));
  });
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
    if (!by) return;
    event.preventDefault();
    show(cursor.childElementCount ? at + by : at);
  });
  leave();
}
