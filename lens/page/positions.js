/* The loss at each position of the shown prompt, at each step: a map next to the charts. */

import { clamp, format, roundTicks, shortNumber, visible } from "./text.js";
import { $, line, make, prepareCanvas } from "./dom.js";
import { here, nearestFrame, run, state, update } from "./state.js";
import { colours, viridis } from "./colours.js";
import { sideWidth } from "./grid.js";
import { MARGIN } from "./charts.js";

let lossFigure, lossCells, lossCursor, lossCaption;
const LOSS_HEIGHT = 150;

export function buildPositions() {
  lossCells = make("canvas", { id: "positions" });
  lossCells.setAttribute("role", "img");
  lossCells.setAttribute("aria-label", "loss at each position of the prompt at each step");
  lossCursor = make("canvas", { className: "marks" });
  lossCaption = make("span", { className: "number" });
  const title = make("b", { textContent: "loss at each position",
    title: "−ln of the probability of the next token, in nats" });
  lossFigure = make("figure", { className: "loss-map" }, make("figcaption", {}, title, lossCaption),
    make("div", { className: "frame" }, lossCells, lossCursor));
  $("legend").before(lossFigure);
  const place = ({ clientX, clientY }) => {
    const box = lossCells.getBoundingClientRect();
    const { steps, count, bottom } = lossScales();
    const part = (clientX - box.left - MARGIN.left) / lossScales().inner;
    const step = steps[0] + part * (steps.at(-1) - steps[0]);
    const at = clamp(steps.findLastIndex((known) => known <= step), 0, steps.length - 1);
    const position = clamp(Math.floor(((clientY - box.top) / bottom) * count), 0, count - 1);
    return { at, position };
  };
  lossCells.addEventListener("pointermove", (event) => showLoss(place(event)));
  lossCells.addEventListener("pointerleave", () => showLoss(null));
  lossCells.addEventListener("click", (event) => {
    const { at, position } = place(event);
    update({ frame: nearestFrame(run, run.steps[at]), query: position });
  });
}

/** Returns the losses of the shown prompt at each step, [] if they are unknown. */
function lossesOfPrompt() {
  const rows = run.losses.map((of) => of?.[state.prompt]?.slice(0, here.T) ?? []);
  return rows.every((row) => row.length) && rows.length > 1 ? rows : [];
}

function lossScales() {
  const count = lossesOfPrompt()[0]?.length ?? 0;
  const inner = sideWidth - MARGIN.left - MARGIN.right;
  return { steps: run.steps, count, inner, bottom: LOSS_HEIGHT - MARGIN.bottom };
}

let cellsDrawn = "";

export function drawPositions() {
  const rows = lossesOfPrompt();
  lossFigure.hidden = !rows.length;
  if (!rows.length) return;
  const { steps, count, inner, bottom } = lossScales();
  const x = (step) => MARGIN.left + ((step - steps[0]) / (steps.at(-1) - steps[0])) * inner;
  const y = (position) => (position / count) * bottom;
  const facts = [state.prompt, sideWidth, document.documentElement.dataset.theme].join();
  if (facts !== cellsDrawn) drawCells(rows, x, y);
  cellsDrawn = facts;
  const context = prepareCanvas(lossCursor, sideWidth, LOSS_HEIGHT);
  context.strokeStyle = "#fff";
  context.lineWidth = 3;
  line(context, [[x(here.step), 0], [x(here.step), bottom]]);
  context.strokeStyle = colours.accent;
  context.lineWidth = 1.5;
  line(context, [[x(here.step), 0], [x(here.step), bottom]]);
  showLoss(null);
}

function drawCells(rows, x, y) {
  const { steps, count, inner, bottom } = lossScales();
  const context = prepareCanvas(lossCells, sideWidth, LOSS_HEIGHT);
  const most = Math.max(...rows[0]);
  rows.forEach((row, n) => {
    const [from, to] = [x(steps[n]), n + 1 < steps.length ? x(steps[n + 1]) : x(steps[n])];
    row.forEach((loss, position) => {
      context.fillStyle = `rgb(${viridis[Math.round(255 * clamp(loss / most, 0, 1))]})`;
      context.fillRect(from, y(position), to - from + 0.6, y(1) + 0.6);
    });
  });
  context.font = "10.5px system-ui, sans-serif";
  context.fillStyle = colours.muted;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const left = MARGIN.left - 5;
  const { period } = run.prompts[state.prompt];
  if (period) {
    context.fillText("copy 1", left, y(period / 2));
    context.fillText("copy 2", left, y(1.5 * period));
    context.strokeStyle = "#fff";
    line(context, [[MARGIN.left, y(period + 1)], [MARGIN.left + inner, y(period + 1)]]);
  } else {
    for (const tick of roundTicks(0, count - 1, 4)) {
      if (Number.isInteger(tick)) context.fillText(String(tick), left, Math.max(6, y(tick + 0.5)));
    }
  }
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillText(`step ${shortNumber(steps[0])}`, MARGIN.left, bottom + 12);
  context.textAlign = "right";
  context.fillText(shortNumber(steps.at(-1)), MARGIN.left + inner, bottom + 12);
}

/** Shows the loss under the pointer or, without a pointer, the meaning of the colours. */
function showLoss(place) {
  const rows = lossesOfPrompt();
  if (!place) {
    lossCaption.textContent = `brightest: ${format(Math.max(...rows[0]))} or more`;
    return;
  }
  const { at, position } = place;
  const token = visible(run.prompts[state.prompt].tokens[position], 12);
  lossCaption.textContent = `step ${run.steps[at]} · after \u2068"${token}"\u2069 (${position}): ` +
    format(rows[at][position]);
}
