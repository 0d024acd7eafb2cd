/* What the page shows in one sentence, and the legend of the names of heads, which is also a filter. */

import { format, formatLoss, plural } from "./text.js";
import { $, bold, make } from "./dom.js";
import { headName, here, placeOfHead, run, state, statisticOf, textName, update } from "./state.js";
import { defineColours, fillTag, findName, groupTitle, kindOf, nameAt, shownName } from "./names.js";
import { clearestHead } from "./finding.js";

const indices = () => Array.from({ length: run.count }, (_, index) => index);

let known = new Set(); // the names that heads of the run have at any step
let hasOutlined = false; // whether a name does not hold on the text, at any step

/** Writes what depends on the steps of the run. */
export function buildSubject() {
  writeSubject();
  known = new Set(run.namesAt.flat().map((n) => run.names[n].key));
  hasOutlined = run.nameSteps.some((step) =>
    indices().some((index) => findName(run, index, step)?.onText === false));
}

export function buildLegend() {
  defineColours(run);
  buildSubject();
  const kinds = run.names.map(({ key }) => kindOf(key)).filter(Boolean);
  for (const { key, letter, title, meaning } of kinds) {
    const tag = make("span");
    fillTag(tag, { key, letter });
    const button = make("button", { className: "quiet", title: `${meaning}\nClick: only these heads.` },
      tag, make("span", { textContent: title }));
    button.dataset.name = key;
    button.addEventListener("click", () => chooseName(key));
    $("names").append(button);
  }
  const outlined = make("span", { className: "tag hollow", textContent: "A" });
  $("names").append(make("span", { id: "hollow" }, outlined,
    ` outlined: not on ${textName()}, on prompts only`), make("span", { id: "no-names" }));
}

/** Shows only the heads of a name, and the clearest of them enlarged; again: all heads. */
function chooseName(key) {
  if (state.name === key) return update({ name: "" });
  const found = clearestHead(state.frame, (index) => nameAt(run, index, here.step) === key);
  const { prompt, query } = found ?? {};
  update({ name: key, ...(found ? { prompt, query, ...placeOfHead(found.index), more: [] } : {}) });
}

/** Writes what the model is and what its heads have learned at the last step. */
function writeSubject() {
  const { step } = run.frames.at(-1);
  const isTraining = run.frames.length > 1;
  const when = run.isTraining ? "So far" : "At the end";
  const names = indices().map((index) => findName(run, index, step)).filter(Boolean);
  const [named, onText] = [names.length, names.filter((name) => name.onText).length];
  const heads = `${named || "none"} of ${plural(run.count, "head")} ` +
    `${named > 1 ? "have" : "has"} a clear pattern` +
    (named ? ", and a name for it" : ", so none has a name") +
    (onText < named ? `; ${onText || "none"} of the names ` +
      `${onText === 1 ? "holds" : "hold"} on ${textName()}` : "");
  const text = [bold(run.name), `: ${plural(run.layers, "layer")} × ${plural(run.heads, "head")}` +
    (isTraining ? `, ${plural(step, "training step")}. ${when}, ${heads}` : `; ${heads}`) + ". "];
  const groups = run.ablation?.method === "exact" ? run.ablation.groups : [];
  const [most] = [...groups].sort((a, b) => b.loss_change - a.loss_change);
  if (most?.loss_change > 2 * (most?.loss_change_error ?? Infinity)) {
    const [before, after] = [0, most.loss_change].map((more) => run.ablation.loss + more);
    text.push(`The model needs ${groupTitle(most)} most: without ${most.heads === 1 ? "it" : "them"}, ` +
      `the loss rises from ${formatLoss(before)} to `, bold(formatLoss(after)), ".");
  }
  text.push(noCopyText(step));
  $("subject").replaceChildren(...text);
}

/** Returns that no head is an induction head at a step, and which is nearest; "" if one is. */
function noCopyText(step) {
  const { values, uniform } = statisticOf(run, "induction") ?? {};
  const last = values?.at(-1) ?? [];
  if (!last.every(Number.isFinite) || !last.length || !Number.isFinite(uniform) ||
    indices().some((index) => nameAt(run, index, step) === "induction")) return "";
  const most = last.indexOf(Math.max(...last));
  return " No head is an induction head, which copies from earlier in the text: the largest mean " +
    `weight is ${format(last[most])} (${headName(most, run)}), and chance is ${format(uniform)}.`;
}

/** Updates the legend: the number of heads of each name at the shown step, also of another run. */
export function drawLegend() {
  const names = indices().map((index) => shownName(index));
  const shown = names.map((name) => name?.key);
  $("hollow").hidden = !hasOutlined;
  const isOutlined = names.some((name) => name?.onText === false);
  $("hollow").style.visibility = isOutlined ? "" : "hidden"; // the same place at all steps
  for (const button of $("names").querySelectorAll("button")) {
    const { name } = button.dataset;
    const count = shown.filter((key) => key === name).length;
    // The same names at all steps, so that nothing moves while the page plays.
    button.hidden = !known.has(name) && !count;
    button.disabled = !count && state.name !== name;
    button.lastChild.textContent = `${kindOf(name).title}${count === 1 ? "" : "s"} ${count}`;
    button.setAttribute("aria-pressed", state.name === name);
  }
  $("no-names").textContent = $("names").querySelector("button:not([hidden])") ? ""
    : "No head has a name: none attends to one kind of token clearly more than by chance, " +
      `${run.windows ? `on ${textName()} or on the repeated sequence` : "on every prompt"}.`;
}
