/* The tour of a run that has learned to copy a repeated sequence: its heads and its losses, in the
 * order of the steps. */

import { format, formatChance, formatLoss, formatWeight } from "./text.js";
import { bold, make, quotedToken } from "./dom.js";
import { weight } from "./data.js";
import {
  headName, lossesOf, meanLoss, other, placeOfHead, run, side, statisticOf, textName,
} from "./state.js";
import { findName, groupTitle, kindOf, nameAt, sinceStep } from "./names.js";
import { lineOf, textStops } from "./tour_basics.js";

const lastStep = () => run.frames.at(-1).step;
const repeatedPrompt = () =>
  run.prompts.findIndex(({ period, length }) => period > 2 && length > 2 * period);

/** Returns the head with this name on the prompts at the last step that has the largest value, or
 * null. */
function bestHead(key) {
  const values = statisticOf(run, key)?.values.at(-1) ?? [];
  const named = values.map((_, index) => index).filter((index) => {
    const name = findName(run, index, lastStep());
    return name?.key === key && name.onPrompts;
  });
  return named.sort((a, b) => values[b] - values[a])[0] ?? null;
}

/** Returns what the tour is about, or null if the page has not all that it needs:
 * {prompt: index, period, labels, induction, previous: heads, since: step, and the indices of
 * frames, in this order: before, grown, copies, last}. */
function findSubject() {
  const prompt = repeatedPrompt();
  const [induction, previous] = ["induction", "previous_token"].map(bestHead);
  const last = run.frames.length - 1;
  if (other || prompt < 0 || induction === null || previous === null || !last) return null;
  const sides = run.frames.map((_, frame) => side(run, frame, prompt));
  if (!lossesOf(sides[last]).length) return null;
  // The last snapshot before the change at which the head is nearly uniform.
  const since = sinceStep(run, induction, lastStep());
  const { values } = statisticOf(run, "induction");
  const chance = statisticOf(run, "induction").uniform;
  const limit = Math.min(since, run.stage ?? since);
  const earlier = sides.filter((of) => of.step < limit && lossesOf(of).length);
  const isUniform = ({ at }) => (values[at]?.[induction] ?? 0) < chance + 0.05;
  const before = (earlier.findLast(isUniform) ?? earlier.at(-1))?.frame;
  if (before === undefined) return null;
  const from = (step) => run.frames.findIndex((frame) => frame.step >= step);
  const grown = Math.max(from(sinceStep(run, previous, lastStep())), before);
  const copies = Math.max(from(since), from(run.stage ?? since), grown);
  return { prompt, ...run.prompts[prompt], induction, previous, since, before, grown, copies, last };
}

/** Returns what this tour needs and the page has not. */
export function missingForCopying() {
  const [induction, previous] = ["induction", "previous_token"].map(bestHead);
  const missing = [
    repeatedPrompt() < 0 && "a repeated sequence as a prompt",
    previous === null && "a previous-token head on the prompts",
    induction === null && "an induction head on the prompts",
  ].filter(Boolean);
  return missing.length || findSubject() ? missing : ["the losses at a step before the induction head"];
}

/** Returns the tour, see tour.js, or null if the run has not learned to copy. */
export function copyingTour() {
  const subject = findSubject();
  if (!subject) return null;
  const { before, grown, copies, last } = subject;
  const removed = run.ablation?.method === "exact";
  const count = 5 + removed + (run.windows ? 1 : 0);
  return { count, isShort: !removed, frames: [before, grown, copies, last],
    stops: () => copyingStops(subject, removed) };
}

