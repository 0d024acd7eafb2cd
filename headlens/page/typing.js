/* The line to type in. A typed text is shown as a run with one prompt: its frames are the checkpoints that
 * the run has kept, and an engine computes them when they are needed: served.js or embedded.js. An engine:
 *
 *   steps, limit   steps of the checkpoints, ascending; most tokens of a text
 *   read({text | ids, step, off, signal})   what the model does on a text, with these heads off
 *   parts({ids, step, off, layer, head, query, key, signal})   see why.js
 *
 * A reading: {ids, prefix: how many of them are put in front of a text, special: [id that ends a text],
 * tokens, texts, labels, signs, truncated, codes, norms, largest_norms, losses, likely: {ids, labels,
 * probabilities}: five per position, next: the same, 40 after the last position}. tokens to signs, codes
 * and norms are as those of a prompt and a frame, see index.html. */

import { clamp, format, stepText } from "./text.js";
import { $, showMessage } from "./dom.js";
import { decode } from "./data.js";
import { hasSteps, headName, nearestIndex, otherSide, run, setRuns, state, update } from "./state.js";
import { pause } from "./player.js";

const MOST_NEW = 100; // tokens of one continuation
const PAUSE = 300; // milliseconds without a key, before heads are measured on the text

let engine = null;
let buildSteps; // builds what depends on the steps of the run
let before = null; // {run, state} of the recorded prompts
let wanted = null; // of the newest request: {source: {text} or {ids}, off: Set of heads}
// Of the shown text: {source, ids, whole: Map of readings with all heads by step, effects: Map of the mean
// probability of the right token without the heads of a card}.
let shown = null;
let asking = null; // AbortController of the newest request
const loading = new Map(); // AbortController of each frame that is computed, by its index
let versions = 0; // of typed texts
let continuing = null; // AbortController of a continuation
let isGenerated = false; // whether the model wrote the end of the text
const undone = []; // sources of texts that were replaced or left

/** Offers the line. build: builds what depends on the steps of the run. */
export function buildTyping(of, build) {
  [engine, buildSteps] = [of, build];
  const line = $("typed");
  line.addEventListener("input", () => {
    stopContinuing();
    isGenerated = false;
    fitLine();
    if (line.value) readWanted({ source: { text: line.value } });
    else leaveTyped();
  });
  line.addEventListener("keydown", (event) => {
    const wasContinuing = continuing;
    stopContinuing(); // the model does not write where the user types
    if (event.key === "Escape" && !wasContinuing) line.blur();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!wasContinuing) toggleContinuing();
  });
  line.addEventListener("pointerdown", stopContinuing);
  $("continue").addEventListener("click", toggleContinuing);
  $("all-on").addEventListener("click", () => switchHeads([...wanted.off], true));
  $("leave").addEventListener("click", () => {
    undone.push(shown.source);
    line.value = "";
    leaveTyped();
    line.focus();
  });
  $("undo").addEventListener("click", () => {
    stopContinuing();
    readWanted({ source: undone.pop() }).then(writeLine);
  });
  $("take-prompt").addEventListener("click", () => {
    const { tokens, period, text } = run.prompts[state.prompt];
    line.value = period ? plainText(tokens.slice(1)) : text; // without the token of the start
    line.dispatchEvent(new Event("input"));
  });
  $("temperature").addEventListener("input", showSampling);
  showSampling();
  showTyping();
}

/** Shows the line as soon as there is a checkpoint. */
export function showTyping() {
  $("typing").hidden = !engine?.steps.length;
  if (engine) $("typing-hint").hidden = !$("typing").hidden;
  if (engine) $("typing-hint").textContent = "You can type here as soon as the run has a checkpoint.";
  if ($("typing").hidden) return;
  $("continue").textContent = continuing ? "❚❚ stop" : "continue ›";
  $("continue").disabled = !run.isTyped || !canGrow();
  $("undo").hidden = !undone.length;
  $("leave").hidden = !run.isTyped;
  $("take-prompt").hidden = run.isTyped;
  $("all-on").hidden = !run.off?.size;
  const rest = run.prompts[0].truncated ? "; it does not read the end of your text" : "";
  $("typing-note").textContent = run.isTyped && !canGrow()
    ? `The model reads at most ${engine.limit} tokens${rest}.` : "";
}

