/* The loss at each position of the shown prompt, at each step: a map next to the charts. */

import { clamp, formatLoss, shortNumber, visible } from "./text.js";
import { roundTicks } from "./ticks.js";
import { $, line, make, prepareCanvas } from "./dom.js";
import { here, nearestFrame, nearestIndex, run, state, update } from "./state.js";
import { colours, viridis } from "./colours.js";
import { sideWidth } from "./grid.js";
import { MARGIN } from "./charts.js";

let lossFigure, lossCells, lossCursor, lossCaption, lossNote;
const LOSS_HEIGHT = 150;
const LOSS_BOTTOM = LOSS_HEIGHT - MARGIN.bottom; // where the cells end

export function buildPositions() {
  lossCells = make("canvas", { id: "positions" });
  lossCells.setAttribute("role", "img");
  lossCells.setAttribute("aria-label", "loss at each position of the prompt at each step");
  lossCursor = make("canvas", { className: "marks" });
  lossCaption = make("span", { className: "number" });
  lossNote = make("p", { className: "note", textContent: "The tokens of copy 1 are random. No " +
    "model can predict them, so their loss stays large and can rise during the training. In " +
    "copy 2, the loss falls when the model learns to copy." });
  const title = make("b", { textContent: "loss at each position",
    title: "−ln of the probability of the next token, in nats" });
  lossFigure = make("figure", { className: "loss-map" }, make("figcaption", {}, title, lossCaption),
    make("div", { className: "frame" }, lossCells, lossCursor), lossNote);
  $("legend").before(lossFigure);
  const place = ({ clientX, clientY }) => {
    const box = lossCells.getBoundingClientRect();
    const count = lossesOfPrompt()[0].length;
    const part = (clientX - box.left - MARGIN.left) / lossWidth();
    const step = run.steps[0] + part * (run.steps.at(-1) - run.steps[0]);
    const at = nearestIndex(run.steps, step);
    const position = Math.floor(((clientY - box.top) / LOSS_BOTTOM) * count);
    return { at, position: clamp(position, 0, count - 1) };
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

const lossWidth = () => sideWidth() - MARGIN.left - MARGIN.right;
const lossX = (step) => MARGIN.left +
  ((step - run.steps[0]) / (run.steps.at(-1) - run.steps[0])) * lossWidth();

let cellsDrawn = []; // what the cells depend on

export function drawPositions() {
  const rows = lossesOfPrompt();
  lossFigure.hidden = !rows.length;
  if (!rows.length) return;
  lossNote.hidden = !run.prompts[state.prompt].period;
  const facts = [run, state.prompt, sideWidth(), document.documentElement.dataset.theme];
  if (facts.some((fact, n) => fact !== cellsDrawn[n])) drawCells(rows);
  cellsDrawn = facts;
  const context = prepareCanvas(lossCursor, sideWidth(), LOSS_HEIGHT);
  for (const [colour, thick] of [["#fff", 3], [colours.accent, 1.5]]) {
    context.strokeStyle = colour;
    context.lineWidth = thick;
    line(context, [[lossX(here.step), 0], [lossX(here.step), LOSS_BOTTOM]]);
  }
  showLoss(null);
}

function drawCells(rows) {
  const { steps } = run;
  const context = prepareCanvas(lossCells, sideWidth(), LOSS_HEIGHT);
  const most = Math.max(...rows[0]);
  const count = rows[0].length;
  const y = (position) => (position / count) * LOSS_BOTTOM;
  rows.forEach((row, n) => {
    // Each cell reaches halfway to the steps before and after it.
    const [from, to] = [n - 1, n + 1].map((at) => lossX((steps[n] + (steps[at] ?? steps[n])) / 2));
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
    line(context, [[MARGIN.left, y(period + 1)], [lossX(steps.at(-1)), y(period + 1)]]);
  } else {
    for (const tick of count > 1 ? roundTicks(0, count - 1, 4) : []) {
      if (Number.isInteger(tick)) context.fillText(String(tick), left, Math.max(6, y(tick + 0.5)));
    }
  }
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillText(`step ${shortNumber(steps[0])}`, MARGIN.left, LOSS_BOTTOM + 12);
  context.textAlign = "right";
  context.fillText(shortNumber(steps.at(-1)), lossX(steps.at(-1)), LOSS_BOTTOM + 12);
}

/** Shows the loss under the pointer or, without a pointer, the meaning of the colours. */
function showLoss(place) {
  const rows = lossesOfPrompt();
  if (!rows.length) return; // the pointer leaves the map because it is hidden
  if (!place) {
    lossCaption.textContent = "a row for each position · dark: 0 · bright: " +
      `${formatLoss(Math.max(...rows[0]))} nats or more`;
    return;
  }
  const { at, position } = place;
  const token = visible(run.prompts[state.prompt].labels[position], 12);
  lossCaption.textContent = `step ${run.steps[at]} · after \u2068"${token}"\u2069 (${position}): ` +
    formatLoss(rows[at][position]);
}
