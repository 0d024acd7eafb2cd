/* The first screen: one prompt in large type, lines of attention that change with the step, a sentence
 * that says what happens, and cards of heads that can be switched off. headlens/story.py decides what
 * is shown and what it is called; this file draws it. */

import { clamp, clip, stepText } from "./text.js";
import { $, fillSelect, isPrinted, make, prepareCanvas } from "./dom.js";
import { hasStory, nearestFrame, placeOfHead, run, state, update } from "./state.js";
import { weight } from "./data.js";
import { setColour } from "./names.js";
import { layOut } from "./grid.js";
import { WEIGHTS } from "./colours.js";
import {
  isPlaying, pause, playedPart, showFrame, shownPosition, still, togglePlay,
} from "./player.js";
import { placeOf } from "./losses.js";
import { canFollow, effectText, percentText, switchHeads, takeNext, wasText } from "./typing.js";
import { clearWhy, explain } from "./why.js";

const EASE = 0.16; // seconds in which most of a change is done
const FAINT = 0.03; // weights that are not drawn
const MOST_LETTER = 30; // pixels of the letters of the repeated sequence, at most
const JOINED = /[\u0600-\u08ff]|\p{M}/u; // Arabic, marks
const WALK = 20; // query tokens over which a passage is read while it plays

let story; // the shown story: of state.prompt
let builtFor = ""; // what the tokens were built for
let cardsFor = ""; // what the cards and the time line were built for
let tokenNodes = []; // the element of each token
let tokenBoxes = []; // of each token, in the picture: {x, top, bottom, left, right}
let storyCards = []; // {data, node, canvas, colour, lit}
let pointedToken = null; // the token under the pointer
let pointedCard = null;
let keptCard = null; // a click on a card keeps its lines
let drawn = null; // what is drawn: {at, query: [0 to 1 per token], card: [per card], chance: [per token]}
let readQuery = null; // the query token that the sentence and the list are about
let isMoving = false;
let drawnTime = 0; // time of the last drawing

const frameCount = () => run.frames.length;
const cardOff = () => story.cards.find(({ name }) => state.off && name === state.off) ?? null;
const isOff = ({ data }) => (run.isTyped ? data.group.every((index) => run.off.has(index))
  : state.off !== "" && data.name === state.off);

// ------------------------------------------------------------------------------------------- building

/** Builds what depends on the data of the run. */
export function buildStory() {
  $("show-story").hidden = !hasStory();
  $("show-story").onclick = showStory;
  if (!hasStory()) return;
  builtFor = cardsFor = "";
  const choices = run.prompts.map((prompt, n) =>
    [n, `\u2068${prompt.title}\u2069`, !run.story.prompts[n]]);
  fillSelect($("story-prompt"), choices);
  $("story-prompt").hidden = choices.length < 2;
  $("story-prompt").onchange = (event) => {
    pause();
    update({ prompt: Number(event.target.value), query: null, off: "" });
  };
  $("show-all").textContent = run.count === 1 ? "the head ›" : `all ${run.count} heads ›`;
  $("show-all").onclick = () => openAllHeads(storyCards[keptCard]?.data.heads[0]);
  $("story-play").onclick = togglePlay;
  $("story-step").max = frameCount() - 1;
  $("story-step").oninput = (event) => {
    pause();
    showFrame(Number(event.target.value));
  };
  $("story-time").hidden = frameCount() === 1;
  const tokens = $("story-tokens");
  tokens.onpointermove = (event) => pointAt(event.target.dataset?.token);
  tokens.onpointerleave = () => pointAt(undefined);
  tokens.onclick = (event) => {
    const token = event.target.dataset.token;
    if (token === undefined) return;
    pause();
    update({ query: state.query === Number(token) ? null : Number(token) });
  };
}

/** Sets the state for a page that opens without a link: its prompt and, if it plays, the first step.
 * Returns whether it plays. */
export function openingStory() {
  state.prompt = run.story.opening;
  const plays = frameCount() > 1 && !still.matches;
  if (plays) state.frame = 0;
  return plays;
}

export function showStory() {
  if (!hasStory()) return;
  pause();
  update({ view: "story", compare: "off", query: null }).then(() => scrollTo(0, 0));
}

