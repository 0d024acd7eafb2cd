/* Builds and draws the page. No other module imports this module. */

import { $, setPrinted } from "./dom.js";
import { decode, prefetch, prepare, readData, weight } from "./data.js";
import {
  draw, hovered, other, otherSide, redraw, run, selected, setRuns, state, update,
} from "./state.js";
import { dark, readTheme } from "./colours.js";
import {
  buildGrid, drawGrid, fitPaper, layOut, markHovered, measureBar, measureSide, showHovered, setTabStop,
  showDetail,
} from "./grid.js";
import { prepareMaps } from "./cells.js";
import { buildDetail, drawDetail } from "./detail.js";
import { placeTokens } from "./words.js";
import { drawContexts } from "./contexts.js";
import { buildCharts, drawChartMarks, drawCharts } from "./charts.js";
import { keepLink, readLink, restore } from "./link.js";
import { buildChoices, buildControls, showControls } from "./controls.js";
import { buildTimeline, drawTimeline } from "./losses.js";
import { buildLegend, drawLegend } from "./legend.js";
import { drawFinding, openingView } from "./finding.js";
import { buildStory, drawStory, openingStory } from "./story.js";
import { drawGroups, drawRemoved } from "./removed.js";
import { buildHelp } from "./help.js";
import { onKey } from "./keys.js";
import { togglePlay } from "./player.js";
import { firstRun, followHeads, followRun } from "./live.js";
import { followRuns } from "./runs.js";
import { showTraining } from "./training.js";
import { buildTabs, shownTab, showTab, tabOfLink } from "./tabs.js";
import { buildTyping } from "./typing.js";
import { servedEngine } from "./served.js";
import { embeddedEngine } from "./embedded.js";

function drawAll() {
  if (shownTab() !== "heads") return; // nothing has a size
  if (drawStory()) return keepLink();
  const top = () => (hovered.query === null ? 0 : $("map").getBoundingClientRect().top);
  const before = top();
  prepareMaps();
  showControls();
  layOut();
  drawGrid();
  drawLegend();
  drawFinding();
  drawRemoved();
  drawDetail();
  drawContexts();
  drawCharts();
  drawGroups();
  drawTimeline();
  showHovered();
  scrollBy(0, top() - before); // the cell under the pointer does not move
  keepLink();
}

function drawPointer() {
  markHovered();
  showHovered();
  drawChartMarks();
}

/** Registers the listeners for keyboard, address, size and theme, after the first drawing. */
function listen() {
  document.addEventListener("keydown", onKey);
  // Not location.hash: keepLink may replace it before this event arrives.
  addEventListener("hashchange", ({ newURL }) => tabOfLink(newURL) || restore(new URL(newURL).hash));
  addEventListener("resize", () => update());
  dark.addEventListener("change", () => {
    readTheme();
    update();
  });
  for (const [event, isPrinted] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => {
      setPrinted(isPrinted);
      if (state.view === "all") fitPaper(isPrinted);
      readTheme(isPrinted);
      redraw();
    });
  }
  new ResizeObserver(() => {
    if (state.view === "story" || !measureSide()) return;
    drawDetail();
    drawCharts();
  }).observe($("side"));
  const sizes = new ResizeObserver(measureBar);
  for (const id of ["bar", "all", "side"]) sizes.observe($(id));
  new ResizeObserver(drawTimeline).observe($("track"));
  new ResizeObserver(placeTokens).observe($("text"));
}

function fail(error) {
  $("app").hidden = true;
  $("error").hidden = false;
  $("error").textContent = error.message || String(error);
}

/** Builds and draws the heads, when their tab is shown for the first time. */
async function startHeads({ runs: found, training, live, token, model }) {
  const runs = live ? [await firstRun()] : found;
  const [first, second = null] = await Promise.all(runs.slice(0, 2).map(prepare));
  setRuns(first, second);
  window.lens.runs = runs;
  const proofs = [...new Set([first, second].map((each) => each?.proof))].filter(Boolean);
  $("proof").title = proofs.join("\n"); // how they were verified
  $("proof").textContent = proofs.map((text) => text.replace(/^(maps verified):.*/, "$1")).join(" · ");
  buildGrid();
  buildDetail();
  buildCharts();
  buildLegend();
  buildTimeline();
  buildHelp();
  buildStory();
  buildControls();
  const engine = live ? servedEngine(token) : model ? embeddedEngine(model) : null;
  if (engine) buildTyping(engine, buildAgain);
  $("typing-hint").hidden = Boolean(engine) || !training;
  Object.assign(state, readLink(location.hash));
  const plays = state.view === "story" && (!location.hash || tabOfLink(location.hash)) && openingStory();
  const needed = [state.frame, ...(plays ? [run.frames.length - 1] : [])].map((n) => decode(run, n));
  const b = otherSide();
  if (b) needed.push(decode(b.run, b.frame));
  await Promise.all(needed);
  $("app").hidden = false;
  readTheme();
  redraw();
  // Without a link and a second run, the page opens with a head. It must not hide the others.
  const hides = $("app").matches(".compact:not(.wide)");
  const isEmpty = !location.hash || tabOfLink(location.hash) || /^#view=all$/.test(location.hash);
  if (plays) togglePlay();
  else if (isEmpty && state.view === "all" && !other && !hides) update(openingView());
  else if (selected() !== null) showDetail();
  if (selected() !== null) setTabStop(selected());
  listen();
  document.documentElement.dataset.ready = "1";
  prefetch(run).then(() => other && prefetch(other));
  if (live) followHeads(buildAgain, engine);
}

async function start() {
  const text = $("data").textContent;
  $("data").textContent = ""; // the text is not needed twice
  const data = readData(text);
  const { runs, training, live } = data;
  if (training) {
    showTraining(training);
    $("live").hidden = false;
    $("live").textContent = training.state;
  }
  let heads = null;
  const tabs = data.tabs ?? [...(runs.length ? ["heads"] : []),
    ...(training ? ["training", "settings"] : [])];
  const usual = tabs.find((name) => name !== "runs") ?? "runs";
  buildTabs(tabs, (name) => {
    $("error").hidden = name !== "heads" || !$("error").textContent;
    $("proof").hidden = name !== "heads";
    if (name !== "heads") return;
    heads ??= startHeads(data).catch(fail);
    if (run) update();
  });
  if (tabs.includes("runs")) followRuns(tabs.length === 1);
  if (live && String(tabs) !== "runs") followRun();
  addEventListener("hashchange", ({ newURL }) => showTab(tabOfLink(newURL) || usual));
  showTab(tabOfLink(location.hash) || usual);
  readTheme();
  await heads;
  document.documentElement.dataset.ready = "1";
}

/** Builds what depends on the steps of the run, after a page that follows a run has new ones. */
function buildAgain() {
  window.lens.runs = [run];
  buildCharts();
  buildTimeline();
  buildStory();
  buildChoices();
}

// For tests and for the browser console.
window.lens = {
  state,
  weight(of, frame, prompt, layer, head, ...cell) {
    const side = of ? other : run;
    return weight(side, frame, prompt, layer * side.heads + head, ...cell);
  },
  decode: (of, frame) => decode(of ? other : run, frame),
  redraw,
  update,
  ready: null,
};
Object.assign(draw, { all: drawAll, pointer: drawPointer });
window.lens.ready = start().catch(fail);
