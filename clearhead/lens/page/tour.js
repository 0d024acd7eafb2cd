/* The guided tour: how the model of this run learned to copy a repeated sequence. Each stop sets
 * the view and says in a few sentences what it shows, with the numbers of this run. */

import { format, formatLoss, formatWeight, visible } from "./text.js";
import { $, bold, make } from "./dom.js";
import { decode, weight } from "./data.js";
import {
  DEFAULTS, headName, lossesOf, meanLoss, other, placeOfHead, run, selected, side, state,
  statisticOf, update,
} from "./state.js";
import { groupTitle, kindOf, nameAt, sinceStep } from "./names.js";
import { pause } from "./player.js";

let stops = []; // {title, text: [string or node], view, outline, points: ids of elements}
let subject = null; // {prompt, period, before, last: indices of frames, induction, previous}

/** Returns the head with this name at the last step that has the largest value, or null. */
function bestHead(key) {
  const values = statisticOf(run, key)?.values.at(-1) ?? [];
  const named = values.map((_, index) => index)
    .filter((index) => nameAt(run, index, run.frames.at(-1).step) === key);
  return named.sort((a, b) => values[b] - values[a])[0] ?? null;
}

/** Returns what the tour is about, or null if the page has not all that it needs. */
function findSubject() {
  const prompt = run.prompts.findIndex(({ period, length }) => period > 2 && length > 2 * period);
  const [induction, previous] = ["induction", "previous_token"].map(bestHead);
  const last = run.frames.length - 1;
  const { step } = run.frames[last];
  if (other || prompt < 0 || induction === null || previous === null) return null;
  const sides = run.frames.map((_, frame) => side(run, frame, prompt));
  if (!last || !lossesOf(sides[last]).length) return null;
  // The last snapshot before the change at which the head is nearly uniform.
  const since = sinceStep(run, induction, step);
  const { values } = statisticOf(run, "induction");
  const chance = run.prompts[prompt].uniform.induction;
  const limit = Math.min(since, run.stage ?? since);
  const earlier = sides.filter((of) => of.step < limit && lossesOf(of).length);
  const isUniform = ({ at }) => (values[at]?.[induction] ?? 0) < chance + 0.05;
  const before = earlier.findLast(isUniform) ?? earlier.at(-1);
  return before ? { prompt, ...run.prompts[prompt], before: before.frame, last, induction,
    previous, since } : null;
}

export function buildTour() {
  subject = findSubject();
  $("show-tour").hidden = !subject;
  if (!subject) return;
  for (const id of ["show-tour", "offer-tour"]) {
    $(id).addEventListener("click", () => goTour(1).then(() => $("tour-next").focus()));
  }
  $("tour-next").addEventListener("click", () => goTour(state.tour + 1));
  $("tour-back").addEventListener("click", () => goTour(state.tour - 1));
  $("tour-end").addEventListener("click", endTour);
}

export function endTour() {
  update({ tour: 0 });
  $("show-tour").focus();
}

/** Returns the largest number of stops, 0 if there is no tour. */
export const tourLength = () => (subject ? 6 : 0);

/** Shows a stop, counted from 1; after the last stop the tour ends. */
export async function goTour(number) {
  pause();
  await Promise.all([subject.before, subject.last].map((frame) => decode(run, frame)));
  stops = makeStops();
  const stop = stops[number - 1];
  if (!stop) return endTour();
  const { theme } = state;
  await update({ ...DEFAULTS, ...stop.view, theme, prompt: subject.prompt, tour: number });
  const shown = stop.points.map($).find((node) => node.offsetHeight);
  shown?.scrollIntoView({ block: "nearest" });
}