/** Opens the screen of all heads, with one of them enlarged. */
function openAllHeads(index) {
  const frame = isPlaying() ? frameCount() - 1 : state.frame; // not a step in the middle of the play
  pause();
  const head = index === undefined ? {} : { ...placeOfHead(index), query: shownQuery() };
  update({ view: "all", frame, off: "", ...head }).then(() => scrollTo(0, 0));
}

function pointAt(token) {
  const found = token === undefined ? null : Number(token);
  if (found === pointedToken) return;
  pointedToken = found;
  drawStory();
}

/** Moves the query token by the arrow keys. */
export function moveStoryQuery(right, down) {
  const { period } = run.prompts[state.prompt];
  const by = period ? right + down * period : right || down;
  const last = tokenNodes.length - 1;
  pause();
  pointedToken = null;
  update({ query: clamp((state.query ?? story.query) + by, period ? 1 : 0, last) });
}

const chosenToken = () => state.query ?? pointedToken; // a click keeps it

/** Returns the query token whose attention is shown, null for all of them. */
function shownQuery() {
  if (chosenToken() !== null || story.layout === "lines") return chosenToken();
  if (!isPlaying()) return story.query;
  const first = Math.max(1, story.query - WALK);
  return Math.min(story.query, first + Math.floor((story.query - first + 1) * playedPart() * 1.15));
}

/** Writes the tokens of the shown prompt. */
function buildTokens() {
  const prompt = run.prompts[state.prompt];
  const isLines = story.layout === "lines";
  const box = $("story-tokens");
  $("story-picture").dataset.layout = story.layout;
  box.dir = isLines ? "ltr" : "auto";
  const from = isLines ? "arrow keys select the token whose attention is shown"
    : "left and right arrow keys select the query token";
  box.ariaLabel = `prompt; ${from}`;
  tokenNodes = Array.from({ length: story.shown }, (_, n) => {
    const isStart = isLines && n === 0;
    const node = make("span", { textContent: isStart ? "○" : isLines ? clip(prompt.labels[n], 16)
      : prompt.texts[n].replaceAll("⏎", "⏎\n") });
    node.title = isStart ? `the start of the text, ${clip(prompt.labels[0], 16)}` : "";
    node.dataset.token = n;
    return node;
  });
  if (isLines) {
    const rows = story.rows.map((text, row) => {
      const part = tokenNodes.slice(row ? prompt.period + 1 : 0, row ? undefined : prompt.period + 1);
      return make("span", { className: "row", title: "" }, make("small", { textContent: text }), ...part);
    });
    box.replaceChildren(...rows);
  } else box.replaceChildren(...tokenNodes);
  // Space between letters or between their bytes would divide those that are joined.
  const isJoined = JOINED.test(box.textContent);
  box.classList.toggle("joined", isJoined);
  box.classList.toggle("spaced", story.unit === "letter" && !isJoined);
  drawn = pointedToken = null;
}

function buildCards() {
  storyCards = story.cards.map(makeCard);
  $("story-cards").replaceChildren(...storyCards.map(({ node }) => node));
  buildTime();
  pointedCard = keptCard = null;
}

function makeCard(data, number) {
  const canvas = make("canvas", { className: "pixels thumbnail" });
  const name = make("button", { title: data.meaning });
  const open = make("button", { textContent: `${data.places} ›`,
    title: "open among all heads", onclick: () => openAllHeads(data.heads[0]) });
  const texts = make("div", {}, make("h3", {}, name), make("p", {}, make("span"), " · ", open),
    make("p", { textContent: data.effect, className: "effect" }));
  const node = make("article", {}, canvas, texts);
  canvas.onclick = name.onclick = () => {
    pause();
    keptCard = keptCard === number ? null : number;
    drawStory();
  };
  if (data.without || run.isTyped) {
    const turn = make("button", { className: "switch", ariaLabel: `${data.title}: switched on` });
    turn.setAttribute("role", "switch");
    turn.onclick = () => {
      pause();
      if (run.isTyped) return switchHeads(data.group, isOff({ data }));
      const turnsOn = state.off === data.name;
      pointedCard = null;
      if (keptCard === number) keptCard = null; // it has no lines now; those of the others are shown
      update({ off: turnsOn ? "" : data.name, frame: turnsOn ? state.frame : frameCount() - 1 });
    };
    node.append(turn);
  }
  setColour(node, data.name);
  const light = (to) => {
    if (storyCards[number]?.node !== node) return; // it loses the focus as it is replaced
    pointedCard = to;
    drawStory();
  };
  for (const event of ["pointerenter", "focusin"]) node.addEventListener(event, () => light(number));
  for (const event of ["pointerleave", "focusout"]) node.addEventListener(event, () => light(null));
  return { data, node, canvas };
}

