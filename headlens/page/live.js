/* A page of a server (headlens/live_snapshots.py): takes up new snapshots and losses of the run. */

import { formatLoss } from "./text.js";
import { $, make, showMessage } from "./dom.js";
import { decode, prefetch, prepare, readData } from "./data.js";
import { nearestFrame, other, run, setRuns, state, update } from "./state.js";
import { isPlaying } from "./player.js";
import { buildTimeline, drawTimeline } from "./losses.js";
import { buildSubject } from "./legend.js";
import { poll } from "./polling.js";

let shownSnapshots = ""; // the version that the page shows
let shownCurves = ""; // as JSON
let rebuild = null; // builds what depends on the data; null until the page is drawn
let liveText, liveLosses, lostText; // elements

/** Returns whether a page has to ask a server for its data. */
export function isLive(text) {
  try {
    return JSON.parse(text).live === true;
  } catch {
    return false;
  }
}

/** Shows the state of the run from now on. Returns its data as soon as it has a snapshot. */
export function firstRun() {
  liveText = make("span", { className: "number" });
  lostText = make("b", { hidden: true });
  liveLosses = make("span", { className: "number losses" });
  $("live").append(make("i"), liveText, liveLosses, lostText,
    make("a", { href: "report", textContent: "report" }),
    make("a", { href: "../../", textContent: "all runs" }));
  $("live").hidden = false;
  return new Promise((done, fail) => {
    const take = async (found) => {
      showProgress(found);
      if (rebuild) return takeUp(found);
      if (shownSnapshots) return false; // the page is not drawn yet
      if (!found.snapshots) return showWaiting(found);
      const text = await loadData();
      if (text === null) return false;
      const [first] = readData(text);
      Object.assign(first, { curves: found.curves, isTraining: found.state === "running" });
      shownCurves = JSON.stringify(found.curves);
      $("error").hidden = true;
      return done(first);
    };
    const wrong = (error) => {
      (rebuild ? showMessage : fail)(error.message);
      return false;
    };
    poll("state.json", (found) => take(found).catch(wrong), showConnection);
  });
}

/** Takes up new data from now on. build: builds what depends on the data of the run. */
export function followRun(build) {
  rebuild = build;
}

/** Returns the text of the data, null if it cannot be read now: a file may just be replaced. */
async function loadData() {
  try {
    const response = await fetch("data.json", { cache: "no-cache" });
    const text = await response.text();
    if (response.ok) {
      shownSnapshots = JSON.parse(text).snapshots;
      return text;
    }
    if (!rebuild) showInstead(text);
  } catch {
    // The server has just stopped; showConnection says so.
  }
  return null;
}

/** Takes up new snapshots, then new losses. Returns false if this has to wait. */
async function takeUp(found) {
  if (isPlaying()) return false; // it shows the steps that it started with
  if (found.snapshots && found.snapshots !== shownSnapshots) {
    const before = shownSnapshots;
    const text = await loadData();
    const isTaken = text !== null && await takeSnapshots(readData(text)[0], found);
    if (!isTaken) shownSnapshots = before;
    return isTaken;
  }
  const curves = JSON.stringify(found.curves);
  Object.assign(run, { curves: found.curves, isTraining: found.state === "running" });
  buildSubject();
  if (curves !== shownCurves) {
    buildTimeline();
    drawTimeline();
  }
  shownCurves = curves;
  return true;
}

const shapeOf = (of) => JSON.stringify([of.layers, of.heads, !of.text,
  of.prompts.map(({ text, tokens }) => [text, tokens]), of.statistics.map(({ key }) => key)]);

/** Shows a run with other snapshots in the same view: the same step or, at the end, the new end. */
async function takeSnapshots(fresh, { curves, state: now }) {
  if (shapeOf(fresh) !== shapeOf(run)) {
    location.reload(); // the run was started again with other prompts
    return false;
  }
  Object.assign(fresh, { curves, isTraining: now === "running" });
  await prepare(fresh);
  const known = new Map(run.frames.map((frame) => [frame.address, frame]));
  fresh.frames = fresh.frames.map((frame) => known.get(frame.address) ?? frame);
  const last = fresh.frames.length - 1;
  const place = () => (state.frame === run.frames.length - 1 ? last
    : nearestFrame(fresh, run.frames[state.frame].step));
  const compared = () => (state.compare.startsWith("step:")
    ? [nearestFrame(fresh, Number(state.compare.slice(5)))] : []);
  for (;;) { // the user may change the step while a frame is loaded
    const missing = [place(), ...compared()].filter((frame) => !fresh.frames[frame].bytes);
    if (!missing.length) break;
    try {
      await Promise.all(missing.map((frame) => decode(fresh, frame)));
    } catch {
      return false; // a run that was resumed has just removed this step
    }
  }
  if (isPlaying()) return false;
  const frame = place();
  setRuns(fresh, other);
  shownCurves = JSON.stringify(curves);
  rebuild();
  update({ frame });
  prefetch(fresh).then(() => run === fresh && update());
  return true;
}

function showInstead(text) {
  $("error").textContent = text;
  $("error").hidden = false;
}

function showWaiting({ is_recorded: isRecorded }) {
  showInstead(isRecorded ? `${document.title} has no attention snapshot yet. The first one appears ` +
    "here." : `${document.title} records no attention (lens.every=0).`);
}

/** Shows the state of the run, its step and its last losses. */
function showProgress({ state: now, step, max_steps: planned, losses }) {
  $("live").dataset.state = now;
  const count = (number) => number.toLocaleString("en");
  const steps = `step ${count(step)}${planned && now !== "finished" ? ` of ${count(planned)}` : ""}`;
  liveText.textContent = `${now} · ${steps}`;
  liveLosses.textContent = Object.entries(losses).filter(([name]) => !name.includes("accuracy"))
    .map(([name, loss]) => `${name.replace(" (smoothed)", "")} ${formatLoss(loss)}`).join(" · ");
}

/** Says why the page does not change. It continues when the answer is right again. */
function showConnection(status, text) {
  lostText.hidden = status === 200;
  lostText.textContent = status === 404 ? "this run was removed" : text || "not connected";
  $("live").classList.toggle("lost", !lostText.hidden);
}
