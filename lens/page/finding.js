/* One sentence about the enlarged head, and the head with which the page opens. */

import { formatWeight, visible } from "./text.js";
import { $, make } from "./dom.js";
import { here, run, selected, state, update } from "./state.js";
import { WEIGHTS } from "./colours.js";
import { selectedQuery } from "./detail.js";
import { KINDS, findName, headOf, nameAt, namingEvents, sinceText } from "./names.js";

const isSeparator = (token) => (token.trim() ? /^\p{P}+$/u.test(token.trim()) : token.includes("\n"));
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
    separator: upTo(query).filter((key) => key > 0 && isSeparator(tokens[key])),
    positional: upTo(query),
  }[name];
}

/** Returns the weight of a head in a frame with decoded weights. */
function weightIn(of, frame, number, index, query, key) {
  const { start, triangle } = of.prompts[number];
  const place = start + index * triangle + (query * (query + 1)) / 2 + key;
  return WEIGHTS[of.frames[frame].bytes[place]];
}

/** Returns the target with the largest weight: {query, key, weight, uniform}, or null. */
function strongestIn(of, frame, number, index, name, query) {
  let found = null;
  for (const key of targetsOf(name, of.prompts[number], query)) {
    const weight = weightIn(of, frame, number, index, query, key);
    if (!found || weight > found.weight) found = { query, key, weight, uniform: 1 / (query + 1) };
  }
  return found;
}

/** Returns the query token with a target whose weight is most above uniform attention, or null.
 * Tokens 0 and 1 have too few key tokens. */
export function sharpestRow(of, frame, number, index, name) {
  const rise = ({ weight, uniform }) => weight - uniform;
  let found = null;
  for (let query = 2; query < of.prompts[number].length; query++) {
    const row = strongestIn(of, frame, number, index, name, query);
    if (row && (!found || rise(row) > rise(found))) found = row;
  }
  return found;
}

/** Returns the prompt on which a statistic of a head is most significant, and this significance. */
function bestPrompt(of, frame, key, index) {
  return of.prompts.reduce((best, { uniform }, prompt) => {
    const value = of.frames[frame].facts.statistics[prompt][key]?.[index] ?? null;
    const chance = uniform?.[key] ?? null;
    if (value === null || chance === null) return best;
    const size = (value - chance) / (1 - chance);
    return !best || size > best.size ? { prompt, size } : best;
  }, null);
}

const SIMPLE = ["diagonal", "first_token"]; // these heads copy nothing from the tokens between

/** Returns the view of the most significant head of the last step, if possible not of a simple one;
 * {} if no head has a name. */
export function openingView() {
  const frame = run.frames.length - 1;
  const { step } = run.frames[frame];
  let best = null;
  for (let index = 0; index < run.count; index++) {
    const key = nameAt(run, index, step);
    if (!KINDS[key]) continue;
    const found = bestPrompt(run, frame, key, index);
    if (found) found.rank = found.size - (SIMPLE.includes(key) ? 1 : 0);
    if (found && (!best || found.rank > best.rank)) best = { ...found, index, key };
  }
  if (!best) return {};
  const { prompt, index, key } = best;
  const query = sharpestRow(run, frame, prompt, index, key)?.query ?? null;
  return { frame, prompt, query, layer: Math.floor(index / run.heads), head: index % run.heads };
}

const ORDINALS = ["first", "second", "third"];

/** Returns the part of a sentence that says to which token the query token attends. */
function patternText(name, { tokens, period }, { query, key }) {
  const quoted = (n) => make("bdi", { textContent: `"${visible(tokens[n], 24)}"` });
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
    positional: () => [`it attends to the same positions in all texts; at position ${query}, to ` +
      `position ${key}`],
  }[name]();
}

/** Returns the later name of a head that has none at the shown step, as a sentence. */
function laterText(index) {
  const event = namingEvents(run).find(({ heads, step }) =>
    heads.includes(index) && step > here.step);
  return event ? ` It becomes ${withArticle(event.key)} at step ${event.step}.` : "";
}

const withArticle = (key) => `${/^[aeiou]/.test(KINDS[key].title) ? "an" : "a"} ${KINDS[key].title}`;

/** Returns the prompt and the row on which to see the name of a head, or null. */
function bestRow(name, index) {
  const row = sharpestRow(run, state.frame, state.prompt, index, name);
  if (row) return { prompt: state.prompt, ...row };
  const best = bestPrompt(run, state.frame, name, index);
  return best && { prompt: best.prompt,
    ...sharpestRow(run, state.frame, best.prompt, index, name) };
}

/** Shows what the enlarged head does at the shown step, on its sharpest row. */
export function drawFinding() {
  const index = selected();
  const name = index === null ? null : findName(run, index, here.step);
  const since = name && sinceText(run, index, here.step);
  $("detail-name").textContent = name ? `· ${name.title}${since}` : "";
  $("detail-name").className = name ? `kind-${name.key}` : "";
  if (index === null) return;
  const head = headOf(run, index);
  if (!name) {
    const why = nameAt(run, index, here.step) === "uniform" ? "its attention is nearly uniform"
      : "it attends to no kind of token clearly more than uniform attention does";
    $("finding").replaceChildren(`${head} has no name at step ${here.step}: ${why}.`,
      laterText(index));
    return;
  }
  const row = bestRow(name.key, index);
  const parts = [`${head} is ${withArticle(name.key)}${since}`];
  if (row?.prompt === state.prompt) {
    parts.push(": ", ...patternText(name.key, run.prompts[state.prompt], row), " with weight ",
      make("b", { textContent: formatWeight(row.weight) }), ` (uniform ${row.uniform.toFixed(2)}).`);
  } else parts.push(row ? `. This is measured on prompt ${row.prompt + 1}.` : ".");
  if (row && (row.prompt !== state.prompt || row.query !== selectedQuery())) {
    const button = make("button", { textContent: "show" });
    button.addEventListener("click", () => update({ prompt: row.prompt, query: row.query }));
    parts.push(" ", button);
  }
  $("finding").replaceChildren(...parts);
}
