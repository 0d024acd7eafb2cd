/* What happens without a head: loss and accuracy when heads are removed, see headlens/ablation.py. */

import { format, formatLoss, formatLossChange, lossDigits, plural, rounded } from "./text.js";
import { $, bold, make } from "./dom.js";
import {
  A, B, headName, indexInB, isMeasured, nearestFrame, other, removalOf, REMOVED, run, selected,
  sideName, state, textName, update,
} from "./state.js";
import { sortBy } from "./controls.js";
import { fillTag, findName, groupTitle, kindOf, nameAt } from "./names.js";

const changeText = (result) => formatLossChange(result.loss_change, result.loss_change_error);

/** Returns whether a change of the loss is not clearly different from 0. */
const isNoise = ({ loss_change: change, loss_change_error: error }) =>
  error !== null && Math.abs(change) <= 2 * error;

/** Returns the place of a head among all heads, ordered by the change of the loss without them. */
function rankOf({ heads }, { loss_change: change }) {
  const larger = heads.filter((one) => one.loss_change > change).length;
  return `; ${larger ? `number ${larger + 1} of the ${heads.length} heads by this change`
    : `the largest change of the ${heads.length} heads`}`;
}

/** Returns whether the removal of several heads changes the loss more than their single removals do
 * together, as a sentence. */
function togetherText({ heads, method }, group, isInGroup) {
  const members = heads.filter(isInGroup);
  const sum = members.reduce((total, { loss_change: change }) => total + change, 0);
  const isMore = group.loss_change - sum > 3 * (group.loss_change_error ?? Infinity);
  if (method !== "exact" || members.length !== group.heads || !isMore) return "";
  return ` This is more than the single changes together, ${formatLoss(sum, true)}: ` +
    "without one of them, the others replace a part of what it does.";
}

/** Returns one sentence: loss and accuracy before and after the removal. */
function resultText({ method, loss, accuracy }, result, rankText = "") {
  const { loss_change: change, accuracy_without: without } = result;
  // So that the two losses differ if the change is not 0.
  const [before, after] = [loss, loss + change].map((value) =>
    rounded(value, Math.max(lossDigits(value), lossDigits(change))));
  const about = method === "exact" ? "" : "about ";
  const isNone = formatLoss(change, true) === "0";
  const isUnclear = !isNone && isNoise(result);
  const parts = [`loss ${before} → ${about}${after} (`,
    bold(isNone ? "no measurable change" : changeText(result)),
    isUnclear ? ", not clearly different from 0)" : isNone ? ")" : `${rankText})`];
  if (without !== null) parts.push(`, accuracy ${format(accuracy)} → `, bold(format(without)));
  return parts;
}

/** Returns the other groups of heads that the model clearly needs, if it needs the group `name`. */
function alsoNeeded({ method, accuracy, groups }, name) {
  const most = Math.max(...groups.map((group) => group.loss_change));
  const needed = method !== "exact" ? [] : groups.filter((group) =>
    group.loss_change > Math.max(0.1 * most, 2 * (group.loss_change_error ?? 0)));
  const others = needed.filter((group) => group.name !== name);
  if (!others.length || others.length === needed.length) return [];
  const texts = others.map((group) => `without ${groupTitle(group)}, ${accuracy === null
    ? `the loss changes by ${formatLoss(group.loss_change, true)}`
    : `accuracy is ${format(group.accuracy_without)}`}`);
  return [make("br"), `The model also needs heads of other kinds: ${texts.join("; ")}.`];
}

const MEANING = "exact: measured without the heads; first-order estimate: gradient times change";
const howMeasured = ({ method, windows, targets }) => make("p", { className: "note", title: MEANING,
  textContent: `${method === "exact" ? "exact: output replaced by its mean"
    : "first-order estimate, correct only for small changes"}; ` +
  `${plural(targets, "prediction")} in ${plural(windows, "validation window")}` +
  (windows > 1 ? "; ± standard error" : "") });

/** Returns where the values are, for a side that shows another step. */
function elsewhere(of) {
  const { step } = of.run.ablation;
  const parts = [`Measured at step ${step}. `];
  if (of.run === run) {
    const button = make("button", { textContent: "show" });
    button.addEventListener("click", () => update({ frame: nearestFrame(run, step) }));
    parts.push(button);
  }
  return parts;
}

/** Returns for each run with removed heads one side, if possible at the step of the measurement. */
const measuredSides = () => [run, other].flatMap((of) => {
  const sides = [A, B].filter((side) => of?.ablation && side?.run === of);
  return sides.find(isMeasured) ?? sides.slice(0, 1);
});
const prefix = (of) => (B ? [bold(sideName(of)), " · "] : []);