const canGrow = () => shown.ids.length < engine.limit;

const showSampling = () => {
  $("temperature-value").textContent = Number($("temperature").value).toFixed(1);
};

/** Gives the line the height of its text. */
function fitLine() {
  const line = $("typed");
  line.style.height = "auto";
  line.style.height = `${line.scrollHeight + 2}px`;
}

/** Returns the text of tokens. */
function plainText(tokens) {
  const bytes = tokens.flatMap((token) => (/^(<0x[0-9A-F]{2}>)+$/.test(token)
    ? token.match(/[0-9A-F]{2}(?=>)/g).map((hex) => Number.parseInt(hex, 16))
    : [...new TextEncoder().encode(token)]));
  return new TextDecoder().decode(new Uint8Array(bytes));
}

function writeLine() {
  const [{ tokens, prefix }] = run.prompts;
  $("typed").value = plainText(tokens.slice(prefix));
  fitLine();
  $("typed").scrollTop = $("typed").scrollHeight;
}

// ------------------------------------------------------------------------------------ the typed text

/** Reads a text at the shown checkpoint and shows it. changes: of what is wanted. Returns whether it is
 * shown: a newer request replaces an older one. */
async function readWanted(changes) {
  pause();
  for (const one of [asking, ...loading.values()]) one?.abort();
  const { signal } = (asking = new AbortController());
  const { source, off } = (wanted = { off: new Set(), ...wanted, ...changes });
  const { frame } = state;
  const last = engine.steps.at(-1);
  const isLast = frame === run.frames.length - 1; // then at the newest checkpoint, while the run trains
  const near = run.isTyped && !isLast ? run.frames[frame].step : last;
  const step = engine.steps[nearestIndex(engine.steps, near)];
  const recorded = before?.run ?? run;
  const isSame = shown?.source === source; // heads are switched
  try {
    const known = isSame ? shown.whole : new Map();
    const whole = known.get(step) ?? await engine.read({ ...source, step, off: [], signal });
    if (!Number.isFinite(whole.next.probabilities[0])) {
      throw new Error("This model has diverged: what it predicts are not numbers.");
    }
    const { ids } = whole;
    const reading = off.size ? await engine.read({ ids, step, off: [...off], signal }) : whole;
    await decode(recorded, knownFrame(recorded, step));
    if (signal.aborted) return false;
    const effects = isSame ? shown.effects : new Map();
    shown = { source, ids, whole: known.set(step, whole), effects };
    const isMoved = run.isTyped && frame !== state.frame; // by the user, to a step that is not read yet
    await showReadingOf(reading, off, { query: isSame ? state.query : null, isMoved });
    return true;
  } catch (error) {
    if (!signal.aborted) showMessage(error.message);
    return false;
  }
}

/** Shows the reading of the text. query: the selected query token, or null. */
async function showReadingOf(reading, off, { query, isMoved }) {
  const isStale = run.frames.map(({ step }) => step).join() !== engine.steps.join() || !run.isTyped;
  const typed = isStale ? typedRun(before?.run ?? run) : run;
  Object.assign(typed, { size: typed.count * cells(reading), normSize: typed.count * reading.ids.length,
    version: ++versions, off, prompts: [promptOf(reading)] });
  typed.frames = typed.frames.map((frame, n) => frameOf(typed, frame, n));
  const place = nearestIndex(engine.steps, reading.step);
  typed.frames[place].take(reading);
  if (typed.story) {
    const story = typed.story.prompts[0];
    [story.shown, story.query] = [reading.ids.length, reading.ids.length - 1];
  }
  const changes = { query, ...(isMoved && !isStale ? {} : { frame: place }) };
  if (isStale) {
    before ??= { run, state: { ...state } };
    setRuns(typed, null);
    buildSteps();
    Object.assign(changes, { prompt: 0, off: "", compare: "off" });
  }
  await update(changes);
  showTyping();
  measureCards(typed, reading.step, asking.signal);
}

