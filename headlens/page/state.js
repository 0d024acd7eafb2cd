/* The state of the page, which the controls change, and A and B, which the page shows. */

import { plural, stepText } from "./text.js";
import { showMessage } from "./dom.js";
import { decode } from "./data.js";

export const DEFAULTS = {
  prompt: 0,
  frame: 0, // index into the frames of runs[0]
  layer: null, // the enlarged head
  head: null,
  map: "weights", // or "valued": weights times norms of values
  query: null, // position of the query token; null: the last
  sort: "", // "" is layer order, else a statistic's key or "significance"
  descending: true,
  name: "", // only heads with this name
  compare: "off", // "run": the other run at this step, "run:40", "step:40"
  show: "difference", // shown in the grid during a comparison: "a", "b" or "difference"
  theme: "auto", // "light", "dark"
  view: "all", // "story": the first screen; "all": all heads
  off: "", // on the first screen, the name of the heads that are switched off
};
export const state = { ...DEFAULTS };
export const hovered = { index: null, at: null, query: null, key: null }; // at the pointer
export let run; // the first run of the page
export let other = null; // a second run to compare with
export let A; // the shown step: {run, frame, prompt, tokens, T, bytes}
export let B = null; // compared with A; of two steps, the later; B.same: same tokens as A
export let here; // A or B: the side whose step the slider sets

export const SIGNIFICANCE = { key: "significance", title: "significance",
  description: "(value − chance) / (1 − chance), the largest of all names." };
export const REMOVED = { key: "loss_change", title: "loss without the head",
  description: "The change of the loss when the head is removed, in nats." };
export const statisticOf = (of, key) => (key === SIGNIFICANCE.key
  ? { ...SIGNIFICANCE, values: of.significance } : key === REMOVED.key ? of.removed && REMOVED
    : of.statistics.find((statistic) => statistic.key === key));
/** Returns the position of the selected query token. */
export const selectedQuery = () => Math.min(state.query ?? Infinity, A.T - 1);
export const selected = () => (state.layer === null ? null : state.layer * run.heads + state.head);

/** Returns {layer, head} of the index of a head. */
export const placeOfHead = (index, of = run) =>
  ({ layer: Math.floor(index / of.heads), head: index % of.heads });

/** Returns the name of a layer, such as "L3": its number in the model. */
export const layerName = (layer, of = run) => `L${of.numbers[layer]}`;

/** Returns the name of the place of a head, such as "L3 H2". */
export function headName(index, of = run) {
  const { layer, head } = placeOfHead(index, of);
  return `${layerName(layer, of)} H${head}`;
}

/** Returns the data of one step of a run on one prompt. It has `bytes` if its frame is decoded. */
export function side(of, frame, prompt) {
  const { tokens, texts, labels, length: T, start, triangle, normStart } = of.prompts[prompt];
  const { step, bytes, facts, normBytes: norms } = of.frames[frame];
  const at = Math.max(0, of.steps.findLastIndex((known) => known <= step));
  return { run: of, frame, prompt, tokens, texts, labels, T, start, triangle, normStart, step, bytes,
    facts, norms, at };
}

/** Returns the index of the number that is nearest to a number. */
export function nearestIndex(numbers, number) {
  const distances = numbers.map((one) => Math.abs(one - number));
  return distances.indexOf(Math.min(...distances));
}

export const nearestFrame = (of, step) => nearestIndex(of.frames.map((frame) => frame.step), step);

const sameTokens = (one, two) => one.tokens.join("\0") === two.tokens.join("\0");

/** Returns whether steps say something: those of a model without a training are 0. */
export const hasSteps = () => run.frames.length > 1 || run.frames[0].step > 0;

/** Returns the side to compare with, or null. */
export function otherSide() {
  const [kind, step] = state.compare.split(":");
  if (kind === "step") return side(run, nearestFrame(run, Number(step)), state.prompt);
  if (kind !== "run" || !other) return null;
  const frame = nearestFrame(other, Number(step ?? run.frames[state.frame].step));
  const match = other.prompts.findIndex((of) => sameTokens(of, run.prompts[state.prompt]));
  return side(other, frame, match >= 0 ? match : Math.min(state.prompt, other.prompts.length - 1));
}

/** Returns the side of the other run, or null. */
export const otherRunSide = () => (B && B.run !== run ? B : null);

