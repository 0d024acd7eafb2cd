/* The time axis: losses under the slider, and marks where heads got their names. */

import { clamp, format, formatLoss, stepText } from "./text.js";
import { $, line, make, prepareCanvas } from "./dom.js";
import { here, run, state, update } from "./state.js";
import { pause } from "./player.js";
import { setColour } from "./names.js";

const THUMB = 8; // half the width of the slider's handle
const AXIS = 34; // width of the axis at the right, in pixels; the slider leaves this room
export const ACCURACY = "accuracy: how often the most likely next token is the right one";
let timeCurves = []; // {points: [[step, value]], label: its legend, isPart: from 0 to 1}
let frameSteps = [];

/** Returns the place of a step on the slider, 0 to 1: frames are evenly spaced. */
export function placeOf(step) {
  const steps = frameSteps;
  const n = clamp(steps.findLastIndex((known) => known <= step), 0, steps.length - 2);
  return clamp((n + (step - steps[n]) / (steps[n + 1] - steps[n])) / (steps.length - 1), 0, 1);
}

export function buildTimeline() {
  document.documentElement.style.setProperty("--axis", `${AXIS}px`);
  timeCurves = Object.entries(run.curves).filter(([, points]) => points.length > 1)
    .map(([title, points]) => {
      const short = title.replace(/ loss\b|^validation (?=acc)/, "");
      const isPart = title.includes("accuracy");
      const label = make("span", { title: isPart ? `validation ${ACCURACY}` : title }, `${isPart ? "· " : ""}${short} `,
        make("b", { className: "number" }));
      label.dataset.curve = title;
      return { points, label, isPart };
    })
    .sort((one, two) => one.isPart - two.isPart); // the losses first
  $("losses-frame").hidden = $("curves").hidden = !timeCurves.length;
  if (run.frames.length === 1) return; // #time is hidden
  frameSteps = run.frames.map((frame) => frame.step);
  $("curves").replaceChildren("loss:", ...timeCurves.map(({ label }) => label),
    make("span", { id: "news" }));
  buildMarks();
  const go = (event) => {
    if (!event.buttons) return;
    const box = $("track").getBoundingClientRect();
    const part = (event.clientX - box.left - THUMB) / (box.width - AXIS - 2 * THUMB);
    pause();
    update({ frame: Math.round(clamp(part, 0, 1) * (run.frames.length - 1)) });
  };
  // Not addEventListener: a page that follows a run builds the timeline again.
  $("marks").onpointerdown = $("losses").onpointermove = go;
  $("losses").onpointerdown = (event) => {
    $("losses").setPointerCapture(event.pointerId);
    go(event);
  };
}

/** Marks the steps at which heads first got their names and the loss on copy 2 had fallen. */
function buildMarks() {
  $("marks").replaceChildren();
  const seen = new Map(); // number of marks at each step
  const mark = (className, step, title, key) => {
    const node = make("i", { className, title });
    const shift = 5 * (seen.get(step) ?? 0);
    node.style.left = `calc(${THUMB + shift}px + (100% - ${AXIS + 2 * THUMB}px) * ${placeOf(step)})`;
    $("marks").append(node);
    setColour(node, key);
  };
  for (const event of run.events) {
    const text = `${stepText(event.step)}: ${event.text}`;
    mark(`kind-${event.key}`, event.step, text, event.key);
    seen.set(event.step, (seen.get(event.step) ?? 0) + 1);
  }
  if (Number.isFinite(run.stage)) {
    const text = `${stepText(run.stage)}: the loss on copy 2 has fallen`;
    mark("stage", run.stage, text);
  }
}

/** Returns what happened at the shown step, after the frame before it. */
export function newsText() {
  const before = run.frames[here.frame - 1]?.step ?? -1;
  const isNew = ({ step }) => step > before && step <= here.step;
  const copies = Number.isFinite(run.stage) && isNew({ step: run.stage });
  return [...run.events.filter(isNew).map(({ text }) => text),
    ...(copies ? ["the loss on copy 2 has fallen"] : [])].join(" · ");
}

/** Draws the axis of the losses at the right of the curves: 0 and the largest loss. */
function drawAxis(context, width, tall, most) {
  context.fillStyle = context.strokeStyle = getComputedStyle($("curves")).color;
  context.font = "10px system-ui, sans-serif";
  context.lineWidth = 1;
  line(context, [[width - 0.5, 1], [width - 0.5, tall]]);
  context.textAlign = "right";
  context.textBaseline = "top";
  context.fillText(formatLoss(most), width - 4, 1);
  context.textBaseline = "bottom";
  context.fillText("0", width - 4, tall);
}

export function drawTimeline() {
  if (!timeCurves.length || run.frames.length === 1 || state.view === "story") return;
  for (const { points, label, isPart } of timeCurves) {
    const value = points.findLast(([step]) => step <= here.step)?.[1] ?? null;
    label.lastChild.textContent = isPart ? format(value) : formatLoss(value);
  }
  const news = newsText();
  const marks = [...(run.events.length ? ["marks: heads first get their names"] : []),
    ...(Number.isFinite(run.stage) ? ["outlined: the loss on copy 2 has fallen"] : [])];
  $("news").textContent = news ? `new: ${news}` : marks.join(" · ");
  const { clientWidth: width, clientHeight: tall } = $("losses").parentElement;
  if (!width || !tall) return; // hidden in a small window
  const context = prepareCanvas($("losses"), width, tall);
  const losses = timeCurves.filter(({ isPart }) => !isPart);
  const most = Math.max(...losses.flatMap(({ points }) => points.map(([, value]) => value)));
  const x = (step) => THUMB + placeOf(step) * (width - AXIS - 2 * THUMB);
  drawAxis(context, width, tall, most);
  context.lineWidth = 1.3;
  for (const { points, label, isPart } of timeCurves) {
    context.strokeStyle = getComputedStyle(label).color;
    const y = (value) => tall - 1 - Math.min(1, value / (isPart ? 1 : most)) * (tall - 3);
    line(context, points.map(([step, value]) => [x(step), y(value)]));
  }
  context.strokeStyle = getComputedStyle($("step-number")).color;
  context.lineWidth = 1;
  line(context, [[x(here.step), 0], [x(here.step), tall]]);
  const text = timeCurves.map(({ label }) => label.textContent).join(", ");
  $("losses").setAttribute("aria-label", `losses at ${stepText(here.step)}: ${text}`);
}
