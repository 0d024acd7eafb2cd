/* Names of heads at each step. headlens/heads.py has the names and the rule. */

import { A, B, headName, here, indexInB, run, state } from "./state.js";

const TEXT_ONLY = 1; // places where a name holds
const PROMPTS_ONLY = 2;

const titleOf = ({ key, title }, tokensBack) =>
  (key === "offset" && tokensBack ? `${title} ${tokensBack}` : title);

/** Returns {key, title, ... the fields of Kind, see headlens/heads.py} of a name that the page shows,
 * else null. Uniform attention is not a finding. tokensBack: of a head "offset". */
export function kindOf(key, tokensBack = null) {
  const name = run.names.find((one) => one.key === key && one.letter);
  if (!name) return null;
  return { ...name, title: `${titleOf(name, tokensBack).replaceAll(" ", "-")} head`,
    target: name.target.replace("{}", tokensBack ?? "2 to 8") };
}

const snapshotAt = (of, step) => of.nameSteps.findLastIndex((known) => known <= step);
const nameIn = (of, snapshot, index) => of.names[of.namesAt[snapshot]?.[index]]?.key ?? "";

/** Returns the key of the name of a head at a step: at the last snapshot up to this step. */
export const nameAt = (of, index, step) => nameIn(of, snapshotAt(of, step), index);

/** Returns the first step from which all snapshots up to `step` give the head its name. */
export const sinceStep = (of, index, step) => of.nameSteps[of.sinceAt[snapshotAt(of, step)]?.[index]];

/** Returns the nearest step before (by = -1) or after (by = 1) `step` at which a head has a name,
 * {step, key}, or null. */
export function nearestName(of, index, step, by) {
  for (let n = snapshotAt(of, step) + by; n >= 0 && n < of.nameSteps.length; n += by) {
    const key = nameIn(of, n, index);
    if (kindOf(key)) return { step: of.nameSteps[n], key };
  }
  return null;
}

/** Returns the number of tokens back with the largest weight of a head, from 2 to 8. */
export const offsetAt = (of, index, step) => of.offsetsAt[snapshotAt(of, step)]?.[index];

/** Returns the name of a head for a caption: "offset 3", "uniform", "". */
export const plainName = (of, index, step) => titleOf(
  of.names.find(({ key }) => key === nameAt(of, index, step)), offsetAt(of, index, step));

/** Returns the name of a head, as kindOf, with {onText, onPrompts: whether it holds there, where: "on
 * the text only", "on repeated sequences only", or "" if it holds on text and prompts}; null without a
 * name. Without a text, a name holds everywhere. */
export function findName(of, index, step) {
  const kind = kindOf(nameAt(of, index, step), offsetAt(of, index, step));
  if (!kind) return null;
  const place = of.windows ? of.placesAt[snapshotAt(of, step)]?.[index] : 0;
  const where = place === TEXT_ONLY ? "on the text only" : place === PROMPTS_ONLY
    ? "on repeated sequences only" : ""; // other names do not hold on prompts only
  return { ...kind, onText: place !== PROMPTS_ONLY, onPrompts: place !== TEXT_ONLY, where };
}

/** Returns where a name holds as the end of a sentence about a head: ", on the text only". */
export const whereText = ({ where }) => (where ? `, ${where}` : "");

/** Returns " since step N" for a named head, " at step N" if this name is new, and since when the head
 * had the name at some snapshots; "" if there is only one snapshot. */
export function sinceText(of, index, step) {
  if (of.nameSteps.length === 1) return "";
  const since = sinceStep(of, index, step);
  const name = nameAt(of, index, step);
  const first = of.nameSteps.find((_, snapshot) => nameIn(of, snapshot, index) === name);
  return ` ${since === of.nameSteps[snapshotAt(of, step)] ? "at" : "since"} step ${since}` +
    (first < since ? ` (on and off since step ${first})` : "");
}

/** Returns the name of a head on the side that the grid shows, or null. */
export function shownName(index) {
  const of = !B || state.show === "difference" ? here : state.show === "b" ? B : A;
  const place = of === B ? indexInB(index) : index;
  const name = place < 0 ? null : findName(of.run, place, of.step);
  return name && { ...name, since: () => sinceText(of.run, place, of.step) };
}

/** Returns when heads first got each of their names: [{step, key, heads: [index]}]. */
export function namingEvents(of) {
  const known = new Set();
  return of.nameSteps.flatMap((step, snapshot) => {
    const events = new Map();
    for (let index = 0; index < of.count; index++) {
      const key = nameIn(of, snapshot, index);
      if (known.has(`${index} ${key}`) || !kindOf(key)) continue;
      known.add(`${index} ${key}`);
      if (!events.has(key)) events.set(key, { step, key, heads: [] });
      events.get(key).heads.push(index);
    }
    return [...events.values()];
  });
}

/** Returns a short text of an event: "L1 H2, L1 H3: induction head". */
export function describeEvent({ key, heads }) {
  const some = heads.slice(0, 4).map((index) => headName(index)).join(", ");
  const more = heads.length > 4 ? ` and ${heads.length - 4} more` : "";
  return `${some}${more}: ${kindOf(key).title}`;
}

const kindTitle = (name) => kindOf(name)?.title ?? `${name} head`;

/** Returns a description of all heads of a name: "both induction heads", "the self head". */
export const groupTitle = ({ name, heads }) =>
  (heads === 1 ? `the ${kindTitle(name)}`
    : `${heads === 2 ? "both" : `all ${heads}`} ${kindTitle(name)}s`);

/** Shows a name as a letter on its colour; hollow, if the name does not hold on the text. */
export function fillTag(tag, name) {
  tag.className = name ? `tag kind-${name.key}${name.onText === false ? " hollow" : ""}` : "tag";
  tag.textContent = name?.letter ?? "";
  setColour(tag, name?.key);
}

/** Defines the colours of all names, --kind-KEY. */
export function defineColours(of) {
  for (const { key, colours } of of.names.filter(({ letter }) => letter)) {
    document.documentElement.style.setProperty(`--kind-${key}`, `light-dark(${colours.join()})`);
  }
}

/** Gives an element the colour of a name, which style.css uses; without a name none. */
export function setColour(node, key) {
  node.style.setProperty("--kind", key ? `var(--kind-${key})` : "");
}
