/* One sentence about the enlarged head, and the head with which the page opens. */

import { format, formatMean, formatWeight, plural } from "./text.js";
import { $, bold, make, quotedToken } from "./dom.js";
import { weight } from "./data.js";
import {
  errorOf, headName, here, placeOfHead, run, selected, selectedQuery, side, significance, state,
  statisticOf, textName, uniformOf, update, valueAt,
} from "./state.js";
import {
  findName, kindOf, nameAt, nearestName, offsetAt, setColour, sinceText, whereText,
} from "./names.js";

/** Returns the key tokens to which a head with this name attends, for one query token. tokensBack: of
 * a head "offset". Without a name: all but the first token and the query token itself. */
function targetsOf(name, { targets }, query, tokensBack) {
  if (!name) return Array.from({ length: query - 1 }, (_, n) => n + 1);
  return targets[name === "offset" ? `offset_${tokensBack}` : name]?.[query] ?? [];
}

/** Returns how many tokens before the query token the key token is to which a head attends most, and
 * the mean weight at this distance: {distance, mean}. */
export function usualDistance(frame, prompt, index) {
  const { length } = run.prompts[prompt];
  const means = Array.from({ length: Math.max(1, Math.min(32, length - 2)) }, (_, distance) => {
    const from = Math.max(2, distance);
    let sum = 0;
    for (let query = from; query < length; query++) {
      sum += weight(run, frame, prompt, index, query, query - distance);
    }
    return { distance, mean: sum / (length - from) };
  });
  return means.reduce((best, one) => (one.mean > best.mean ? one : best));
}

/** Returns the target whose weight is most above uniform attention, {prompt, query, key, weight,
 * uniform}, or null. Query tokens 0 and 1 have too few key tokens. */
function sharpestRow(frame, prompt, index, name) {
  let found = null;
  const { distance } = name === "positional" ? usualDistance(frame, prompt, index) : {};
  const tokensBack = offsetAt(run, index, run.frames[frame].step);
  for (let query = Math.max(2, distance ?? 0); query < run.prompts[prompt].length; query++) {
    const uniform = 1 / (query + 1);
    const keys = distance === undefined ? targetsOf(name, run.prompts[prompt], query, tokensBack)
      : [query - distance];
    for (const key of keys) {
      const value = weight(run, frame, prompt, index, query, key);
      if (!found || value - uniform > found.weight - found.uniform) {
        found = { prompt, query, key, weight: value, uniform };
      }
    }
  }
  return found;
}

/** Returns the prompt on which a statistic of a head is most significant, and this significance. A
 * repeated sequence of random tokens only if the statistic is defined on no text before it, because
 * a text is easier to read. only: the only prompt to use. */
function bestPrompt(frame, key, index, only = null) {
  const isRandom = (prompt) => run.prompts[prompt].period > 0;
  return run.prompts.reduce((best, _, prompt) => {
    if (prompt !== (only ?? prompt)) return best;
    const size = significance(side(run, frame, prompt), key, index, false);
    if (size === null || (best && (size <= best.size || isRandom(prompt)))) return best;
    return { prompt, size };
  }, null);
}

/** Returns the most significant head of a frame: a head with a name, if possible not a simple one, or
 * else the head that is nearest to a name: {index, key: of the name, frame, prompt, query: its clearest
 * row or null}. null if no statistic is defined. accepts: which heads to consider, on all prompts.
 * With a text, heads are as significant as on the text. */
export function clearestHead(frame, accepts = null) {
  const { step } = run.frames[frame];
  const keys = run.statistics.filter(({ is_name }) => is_name).map(({ key }) => key);
  let best = null;
  for (let index = 0; index < run.count; index++) {
    if (accepts && !accepts(index)) continue;
    const name = findName(run, index, step);
    for (const key of name ? [name.key] : keys) {
      const found = bestPrompt(frame, key, index, accepts ? null : run.opening_prompt);
      const prompt = found?.prompt ?? 0;
      const size = run.windows ? significance(side(run, frame, prompt), key, index, true) ?? 0
        : found?.size;
      if (size === undefined) continue;
      const rank = size + (name ? 1 + name.onText : 0) - (kindOf(key).is_simple ? 1 : 0);
      if (!best || rank > best.rank) best = { prompt, rank, index, key };
    }
  }
  if (!best) return null;
  const { index, key } = best;
  // The repeated sequence is no example of a head whose name holds on the text only, and harder to
  // read than a text if there is no name.
  const isOnPrompts = findName(run, index, step)?.onPrompts ?? !run.windows;
  const prompt = isOnPrompts ? best.prompt
    : Math.max(0, run.prompts.findIndex(({ period }) => !period));
  const row = sharpestRow(frame, prompt, index, key) ?? sharpestRow(frame, prompt, index, "");
  return { index, key, frame, prompt, query: row?.query ?? null };
}

