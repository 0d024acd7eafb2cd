/* Names of heads at each step. lens/heads.py has the names and the rule. */

import { A, B, headName, here, indexInB, run, state } from "./state.js";

/** Returns {key, title, letter, meaning, target, is_simple} of a name that the page shows, else null.
 * Uniform attention is not a finding. */
export function kindOf(key) {
  const name = run.names.find((one) => one.key === key && one.letter);
  return name ? { ...name, title: `${name.title.replaceAll(" ", "-")} head` } : null;
}

const snapshotAt = (of, step) => of.nameSteps.findLastIndex((known) => known <= step);
const nameIn = (of, snapshot, index) => of.names[of.namesAt[snapshot]?.[index]]?.key ?? "";

/** Returns the key of the name of a head at a step: at the last snapshot up to this step. */
export const nameAt = (of, index, step) => nameIn(of, snapshotAt(of, step), index);

/** Returns the first step from which all snapshots up to `step` give the head its name. */
export function sinceStep(of, index, step) {
  let snapshot = snapshotAt(of, step);
  const name = nameIn(of, snapshot, index);
  while (snapshot > 0 && nameIn(of, snapshot - 1, index) === name) snapshot -= 1;
  return of.nameSteps[snapshot];
}

/** Returns the nearest step before (by = -1) or after (by = 1) `step` at which a head has a name,
 * {step, key}, or null. */
export function nearestName(of, index, step, by) {
  for (let n = snapshotAt(of, step) + by; n >= 0 && n < of.nameSteps.length; n += by) {
    const key = nameIn(of, n, index);
    if (kindOf(key)) return { step: of.nameSteps[n], key };
  }
  return null;
}

/** Returns {key, title, letter} of a named head, or null. */
export function findName(of, index, step) {
  return kindOf(nameAt(of, index, step));
}

/** Returns " since step N" for a named head, " at step N" if this name is new, and when the head had the
 * name first; "" if there is only one snapshot. */
export function sinceText(of, index, step) {
  if (of.nameSteps.length === 1) return "";
  const since = sinceStep(of, index, step);
  const name = nameAt(of, index, step);
  const first = of.nameSteps.find((_, snapshot) => nameIn(of, snapshot, index) === name);
  return ` ${since === of.nameSteps[snapshotAt(of, step)] ? "at" : "since"} step ${since}` +
    (first < since ? ` (first at step ${first})` : "");
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

/** Returns a description of all heads of a name: "both induction heads". */
export const groupTitle = ({ name, heads }) =>
  (heads === 1 ? `the only ${kindTitle(name)}`
    : `${heads === 2 ? "both" : `all ${heads}`} ${kindTitle(name)}s`);

/** Shows a name as a letter on its colour. */
export function fillTag(tag, name) {
  tag.className = name ? `tag kind-${name.key}` : "tag";
  tag.textContent = name?.letter ?? "";
}
