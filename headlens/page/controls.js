/* The controls at the top, the notes below them, and the comparison of steps or runs. */

import { clip, format, plural, stepText } from "./text.js";
import { $, bold, checkRadio, fillSelect, make, showMessage } from "./dom.js";
import {
  A, B, REMOVED, SIGNIFICANCE, chancesOf, gridShows, hasSteps, here, nearestFrame,
  other, otherRunSide, overText, run, sideName, state, statisticOf, update,
} from "./state.js";
import { toggleTheme } from "./colours.js";
import { select, stepHead } from "./grid.js";
import { choosePrompt } from "./finding.js";
import { isPlaying, pause, togglePlay } from "./player.js";
import { newsText } from "./losses.js";
import { openHelp } from "./help.js";

// Controls that only set the state: [id, name in the state].
const SETTERS = [["kind", "map"], ["compare", "compare"]];

export function buildControls() {
  fillSelect($("prompt"), run.prompts.map(({ title }, n) =>
    [n, `${n + 1}: \u2068${clip(title, 70)}\u2069`])); // isolated: it may be written from right to left
  buildChoices();
  listenToControls();
}

/** Builds the choices that depend on the steps of the run. */
export function buildChoices() {
  const choices = run.statistics.map(({ key, title, empty }) => [key, title, empty]);
  const more = [SIGNIFICANCE, ...(run.removed ? [REMOVED] : [])];
  fillSelect($("sort"), [["", "layer"], ...more.map(({ key, title }) => [key, title]), ...choices]);
  buildCompare();
  $("step").max = run.frames.length - 1;
  $("time").hidden = run.frames.length === 1;
}

function listenToControls() {
  const on = (id, event, act) => $(id).addEventListener(event, act);
  on("step", "input", (event) => {
    pause();
    update({ frame: Number(event.target.value) });
  });
  on("play", "click", togglePlay);
  on("prompt", "change", (event) => choosePrompt(Number(event.target.value)));
  for (const [id, name] of SETTERS) {
    on(id, "change", (event) => update({ [name]: event.target.value }));
  }
  on("sort", "change", (event) => sortBy(event.target.value));
  on("direction", "click", () => update({ descending: !state.descending }));
  on("show", "change", (event) => update({ show: event.target.value }));
  on("theme", "click", toggleTheme);
  on("show-help", "click", () => openHelp());
  on("close", "click", () => select(null));
  on("previous-head", "click", () => stepHead(-1));
  on("next-head", "click", () => stepHead(1));
  on("options", "click", () => {
    const open = $("app").classList.toggle("open");
    $("options").setAttribute("aria-expanded", open);
    if (open) scrollTo(0, 0); // the controls are at the top
  });
}

function buildCompare() {
  const compare = $("compare");
  fillSelect(compare, [["off", "nothing"]]);
  const group = (text, values) => {
    const options = values.map(([value, textContent]) => make("option", { value, textContent }));
    compare.append(make("optgroup", { label: text }, ...options));
  };
  const steps = (of, kind) => of.frames.map(({ step }) => [`${kind}:${step}`, stepText(step)]);
  if (run.frames.length > 1) group("another step of this run", steps(run, "step"));
  if (other) group(other.name, [["run", "same step"], ...steps(other, "run")]);
}

/** Sorts the heads, at a step with values. */
function sortBy(sort) {
  update(sort === REMOVED.key
    ? { sort, descending: true, frame: nearestFrame(run, run.removed.step) } : { sort });
}