function buildTime() {
  const { points } = story.curve;
  const most = Math.max(...points.map(([, loss]) => loss));
  story.heights = points.map(([step, loss]) =>
    [frameCount() > 1 ? placeOf(step) : 0, 100 - 94 * (loss / most || 0)]);
  $("story-curve").lastElementChild.setAttribute("d", story.heights.length < 2 ? "M0 94H1000"
    : `M${story.heights.map(([x, y]) => `${(1000 * x).toFixed(1)} ${y.toFixed(1)}`).join("L")}`);
  $("story-curve").classList.toggle("flat", story.heights.length < 2);
  $("story-loss").setAttribute("y2", Math.max(40, ...story.heights.map(([, y]) => y)));
  $("story-now").lastElementChild.textContent = story.heights.length < 2 ? "" : story.curve.title;
  const births = frameCount() > 1 ? [...story.births].sort((a, b) => a.step - b.step) : [];
  const parts = births.map(({ step, name, text }, n) => {
    const jump = () => {
      pause();
      keptCard = storyCards.findIndex(({ data }) => data.name === name);
      showFrame(nearestFrame(run, step));
    };
    const dot = make("i", { title: `${text}: first at ${stepText(step)}`, onclick: jump });
    const label = make("button", { className: "quiet", onclick: jump }, make("i"),
      `${text} · ${stepText(step)}`);
    placeOnCurve(dot, placeOf(step));
    dot.style.translate = `${10 * births.slice(0, n).filter((one) => one.step === step).length}px`;
    for (const node of [dot, label]) {
      node.dataset.step = step;
      setColour(node, name);
    }
    return [dot, label];
  });
  $("story-births").replaceChildren(...parts.map(([dot]) => dot));
  $("story-names").replaceChildren(...parts.map(([, label]) => label));
}

// -------------------------------------------------------------------------------------------- drawing

/** Draws the first screen. Returns whether it is shown. */
export function drawStory() {
  const isShown = state.view === "story" && hasStory();
  const before = $("all-heads").hidden;
  $("story").hidden = !isShown;
  $("all-heads").hidden = isShown;
  if (!isShown) {
    if (before) layOut(true); // it was hidden, so its sizes were not known
    return false;
  }
  if (!run.story.prompts[state.prompt]) state.prompt = run.story.opening; // a prompt of a few tokens
  story = run.story.prompts[state.prompt];
  // Not after a change of the prompt or the step, or when a run was resumed.
  const canSwitch = state.frame === frameCount() - 1
    && story.cards.some(({ name, without }) => without && name === state.off);
  if (!canSwitch) state.off = "";
  const width = $("story-picture").clientWidth;
  const ofCards = [state.prompt, run.isTyped, frameCount(), run.frames.at(-1).step].join();
  if (ofCards !== cardsFor) {
    buildCards();
    $("story-head").style.setProperty("--head", 0);
  }
  cardsFor = ofCards;
  const key = [ofCards, width, run.version].join();
  if (key !== builtFor) {
    buildTokens();
    (story.layout === "lines" ? fitRows : fitPassage)(width);
    fitHead();
  }
  builtFor = key;
  showTexts();
  measureTokens();
  startMoving();
  return true;
}

/** Gives the head room for its tallest sentence, so that nothing moves below it, and keeps a low
 * picture in a narrow window while the cards are scrolled. */
