/* A page of a server (clearhead/output/live_server.py): takes up new snapshots, losses and samples. */

import { $, make, showMessage } from "./dom.js";
import { decode, prefetch, prepare, readData } from "./data.js";
import { nearestFrame, other, run, setRuns, state, update } from "./state.js";
import { isPlaying } from "./player.js";
import { buildTimeline, drawTimeline } from "./losses.js";
import { poll } from "./polling.js";
import { shownTab } from "./tabs.js";
import { showTraining } from "./training.js";
import { showTyping } from "./typing.js";

let shownSnapshots = ""; // the versions that the page shows
let shownTraining = "";
let curves = {}; // losses under the time line
let first = null; // {done, fail}: the tab of the heads waits for the first snapshot
let rebuild = null; // builds what depends on the data; null until the heads are drawn
let model = null; // it computes at the checkpoints
let checkpoints = { steps: [] }; // of the run, with the most tokens of a text
let liveText, lostText; // elements

/** Shows the state, the losses and the samples of the run from now on. */
export function followRun() {
  liveText = make("span", { className: "number" });
  lostText = make("b", { hidden: true });
  $("live").append(make("i"), liveText, lostText);
  $("live").hidden = false;
  const wrong = (error) => {
    if (first) first.fail(error);
    else showMessage(error.message);
    return false;
  };
  poll("state.json", (found) => take(found).catch(wrong), showConnection);
}

/** Returns the data of the run as soon as it has a snapshot. */
export const firstRun = () => new Promise((done, fail) => (first = { done, fail }));

/** Takes up new snapshots and checkpoints from now on. build: builds what depends on the data of the
 * run. */
export function followHeads(build, of) {
  [rebuild, model] = [build, of];
  takeCheckpoints();
}

function takeCheckpoints() {
  Object.assign(model, checkpoints);
  showTyping();
}

/** Takes up what is new. Returns false if something has to wait. */
async function take(found) {
  checkpoints = found.typing ?? { steps: [] };
  $("live").dataset.state = found.state;
  liveText.textContent = found.text;
  const isNew = found.training !== shownTraining;
  if (isNew && !await takeTraining(found.training)) return false;
  if (rebuild) return takeHeads(found, isNew);
  if (!first || shownSnapshots) return false; // the heads are not shown, or not drawn yet
  if (!found.snapshots) {
    showInstead("The run has no attention snapshot yet. The first one appears here.");
    return false;
  }
  const text = await loadData();
  if (text === null) return false;
  showInstead("");
  first.done(Object.assign(readData(text).runs[0], { curves }));
  first = null;
  return true;
}

async function ask(address) {
  try {
    const response = await fetch(address, { cache: "no-cache" });
    return { isFound: response.ok, text: await response.text() };
  } catch {
    return { isFound: false, text: "" }; // the server has just stopped; showConnection says so
  }
}

async function takeTraining(version) {
  const { isFound, text } = await ask("training.json");
  if (!isFound || !text) return isFound;
  const found = JSON.parse(text);
  curves = found.curves;
  shownTraining = version;
  showTraining(found.training);
  return true;
}

/** Returns the text of the data, null if it cannot be read now: a file may just be replaced. */
async function loadData() {
  const { isFound, text } = await ask("data.json");
  if (isFound) shownSnapshots = JSON.parse(text).snapshots;
  else if (text && !rebuild) showInstead(text);
  return isFound ? text : null;
}

/** Takes up new snapshots, then new losses. Returns false if this has to wait. */
async function takeHeads(found, hasLosses) {
  takeCheckpoints();
  if (isPlaying() || run.isTyped) { // it shows the steps that it started with
    waitingLosses ||= hasLosses;
    return false;
  }
  if (found.snapshots && found.snapshots !== shownSnapshots) {
    const before = shownSnapshots;
    const text = await loadData();
    const isTaken = text !== null && !run.isTyped && await takeSnapshots(readData(text).runs[0]);
    if (!isTaken) shownSnapshots = before;
    return isTaken;
  }
  Object.assign(run, { curves });
  if (hasLosses || waitingLosses) {
    buildTimeline();
    drawTimeline();
  }
  waitingLosses = false;
  return true;
}

let waitingLosses = false;

const shapeOf = (of) => JSON.stringify([of.numbers, of.heads, !of.text,
  of.prompts.map(({ text, tokens }) => [text, tokens]), of.statistics.map(({ key }) => key)]);

/** Shows a run with other snapshots in the same view: the same step or, at the end, the new end. */
async function takeSnapshots(fresh) {
  if (shapeOf(fresh) !== shapeOf(run)) {
    location.reload(); // the run was started again with other prompts
    return false;
  }
  Object.assign(fresh, { curves });
  await prepare(fresh);
  const known = new Map(run.frames.map((frame) => [frame.address, frame]));
  fresh.frames = fresh.frames.map((frame) =>
    Object.assign(known.get(frame.address) ?? frame, { heads: frame.heads }));
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
  if (isPlaying() || run.isTyped) return false;
  const frame = place();
  setRuns(fresh, other);
  waitingLosses = false;
  rebuild();
  update({ frame });
  prefetch(fresh);
  return true;
}

function showInstead(text) {
  $("error").textContent = text;
  $("error").hidden = !text || shownTab() !== "heads";
}

/** Says why the page does not change. It continues when the answer is right again. */
function showConnection(status, text) {
  lostText.hidden = status === 200;
  lostText.textContent = status === 404 ? "this run was removed" : text || "not connected";
  $("live").classList.toggle("lost", !lostText.hidden);
}
