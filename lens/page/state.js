/* The state of the page (what controls change) and the one or two sides that it shows. */

import { say } from "./dom.js";
import { decode } from "./data.js";

export const DEFAULTS = {
  prompt: 0,
  frame: 0, // index into the frames of runs[0]
  layer: null, // the enlarged head
  head: null,
  query: null, // position of the query token; null: the last
  sort: "", // "" is layer order, else a statistic's key
  descending: true,
  filter: "", // a statistic's key
  threshold: null,
  scale: "sqrt", // or "linear"
  hideFirst: false,
  compare: "off", // "run": the other run at this step, "run:40", "step:40"
  show: "difference", // what the grid shows while comparing: "a", "b", "difference"
  theme: "auto", // "light", "dark"
};
export const state = { ...DEFAULTS };
export const pointed = { index: null, at: null, query: null, key: null }; // under the pointer
export const timing = { ready: 0, grid: 0, redraw: 0 };
export let run; // the run of the page
export let other = null; // a second run to compare with
export let A; // what is shown: {run, frame, prompt, tokens, T, bytes}
export let B = null; // what A is compared with, the later of two steps; B.same: its tokens are A's
export let here; // A or B: the one that the slider moves

export const statisticOf = (of, key) => of.statistics.find((statistic) => statistic.key === key);
export const selected = () => (state.layer === null ? null : state.layer * run.heads + state.head);

/** What one side shows; has bytes when its frame is decoded. */
function side(of, frame, prompt) {
  const { tokens, length, start, triangle } = of.prompts[prompt];
  const { step, bytes } = of.frames[frame];
  let at = of.steps.indexOf(step);
  if (at < 0) at = Math.max(0, of.steps.findLastIndex((known) => known <= step));
  return { run: of, frame, step, prompt, tokens, T: length, start, triangle, bytes, at };
}

export function nearestFrame(of, step) {
  const distances = of.frames.map((frame) => Math.abs(frame.step - step));
  return distances.indexOf(Math.min(...distances));
}

const sameTokens = (one, two) => one.tokens.join("\0") === two.tokens.join("\0");

/** The side to compare with, or null. */
export function otherSide() {
  const [kind, step] = state.compare.split(":");
  if (kind === "step") return side(run, nearestFrame(run, Number(step)), state.prompt);
  if (kind !== "run" || !other) return null;
  const frame = nearestFrame(other, Number(step ?? run.frames[state.frame].step));
  const match = other.prompts.findIndex((of) => sameTokens(of, run.prompts[state.prompt]));
  return side(other, frame, match >= 0 ? match : Math.min(state.prompt, other.prompts.length - 1));
}

/** The side of the other run, or null. */
export const foreign = () => (B && B.run !== run ? B : null);

/** What the maps of the grid show; maps of different prompts are not subtracted. */
export const gridShows = () => (B && (B.same || state.show === "b") ? state.show : "a");

/** The index of A's head in the run of B, or -1. */
export function indexInB(index) {
  const [layer, head] = [Math.floor(index / run.heads), index % run.heads];
  const fits = B && layer < B.run.layers && head < B.run.heads;
  return fits ? layer * B.run.heads + head : -1;
}

/** Whether A and B have weights of this head on the same prompt. */
export const comparable = (index) => Boolean(B?.same) && indexInB(index) >= 0;

export function valueAt(of, key, index) {
  return statisticOf(of.run, key)?.values[of.at]?.[index] ?? null;
}

/** A statistic of a head as the grid shows it: of A, of B, or B − A. */
export function shownValue(key, index) {
  const a = valueAt(A, key, index);
  if (!B || state.show === "a") return a;
  const place = indexInB(index);
  const b = place < 0 ? null : valueAt(B, key, place);
  if (state.show === "b") return b;
  return a === null || b === null ? null : b - a;
}

export function sideName(of) {
  if (!B) return `step ${of.step}`;
  const name = foreign() ? `, ${of.run.name}` : "";
  return `${of === A ? "A" : "B"}: step ${of.step}${name}`;
}

/** What redraw and pointAt call to draw; set by main.js. */
export const draw = { all: () => {}, pointer: () => {} };

export function setRuns(first, second) {
  [run, other] = [first, second];
}

let tickets = 0;

/** Changes the state and draws it, at once if its frames are decoded. */
export function update(changes = {}) {
  Object.assign(state, changes);
  const ticket = ++tickets;
  const needed = [[run, state.frame]];
  const b = otherSide();
  if (b) needed.push([b.run, b.frame]);
  if (needed.every(([of, frame]) => of.frames[frame].bytes)) {
    redraw();
    return Promise.resolve();
  }
  const waiting = Promise.all(needed.map(([of, frame]) => decode(of, frame)));
  return waiting.then(() => ticket === tickets && redraw(), (error) => say(error.message));
}

export function choosePrompt(prompt) {
  update({ prompt, query: null });
}

/** Draws everything from the state; returns the milliseconds that it took. */
export function redraw() {
  here = side(run, state.frame, state.prompt);
  const there = otherSide();
  // Of two steps of this run A is the earlier: B − A is what was gained since.
  [A, B] = there?.run === run && there.step < here.step ? [there, here] : [here, there];
  if (B) B.same = sameTokens(A, B);
  draw.all();
  return timing.redraw;
}

/** Sets the head under the pointer (null: none), and in a chart the index of its step. */
export function pointAt(index, at = null) {
  if (index === pointed.index && at === pointed.at) return;
  Object.assign(pointed, { index, at });
  draw.pointer();
}