/** Measures the heads of each card on the text, when the user pauses: what is expected without them. */
async function measureCards(typed, step, signal) {
  const of = shown;
  await new Promise((done) => { setTimeout(done, PAUSE); });
  for (const { group, name } of typed.story?.prompts[0].cards ?? []) {
    if (signal.aborted || of !== shown || typed.off.size) return;
    const key = `${name} ${step}`;
    try {
      const found = await engine.read({ ids: of.ids, step, off: group, signal });
      of.effects.set(key, meanRight(found));
    } catch {
      return; // the user types on
    }
    if (of === shown) update();
  }
}

/** Returns what a card says about its heads on the text. */
export function effectText({ group, name }) {
  const off = group.filter((index) => run.off.has(index)).length;
  if (off) return off < group.length ? `${off} of ${group.length} heads are off` : "";
  const { step } = run.frames[state.frame];
  const [whole, p] = [shown.whole.get(step), shown.effects.get(`${name} ${step}`)];
  if (run.off.size || !whole || p === undefined || !whole.losses.length) return "";
  const [before, after] = [meanRight(whole), p].map(percentText);
  const gets = before === after ? "as likely" : `${after}, not ${before},`;
  return `right ${run.story.prompts[0].unit} ${gets} without ${group.length > 1 ? "them" : "it"}`;
}

const cells = ({ ids: { length } }) => (length * (length + 1)) / 2;

const promptOf = (reading) => ({ name: "typed", title: "your text", period: 0, start: 0,
  normStart: 0, length: reading.ids.length, triangle: cells(reading), text: plainText(reading.tokens),
  prefix: reading.prefix, tokens: reading.tokens, texts: reading.texts, labels: reading.labels,
  signs: reading.signs, truncated: reading.truncated });

/** Returns the index of the last recorded frame until a step. */
const knownFrame = ({ frames }, step) => Math.max(0, frames.findLastIndex((one) => one.step <= step));

/** Returns the run of a typed text. recorded: the run of the page. */
function typedRun(recorded) {
  const frames = engine.steps.map((step) => {
    const known = knownFrame(recorded, step);
    return { step, known, heads: recorded.frames[known].heads };
  });
  const told = recorded.story?.prompts[recorded.story.opening];
  const groupOf = (name) => { // all heads with a name at the end; a card draws some
    const { names } = recorded.frames.at(-1).heads;
    return names.flatMap((n, index) => (recorded.names[n].key === name ? [index] : []));
  };
  const last = Math.max(1, frames.length - 1);
  const isKept = (step) => step >= frames[0].step; // else it is before the time line
  const story = told && { ...told, layout: "text", note: "", arc: "", predicted_from: 1,
    curve: { title: told.curve.title.replace("this prompt", "a recorded prompt"),
      points: told.curve.points.filter(([step]) => isKept(step)) },
    births: told.births.filter(({ step }) => isKept(step)),
    pace: frames.map((_, n) => n / last), frames: frames.map(({ known }) => told.frames[known]),
    key_to_picture: `Click a ${told.unit} to see what follows it, and to write something else there.`,
    key_to_dots: `Dotted lines: without the heads, the probability of the ${told.unit} changes by more ` +
      "than 10\u00a0%.",
    cards: told.cards.map((card) => ({ ...card, from: 1, effect: "",
      which: card.without?.marked, group: card.name ? groupOf(card.name) : card.heads })) };
  const curves = Object.entries(recorded.curves).map(([name, points]) =>
    [name, points.filter(([step]) => isKept(step))]);
  return { ...recorded, isTyped: true, recorded, frames, opening: null,
    curves: Object.fromEntries(curves), events: recorded.events.filter(({ step }) => isKept(step)),
    stage: isKept(recorded.stage) ? recorded.stage : null,
    story: told ? { opening: 0, prompts: [story] } : null };
}

