/* The guided tour: each stop sets the view and says in a few sentences what it shows: what one row means,
 * what the clearest head of each name does, which tokens of the text it connects, and what changed from
 * the first to the last step. */

import { format, formatLoss, formatLossChange, formatWeight } from "./text.js";
import { $, bold, quotedToken, showMessage } from "./dom.js";
import { decode, weight } from "./data.js";
import {
  DEFAULTS, headName, other, placeOfHead, run, selected, side, state, textName, uniformOf, update, valueAt,
} from "./state.js";
import { findName, groupTitle, kindOf, nameAt, offsetAt, whereText } from "./names.js";
import { clearestHead, distanceText, usualDistance, withArticle } from "./finding.js";
import { pause } from "./player.js";

// [{title, text: [string or node], view, outline, points}], made at the first stop. outline: the line of
// cells to outline in the map, {from, to: [key, query]}; points: ids of elements.
let stops = [];
let before = {}; // {view, top: the scroll position} before the tour

export function buildTour() {
  $("show-tour").hidden = !tourLength();
  $("show-tour").onclick = () => goTour(1).then(() => $("tour-next").focus());
  $("tour-next").onclick = () => goTour(state.tour + 1);
  $("tour-back").onclick = () => goTour(state.tour - 1);
  $("tour-end").onclick = endTour;
}

/** Ends the tour and restores the view before it. */
export function endTour() {
  const { top = scrollY } = before;
  update({ ...before.view, tour: 0 }).then(() => scrollTo(0, top));
  before = {};
  $("show-tour").focus();
}

const isReadable = ({ length }) => length > 2;

/** Returns the number of stops, 0 if there is no tour. */
export function tourLength() {
  if (other || run.frames.length < 2 || !run.prompts.some(isReadable)) return 0;
  return 2 + Math.max(1, shownNames().length) + (run.windows ? 1 : 0);
}

/** Shows in one line that the page does not have this stop of the tour. Returns whether it has not. */
export function explainTour(number) {
  const count = tourLength();
  if (!(number > count)) return false;
  showMessage(count ? `No stop ${number}: the tour of this page has ${count} stops.`
    : "This page has no tour: it needs one run with two snapshots and a prompt of three tokens.");
  return true;
}

/** Shows a stop, counted from 1; after the last stop the tour ends. */
export async function goTour(number) {
  pause();
  for (const frame of [0, run.frames.length - 1]) await decode(run, frame);
  stops = makeStops();
  const stop = stops[number - 1];
  if (!stop) return endTour();
  if (!state.tour) before = { view: { ...state }, top: scrollY };
  const { theme } = state;
  await update({ ...DEFAULTS, ...stop.view, theme, tour: number });
  const shown = stop.points.map($).find((node) => node.offsetHeight);
  shown?.scrollIntoView({ block: "nearest" });
}

/** Shows or hides the panel of the tour. */
export function drawTour() {
  const stop = stops[state.tour - 1];
  $("tour").hidden = !stop;
  for (const node of document.querySelectorAll(".pointed")) node.classList.remove("pointed");
  document.documentElement.style.setProperty("--tour", `${$("tour").offsetHeight}px`);
  if (!stop) return;
  const title = `${state.tour} of ${stops.length}: ${stop.title}`;
  if ($("tour-title").textContent !== title) {
    $("tour-title").textContent = title;
    $("tour-text").replaceChildren(...stop.text);
  }
  $("tour-back").disabled = state.tour === 1;
  $("tour-next").textContent = state.tour === stops.length ? "finish" : "next";
  for (const id of stop.points) $(id).classList.add("pointed");
  document.documentElement.style.setProperty("--tour", `${$("tour").offsetHeight}px`);
}

/** Returns the line of cells to outline in the shown map, or null. */
export function tourOutline() {
  const { outline, view } = stops[state.tour - 1] ?? {};
  if (!outline || state.prompt !== view.prompt) return null;
  return selected() === view.layer * run.heads + view.head ? outline : null;
}

/** Returns the names that heads have at the last step, at most four. */
function shownNames() {
  const names = Array.from({ length: run.count }, (_, index) =>
    nameAt(run, index, run.frames.at(-1).step));
  return run.names.filter(({ key }) => kindOf(key) && names.includes(key))
    .sort((a, b) => a.is_simple - b.is_simple).slice(0, 4).map(({ key }) => key);
}

/** Returns the line of the cells to which the heads of a name attend, or null if it is no line.
 * tokensBack: of a head "offset". */
function lineOf(key, { length, period }, tokensBack) {
  if (key === "induction" && period) return { from: [2, period + 1], to: [period + 1, 2 * period] };
  const back = { previous_token: 1, diagonal: 0, offset: tokensBack }[key];
  return back === undefined || back >= length ? null
    : { from: [0, back], to: [length - 1 - back, length - 1] };
}