/** Shows the loss without the enlarged head, and without all heads of its name. */
export function drawRemoved() {
  const placeIn = (of) => (of.run === run ? selected() : indexInB(selected()));
  const sides = selected() === null ? [] : measuredSides().filter((of) => placeIn(of) >= 0);
  $("removed").hidden = !sides.length;
  $("removed").replaceChildren(make("h3", { textContent: "What happens without it?" }),
    ...sides.flatMap((of) => {
      if (!isMeasured(of)) return [make("p", {}, ...prefix(of), ...elsewhere(of))];
      const found = removalOf(of, placeIn(of));
      if (!found) return [];
      const { ablation } = of.run;
      const name = nameAt(of.run, placeIn(of), of.step);
      const group = ablation.groups.find((one) => one.name === name && one.heads > 1);
      const all = group ? [make("br"), `Without ${groupTitle(group)}: `,
        ...resultText(ablation, group), ".", togetherText(ablation, group, ({ layer, head }) =>
          nameAt(of.run, layer * of.run.heads + head, of.step) === name)] : [];
      return [
        make("p", {}, ...prefix(of), `Without ${headName(placeIn(of), of.run)}: `,
          ...resultText(ablation, found, rankOf(ablation, found)), ".", ...all,
          ...alsoNeeded(ablation, name)),
        ...(ablation.groups.length ? [] : [howMeasured(ablation)])];
    }));
}

function groupRows(of, group, digits) {
  const { ablation } = of.run;
  const tag = make("span");
  if (kindOf(group.name)) fillTag(tag, kindOf(group.name));
  const without = group.accuracy_without;
  const cells = [rounded(ablation.loss + group.loss_change, digits), changeText(group),
    ...(ablation.accuracy === null ? [] : [format(without)])];
  const weak = ablation.heads.filter(({ layer, head }) => {
    const name = findName(of.run, layer * of.run.heads + head, ablation.step);
    return name?.key === group.name && !name.onText;
  }).length;
  const only = !weak ? "" : weak === group.heads ? ` On prompts only, not on ${textName()}.`
    : ` ${weak} of them on prompts only, not on ${textName()}.`;
  const meaning = (kindOf(group.name)?.meaning ?? "") + only; // "uniform" has none
  return [
    make("tr", { className: isNoise(group) ? "noise" : "" },
      make("th", { scope: "row" }, tag, ` ${groupTitle(group)}`),
      ...cells.map((textContent) => make("td", { className: "number", textContent }))),
    make("tr", {}, make("td", { colSpan: cells.length + 1, className: "note", textContent: meaning })),
  ];
}

function groupTable(of) {
  const { ablation } = of.run;
  const accuracy = ablation.accuracy === null ? [] : ["accuracy"];
  const head = ["removed", "loss", "change", ...accuracy].map((textContent, n) =>
    make("th", { scope: "col", textContent, className: n ? "number" : "" }));
  // One number of decimals in the column of losses.
  const digits = Math.max(...[ablation.loss, ...ablation.groups.map((one) => one.loss_change)]
    .map(lossDigits));
  const clean = [rounded(ablation.loss, digits), "", ...accuracy.map(() => format(ablation.accuracy))];
  const sorted = [...ablation.groups].sort((a, b) => b.loss_change - a.loss_change);
  return [make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {},
    make("tr", {}, make("th", { scope: "row", textContent: "nothing" }),
      ...clean.map((textContent) => make("td", { className: "number", textContent }))),
    ...sorted.flatMap((group) => groupRows(of, group, digits)))),
  ...(sorted.some(isNoise) ? [make("p", { className: "note",
    textContent: "grey: not clearly different from 0" })] : []),
  howMeasured(ablation)];
}

/** Shows the loss without all heads of each name. */
export function drawGroups() {
  const sides = measuredSides().filter((of) => of.run.ablation.groups.length);
  $("groups").hidden = !sides.length;
  if (!sides.length) return;
  const isSorted = state.sort === REMOVED.key;
  const sort = make("button", { textContent: isSorted ? "sort heads by layer"
    : "sort heads by loss without the head" });
  sort.addEventListener("click", () => sortBy(isSorted ? "" : REMOVED.key));
  $("groups").replaceChildren(
    make("h2", { textContent: "What if all heads of one kind are removed?" }),
    ...sides.flatMap((of) => [
      ...(B && isMeasured(of) ? [make("p", {}, bold(sideName(of)))] : []),
      ...(isMeasured(of) ? groupTable(of) : [make("p", {}, ...prefix(of), ...elsewhere(of))]),
    ]),
    make("p", { className: "note", textContent: "Attention is not importance: a head can have a " +
      "clear pattern that the model does not need. Heads of the same name can replace each " +
      "other: the loss may change little without one of them and much without all of them." }),
    ...(run.ablation ? [sort] : []));
}