function fitHead() {
  const head = $("story-head");
  const withouts = story.cards.flatMap(({ without }) => without ?? []);
  const sentences = [...(run.isTyped ? [story.frames[state.frame]] : story.frames), ...withouts];
  const lines = story.layout === "lines" ? story.cards.map((card) => ` · ${card.lines}`) : [""];
  const longest = lines.reduce((a, b) => (a.length < b.length ? b : a));
  // A typed text has sentences that come later: the room grows with them.
  if (!run.isTyped) head.style.setProperty("--head", 0);
  const heights = sentences.map((sentence) => {
    showHeadline(sentence);
    $("story-line").textContent = sentence.line + longest;
    return head.getBoundingClientRect().height;
  });
  head.style.setProperty("--head", `${Math.max(...heights)}px`);
  $("story-picture").classList.toggle("low", $("story-picture").offsetHeight < 0.45 * innerHeight);
}

/** Gives the passage letters that are as large as there is room. */
function fitPassage(width) {
  let { length } = $("story-tokens").textContent;
  if (run.isTyped) length = 50 * Math.ceil(length / 50); // the letters do not shrink with each key
  const tall = Math.min(250, innerHeight * (run.isTyped ? 0.2 : 0.25));
  const room = Math.sqrt((width * tall) / (1.15 * Math.max(1, length)));
  const letter = clamp(room, 18, clamp(width / 22, 22, 46));
  $("story-tokens").style.setProperty("--letter", `${letter}px`);
}

/** Gives the two rows columns that fit, and hides the tokens that do not. */
function fitRows(width) {
  const { period } = run.prompts[state.prompt];
  const longest = Math.max(...tokenNodes.slice(1).map((span) => [...span.textContent].length));
  const room = width - 8;
  const isTall = longest > 1 && room / (period + 1) < longest * 7.6;
  const least = isTall ? 17 : longest * 7.6 + 4;
  const count = Math.min(period + 1, Math.floor(room / least));
  const column = Math.min(46, room / count);
  const box = $("story-tokens");
  box.classList.toggle("tall", isTall);
  box.style.setProperty("--column", `${column}px`);
  const letter = isTall ? 14 : Math.min(MOST_LETTER, (column * 0.86) / (0.62 * longest));
  box.style.setProperty("--letter", `${letter}px`);
  tokenNodes.forEach((span, n) => { span.hidden = (n > period ? n - period : n) >= count; });
  story.cut = count > period ? ""
    : `There is room for the first ${count - 1} of ${period} ${story.unit}s of each copy.`;
}

/** Shows a sentence with a clause in the colour of the heads that it is about. */
function showHeadline({ headline, marked, about }) {
  if ($("story-headline").textContent === headline) return;
  const at = headline.indexOf(marked);
  const clause = make("b", { textContent: marked });
  setColour(clause, about);
  $("story-headline").replaceChildren(headline.slice(0, at), clause, headline.slice(at + marked.length));
}

/** Marks the tokens whose probability heads change that are switched off. */
function markChanged() {
  const { facts } = run.frames[state.frame];
  const losses = facts?.whole?.of_prompts[0].losses;
  const now = facts?.predictions?.of_prompts[0].losses;
  tokenNodes.forEach((node, n) => {
    const [p, was] = [now, losses].map((of) => (of && n ? Math.exp(-of[n - 1]) : 0));
    node.classList.toggle("worse", Boolean(losses) && was - p > 0.1);
    node.classList.toggle("better", Boolean(losses) && p - was > 0.1);
    if (run.isTyped) node.title = losses && n ? `${percentText(p)}, with all heads ${percentText(was)}` : "";
  });
}