/** Returns a frame that the engine computes when it is shown. */
function frameOf(typed, { step, known, heads }, index) {
  const of = shown;
  const frame = { step, known, heads };
  frame.read = async () => {
    const needed = [state.frame, otherSide()?.frame];
    for (const [n, one] of loading) if (!needed.includes(n)) one.abort();
    const { signal } = loading.set(index, new AbortController()).get(index);
    const { ids } = of;
    const whole = of.whole.get(step) ?? await engine.read({ ids, step, off: [], signal });
    of.whole.set(step, whole);
    const off = [...typed.off];
    const reading = off.length ? await engine.read({ ids, step, off, signal }) : whole;
    await decode(typed.recorded, known);
    signal.throwIfAborted(); // another text is shown
    measureCards(typed, step, signal);
    return frame.take(reading);
  };
  frame.take = (reading) => {
    const { facts } = typed.recorded.frames[known];
    const whole = of.whole.get(step);
    if (typed.story) {
      const { frames } = typed.story.prompts[0];
      frames[index] = { ...frames[index], ...headlineOf(typed, reading, whole) };
    }
    const nowhere = facts.heads.findings.map(() => -1);
    const clearest = Object.entries(facts.heads.clearest).map(([name, [head]]) => [name, [head, 0]]);
    Object.assign(frame, { reading, bytes: reading.codes, normBytes: reading.norms,
      pending: Promise.resolve(reading.codes), facts: { ...facts, without: undefined,
        largest_norms: [reading.largest_norms], predictions: asPredictions(reading),
        whole: whole === reading ? null : asPredictions(whole), heads: { findings: nowhere.map(() => []),
          rows: [nowhere], prompts: nowhere, clearest: Object.fromEntries(clearest) } } });
    return reading.codes;
  };
  return frame;
}

/** Returns the predictions of a reading as those of a frame, with the ids of the tokens. */
function asPredictions({ ids, losses, likely }) {
  const perPosition = likely.ids[0].length;
  return { labels: likely.labels.flat(), ids: likely.ids.flat(), of_prompts: [{ losses,
    tokens: likely.ids.map((of, n) => of.map((_, place) => n * perPosition + place)),
    probabilities: likely.probabilities,
    hits: likely.ids.map((of, n) => of.indexOf(ids[n + 1])) }] };
}

// ------------------------------------------------------------------------------------------ sentences

export const percentText = (p) => `${format(p === null ? NaN : 100 * p, false, "percent")}\u00a0%`;

/** Returns the probability that a token had with all heads, as text; it is known for five tokens. */
export function wasText({ ids, of_prompts: [{ tokens, probabilities }] }, query, id, asText = percentText) {
  const at = tokens[query].findIndex((of) => ids[of] === id);
  const text = asText(probabilities[query].at(at));
  return at < 0 ? `was <${text.replace("<", "")}` : `was ${text}`;
}

const meanRight = ({ losses }) => losses.reduce((sum, loss) => sum + Math.exp(-loss), 0) / losses.length;

/** Returns what the heads that are switched off are called. */
function offText({ off, ...typed }) {
  const card = typed.story.prompts[0].cards.find(({ group }) =>
    group.length === off.size && group.every((index) => off.has(index)));
  if (card?.which) return `the ${card.which}`;
  const places = [...off].sort((a, b) => a - b).map((index) =>
    headName(index, typed).replace(" ", "\u00a0"));
  const more = places.length > 3 ? ` and ${places.length - 2} more heads` : "";
  return (more ? places.slice(0, 2) : places).join(", ") + more;
}

/** Returns the sentences about a reading: what the model expects after the text. whole: the reading with
 * all heads. */