/** Returns the view of this head. */
export function openingView() {
  const { index, frame, prompt, query } = clearestHead(run.frames.length - 1) ?? {};
  return index === undefined ? {} : { frame, prompt, query, ...placeOfHead(index) };
}

/** Returns a distance to a key token in words. */
export const distanceText = (distance) =>
  (distance ? `the token ${plural(distance, "position")} before it` : "itself");

/** Returns the example of a name, with these tokens. */
function patternText({ example }, { labels }, { query, key }) {
  const token = (n) => [quotedToken(labels[n]), ` (${n})`];
  const parts = { "{query}": token(query), "{key}": token(key), "{back}": [query - key] };
  return `at {query} it attends to ${example},`.split(/({\w+})/).flatMap((part) => parts[part] ?? part);
}

/** Returns the mean weight of a head on the targets of a name, on the text. */
function onTextText({ key, target }, index) {
  const mean = formatMean(valueAt(here, key, index, true), errorOf(here, key, index));
  return ["mean weight ", bold(mean), ` on ${target} (chance ${format(uniformOf(here, key, true))})`];
}

/** Returns the fraction of the attention of a head that is on the targets of a name, on the text. */
function explainedBy({ key }, index) {
  const back = offsetAt(run, index, here.step);
  const { length } = run.windows[0];
  const coverage = key === "offset" ? (length - back) / (length - 1) : statisticOf(run, key).coverage;
  return coverage * valueAt(here, key, index, true);
}

const percent = (part) => `${part < 0.005 ? "<1" : Math.round(100 * part)} %`;

/** Returns why a head has no name on the text: the name that is nearest. */
function noNameOnTextText(index) {
  const size = ({ key }) => significance(here, key, index, true) ?? -1;
  const [nearest] = run.statistics.filter((one) => one.is_name)
    .sort((one, two) => size(two) / two.named_from - size(one) / one.named_from);
  const kind = kindOf(nearest.key, offsetAt(run, index, here.step));
  const uniform = uniformOf(here, nearest.key, true);
  const needed = format(uniform + nearest.named_from * (1 - uniform));
  const why = size(nearest) < nearest.named_from ? `a name needs at least ${needed}`
    : "for a name, the standard error is too large";
  return [`on ${textName()}, it is nearest to `, `${withArticle(kind)}: `, ...onTextText(kind, index),
    `; ${why}`];
}

/** Returns why a head has no name. */
function noNameText(index) {
  if (nameAt(run, index, here.step) === "uniform") return ["its attention is nearly uniform"];
  if (run.windows) return noNameOnTextText(index);
  const size = ({ key }) => significance(here, key, index, false) ?? -1;
  const [most] = run.statistics.filter((one) => one.is_name && size(one) >= one.named_from)
    .sort((one, two) => size(two) - size(one));
  if (!most) {
    return ["what it attends to on this prompt fits none of the named patterns"];
  }
  const value = format(valueAt(here, most.key, index, false));
  const uniform = format(uniformOf(here, most.key, false));
  const { target } = kindOf(most.key, offsetAt(run, index, here.step));
  return [`on this prompt, its mean weight on ${target} is ${value} (chance ` +
    `${uniform}), but a name needs a large weight on every prompt`];
}

/** Returns the last and the next name of a head that has none at the shown step, as sentences. */
function otherNamesText(index) {
  const [before, after] = [-1, 1].map((by) => nearestName(run, index, here.step, by));
  const named = ({ step }) => withArticle(findName(run, index, step));
  return (before ? ` It was ${named(before)} at step ${before.step}.` : "") +
    (after ? ` It becomes ${named(after)} at step ${after.step}.` : "");
}