function showTexts() {
  if (run.isTyped) markChanged();
  const frame = story.frames[state.frame];
  const off = cardOff();
  const isLast = off || state.frame === frameCount() - 1;
  const card = storyCards[activeCard()];
  showHeadline(off ? off.without : frame);
  const hasLines = story.layout === "lines" && !isOff(card);
  const line = (off ? off.without : frame).line;
  $("story-line").textContent = [line, hasLines && card.data.lines].filter(Boolean).join(" · ");
  $("story-prompt").value = state.prompt;
  storyCards.forEach((card, number) => {
    const { data, node } = card;
    const title = node.querySelector("h3 button");
    title.textContent = frame.titles[number];
    title.setAttribute("aria-pressed", String(number === keptCard));
    node.classList.toggle("off", isOff(card));
    const isActive = chosenCard() === null ? story.layout === "lines" && number === 0
      : number === chosenCard();
    node.classList.toggle("active", isActive && !isOff(card));
    const isEarly = !frame.named[number] && frameCount() > 1;
    node.classList.toggle("early", isEarly);
    const isBefore = isEarly && run.frames[state.frame].step < data.since;
    // It is about the last step.
    node.querySelector(".effect").style.visibility = isLast || run.isTyped ? "visible" : "hidden";
    if (run.isTyped) node.querySelector(".effect").textContent = effectText(data);
    node.querySelector("p").firstChild.textContent = isBefore ? data.early : data.note;
    const turn = node.querySelector(".switch");
    turn?.setAttribute("aria-checked", String(!isOff(card)));
    node.dataset.name = data.name;
  });
  $("story-play").textContent = isPlaying() ? "❚❚" : "▶";
  $("story-play").ariaLabel = isPlaying() ? "pause" : "play";
  const { step } = run.frames[state.frame];
  $("story-step").value = state.frame;
  $("story-step").setAttribute("aria-valuetext", `${stepText(step)}: ${frame.headline}`);
  $("story-now").firstElementChild.textContent = stepText(step);
  for (const node of [...$("story-births").children, ...$("story-names").children]) {
    node.classList.toggle("future", node.dataset.step > step);
  }
  showReading();
}

/** Returns the card whose lines are shown alone, or null. */
function chosenCard() {
  const chosen = pointedCard ?? keptCard;
  return chosen !== null && isOff(storyCards[chosen]) ? null : chosen;
}
const activeCard = () => chosenCard() ?? 0;

/** Returns what the model predicts, at the shown step or without the heads of a card. */
function shownPredictions() {
  const { facts } = run.frames[cardOff() ? frameCount() - 1 : state.frame];
  const found = cardOff() ? facts?.without?.[state.off] : facts?.predictions;
  return found ? { texts: found.labels, ids: found.ids, whole: facts.whole,
    ...found.of_prompts[state.prompt] } : null;
}

const token = (label) => make("bdi", { textContent: `“${clip(label, 16)}”` });

/** Returns a list item of a token that the model expects. was: its probability with all heads, as text.
 * take: writes it into the text. */
function expected(label, p, isRight, was = "", take = null) {
  const title = "writes it here, instead of what follows";
  const item = make("li", { className: isRight ? "right" : "" },
    take ? make("button", { title, onclick: take }, token(label)) : token(label),
    make("span", { textContent: percentText(p) }),
    ...(was ? [make("small", { textContent: was, title: "with all heads" })] : []));
  item.style.setProperty("--p", p ?? 0);
  return item;
}

/** Returns the head of a card with the largest weight in a cell. */
const strongestHead = ({ heads }, query, key) => heads.reduce((best, index) => {
  const [a, b] = [best, index].map((one) => weight(run, state.frame, state.prompt, one, query, key));
  return b > a ? index : best;
});