function headlineOf(typed, reading, whole) {
  const { story: { prompts: [{ unit, cards }] }, off } = typed;
  const best = ({ next }, id = next.ids[0]) => {
    const at = next.ids.indexOf(id);
    return { id, label: next.labels[at], p: at < 0 ? 0 : next.probabilities[at] };
  };
  const [now, full] = [best(reading), best(whole)];
  const right = (of) => (of.losses.length ? percentText(meanRight(of)) : "");
  const gets = right(reading) && `the right ${unit} gets ${right(reading)} (mean probability in your text)`;
  const line = (...parts) => [hasSteps() && stepText(reading.step), ...parts].filter(Boolean).join(" · ");
  if (reading === whole) {
    const headline = now.p >= 0.1 ? `After your text it expects “${now.label}”: ${percentText(now.p)}.`
      : `Many ${unit}s can follow: “${now.label}” first, with ${percentText(now.p)}.`;
    return { headline, marked: `“${now.label}”`, about: "", line: line(gets) };
  }
  const without = offText(typed);
  const about = cards.find(({ group }) => group.every((index) => off.has(index)))?.name ?? "";
  const [p, before] = [best(reading, full.id).p, full.p].map(percentText);
  const gives = `“${full.label}” ${p === before ? `stays at ${p}` : `gets ${p}, not ${before}`}`;
  const isSame = now.id === full.id;
  const result = isSame ? gives : `it expects “${now.label}”, not “${full.label}”`;
  return { headline: `Without ${without}, ${result}.`, marked: without, about,
    line: line(!isSame && gives, gets, gets && `with all heads ${right(whole)}`) };
}

// --------------------------------------------------------------------------------------- what one does

/** Switches heads of the typed text off or on. */
export function switchHeads(heads, isOn) {
  stopContinuing();
  const others = [...wanted.off].filter((index) => !heads.includes(index));
  return readWanted({ off: new Set(isOn ? others : [...others, ...heads]) });
}

/** Returns whether a token of the text can be followed by another one. */
export const canFollow = (query) => Boolean(run.isTyped) && query + 1 < engine.limit;

/** Replaces what follows a token of the text by another token. */
export async function takeNext(query, id) {
  stopContinuing();
  const continues = isGenerated;
  if (query + 1 < shown.ids.length) undone.push(shown.source);
  if (!await readWanted({ source: { ids: [...shown.ids.slice(0, query + 1), id] } })) return;
  writeLine();
  $("story-next").querySelector("button")?.focus(); // the list is a new one
  if (continues) toggleContinuing();
}

/** Shows the recorded prompts again. */
function leaveTyped() {
  stopContinuing();
  asking?.abort();
  wanted = null;
  if (!run.isTyped) return;
  setRuns(before.run, null);
  const { frame, prompt, query } = before.state;
  before = shown = null;
  buildSteps();
  update({ frame, prompt, query, off: "", compare: "off" }).then(showTyping);
}

function stopContinuing() {
  if (continuing) {
    continuing.abort();
    asking?.abort();
    wanted = { ...wanted, source: shown.source };
  }
  continuing = null;
  showTyping();
}

function toggleContinuing() {
  $("sampling").open = false;
  if (continuing) stopContinuing();
  else if (run.isTyped) continueText();
}

/** Appends tokens until the text is full, the model ends it, or it is stopped. */
async function continueText() {
  const { signal } = (continuing = new AbortController());
  showTyping();
  const isInside = () => $("typed").value.endsWith("\ufffd"); // a character of several tokens
  for (let count = 0; canGrow() && (count < MOST_NEW || isInside()); count++) {
    const { next, special } = run.frames[state.frame].reading ?? {};
    const id = next?.ids[sampled(next)] ?? null;
    if (id === null || special.includes(id)) break;
    const isShown = await readWanted({ source: { ids: [...shown.ids, id] } });
    if (!isShown || signal.aborted) break;
    isGenerated = true;
    writeLine();
    await new Promise(requestAnimationFrame);
    if (signal.aborted) break;
  }
  if (!signal.aborted) stopContinuing();
}

/** Returns the place of a token, drawn from the most likely ones. */
function sampled({ probabilities }) {
  const temperature = Number($("temperature").value);
  if (temperature === 0) return 0;
  const most = clamp(Math.round(Number($("top-k").value)) || 1, 1, probabilities.length);
  const parts = probabilities.slice(0, most).map((p) => (p / probabilities[0]) ** (1 / temperature));
  let left = Math.random() * parts.reduce((sum, part) => sum + part, 0);
  return Math.max(0, parts.findIndex((part) => (left -= part) < 0));
}

/** Returns the exact parts of an attention score in the typed text. */
export const partsOf = (layer, head, query, key) => engine.parts({ ids: shown.ids,
  step: run.frames[state.frame].step, off: [...run.off], layer, head, query, key,
  signal: new AbortController().signal });