/** Updates all controls and notes from the state. */
export function showControls() {
  $("step-number").textContent = hasSteps() ? stepText(here.step) : "";
  // The slider does not move when the number of digits changes.
  $("step-number").style.minWidth = `${stepText(run.frames.at(-1).step).length - 0.5}ch`;
  $("step").value = state.frame;
  $("step").setAttribute("aria-valuetext", `${stepText(here.step)} ${newsText()}`.trim());
  $("play").textContent = isPlaying() ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", isPlaying() ? "pause" : "play");
  $("prompt").value = state.prompt;
  $("prompt").hidden = Boolean(run.isTyped);
  for (const [id, name] of SETTERS) $(id).value = state[name];
  $("map-kind").hidden = !A.norms;
  if (!A.valued) $("kind").value = "weights"; // B may have no norms
  $("sort").value = state.sort;
  $("direction").hidden = !state.sort;
  $("direction").textContent = state.descending ? "↓" : "↑";
  $("direction").title = state.descending ? "largest first" : "smallest first";
  $("show").hidden = !B;
  checkRadio("show", state.show);
  $("brighter").textContent = gridShows() === "difference"
    ? "Orange: more weight in B, blue: less."
    : A.valued ? "Brighter: larger weight × value norm; each head has its own scale." : "";
  showNotes();
}

function showNotes() {
  const prompt = run.prompts[state.prompt];
  const what = [plural(A.T, "token")];
  if (prompt.truncated) what.push(" (prompt truncated)");
  if (prompt.period > 0) {
    const [last, end] = [prompt.period, 2 * prompt.period];
    what.push(` · tokens 1 to ${last}, repeated as ${last + 1} to ${end}: in an induction ` +
      `head, token ${last + 1} attends to token 2, ${last + 2} to 3, and so on`);
  }
  const statistic = statisticOf(run, state.sort);
  if (statistic) {
    const chances = chancesOf(A, state.sort).filter(Number.isFinite).sort((a, b) => a - b);
    const ends = [...new Set([chances[0], chances.at(-1)])].map((end) => format(end)).join(" to ");
    what.push(" · ", bold(statistic.title), `: ${statistic.description}` +
      (chances.length ? ` Chance: ${ends}${chances.length > 1 ? ", by layer" : ""}.` : ""));
  }
  $("what").replaceChildren(...what);
  const notes = [];
  if (B) {
    notes.push(`${sideName(A)}. ${sideName(B)}.`);
    if (!B.same) {
      notes.push("A and B have different tokens, so only the statistics are subtracted" +
        (state.show === "difference" ? "; the heatmaps show A." : "."));
    }
    if (otherRunSide()) {
      notes.push("Heads with the same number in two runs need not correspond: " +
        "scripts.compare_heads matches them.");
    }
    if (!B.run.windows !== !run.windows) {
      notes.push(`The statistics of ${run.windows ? "A" : "B"} are those of a text, the others means ` +
        "over prompts.");
    }
    if (String(B.run.numbers) !== String(run.numbers) || B.run.heads !== run.heads) {
      const size = `${plural(B.run.layers, "layer")} × ${plural(B.run.heads, "head")}`;
      notes.push(`B has ${size}; only heads that both models have are compared.`);
    }
  }
  $("compare-note").hidden = !B;
  const text = notes.join(" ");
  if ($("compare-note").textContent !== text) $("compare-note").textContent = text;
  const [when, mark, size] = run.steps.length > 1 ? ["over the training", "line", "thick"]
    : ["by layer", "dot", "large"];
  $("legend").hidden = $("charts-title").hidden = run.statistics.every(({ empty }) => empty);
  $("charts-title").textContent = `All heads ${when}, on ${overText()}`;
  $("legend").replaceChildren(`Each ${mark} is one head`,
    ...(otherRunSide() ? [", ", bold("blue: B")] : [" in the colour of its name, grey without a name"]),
    "; ", make("i", { textContent: `${size}: the selected head` }),
    `. Dashed: chance (equal weights on all visible key tokens). Point at a ${mark} to see which head it is.`);
}

/** Starts or stops a comparison: with the other run, or with the first step. */
export function toggleCompare() {
  const last = state.frame ? 0 : -1;
  const compare = other ? "run" : `step:${run.frames.at(last).step}`;
  if (!other && run.frames.length === 1) showMessage("This page has one step of one run.");
  else update({ compare: state.compare === "off" ? compare : "off" });
}
