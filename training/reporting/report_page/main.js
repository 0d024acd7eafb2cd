// Draws the charts as SVG. A cursor at the nearest logged step shows the value of every line. All
// positions are percentages of the plot, so it fits any width while its text keeps its size.

const MARKERS_UP_TO = 60; // points; above that the markers would hide the line
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

/** About `count` multiples of 1, 2 or 5 times a power of ten, from below low to above high. */
function roundTicks(low, high, count) {
  const rough = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((n) => n * power >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.max(Math.ceil(high / step - 1e-9), first + 1);
  return Array.from({length: last - first + 1}, (_, n) => +((first + n) * step).toPrecision(12));
}

const nearest = (points, step) => points.reduce((best, point) =>
  (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));

/** The path of a line with a break at each gap. */
function pathOf(points, x, y) {
  let path = "", pen = "M";
  for (const [step, value] of points) {
    // h0: a point between two gaps is a line of length 0, which the round cap makes a dot.
    if (value !== null) path += `${pen}${x(step)} ${y(value)}${pen === "M" ? "h0" : ""}`;
    pen = value === null ? "M" : "L";
  }
  return path;
}

function drawAxes(plot, x, y, xTicks, yTicks) {
  svg("rect", plot, {class: "area", width: "100%", height: "100%"});
  for (const tick of yTicks) {
    const at = `${y(tick)}%`;
    svg("line", plot, {class: "grid", x2: "100%", y1: at, y2: at});
    const place = {class: "y", y: at, dx: -8, dy: ".35em", "text-anchor": "end"};
    svg("text", plot, place, compact.format(tick));
  }
  svg("line", plot, {class: "axis", x2: "100%", y1: "100%", y2: "100%"});
  const group = svg("g", plot);
  for (const tick of xTicks) {
    const place = {class: "x", x: `${x(tick)}%`, y: "100%", dy: "1.5em", "text-anchor": "middle"};
    svg("text", group, place, compact.format(tick));
  }
  svg("text", plot, {x: "100%", y: "100%", dy: "3em", "text-anchor": "end"}, "step");
}

function drawChart(figure, chart) {
  const caption = html("figcaption", figure);
  const title = html("h3", caption, {textContent: `${chart.title} `});
  html("span", title, {className: "unit", textContent: chart.unit});
  const lines = chart.lines.map((line) =>
    ({...line, points: line.points.filter((point) => point[1] !== null), all: line.points}));
  if (lines.length) drawPlot(figure, chart, lines);
  if (chart.gaps) {
    const textContent = `${chart.gaps} not finite (NaN or inf) and not drawn`;
    html("p", figure, {className: "note", textContent});
  }
}

function drawPlot(figure, chart, lines) {
  const readout = html("div", figure, {className: "readout"});
  readout.setAttribute("aria-live", "polite");
  const [x0, x1] = [chart.steps[0], Math.max(chart.steps[1], chart.steps[0] + 1)];
  const values = lines.flatMap((line) => line.points.map((point) => point[1]));
  const low = Math.min(...values, chart.from_zero ? 0 : Infinity);
  const yTicks = roundTicks(low, Math.max(...values), 5);
  const xTicks = roundTicks(x0, x1, Math.min(6, x1 - x0)).filter((t) => t >= x0 && t <= x1);
  const [y0, y1] = [yTicks[0], yTicks.at(-1)];
  const x = (step) => +(100 * (step - x0) / (x1 - x0)).toFixed(3);
  const y = (value) => +(100 * (y1 - value) / (y1 - y0)).toFixed(3);

  const label = `${chart.title} over steps: ${lines.map((line) => line.name).join(", ")}`;
  const plot = svg("svg", figure, {class: "plot", role: "img", tabindex: 0, "aria-label": label});
  drawAxes(plot, x, y, xTicks, yTicks);
  const box = {class: "lines", viewBox: "0 0 100 100", preserveAspectRatio: "none"};
  const drawn = svg("svg", plot, box);
  for (const {name, classes, points, all} of lines) {
    svg("path", drawn, {class: classes, "data-name": name, d: pathOf(all, x, y)});
    if (classes !== "validation" || points.length > MARKERS_UP_TO) continue;
    for (const [step, value] of points) {
      svg("circle", plot, {class: classes, r: 3.5, cx: `${x(step)}%`, cy: `${y(value)}%`});
    }
  }
  readable(plot, readout, lines, {x, y, stepAt: (across) => x0 + across * (x1 - x0)});
}

/** Shows the values at the last step, or at the cursor. */
function readable(plot, readout, lines, {x, y, stepAt}) {
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
      html("span", readout, {className: classes, textContent: `${name} ${value}${when}`});
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

const charts = JSON.parse(document.getElementById("data").textContent);
const place = document.querySelector(".charts");
if (!charts.length) place.textContent = "No metrics yet.";
for (const chart of charts) {
  drawChart(html("figure", place, {className: chart.keys.length > 1 ? "wide" : ""}), chart);
}
