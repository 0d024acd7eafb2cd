/* Names of heads at each step. headlens/heads.py has the names and the rule, headlens/finding.py what the
 * page says about them. */

import { A, B, here, indexInB, run, state } from "./state.js";

/** Returns how the page shows the heads of a name: {key, letter, title, meaning, ...}, see Kind in
 * headlens/heads.py; null for a name that it does not show. */
export const kindOf = (key) => run.names.find((one) => one.key === key && one.letter) ?? null;

const headsAt = (of) => of.run.frames[of.frame].heads;

/** Returns the name of a head, as kindOf, with its own title, {where, hollow}: where the name holds, and
 * whether it does not hold on the text; null without a name that the page shows. */
export function nameAt(of, index) {
  const { names, titles, wheres, hollow } = headsAt(of);
  return titles[index] ? { ...kindOf(of.run.names[names[index]].key), title: titles[index],
    where: wheres[index], hollow: hollow[index] } : null;
}

/** Returns the sentences about the name of a head: since when it has it, and its other names. */
export const statusOf = (of, index) => headsAt(of).findings[index];

/** Returns the side that the grid shows. */
export const shownSide = () => (!B || state.show === "difference" ? here : state.show === "b" ? B : A);

/** Returns what this function returns for a head on the side that the grid shows, or null. */
export function onShownSide(find, index) {
  const of = shownSide();
  const place = of === B ? indexInB(index) : index;
  return place < 0 ? null : find(of, place);
}

/** Returns the name of a head on the side that the grid shows, or null. */
export const shownName = (index) => onShownSide(nameAt, index);

/** Shows a name as a letter on its colour; hollow, if the name does not hold on the text. */
export function fillTag(tag, name) {
  tag.className = name ? `tag kind-${name.key}${name.hollow ? " hollow" : ""}` : "tag";
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
