/* One sentence about the enlarged head, and the head with which the page opens. */

import { format, formatWeight, plural } from "./text.js";
import { $, bold, make, quotedToken } from "./dom.js";
import { weight } from "./data.js";
import {
  headName, here, placeOfHead, run, selected, selectedQuery, side, significance, state,
  uniformOf, update, valueAt,
} from "./state.js";
import { findName, kindOf, nameAt, nearestName, sinceText } from "./names.js";

const isSeparator = (token) => token !== "" && /^\p{P}*$/u.test(token.trim());
const upTo = (count) => Array.from({ length: count }, (_, n) => n);

/** Returns the key tokens to which a head with this name attends, for one query token. */
function targetsOf(name, prompt, query) {
  const { tokens, period } = prompt;
  const inCopy = period > 0 && query > period && query <= 2 * period;
  return {
    previous_token: [query - 1],
    induction: inCopy ? [query - period + 1] : [],
    duplicate_token: inCopy ? [query - period] : [],
    first_token: [0],
    diagonal: [query],
    // Between random tokens, a separator separates nothing.
    separator: period ? [] : upTo(query).filter((key) => key > 0 && isSeparator(tokens[key])),
    segment_start: period ? [] : upTo(query).filter((key) =>
      key > 0 && isSeparator(tokens[key - 1]) && !isSeparator(tokens[key])),
  }[name] ?? [];
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
  for (let query = Math.max(2, distance ?? 0); query < run.prompts[prompt].length; query++) {
    const uniform = 1 / (query + 1);
    const keys = distance === undefined ? targetsOf(name, run.prompts[prompt], query)
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
 * row or null}. null if no statistic is defined. accepts: which heads to consider, on all prompts. */
export function clearestHead(frame, accepts = null) {
  const { step } = run.frames[frame];
  const keys = run.statistics.filter(({ is_name }) => is_name).map(({ key }) => key);
  let best = null;
  for (let index = 0; index < run.count; index++) {
    if (accepts && !accepts(index)) continue;
    const name = nameAt(run, index, step);
    const isNamed = Boolean(kindOf(name));
    for (const key of isNamed ? [name] : keys) {
      const found = bestPrompt(frame, key, index, accepts ? null : run.opening_prompt);
      if (!found) continue;
      const rank = found.size + (isNamed ? 2 : 0) - (kindOf(key).is_simple ? 1 : 0);
      if (!best || rank > best.rank) best = { ...found, rank, index, key };
    }
  }
  if (!best) return null;
  const { prompt, index, key } = best;
  return { index, key, frame, prompt, query: sharpestRow(frame, prompt, index, key)?.query ?? null };
}

/** Returns the view of this head. */
export function openingView() {
  const { index, frame, prompt, query } = clearestHead(run.frames.length - 1) ?? {};
  return index === undefined ? {} : { frame, prompt, query, ...placeOfHead(index) };
}

const INTRODUCTIONS = {
  induction: ". Such a head copies: ",
  positional: ". Its attention depends on positions more than on tokens: ",
};

/** Returns a distance to a key token in words. */
export const distanceText = (distance) =>
  (distance ? `the token ${plural(distance, "position")} before it` : "itself");

const ORDINALS = ["first", "second", "third"];

/** Returns the part of a sentence that says to which token the query token attends. */
function patternText(name, { tokens, labels, period }, { query, key }) {
  const quoted = (n) => quotedToken(labels[n]);
  const nth = (n) => {
    const count = tokens.slice(0, n + 1).filter((token) => token === tokens[n]).length;
    return [`the ${ORDINALS[count - 1] ?? `${count}th`} `, quoted(n)];
  };
  return {
    previous_token: () => ["at ", quoted(query), ` (${query}) it attends to the token before it, `,
      quoted(key), ","],
    induction: () => ["at ", ...nth(query), " it attends to the token after ",
      ...nth(query - period)],
    duplicate_token: () => ["at ", ...nth(query), " it attends to ", ...nth(query - period)],
    first_token: () => ["at ", quoted(query), ` (${query}) it attends to the first token, `,
      quoted(0), ","],
    diagonal: () => ["at ", quoted(query), ` (${query}) it attends to itself`],
    separator: () => ["at ", quoted(query), ` (${query}) it attends to the separator `,
      quoted(key), ` (${key})`],
    segment_start: () => ["at ", quoted(query), ` (${query}) it attends to `, quoted(key),
      ` (${key}), the first token after a separator,`],
    positional: () => ["at ", quoted(query), ` (${query}) it attends to `, quoted(key), ` (${key}), ` +
      `${distanceText(query - key)},`],
  }[name]();
}

/** Returns why a head has no name. */
function noNameText(index) {
  if (nameAt(run, index, here.step) === "uniform") return "its attention is nearly uniform";
  const size = ({ key }) => significance(here, key, index, false) ?? -1;
  const [most] = run.statistics.filter((one) => one.is_name && size(one) >= one.named_from)
    .sort((one, two) => size(two) - size(one));
  if (!most) {
    return "what it attends to on this prompt fits none of the named patterns";
  }
  const value = format(valueAt(here, most.key, index, false));
  const uniform = format(uniformOf(here, most.key, false));
  return `on this prompt, its mean weight on ${kindOf(most.key).target} is ${value} (chance ` +
    `${uniform}), but a name needs a large weight on every prompt`;
}

/** Returns the last and the next name of a head that has none at the shown step, as sentences. */
function otherNamesText(index) {
  const [before, after] = [-1, 1].map((by) => nearestName(run, index, here.step, by));
  return (before ? ` It was ${withArticle(before.key)} at step ${before.step}.` : "") +
    (after ? ` It becomes ${withArticle(after.key)} at step ${after.step}.` : "");
}

export function withArticle(key) {
  const { title } = kindOf(key);
  return `${/^[aeiou]/.test(title) ? "an" : "a"} ${title}`;
}

/** Returns the row on which to see the name of a head, if possible of the shown prompt, or null. */
function bestRow(name, index) {
  const row = sharpestRow(state.frame, state.prompt, index, name);
  const best = row ? null : bestPrompt(state.frame, name, index);
  return best ? sharpestRow(state.frame, best.prompt, index, name) : row;
}

/** Returns the query token of a prompt at which the name of a head is clearest, or null. */
export function sharpestQuery(index, prompt = state.prompt) {
  const name = findName(run, index, here.step);
  return name && (sharpestRow(state.frame, prompt, index, name.key)?.query ?? null);
}

/** Shows a prompt, on the row where the name of the enlarged head is clearest. */
export function choosePrompt(prompt) {
  update({ prompt, query: selected() === null ? null : sharpestQuery(selected(), prompt) });
}

/** Shows what the enlarged head does at the shown step, on its sharpest row. */
export function drawFinding() {
  const index = selected();
  const name = index === null ? null : findName(run, index, here.step);
  $("detail-name").textContent = name ? `· ${name.title}` : "";
  $("detail-name").className = name ? `kind-${name.key}` : "";
  if (index === null) return;
  const head = headName(index);
  if (!name) {
    $("finding").replaceChildren(
      `${head} has no name at step ${here.step}: ${noNameText(index)}.`, otherNamesText(index));
    return;
  }
  const row = bestRow(name.key, index);
  const parts = [`${head} is ${withArticle(name.key)}${sinceText(run, index, here.step)}`];
  if (row?.prompt === state.prompt) {
    const mean = name.key === "positional"
      ? `; on average ${format(usualDistance(state.frame, state.prompt, index).mean)}`
      : `; on average ${format(valueAt(here, name.key, index, false))} (chance ` +
        `${format(uniformOf(here, name.key, false))})`;
    parts.push(INTRODUCTIONS[name.key] ?? ": ", "for example, ",
      ...patternText(name.key, run.prompts[state.prompt], row), " with weight ",
      bold(formatWeight(row.weight)), ` (chance ${format(row.uniform)})${mean}.`);
  } else parts.push(row ? `. This is measured on prompt ${row.prompt + 1}.` : ".");
  if (!run.ablation) parts.push(" The name says where it attends, not whether the model needs it.");
  if (row && (row.prompt !== state.prompt || row.query !== selectedQuery())) {
    const button = make("button", { textContent: "show" });
    button.addEventListener("click", () => update({ prompt: row.prompt, query: row.query }));
    parts.push(" ", button);
  }
  $("finding").replaceChildren(...parts);
}