/** Returns what the grid shows. Heatmaps of different tokens are not subtracted. */
export const gridShows = () => (B && (B.same || state.show === "b") ? state.show : "a");

/** Returns the index in B of a head of A, or -1. */
export function indexInB(index) {
  const { layer, head } = placeOfHead(index);
  const inB = B ? B.run.numbers.indexOf(run.numbers[layer]) : -1;
  return inB >= 0 && head < B.run.heads ? inB * B.run.heads + head : -1;
}

/** Returns whether A and B both have this head, on the same tokens. */
export const comparable = (index) => Boolean(B?.same) && indexInB(index) >= 0;

/** Returns how the page calls the text on which heads were measured: "the validation text". */
export const textName = () => run.text_name;

/** Returns of what the statistics are: of the text or, without one, of the recorded prompts. */
export const overText = () => (run.windows ? textName()
  : `${plural((run.recorded ?? run).prompts.length, "recorded prompt")} (mean)`);

/** Returns a statistic of all heads at all known steps: {steps, rows, at: index of the step}. */
export function seriesOf(of, key) {
  return { steps: of.run.steps, rows: statisticOf(of.run, key)?.values ?? [], at: of.at };
}

/** Returns [low, high] of a statistic over all heads and known steps, [] without values. */
export function rangeOf(of, key) {
  const values = seriesOf(of, key).rows.flat().filter(Number.isFinite);
  if (!values.length) return [];
  return [Math.min, Math.max].map((most) => values.reduce((a, b) => most(a, b)));
}

/** Returns whether the heads were removed at the step of this side. */
export const isMeasured = (of) => of.run.removed?.step === of.step;

/** Returns a statistic, the significance or the change of the loss of a head, or null. */
export function valueAt(of, key, index) {
  if (key === REMOVED.key) return isMeasured(of) ? of.run.removed.changes[index] : null;
  return statisticOf(of.run, key)?.values[of.at]?.[index] ?? null;
}

/** Returns the value of a statistic for uniform attention as a list: one value for all layers, one
 * for each layer, or none. */
export const chancesOf = (of, key) => [statisticOf(of.run, key)?.uniform ?? []].flat();

/** Returns the value of a statistic for uniform attention in the layer of a head, or null. */
export function uniformOf(of, key, index) {
  const known = chancesOf(of, key);
  return known[known.length > 1 ? placeOfHead(index, of.run).layer : 0] ?? null;
}

/** Returns the standard error of a statistic on the text, null if it is unknown. */
export const errorOf = (of, key, index) => of.run.errors[of.at]?.[key]?.[index] ?? null;

/** Returns a statistic of a head as shown in the grid: of A, of B, or B − A. */
export function shownValue(key, index) {
  const a = valueAt(A, key, index);
  if (!B || state.show === "a") return a;
  const place = indexInB(index);
  const b = place < 0 ? null : valueAt(B, key, place);
  if (state.show === "b") return b;
  return a === null || b === null ? null : b - a;
}

export function sideName(of) {
  if (!B) return stepText(of.step);
  const name = otherRunSide() ? ` (${of.run.name})` : "";
  return `${of === A ? "A" : "B"}: ${stepText(of.step)}${name}`;
}

/** The functions that redraw and hoverHead call. main.js sets them. */
export const draw = { all: () => {}, pointer: () => {} };

/** Returns whether the page has a first screen: not for two runs, or without a prompt to read. */
export const hasStory = () => Boolean(run.story) && !other;

export function setRuns(first, second) {
  [run, other] = [first, second];
}

let tickets = 0;

/** Changes the state and draws it, immediately if the needed frames are decoded. */
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
  return waiting.then(() => ticket === tickets && redraw(), (error) => {
    if (ticket !== tickets) return;
    showMessage(error.message);
    if (run.frames[here?.frame]?.bytes) update({ frame: here.frame, compare: "off" });
  });
}

/** Draws the page from the state. */
export function redraw() {
  here = side(run, state.frame, state.prompt);
  const there = otherSide();
  // Of two steps of one run, A is the earlier: B − A is the change from A to B.
  [A, B] = there?.run === run && there.step < here.step ? [there, here] : [here, there];
  if (B) B.same = sameTokens(A, B);
  draw.all();
}

/** Sets the head under the pointer (or null) and, in a chart, the index of the step. */
export function hoverHead(index, at = null) {
  if (index === hovered.index && at === hovered.at) return;
  Object.assign(hovered, { index, at });
  draw.pointer();
}