function makeStops() {
  const last = run.frames.length - 1;
  const at = clearestHead(last) ??
    { index: 0, key: "previous_token", prompt: run.prompts.findIndex(isReadable), query: null };
  const prompt = run.prompts[at.prompt];
  const query = at.query ?? prompt.length - 1;
  const weightOf = (key) => weight(run, last, at.prompt, at.index, query, key);
  let most = 0;
  for (let key = 1; key <= query; key++) if (weightOf(key) > weightOf(most)) most = key;
  const token = (n) => [quotedToken(prompt.labels[n]), ` (${n})`];
  const steps = [0, last].map((frame) => run.frames[frame].step);
  const viewOf = (one) => ({ ...placeOfHead(one.index), prompt: one.prompt, frame: last,
    query: one.query ?? run.prompts[one.prompt].length - 1 });
  const view = viewOf(at);
  const ofNames = shownNames().map((key) =>
    clearestHead(last, (index) => nameAt(run, index, run.frames[last].step) === key));
  return [
    { title: "one row", points: ["readout"], view,
      text: ["Each row of the heatmap is one token. It can attend to itself and to the tokens before " +
        "it. The marked row is ", ...token(query), ": its largest weight, ",
      bold(formatWeight(weightOf(most))), ", is on ", ...token(most),
      ". The weights of a row sum to 1."] },
    ...(ofNames.length ? ofNames : [at]).map((one, n) => ({
      title: ofNames.length ? withArticle(kindIn(one, last)) : "one head",
      points: [findName(run, one.index, steps[1])?.onPrompts === false ? "contexts" : "finding"],
      view: viewOf(one),
      outline: lineOf(one.key, run.prompts[one.prompt], offsetAt(run, one.index, steps[1])),
      text: [n ? "" : "All rows together show what a head does. ", ...kindText(one, last)] })),
    ...(run.windows ? [{ title: `in ${textName()}`, points: ["contexts"], view,
      text: [`These lines are from ${textName()}: the tokens that `, bold(headName(at.index)),
        " connects. First the five places where it is strongest, then five places drawn at random, " +
        "which show what it does elsewhere."] }] : []),
    { title: `from step ${steps[0]} to step ${steps[1]}`, points: ["others"],
      view: { ...view, compare: `step:${steps[0]}`, show: "b" }, text: changeOfRun(at, last) },
  ];
}

/** Returns a name with the number of tokens back of a head. */
const kindIn = ({ index, key }, frame) => kindOf(key, offsetAt(run, index, run.frames[frame].step));

/** Returns what a head does, with its mean weight on the key tokens of a name, on the text or without
 * one on the prompt. */
function kindText(one, frame) {
  const { index, key, prompt } = one;
  const of = side(run, frame, prompt);
  const kind = kindIn(one, frame);
  const [head, { target }] = [bold(headName(index)), kind];
  if (key === "positional") {
    const { distance, mean } = usualDistance(frame, prompt, index);
    return [head, ` is ${withArticle(kind)}. ${kind.meaning} It attends most to ` +
      `${distanceText(distance)}: its mean weight there is `, bold(format(mean)), ".",
    ...neededText(index, key)];
  }
  const isOnText = run.windows !== null;
  const value = bold(format(valueAt(of, key, index, isOnText)));
  const name = findName(run, index, of.step);
  const isName = name?.key === key;
  return [head, ` is ${isName ? "" : "nearest to "}${withArticle(kind)}` +
    `${isName ? whereText(name) : ""}: ${isOnText ? `on ${textName()}, ` : ""}its mean weight on ${target} is `,
  value, `. Equal weights on all tokens would give ${format(uniformOf(of, key, isOnText))}.`,
  ...neededText(index, key)];
}

/** Returns whether the model needs all heads of a name, if this was measured. */
function neededText(index, key) {
  const group = run.ablation?.groups.find(({ name }) => name === key);
  const { loss_change: change, loss_change_error: error } = group ?? {};
  if (!group || error === null || nameAt(run, index, run.ablation.step) !== key) return [];
  const text = ` Without ${groupTitle(group)}, the loss changes by ${formatLossChange(change, error)}`;
  return [Math.abs(change) > 2 * error ? `${text}.`
    : `${text}, which is not clearly different from 0: attention is not importance.`];
}

/** Returns what changed from the first to the last step. */
function changeOfRun(one, last) {
  const { index, key, prompt } = one;
  const sides = [0, last].map((frame) => side(run, frame, prompt));
  const [before, after] = sides.map((of) => format(valueAt(of, key, index, run.windows !== null)));
  const [few, many] = sides.map((of) => Array.from({ length: run.count }, (_, head) =>
    findName(run, head, of.step)).filter(Boolean).length);
  const losses = run.curves["validation loss"] ?? [];
  // The value of a positional head is not a weight.
  const [what, where] = key === "positional" ? ["value “positional”", ""]
    : ["mean weight", ` on ${kindIn(one, last).target}${run.windows ? ` in ${textName()}` : ""}`];
  return ["A is the first step, B the last one; the play button shows all steps between them. The " +
    `${what} of `, bold(headName(index)), `${where} was `, bold(before), " and is ", bold(after),
    ". ", ...(few || many ? [`${few} of ${run.count} heads had a name, and ${many} ` +
      `${many === 1 ? "has" : "have"} one now. `] : []),
    ...(losses.length > 1 ? [`The validation loss was ${formatLoss(losses[0][1])} and is ` +
      `${formatLoss(losses.at(-1)[1])}.`] : [])];
}
