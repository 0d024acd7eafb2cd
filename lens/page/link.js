/* Writes the view to the fragment of the address (after #) and restores it. */

import { $, showMessage } from "./dom.js";
import {
  DEFAULTS, MOST_HEADS, other, hovered, run, state, statisticOf, update,
} from "./state.js";
import { KINDS } from "./names.js";
import { readTheme } from "./colours.js";
import { pause, playing } from "./player.js";
import { goTour, tourLength } from "./tour.js";

function linkText() {
  const parts = new URLSearchParams();
  const put = (name, value, normal) => value !== normal && parts.set(name, value);
  put("theme", state.theme, "auto");
  put("tour", state.tour, 0);
  if (state.tour) return "#" + parts; // the stop sets the view
  put("prompt", state.prompt, 0);
  put("step", run.frames[state.frame].step, run.frames.at(-1).step);
  // Without a link, the page opens with a head; a link to all heads says so.
  parts.set("head", state.layer === null ? "none" : `${state.layer}.${state.head}`);
  const place = (index) => `${Math.floor(index / run.heads)}.${index % run.heads}`;
  if (state.more.length) parts.set("more", state.more.map(place).join());
  if (state.mean) parts.set("heads", "mean");
  put("map", state.map, "weights");
  put("text", state.text, "attention");
  if (!state.arcs) parts.set("arcs", "hidden");
  put("query", state.query, null);
  if (state.sort) parts.set("sort", (state.descending ? "-" : "+") + state.sort);
  if (state.filter) parts.set("filter", `${state.filter}:${+state.threshold.toPrecision(4)}`);
  put("name", state.name, "");
  put("statistics", state.over, "prompt");
  put("scale", state.scale, "sqrt");
  if (state.hideFirst) parts.set("first", "hidden");
  if (state.stretch) parts.set("colours", "stretched");
  put("compare", state.compare, other ? null : "off"); // default: "run" if there are two runs
  if (state.compare !== "off") parts.set("show", state.show);
  return "#" + parts;
}

/** Returns the state that a link describes. Invalid parts are ignored. */
export function readLink(text) {
  const parts = new URLSearchParams(text.replace(/^.*#/, ""));
  const found = { ...DEFAULTS, frame: run.frames.length - 1 };
  const fits = (n, below) => Number.isInteger(n) && n >= 0 && n < below;
  const whole = (name, below) => {
    const value = Number(parts.get(name) || NaN);
    return fits(value, below) ? value : null;
  };
  const choice = (name, choices) => choices.includes(parts.get(name)) && parts.get(name);
  const known = (key) => statisticOf(run, key) && !statisticOf(run, key).empty;
  found.prompt = whole("prompt", run.prompts.length) ?? 0;
  const step = run.frames.findIndex((frame) => String(frame.step) === parts.get("step"));
  if (step >= 0) found.frame = step;
  const places = (name) => (parts.get(name) ?? "").split(",").map((place) => {
    const [layer, head] = place.split(".").map((n) => (n ? Number(n) : NaN));
    return { layer, head };
  }).filter(({ layer, head }) => fits(layer, run.layers) && fits(head, run.heads));
  Object.assign(found, places("head")[0]);
  if (found.layer !== null) {
    found.more = places("more").map(({ layer, head }) => layer * run.heads + head)
      .slice(0, MOST_HEADS - 1);
  }
  found.mean = parts.get("heads") === "mean";
  found.map = choice("map", ["valued"]) || "weights";
  found.text = choice("text", ["loss"]) || "attention";
  found.arcs = parts.get("arcs") !== "hidden";
  found.query = whole("query", run.prompts[found.prompt].length);
  const [, sign, key] = (parts.get("sort") ?? "").match(/^([-+ ]?)(.*)$/s);
  if (known(key)) Object.assign(found, { sort: key, descending: sign === "-" || sign === "" });
  const [, filter, value] = (parts.get("filter") ?? "").match(/^(.*):(-?[\d.e-]+)$/s) ?? [];
  const filters = run.statistics.filter(({ empty }) => !empty).map(({ key: one }) => one);
  if (filters.includes(filter) && Number.isFinite(+value)) {
    Object.assign(found, { filter, threshold: +value });
  }
  found.name = choice("name", Object.keys(KINDS)) || "";
  found.over = choice("statistics", ["mean"]) || "prompt";
  found.scale = choice("scale", ["linear"]) || "sqrt";
  found.hideFirst = parts.get("first") === "hidden";
  found.stretch = parts.get("colours") === "stretched";
  const compare = parts.get("compare") ?? (other ? "run" : "off");
  if ([...$("compare").options].some((option) => option.value === compare)) found.compare = compare;
  found.show = choice("show", ["a", "b"]) || "difference";
  found.theme = choice("theme", ["light", "dark"]) || "auto";
  found.tour = whole("tour", tourLength() + 1) ?? 0;
  return found;
}

let linkTimer;

/** Updates the address with a delay, because browsers limit the number of changes. */
export function keepLink() {
  clearTimeout(linkTimer);
  if (playing) return;
  linkTimer = setTimeout(() => {
    try {
      history.replaceState(null, "", linkText());
    } catch {
      // A sandboxed frame has no address; the button "link" shows the text instead.
    }
  }, 250);
}

/** Shows the view that a link describes. */
export function restore(text) {
  pause();
  Object.assign(hovered, { query: null, key: null });
  Object.assign(state, readLink(text));
  readTheme();
  return state.tour ? goTour(state.tour) : update();
}

export async function copyLink() {
  const framed = window.top !== window || !/^(https?|file):$/.test(location.protocol);
  try {
    if (framed) throw 0;
    await navigator.clipboard.writeText(location.href.replace(/#.*$/s, "") + linkText());
    showMessage("Link copied.");
  } catch {
    $("link").hidden = false;
    $("link-text").value = linkText();
    $("link-text").select();
  }
}
