/* Writes the view to the fragment of the address (after #) and restores it. */

import { $ } from "./dom.js";
import {
  DEFAULTS, hasStory, other, hovered, run, selected, state, statisticOf, update,
} from "./state.js";
import { kindOf } from "./names.js";
import { readTheme } from "./colours.js";
import { shownTab } from "./tabs.js";
import { isPlaying, pause } from "./player.js";

// Parts of a link with few values, besides the default.
const CHOICES = { theme: ["light", "dark"], map: ["valued"], show: ["a", "b"] };

// A link with other parts opens all heads.
const STORY = ["tab", "view", "theme", "prompt", "step", "query", "off"];

function linkText() {
  const parts = new URLSearchParams();
  for (const part of Object.keys(CHOICES)) {
    if (state[part] !== DEFAULTS[part]) parts.set(part, state[part]);
  }
  if (state.prompt) parts.set("prompt", state.prompt);
  const { step } = run.frames[state.frame];
  if (step !== run.frames.at(-1).step) parts.set("step", step);
  if (state.view === "story" && state.query !== null) parts.set("query", state.query);
  if (state.view === "story" && state.off) parts.set("off", state.off);
  if (state.view === "story") return parts.size ? `#${parts}` : "#view=story";
  // A link to a head or to no head opens all heads.
  parts.set("head", selected() === null ? "none" : `${run.numbers[state.layer]}.${state.head}`);
  if (state.name) parts.set("name", state.name);
  if (state.query !== null) parts.set("query", state.query);
  if (state.sort) parts.set("sort", (state.descending ? "-" : "+") + state.sort);
  if (other || state.compare !== "off") parts.set("compare", state.compare);
  return "#" + parts;
}

/** Returns the state that a link describes. Invalid parts are ignored. */
export function readLink(text) {
  const parts = new URLSearchParams(text.replace(/^.*#/, ""));
  const found = { ...DEFAULTS, frame: run.frames.length - 1 };
  for (const [part, values] of Object.entries(CHOICES)) {
    if (values.includes(parts.get(part))) found[part] = parts.get(part);
  }
  if (kindOf(parts.get("name"))) found.name = parts.get("name");
  const fits = (n, below) => Number.isInteger(n) && n >= 0 && n < below;
  const whole = (name, below) => {
    const value = Number(parts.get(name) || NaN);
    return fits(value, below) ? value : null;
  };
  found.prompt = whole("prompt", run.prompts.length) ?? 0;
  found.query = whole("query", run.prompts[found.prompt].length);
  const step = run.frames.findIndex((frame) => String(frame.step) === parts.get("step"));
  if (step >= 0) found.frame = step;
  const [number, head] = (parts.get("head") ?? "").split(".").map((n) => (n ? Number(n) : NaN));
  const layer = run.numbers.indexOf(number);
  if (layer >= 0 && fits(head, run.heads)) Object.assign(found, { layer, head });
  const [, sign, key] = (parts.get("sort") ?? "").match(/^([-+ ]?)(.*)$/s);
  const known = statisticOf(run, key);
  if (known && !known.empty) Object.assign(found, { sort: key, descending: !/[+ ]/.test(sign) });
  const isStory = [...parts.keys()].every((part) => STORY.includes(part));
  found.view = hasStory() && isStory && parts.get("view") !== "all" ? "story" : "all";
  if (found.view === "story" && !run.isTyped) found.off = parts.get("off") ?? "";
  const compare = parts.get("compare") ?? (other ? "run" : "off");
  if ([...$("compare").options].some((option) => option.value === compare)) found.compare = compare;
  return found;
}

let linkTimer;

/** Updates the address with a delay, because browsers limit the number of changes. */
export function keepLink() {
  clearTimeout(linkTimer);
  if (isPlaying() || run.isTyped) return;
  linkTimer = setTimeout(() => {
    if (shownTab() !== "heads") return;
    try {
      history.replaceState(null, "", linkText());
    } catch {
      // A sandboxed frame has no address.
    }
  }, 250);
}

/** Shows the view that a link describes. */
export function restore(text) {
  pause();
  Object.assign(hovered, { query: null, key: null });
  Object.assign(state, readLink(text));
  readTheme();
  return update();
}