export function withArticle({ title }) {
  return `${/^[aeiou]/.test(title) ? "an" : "a"} ${title}`;
}

/** Returns the row on which to see the name of a head, if possible of the shown prompt, or null. Of
 * copying, a text is a weak example. */
function bestRow(name, index) {
  const isWeak = kindOf(name).on === "repeated" && !run.prompts[state.prompt].period;
  const row = isWeak ? null : sharpestRow(state.frame, state.prompt, index, name);
  const best = row ? null : bestPrompt(state.frame, name, index);
  return best ? sharpestRow(state.frame, best.prompt, index, name) : row;
}

/** Returns the query token of a prompt at which the name of a head is clearest, or else at which the
 * head attends most to an earlier token; null if there is none. */
export function sharpestQuery(index, prompt = state.prompt) {
  const rowOf = (name) => sharpestRow(state.frame, prompt, index, name);
  const row = rowOf(findName(run, index, here.step)?.key ?? "") ?? rowOf("");
  return row?.query ?? null;
}

/** Shows a prompt, on the row where the name of the enlarged head is clearest. */
export function choosePrompt(prompt) {
  update({ prompt, query: selected() === null ? null : sharpestQuery(selected(), prompt) });
}

/** Returns what a head with a name does on the text. */
function onTextFinding(name, index) {
  if (!run.windows || name.key === "positional") return [];
  return [` On ${textName()}: `, ...onTextText(name, index), ...(name.onText ? ["; its name explains ",
    bold(percent(explainedBy(name, index))), " of its attention."]
    : [", too little for the name."])];
}

/** Returns the mean of the weights that a name is about, on the shown prompt. */
function onPromptText({ key }, index) {
  if (key === "positional") {
    return `; on average ${format(usualDistance(state.frame, state.prompt, index).mean)}`;
  }
  return run.windows ? "" : `; on average ${format(valueAt(here, key, index, false))} (chance ` +
    `${format(uniformOf(here, key, false))})`;
}

/** Returns an example of what a head with a name does. row: see bestRow. */
function exampleText(name, index, row) {
  if (!row) return [];
  if (row.prompt !== state.prompt) return [` Prompt ${row.prompt + 1} has an example.`];
  return [" For example, ", ...patternText(name, run.prompts[state.prompt], row),
    " with weight ", bold(formatWeight(row.weight)), ` (chance ${format(row.uniform)})`,
    onPromptText(name, index), "."];
}

const whereTitle = ({ where, onText }) => (where && (onText ? "This pattern is not clear on the prompts."
  : `This pattern is clear on random tokens that are written twice, and not on ${textName()}.`));

/** Shows what the enlarged head does at the shown step, on its sharpest row. */
export function drawFinding() {
  const index = selected();
  const name = index === null ? null : findName(run, index, here.step);
  $("detail-name").replaceChildren(...(name ? [`· ${name.title} `,
    make("small", { textContent: name.where, title: whereTitle(name) })] : []));
  $("detail-name").className = name ? `kind-${name.key}` : "";
  setColour($("detail-name"), name?.key);
  if (index === null) return;
  const head = headName(index);
  if (!name) {
    $("finding").replaceChildren(`${head} has no name at step ${here.step}: `, ...noNameText(index),
      ".", otherNamesText(index));
    return;
  }
  const row = name.onPrompts ? bestRow(name.key, index) : null;
  const since = sinceText(run, index, here.step) + whereText(name);
  const parts = [`${head} is ${withArticle(name)}${since}.`, ...onTextFinding(name, index),
    ...exampleText(name, index, row)];
  if (!run.ablation) parts.push(" The name says where it attends, not whether the model needs it.");
  if (row && (row.prompt !== state.prompt || row.query !== selectedQuery())) {
    const button = make("button", { textContent: "show" });
    button.addEventListener("click", () => update({ prompt: row.prompt, query: row.query }));
    parts.push(" ", button);
  }
  $("finding").replaceChildren(...parts);
}