/** Shows what the query token attends to and what the model expects after it. */
function showReading() {
  const query = readQuery = shownQuery();
  const prompt = run.prompts[state.prompt];
  const found = shownPredictions();
  const labels = prompt.labels.with(0, prompt.period ? "○" : prompt.labels[0]);
  const parts = [];
  clearWhy($("story-why"), query);
  if (chosenToken() !== null || run.isTyped) {
    const seenBy = storyCards.filter((card) => !isOff(card)).map(({ data }) => {
      const row = Array.from({ length: query + 1 }, (_, key) => cardWeight(data, state.frame, query, key));
      const key = row.indexOf(Math.max(...row));
      const at = make("b", {}, token(labels[key]), ` ${percentText(row[key])}`);
      setColour(at, data.name);
      if (!run.isTyped) return at;
      const why = make("button", { className: "quiet", textContent: "why?",
        onclick: () => explain($("story-why"), strongestHead(data, query, key), query, key) });
      why.title = "again: close";
      why.ariaLabel = `why does ${data.places} attend there?`;
      return make("span", {}, at, why);
    });
    if (seenBy.length) parts.push(token(labels[query]), " attends to ");
    parts.push(...seenBy.flatMap((node, n) => (n ? [" · ", node] : [node])));
    if (prompt.period && query <= prompt.period) {
      parts.push(`. Nothing can predict the next ${story.unit} here`);
    } else if (prompt.period && found) {
      const [best] = found.tokens[query];
      parts.push(". Next it expects ", make("b", {}, token(found.texts[best]),
        ` ${percentText(found.probabilities[query][0])}`));
    }
    const isWhole = !run.frames[state.frame].facts?.whole;
    parts.push(run.isTyped ? ` ${isWhole ? story.key_to_picture : story.key_to_dots}`
      : state.query === null ? "." : ". Click it again to let it go.");
  } else if (cardOff()) {
    parts.push(cardOff().without.others);
  } else {
    const hasArc = !story.cut && activeCard() === 0 && state.frame === frameCount() - 1;
    parts.push([story.key_to_picture, story.note, story.cut, hasArc ? story.arc : ""]
      .filter(Boolean).join(" "));
  }
  $("story-reading").replaceChildren(...parts);
  $("story-next").hidden = story.layout === "lines" || !found;
  if ($("story-next").hidden) return;
  let first = Math.max(0, query - 14); // or where a word begins
  while (first && first < query - 4 && prompt.texts[first - 1].trim()) first++;
  const before = Array.from({ length: query - first + 1 }, (_, n) => prompt.texts[first + n]).join("");
  $("story-next").replaceChildren(
    make("p", {}, "after ", make("bdi", { textContent: `“${first ? "…" : ""}${before}”` }),
      " the model expects"),
    make("ol", {}, ...found.tokens[query].map((of, n) => {
      const p = found.probabilities[query][n];
      const isRight = n === found.hits[query];
      return expected(isRight ? prompt.labels[query + 1] : found.texts[of], p, isRight,
        found.whole && wasText(found.whole, query, found.ids[of]),
        canFollow(query) && (() => takeNext(query, found.ids[of])));
    })));
  const chance = tokenChances(cardOff() ? frameCount() - 1 : state.frame)[query + 1] ?? null;
  if (found.hits[query] === -1 && chance !== null) {
    $("story-next").lastElementChild.append(expected(prompt.labels[query + 1], chance, true));
  }
}

/** Returns the mean weights of the heads of a card at a frame, a lower triangle; null if the frame is
 * not decoded. */
function cardMeans({ heads, name: key }, frame) {
  const of = run.frames[frame];
  if (!of.bytes) return null;
  of.means ??= {};
  const name = `${state.prompt} ${state.off} ${heads}`;
  const without = of.facts?.without?.[state.off]?.attention?.[key]?.codes[state.prompt];
  if (without) of.means[name] ??= Float32Array.from(without, (code) => WEIGHTS[code]);
  if (!of.means[name]) {
    const { start, triangle } = run.prompts[state.prompt];
    const sum = new Float32Array(triangle);
    for (const head of heads) {
      const from = start + head * triangle;
      for (let n = 0; n < triangle; n++) sum[n] += WEIGHTS[of.bytes[from + n]] / heads.length;
    }
    of.means[name] = sum;
  }
  return of.means[name];
}

const cellPlace = (query, key) => (query * (query + 1)) / 2 + key;
const cardWeight = (card, frame, query, key) => cardMeans(card, frame)?.[cellPlace(query, key)] ?? 0;

/** Measures where the tokens are. */
function measureTokens() {
  const frame = $("story-picture").getBoundingClientRect();
  const bar = Number.parseFloat(getComputedStyle(tokenNodes[0]).paddingBottom); // room for it below a text
  tokenBoxes = tokenNodes.map((span) => {
    const box = span.getClientRects()[0];
    if (!box) return null; // hidden, or part of a character that has another token
    const [left, right] = [box.left - frame.left, box.right - frame.left];
    return { left, right, x: (left + right) / 2, top: box.top - frame.top,
      bottom: box.bottom - frame.top - bar };
  });
}

