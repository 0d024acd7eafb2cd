/* The guided tour: each stop sets the view and says in a few sentences what it shows. A run that has
 * learned to copy has the tour of tour_copying.js, another run that of tour_basics.js. */

import { $, showMessage } from "./dom.js";
import { decode } from "./data.js";
import { DEFAULTS, other, run, selected, state, update } from "./state.js";
import { pause } from "./player.js";
import { basicTour } from "./tour_basics.js";
import { copyingTour, missingForCopying } from "./tour_copying.js";

// {count: of the stops, isShort: whether it has no stop about removed heads that it could have, frames:
// indices of those that it needs, the last one last, stops()}; null if
// the page has no tour. stops() returns [{title, text: [string or node], view, outline, points}].
// outline: the line of cells to outline in the map, {from, to: [key, query]}; points: ids of elements.
let tour = null;
let stops = [];
let before = {}; // {view, top: the scroll position} before the tour

export function buildTour() {
  tour = copyingTour() ?? basicTour();
  $("show-tour").hidden = !tour;
  if (!tour) return;
  $("show-tour").onclick = () => goTour(1).then(() => $("tour-next").focus());
  $("tour-next").onclick = () => goTour(state.tour + 1);
  $("tour-back").onclick = () => goTour(state.tour - 1);
  $("tour-end").onclick = endTour;
}

/** Ends the tour and restores the view before it. */
export function endTour() {
  const { top = scrollY } = before;
  update({ ...before.view, tour: 0 }).then(() => scrollTo(0, top));
  before = {};
  $("show-tour").focus();
}

/** Returns the number of stops, 0 if there is no tour. */
export const tourLength = () => tour?.count ?? 0;

/** Shows in one line why the page does not have this stop of the tour. Returns whether it has not. */
export function explainTour(number) {
  if (!(number > tourLength())) return false;
  const missing = missingForCopying();
  const needs = missing.length ? ` The tour about copying needs ${missing.join(" and ")}.`
    : tour?.isShort ? " One more needs lens.ablation=exact." : "";
  showMessage(tour ? `No stop ${number}: the tour of this page has ${tour.count} stops.${needs}`
    : other ? "A page with two runs has no tour. Open the page of one run."
      : "This page has no tour: it needs " + (run.frames.length > 1 ? "a prompt of at least 3 tokens."
        : "at least two snapshots, and this page has one."));
  return true;
}

/** Shows a stop, counted from 1; after the last stop the tour ends. */
export async function goTour(number) {
  pause();
  for (const frame of tour.frames) await decode(run, frame);
  stops = tour.stops();
  const stop = stops[number - 1];
  if (!stop) return endTour();
  if (!state.tour) before = { view: { ...state }, top: scrollY };
  const { theme } = state;
  await update({ ...DEFAULTS, ...stop.view, theme, tour: number });
  const shown = stop.points.map($).find((node) => node.offsetHeight);
  shown?.scrollIntoView({ block: "nearest" });
}

/** Shows or hides the panel of the tour. */
export function drawTour() {
  const stop = stops[state.tour - 1];
  $("tour").hidden = !stop;
  for (const node of document.querySelectorAll(".pointed")) node.classList.remove("pointed");
  document.documentElement.style.setProperty("--tour", `${$("tour").offsetHeight}px`);
  if (!stop) return;
  const title = `${state.tour} of ${stops.length}: ${stop.title}`;
  if ($("tour-title").textContent !== title) {
    $("tour-title").textContent = title;
    $("tour-text").replaceChildren(...stop.text);
  }
  $("tour-back").disabled = state.tour === 1;
  $("tour-next").textContent = state.tour === stops.length ? "finish" : "next";
  for (const id of stop.points) $(id).classList.add("pointed");
  document.documentElement.style.setProperty("--tour", `${$("tour").offsetHeight}px`);
}

/** Returns the line of cells to outline in the shown map, or null. */
export function tourOutline() {
  const { outline, view } = stops[state.tour - 1] ?? {};
  if (!outline || state.prompt !== view.prompt) return null;
  return selected() === view.layer * run.heads + view.head ? outline : null;
}