/** Shows or hides the panel of the tour. */
export function drawTour() {
  const stop = stops[state.tour - 1];
  $("tour").hidden = !stop;
  $("offer-tour").hidden = !subject || Boolean(stop);
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

/** Returns the line of cells to outline in the shown map, {from, to: [key, query]}, or null. */
export function tourOutline() {
  const stop = stops[state.tour - 1];
  if (!stop?.outline || state.prompt !== subject.prompt) return null;
  return selected() === stop.view.layer * run.heads + stop.view.head ? stop.outline : null;
}

const lossesIn = (frame) => lossesOf(side(run, frame, subject.prompt));
const copyLoss = (frame, copy) => meanLoss(lossesIn(frame), subject.period, copy);
const chanceOf = (frame, query) => Math.exp(-lossesIn(frame)[query]);

/** Returns what the model predicts after a query token. */
function predictedText(side, frame, query) {
  const { facts: { predictions }, step } = run.frames[frame];
  const { tokens, probabilities } = predictions.of_prompts[subject.prompt];
  const likely = predictions.tokens[tokens[query][0]];
  return [`${side}, step ${step}: most likely `,
    make("bdi", { textContent: `"${visible(likely, 24)}"` }),
    ` with probability ${probabilities[query][0].toFixed(2)}; the true token has `,
    bold(chanceOf(frame, query).toFixed(2)), ". "];
}

/** Returns the query token of the second copy at which the induction head is clearest and the
 * prediction improves most. */
function clearestQuery() {
  const { period, prompt, before, last, induction } = subject;
  const rise = (query) => weight(run, last, prompt, induction, query, query - period + 1) *
    (chanceOf(last, query) - chanceOf(before, query));
  const queries = Array.from({ length: period - 2 }, (_, n) => period + 2 + n);
  return queries.reduce((best, query) => (rise(query) > rise(best) ? query : best));
}

function makeStops() {
  const { period, tokens, prompt, before, last, induction, previous, since } = subject;
  const query = clearestQuery();
  const key = query - period + 1;
  const quoted = (n) => make("bdi", { textContent: `"${visible(tokens[n], 24)}"` });
  const stepOf = (frame) => run.frames[frame].step;
  const average = (frame, name, index) =>
    formatWeight(run.frames[frame].facts.statistics[prompt][name][index], 2);
  const uniform = (name) => run.prompts[prompt].uniform[name].toFixed(2);
  const [I, P] = [headName(induction), headName(previous)];
  const view = (index, more) => ({ ...placeOfHead(index), frame: last, query, ...more });
  const stripe = { from: [2, period + 1], to: [period + 1, 2 * period] };
  return [
    { title: "the task", points: ["words"], view: { frame: last, query },
      text: [`The prompt is ${period} random tokens (copy 1) and the same ${period} again (copy ` +
        "2). The colours show the loss of each token. In copy 1, nothing tells the model what comes " +
        "next: mean loss ", bold(format(copyLoss(last, 1))), ". Training need not reduce this loss, " +
        "and it exceeds that of an even guess if the model is sure of wrong tokens. In copy 2 it " +
        "can copy what followed the same token before: mean loss ", bold(format(copyLoss(last, 2))),
      ", without its first token."] },
    { title: `the previous-token head, ${P}`, points: ["readout"],
      view: view(previous, { query: key }), outline: { from: [0, 1], to: [2 * period - 1, 2 * period] },
      text: ["Copying needs heads in both layers. In ", bold(P), ", most tokens attend to the token before " +
        "them, along the outlined line (mean weight ", bold(average(last, "previous_token", previous)),
      `, uniform ${uniform("previous_token")}). So the vector at `, quoted(key), ` (${key}) also ` +
        "says that ", quoted(key - 1), " came before it. ", nameStepText()] },
    { title: `before, step ${stepOf(before)}`, points: ["readout"], outline: stripe,
      view: view(induction, { frame: before }),
      text: [bold(I), " will attend to the outlined cells: in copy 2, to the token that followed " +
        "the same token in copy 1. At this step it does not yet: mean weight there ",
      bold(average(before, "induction", induction)), ` (uniform ${uniform("induction")}). The loss ` +
        "in copy 2 is ", bold(format(copyLoss(before, 2))), ", in copy 1 ",
      bold(format(copyLoss(before, 1))), "."] },
    { title: `the stripe, since step ${since}`, outline: stripe,
      points: ["readout", "losses-frame"], view: view(induction),
      text: [bold(I), ` is an induction head since step ${since}. At `, quoted(query), ` (${query}) ` +
        "it attends to ", quoted(key), ` (${key}), the token after the first `, quoted(key - 1),
      ", with weight ", bold(formatWeight(weight(run, last, prompt, induction, query, key))),
      ". The mean loss in copy 2 fell from ", bold(format(copyLoss(before, 2))), " at step " +
        `${stepOf(before)} to `, bold(format(copyLoss(last, 2))), ": see the line under the slider."] },
    run.frames[last].facts.predictions && { title: "the prediction becomes right",
      points: ["next"],
      view: view(induction, { compare: `step:${stepOf(before)}`, show: "b", text: "loss" }),
      text: ["The next token after ", quoted(query), ` (${query}) is `, quoted(query + 1), ". ",
        ...predictedText("A", before, query), ...predictedText("B", last, query)] },
    run.ablation?.method === "exact" && { title: "what happens without a head", points: [],
      view: view(previous, { query: key }), text: removedText() },
  ].filter(Boolean);
}

/** Returns since when the previous-token head has its name. It may get it after the induction head:
 * a name needs a limit, and the weight grows before. */
function nameStepText() {
  const { previous, since } = subject;
  const step = sinceStep(run, previous, run.frames.at(-1).step);
  const { values, uniform, named_from: limit } = statisticOf(run, "previous_token");
  const at = run.steps.findLastIndex((known) => known <= since);
  if (step <= since || at < 0) return `The head has this name since step ${step}.`;
  const needed = format(uniform + limit * (1 - uniform));
  const where = run.prompts.length > 1 ? " on every prompt" : "";
  return `A name needs a mean weight of about ${needed}${where}, which this head has since step ` +
    `${step}. At step ${run.steps[at]} its mean weight was ${format(values[at][previous])} ` +
    `(uniform ${format(uniform)}).`;
}

/** Returns what happens without heads, from the data of ablation.py. */
function removedText() {
  const { accuracy, heads, groups, windows } = run.ablation;
  const indexOf = ({ layer, head }) => layer * run.heads + head;
  const nameOf = (index) => nameAt(run, index, run.frames.at(-1).step);
  const rows = [];
  const add = (what, { loss_change: change, accuracy_without: without }) => rows.push(
    make("li", {}, `without ${what}: `,
      ...(without === null ? [] : ["accuracy ", bold(without.toFixed(2)), ", "]),
      `loss ${formatLoss(change, true)}`));
  const addHeads = (some) => some.forEach((row) =>
    add(`${headName(indexOf(row))} (${kindOf(nameOf(indexOf(row))).title})`, row));
  for (const index of [subject.previous, subject.induction]) {
    addHeads(heads.filter((row) => indexOf(row) === index));
    for (const group of groups) {
      if (group.name === nameOf(index) && group.heads > 1) add(groupTitle(group), group);
    }
  }
  const needed = heads.filter((row) => row.loss_change > 0.5 &&
    nameOf(indexOf(row)) === "diagonal");
  addHeads(needed);
  return [make("p", {}, `The output of a head was replaced by its mean, on ${windows} validation ` +
    `windows${accuracy === null ? "" : `; with all heads, accuracy ${accuracy.toFixed(2)}`}. Heads ` +
    "of the same kind can replace each other, so look at all of them together.",
    needed.length ? " Measured in other runs of this kind: an induction head looks for a key " +
      "whose previous token equals the current token. The self head makes the current token " +
      "larger in the query; without it, the output of the previous-token head outweighs it." : ""),
  make("ul", {}, ...rows)];
}
