/* The time axis: losses under the slider, and marks where heads got their names. */

import { clamp, format } from "./text.js";
import { $, line, make, prepareCanvas } from "./dom.js";
import { here, run, update } from "./state.js";
import { pause } from "./player.js";
import { describeEvent, namingEvents } from "./names.js";

const THUMB = 8; // half the width of the slider's handle
let timeCurves = []; // {title, points: [[step, value]], label: its legend, isPart: from 0 to 1}
let namings = []; // when heads got their names
let frameSteps = [];

/** Returns the place of a step on the slider, 0 to 1: frames are evenly spaced. */
function placeOf(step) {
  const steps = frameSteps;
  const n = clamp(steps.findLastIndex((known) => known <= step), 0, steps.length - 2);
  return clamp((n + (step - steps[n]) / (steps[n + 1] - steps[n])) / (steps.length - 1), 0, 1);
}

/** Returns the mean loss on the second copy at each step. Its first token is not predictable. */
function copyLosses() {
  const prompt = run.prompts.findIndex(({ period }) => period > 2);
  if (prompt < 0) return [];
  const { period } = run.prompts[prompt];
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  return run.steps.map((step, n) => [step, run.losses[n]?.[prompt]?.slice(period + 1, 2 * period)])
    .filter(([, losses]) => losses?.length).map(([step, losses]) => [step, mean(losses)]);
}

export function buildTimeline() {
  const known = { ...run.curves };
  const copies = copyLosses();
  if (copies.length > 1) known["loss on the second copy"] = copies;
  timeCurves = Object.entries(known).filter(([, points]) => points.length > 1).map(([title, points]) => {
    const short = title.replace(/ loss$|^loss on the |^validation (?=acc)/, "");
    const label = make("span", { title }, `${short} `, make("b", { className: "number" }));
    label.dataset.curve = title;
    return { title, points, label, isPart: title.includes("accuracy") };
  });
  const none = run.frames.length === 1;
  $("losses").hidden = $("curves").hidden = none || !timeCurves.length;
  if (none) return;
  frameSteps = run.frames.map((frame) => frame.step);
  $("curves").append("loss:", ...timeCurves.map(({ label }) => label),
    make("span", { id: "news" }));
  namings = namingEvents(run);
  const seen = new Map(); // number of marks at each step
  const mark = (className, step, title) => {
    const node = make("i", { className, title });
    const shift = 5 * (seen.get(step) ?? 0);
    node.style.left = `calc(${THUMB + shift}px + (100% - ${2 * THUMB}px) * ${placeOf(step)})`;
    $("marks").append(node);
    return node;
  };
  for (const event of namings) {
    mark(`kind-${event.key}`, event.step, `step ${event.step}: ${describeEvent(event)}`);
    seen.set(event.step, (seen.get(event.step) ?? 0) + 1);
  }
  if (Number.isFinite(run.stage)) {
    const text = `step ${run.stage}: copying begins, the loss on the second copy has fallen`;
    const node = mark("stage", run.stage, text);
    node.classList.toggle("late", placeOf(run.stage) > 0.6);
    node.append(make("span", { textContent: `copying begins, step ${run.stage}` }));
  }
  const go = (event) => {
    if (!event.buttons) return;
    const box = $("track").getBoundingClientRect();
    const part = (event.clientX - box.left - THUMB) / (box.width - 2 * THUMB);
    pause();
    const last = run.frames.length - 1;
    update({ frame: Math.round(clamp(part, 0, 1) * last) });
  };
  for (const id of ["losses", "marks"]) {
    $(id).addEventListener("pointerdown", (event) => {
      if (id === "losses") $(id).setPointerCapture(event.pointerId);
      go(event);
    });
  }
  $("losses").addEventListener("pointermove", go);
}

/** Returns what happened at the shown step, after the frame before it. */
export function newsText() {
  const before = run.frames[run.frames.findIndex(({ step }) => step === here.step) - 1]?.step ?? -1;
  const isNew = ({ step }) => step > before && step <= here.step;
  const copying = Number.isFinite(run.stage) && isNew({ step: run.stage });
  return [...namings.filter(isNew).map(describeEvent), ...(copying ? ["copying begins"] : [])]
    .join(" · ");
}

export function drawTimeline() {
  if (!timeCurves.length || run.frames.length === 1) return;
  for (const { points, label } of timeCurves) {
    const value = points.findLast(([step]) => step <= here.step)?.[1] ?? null;
    label.lastChild.textContent = format(value);
  }
  const news = newsText();
  $("news").textContent = news && `new: ${news}`;
  const { clientWidth: width, clientHeight: tall } = $("losses").parentElement;
  if (!width || !tall) return; // hidden in a small window
  const context = prepareCanvas($("losses"), width, tall);
  const most = Math.max(...timeCurves.filter(({ isPart }) => !isPart)
    .flatMap(({ points }) => points.map(([, value]) => value)));
  const x = (step) => THUMB + placeOf(step) * (width - 2 * THUMB);
  context.lineWidth = 1.3;
  for (const { points, label, isPart } of timeCurves) {
    context.strokeStyle = getComputedStyle(label).color;
    const y = (value) => tall - 1 - (value / (isPart ? 1 : most)) * (tall - 3);
    line(context, points.map(([step, value]) => [x(step), y(value)]));
  }
  context.strokeStyle = getComputedStyle($("step-number")).color;
  context.lineWidth = 1;
  line(context, [[x(here.step), 0], [x(here.step), tall]]);
  const text = timeCurves.map(({ label }) => label.textContent).join(", ");
  $("losses").setAttribute("aria-label", `losses at step ${here.step}: ${text}`);
}