/** Returns the probability that each token had at a frame, null where nothing predicts it. */
function tokenChances(frame) {
  const facts = run.frames[frame].facts;
  const found = cardOff() ? facts?.without?.[state.off] : facts?.predictions;
  const losses = found?.of_prompts[state.prompt].losses;
  return tokenNodes.map((_, n) => (n < story.predicted_from || !Number.isFinite(losses?.[n - 1])
    ? null : Math.exp(-losses[n - 1])));
}

const between = (a, b, part) => (a === null || b === null ? b : a + (b - a) * part);

/** Returns what should be drawn now. */
function storyTarget() {
  const at = cardOff() ? frameCount() - 1 : shownPosition();
  const [low, high] = [Math.floor(at), Math.ceil(at)];
  const [from, to] = [tokenChances(low), low === high ? null : tokenChances(high)];
  const query = shownQuery();
  return {
    at,
    chance: to ? from.map((p, n) => between(p, to[n], at - low)) : from,
    query: tokenNodes.map((_, n) => (query === null ? 1 : Number(n === query))),
    card: storyCards.map((card, number) => (isOff(card) ? 0
      : chosenCard() !== null ? Number(number === chosenCard())
        : query !== null || number === 0 ? 1 : 0)),
  };
}

function startMoving() {
  const jumps = still.matches || drawn === null || isPrinted;
  if (jumps) {
    drawn = storyTarget();
    paintStory();
  }
  if (isMoving || jumps) return;
  isMoving = true;
  drawnTime = performance.now();
  requestAnimationFrame(moveOn);
}

/** Brings what is drawn nearer to the target, until it is there. */
function moveOn(time) {
  isMoving = false;
  if ($("story").hidden || !drawn) return;
  const part = 1 - Math.exp(-Math.max(0, time - drawnTime) / 1000 / EASE);
  drawnTime = time;
  const end = storyTarget();
  const near = (from, to) => (Math.abs(to - from) < 0.002 ? to : from + (to - from) * part);
  const eased = (from, to) => to.map((value, n) => (value === null ? null : near(from[n] ?? value, value)));
  const next = { at: isPlaying() ? end.at : near(drawn.at, end.at), chance: eased(drawn.chance, end.chance),
    query: eased(drawn.query, end.query), card: eased(drawn.card, end.card) };
  const rests = !isPlaying() && JSON.stringify(next) === JSON.stringify(end);
  if (isPlaying() && shownQuery() !== readQuery) showReading();
  drawn = next;
  paintStory();
  if (rests) return;
  isMoving = true;
  requestAnimationFrame(moveOn);
}

/** Returns the weights of a card between two frames. */
function weightsNow({ data }) {
  const [low, high] = [Math.floor(drawn.at), Math.ceil(drawn.at)];
  const [from, to] = [cardMeans(data, low), cardMeans(data, high)];
  if (!from || !to || low === high) return [from ?? to, from ?? to, 0];
  return [from, to, drawn.at - low];
}

function paintStory() {
  const picture = $("story-picture");
  const context = prepareCanvas($("story-lines"), picture.clientWidth, picture.clientHeight);
  const isLines = story.layout === "lines";
  const query = shownQuery();
  const isReading = !isLines && (isPlaying() || chosenToken() !== null); // at rest all of it is shown
  tokenNodes.forEach((span, n) => {
    const p = drawn.chance[n];
    span.classList.toggle("known", p !== null);
    span.classList.toggle("after", isReading && n > query);
    span.classList.toggle("query", query === n);
    if (p !== null) span.style.setProperty("--p", p.toFixed(3));
  });
  storyCards.forEach((card, number) => {
    card.colour = getComputedStyle(card.canvas).color;
    const [from, to, part] = weightsNow(card);
    if (!from) return;
    const value = (at) => from[at] + (to[at] - from[at]) * part;
    paintThumbnail(card, value);
    if (drawn.card[number] > 0.02) paintLines(context, card, value, drawn.card[number]);
  });
  context.globalAlpha = 1;
  if (frameCount() > 1) placeOnCurve($("story-handle"), drawn.at / (frameCount() - 1));
}