function copyingStops(subject, removed) {
  const { period, labels, prompt, induction, previous, since, before, grown, copies, last } = subject;
  const losses = (frame) => lossesOf(side(run, frame, prompt));
  const copyLoss = (frame, copy) => bold(formatLoss(meanLoss(losses(frame), period, copy)));
  const chance = (frame, query) => Math.exp(-losses(frame)[query]);
  const query = clearestQuery(subject, chance);
  const key = query - period + 1;
  const quoted = (n) => quotedToken(labels[n]);
  const stepOf = (frame) => run.frames[frame].step;
  const average = (frame, name, index) =>
    bold(format(run.frames[frame].facts.statistics[prompt][name][index]));
  const uniform = (name) => `(chance ${format(run.prompts[prompt].uniform[name])})`;
  const [I, P] = [induction, previous].map((index) => bold(headName(index)));
  const view = (frame, index, more) => ({ prompt, frame, query, ...placeOfHead(index), ...more });
  const line = (name) => lineOf(name, run.prompts[prompt]);
  const onText = [`These are other sequences than the prompt. In ${textName()}, the mean weight of `, I, " on the " +
    "tokens after earlier occurrences is ", bold(format(statisticOf(run, "induction")
    .values.at(-1)[induction])), ` (chance ${format(statisticOf(run, "induction").uniform)}). `];
  const isEarlier = placeOfHead(previous).layer < placeOfHead(induction).layer;
  const named = sinceStep(run, previous, stepOf(last));
  return [
    { title: "the task", points: ["words"], view: { prompt, frame: before, query },
      text: [`The prompt is ${period} random tokens, written twice. In copy 1, nothing tells the ` +
        "model which token comes next. In copy 2, it could copy. " +
        `At step ${stepOf(before)}, the mean loss in copy 2 is still `, copyLoss(before, 2), "."] },
    { title: `step ${stepOf(before)}, before it copies`, points: ["readout"],
      view: view(before, induction), outline: line("induction"),
      text: [I, " will attend to the outlined cells: in copy 2, to the token that followed the same " +
        "token in copy 1. At this step its mean weight there is ",
      average(before, "induction", induction), ` ${uniform("induction")}.`] },
    { title: `step ${stepOf(grown)}, a previous-token head`, points: ["readout"],
      view: view(grown, previous, { query: key }), outline: line("previous_token"),
      text: [`Copying needs a second head${isEarlier ? " in an earlier layer" : ""}. In `, P,
        ", tokens attend to the token before them, along the outlined line: mean weight ",
        average(grown, "previous_token", previous), ` ${uniform("previous_token")}. So the vector ` +
        "at ", quoted(key), ` (${key}) also says that `, quoted(key - 1), " came before it. " +
        `The head has its name since step ${named}.`] },
    { title: `step ${stepOf(copies)}, an induction head`, outline: line("induction"),
      points: ["readout", "losses-frame"], view: view(copies, induction),
      text: [I, ` is an induction head since step ${since}. At `, quoted(query), ` (${query}) ` +
        "it attends to ", quoted(key), ` (${key}), the token after the first `, quoted(key - 1),
      ", with weight ", bold(formatWeight(weight(run, copies, prompt, induction, query, key))),
      ". The mean loss in copy 2 fell from ", copyLoss(before, 2), " at step " +
        `${stepOf(before)} to `, copyLoss(copies, 2), "."] },
    { title: `step ${stepOf(last)}, the prediction`,
      points: ["next"],
      view: view(last, induction, { compare: `step:${stepOf(before)}`, show: "b", text: "loss" }),
      text: ["After ", quoted(query), ` (${query}) comes `, quoted(query + 1), ". Its predicted " +
        "probability was ", bold(formatChance(chance(before, query))), ` at step ${stepOf(before)} ` +
        "(A) and is ", bold(formatChance(chance(last, query))), ` at step ${stepOf(last)} (B).`] },
    ...textStops(induction, view(last, induction), onText),
    removed && { title: `step ${stepOf(last)}, without these heads`, points: ["removed"],
      view: view(last, previous, { query: key }), text: removedHeads(subject) },
  ].filter(Boolean);
}

/** Returns the query token of the second copy at which the induction head is clearest and the
 * prediction improves most. */
function clearestQuery({ period, prompt, before, copies, last, induction }, chance) {
  const rise = (query) => weight(run, copies, prompt, induction, query, query - period + 1) *
    (chance(last, query) - chance(before, query));
  const queries = Array.from({ length: period - 2 }, (_, n) => period + 2 + n);
  return queries.reduce((best, query) => (rise(query) > rise(best) ? query : best));
}

/** Returns what happens without heads, from the data of ablation.py. */
function removedHeads({ induction, previous }) {
  const { accuracy, heads, groups } = run.ablation;
  const indexOf = ({ layer, head }) => layer * run.heads + head;
  const nameOf = (index) => nameAt(run, index, lastStep());
  const row = (what, { loss_change: change, accuracy_without: without }) => make("li", {},
    `without ${what}: `, bold(without === null ? formatLoss(change, true) : format(without)));
  const single = (chosen) => heads.filter(chosen).map((one) =>
    row(`${headName(indexOf(one))} (${kindOf(nameOf(indexOf(one))).title})`, one));
  // Heads of the same name can replace each other: all of them together.
  const rows = [previous, induction].flatMap((index) => {
    const group = groups.find((one) => one.name === nameOf(index) && one.heads > 1);
    return group ? [row(groupTitle(group), group)] : single((one) => indexOf(one) === index);
  });
  const needed = single((one) => one.loss_change > 0.5 && nameOf(indexOf(one)) === "diagonal");
  const what = accuracy === null ? ["Change of the validation loss:"]
    : ["Accuracy on the validation data with all heads: ", bold(format(accuracy)), "."];
  return [make("p", {}, "Does the model need these heads? Their output was replaced by its mean. ",
    ...what), make("ul", {}, ...rows, ...needed)];
}