function paintLines(context, { colour, data: { from } }, value, strength) {
  const isLines = story.layout === "lines";
  const found = [];
  const first = !isLines ? 0 : shownQuery() === null ? from : 1;
  for (let query = first; query < tokenNodes.length; query++) {
    const lit = drawn.query[query] * strength;
    if (lit < 0.02 || !tokenBoxes[query]) continue;
    for (let key = 0; key <= query; key++) {
      const weight = value(cellPlace(query, key));
      if (weight > FAINT && tokenBoxes[key]) found.push([weight, query, key, lit]);
    }
  }
  found.sort((a, b) => a[0] - b[0]);
  context.strokeStyle = context.fillStyle = colour;
  context.lineCap = "round";
  for (const [weight, query, key, lit] of found) {
    const [a, b] = [tokenBoxes[query], tokenBoxes[key]];
    if (!isLines) {
      const wide = Math.max(6, b.right - b.left);
      context.globalAlpha = Math.min(0.24, 0.4 * weight) * Math.min(1, lit);
      context.beginPath();
      context.roundRect(b.x - wide / 2, b.top, wide, b.bottom - b.top, 5);
      context.fill();
      context.globalAlpha = Math.min(1, 1.5 * weight) * Math.min(1, lit);
      context.fillRect(b.x - wide / 2 + 2, b.bottom - 3, wide - 4, 3);
    }
    context.globalAlpha = Math.min(1, lit) * Math.min(1, 0.06 + weight ** 0.9);
    context.lineWidth = 0.7 + 2.6 * Math.sqrt(weight);
    attentionLine(context, a, b, query === key);
  }
}

/** Draws a line of attention: between rows an S, within a row an arc above it. */
function attentionLine(context, a, b, isSelf) {
  const sameRow = Math.abs(a.top - b.top) < 8;
  context.beginPath();
  if (!sameRow) {
    const [from, to] = [a.top - 3, b.bottom + 3];
    const bend = (from - to) * 0.55;
    context.moveTo(a.x, from);
    context.bezierCurveTo(a.x, from - bend, b.x, to + bend, b.x, to);
  } else {
    const far = Math.abs(a.x - b.x);
    const high = isSelf ? 13 : Math.min(story.layout === "lines" ? 30 : 27, 9 + far * 0.16);
    const spread = isSelf ? 9 : 0;
    const top = a.top - 3;
    context.moveTo(a.x + spread / 3, top);
    const peak = top - high * 1.33;
    context.bezierCurveTo(a.x + spread, peak, b.x - spread, peak, b.x - spread / 3, top);
  }
  context.stroke();
}

/** Draws the mean heatmap of a card in its colour. */
function paintThumbnail({ canvas, colour, data }, value) {
  const T = run.prompts[state.prompt].length;
  const key = `${data.name} ${drawn.at.toFixed(2)} ${colour} ${state.off} ${run.version}`;
  if (canvas.dataset.drawn === key) return;
  canvas.dataset.drawn = key;
  if (canvas.width !== T) canvas.width = canvas.height = T;
  const context = canvas.getContext("2d");
  const image = context.createImageData(T, T);
  const [r, g, b] = colour.match(/[\d.]+/g).map(Number);
  for (let query = 0; query < T; query++) {
    for (let k = 0; k <= query; k++) {
      image.data.set([r, g, b, 12 + 243 * Math.sqrt(value(cellPlace(query, k)))], 4 * (query * T + k));
    }
  }
  context.putImageData(image, 0, 0);
}

/** Places a node of the time line on the curve. place: from 0, the first step, to 1. */
function placeOnCurve(node, place) {
  const points = story.heights;
  const n = clamp(points.findLastIndex(([x]) => x <= place), 0, Math.max(0, points.length - 2));
  const [from, to] = [points[n], points[n + 1] ?? points[n]];
  const part = from && to[0] > from[0] ? clamp((place - from[0]) / (to[0] - from[0]), 0, 1) : 0;
  node.style.left = `${100 * place}%`;
  node.style.top = `${from ? from[1] + (to[1] - from[1]) * part : 94}%`;
}
